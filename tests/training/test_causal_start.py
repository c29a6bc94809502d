"""Checkpoints that transformers itself saved: converted, aligned, trained, sampled, and written back for it."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import dlm
from dlm.models import AttentionSpec, load
from dlm.models.portable import AUTO_MAP
from dlm.training.loop import train
from dlm.training.run import Run
from tests.training.runs import TEXTS, config

END = "<|endoftext|>"
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64}


def saved_by_transformers(folder: Path, family: str, spare: int, tied: bool) -> int:
    """A random causal model and a tokenizer without a mask; returns the tokenizer's size."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=290, special_tokens=[END], initial_alphabet=alphabet))  # fmt: skip
    size = backend.get_vocab_size()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(folder)
    torch.manual_seed(0)
    settings = AutoConfig.for_model(family, vocab_size=size + spare, tie_word_embeddings=tied, eos_token_id=0, **SHAPE)
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    return size


@pytest.mark.parametrize(("family", "spare", "tied"), [("qwen3", 5, True), ("llama", 0, False)])
def test_a_causal_checkpoint_converts_trains_with_alignment_samples_and_goes_back(tmp_path, family, spare, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    mask = saved_by_transformers(tmp_path / "theirs", family, spare, tied)
    options = {"train__init_from": str(tmp_path / "theirs"), "train__tokenizer": "none", "align__weight": "2.0"}
    result = train(config(tmp_path, train__steps="20", train__lr="0.01", align__decay="cosine", **options))
    assert sum(result.losses[-5:]) < 0.9 * sum(result.losses[:5])
    hub = json.loads((result.folder / "config.json").read_text())
    assert (hub["model_type"], hub["mask_token_id"], hub["vocab_size"]) == ("dlm", mask, max(mask + 1, mask + spare))
    assert hub["shifted_logits"] and hub["attention"] == "bidirectional"
    assert hub["auto_map"] == AUTO_MAP and (result.folder / "modeling_dlm.py").is_file()  # for transformers alone
    lm = load(result.folder, device="cpu")
    assert lm.tokenizer.mask_token_id == mask and lm.eos_id == 0
    assert mask not in dlm.generate(lm, ["def "], gen_length=8, block_length=8, steps=8)[0].tokens
    assert dlm.infill(lm, ["def [MASK:3](x):"])[0].holes
    lm.save(tmp_path / "again", family=family)
    theirs, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "again"), torch.arange(mask)[None, 40:90]
    assert AutoTokenizer.from_pretrained(tmp_path / "again").encode("def function_") == lm.encode("def function_")
    with torch.no_grad():
        wanted = lm.network(ids, attention=AttentionSpec("causal"))
        torch.testing.assert_close(theirs(ids).logits, wanted, rtol=1e-4, atol=1e-5)


def test_a_diffusion_model_trained_from_a_causal_one_goes_on_and_goes_back_to_causal(tmp_path):
    ar = train(config(tmp_path, "ar", objective__masking="causal", train__steps="2", eval__sequences="0"))
    assert load(ar.folder).config.attention == "causal" and load(ar.folder).config.shifted_logits
    diffusion = train(config(tmp_path, "d", train__init_from=str(ar.folder), train__steps="2", eval__sequences="0"))
    further = Run(config(tmp_path, "e", train__init_from=str(diffusion.folder), eval__sequences="0"))
    assert (further.model.lm.config.attention, further.model.lm.config.vocab_size) == ("bidirectional", 283)
    back = Run(config(tmp_path, "f", train__init_from=str(diffusion.folder), objective__masking="causal", eval__sequences="0"))  # fmt: skip
    assert (back.model.lm.config.attention, back.model.lm.config.shifted_logits) == ("causal", True)
