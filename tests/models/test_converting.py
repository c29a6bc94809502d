import json

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import dlm
from dlm.data.tokenizer import Tokenizer
from dlm.models import AttentionSpec, convert, load
from tests.refusals import refused

from . import tiny


def letters(size: int, **settings: str) -> Tokenizer:
    """A tokenizer of `size` tokens, the first of which is end-of-text, and none a mask."""
    backend = Backend(models.BPE(vocab={chr(48 + i): i for i in range(size)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return Tokenizer(backend, settings)


def causal(case: str, tokens: int | None, **more: object):
    lm = tiny.model(case, **{"mask_token_id": None, **more})
    lm.tokenizer = None if tokens is None else letters(tokens)
    return lm


@pytest.mark.parametrize(("case", "tokens", "mask"), [("qwen3", 44, 44), ("llama", 48, 48), ("qwen2", None, 48)])
def test_the_mask_takes_a_spare_row_or_a_new_one_with_the_mean_of_all_tokens(case, tokens, mask):
    lm, ids = causal(case, tokens), torch.arange(3, 40)[None]
    weights = {name: p.clone() for name, p in lm.network.named_parameters()}
    with torch.no_grad():
        before = lm.network(ids)
    assert convert(lm) is lm
    assert (lm.mask_id, lm.config.vocab_size, lm.config.attention) == (mask, max(48, mask + 1), "bidirectional")
    assert lm.config.shifted_logits
    for name, now in lm.network.named_parameters():
        was = weights[name]
        if name in ("embed.weight", "lm_head.weight"):
            torch.testing.assert_close(now[mask], was[:mask].mean(0))
            now, was = now[:mask], was[:mask]
        assert torch.equal(now, was), name
    with torch.no_grad():
        after = lm.network(ids, attention=AttentionSpec("causal"))[..., :mask]
        torch.testing.assert_close(after, before[..., :mask])
    if lm.tokenizer is not None:
        assert (lm.tokenizer.mask_token, lm.tokenizer.mask_token_id) == ("[MASK]", mask)
        assert lm.encode("12[MASK]3") == [1, 2, mask, 3] and lm.decode([1, mask, 2]) == "12"


def test_a_mask_that_is_named_already_is_used_and_its_row_left_alone():
    lm = causal("qwen3", 44)
    lm.tokenizer = letters(44, mask_token="A")
    weight, tokenizer = lm.network.embed.weight.clone(), lm.tokenizer
    convert(lm)
    assert lm.mask_id == tokenizer.mask_token_id and lm.tokenizer is tokenizer
    assert torch.equal(lm.network.embed.weight, weight)
    stated = tiny.model("qwen3", mask_token_id=7)
    assert convert(stated).mask_id == 7 and stated.config.vocab_size == 48


@pytest.mark.parametrize(("case", "tokens"), [("qwen3", 44), ("llama", 48), ("qwen2", 40)])
def test_saved_loaded_sampled_and_written_back_for_transformers(case, tokens, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lm, ids = convert(causal(case, tokens)), torch.arange(3, 40)[None]
    lm.save(tmp_path / "diffusion")
    back = load(tmp_path / "diffusion", device="cpu")
    assert (back.config, back.mask_id) == (lm.config.model_copy(update={"model_type": "dlm"}), tokens)
    assert back.tokenizer.mask_token_id == tokens
    with torch.no_grad():
        tiny.near(back.network(ids), lm.network(ids))
    assert len(dlm.generate(back, ["123"], gen_length=4, steps=4)[0].tokens) <= 4
    assert tokens not in dlm.infill(back, ["1[MASK:3]2"])[0].tokens
    back.save(tmp_path / "causal", family=case)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "causal")
    assert type(theirs).__name__.lower() == f"{case}forcausallm"
    with torch.no_grad():
        ours = back.network(ids, attention=AttentionSpec("causal"))
        torch.testing.assert_close(theirs(ids).logits, ours, rtol=1e-5, atol=1e-5)
        again = load(tmp_path / "causal", device="cpu")
        assert again.config.attention == "causal"
        torch.testing.assert_close(again.network(ids), ours, rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "causal").mask_token == "[MASK]"


def test_a_family_that_cannot_say_all_of_it_is_refused(tmp_path):
    lm = convert(causal("qwen3", 44))
    refused("family = 'llama' cannot say qk_norm = True: leave family out", lm.save, tmp_path / "m", family="llama")
    refused("'llada' cannot say .*shifted_logits = True", lm.save, tmp_path / "m", family="llada")
    refused("family = 'gpt2' is not known; known: dlm, ", lm.save, tmp_path / "m", family="gpt2")
    assert not (tmp_path / "m").exists()
    lm.save(tmp_path / "m", family="dlm")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["attention"] == "bidirectional"


def test_block_causal_and_causal_again():
    lm = convert(causal("qwen3", 44), "block_causal", 4)
    assert (lm.network.attention, lm.mask_id) == (AttentionSpec("block_causal", 4), 44)
    assert convert(lm, "causal").network.attention == AttentionSpec("causal") and lm.mask_id == 44
    unshifted = tiny.model("dlm")
    assert convert(unshifted, "causal").config.shifted_logits  # a state that has seen its token predicts the next
    assert convert(causal("qwen3", 44), "causal").mask_id is None


def test_blocks_need_a_length():
    refused("needs block_length >= 1, not None", convert, causal("qwen3", 44), "block_causal")


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused():
    refused("has 48 rows in its embedding, but its tokenizer has 50 tokens", convert, causal("qwen3", 50))
