"""A run's network is what the engine then samples: blocks or token by token, cached or not, shifted or not."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import dlm
from dlm.errors import UserError
from dlm.models import LM, AttentionSpec, ModelConfig, load
from dlm.models.portable import AUTO_MAP
from dlm.training.loop import train
from dlm.training.masking.causal import CausalMasking
from dlm.training.run import Run
from dlm.training.scoring import two_streams
from dlm.training.sections import ObjectiveConfig
from tests.inference.oracle import left_to_right
from tests.refusals import refused
from tests.training.runs import TEXTS, config

BLOCK = 4
BLOCKS = {"objective__masking": "block", "objective__block_length": str(BLOCK), "train__lr": "0.01"}


def said(lm: LM, prompts: list[list[int]], **options) -> list[list[int]]:
    return [found.tokens for found in dlm.generate(lm, prompts, gen_length=12, **options)]


@pytest.mark.parametrize("shifted", ["false", "true"])
def test_blocks_are_sampled_as_they_were_trained(tmp_path, shifted):
    result = train(config(tmp_path, **BLOCKS, train__steps="20", eval__draws="2", model__shifted_logits=shifted))
    assert result.bound[1] > 0 and result.bits_per_byte is not None
    lm = dlm.load(result.folder, device="cpu")
    assert (lm.config.attention, lm.config.block_length) == ("block_causal", BLOCK)
    assert lm.config.shifted_logits == (shifted == "true")
    text = lm.encode("def function_3(x):\n    return x")
    prompts = [text[:n] for n in (1, 4, 6, 7)]  # the first block begins with none or some of the prompt
    for options in ({"steps": 12}, {"steps": 3}, {"rule": "threshold", "threshold": 0.2}):
        assert said(lm, prompts, cache="exact", **options) == said(lm, prompts, cache="none", **options)


@pytest.mark.parametrize("shifted", ["false", "true"])
def test_what_training_predicts_at_a_masked_position_is_what_the_sampler_then_commits(tmp_path, shifted):
    lm = dlm.load(train(config(tmp_path, **BLOCKS, model__shifted_logits=shifted)).folder, device="cpu")
    prompt = lm.encode("def function_3")[:3]
    for cache in ("exact", "none"):
        events = []
        dlm.generate(lm, [prompt], gen_length=12, steps=6, cache=cache, on_step=events.append)
        final, committed = events[-1].canvas, 0
        for event in events:
            noisy, stop = final.clone(), event.lengths[0]
            noisy[:, stop - BLOCK : stop] = event.canvas[:, stop - BLOCK :]
            noisy[:, :stop][event.committed] = lm.mask_id  # as the block was before this step
            canvas, positions, spec = two_streams(noisy, final, BLOCK)
            with torch.no_grad():
                logits = lm.network.predict(canvas, torch.ones_like(final).bool(), positions, attention=spec)
            best = logits.argmax(-1).view_as(final)[:, :stop]
            assert torch.equal(best[event.committed], event.canvas[event.committed])
            committed += int(event.committed.sum())
        assert committed == final.shape[1] - len(prompt)


def test_a_causal_run_is_saved_loaded_and_sampled_from_the_left(tmp_path):
    result = train(config(tmp_path, objective__masking="causal", train__steps="30", train__lr="0.01"))
    assert sum(result.losses[-5:]) < 0.9 * sum(result.losses[:5])
    assert result.bound[1] == 0 and result.bits_per_byte[1] == 0  # the likelihood itself
    lm = dlm.load(result.folder, device="cpu")
    assert (lm.config.attention, lm.config.shifted_logits) == ("causal", True)
    prompts = [lm.encode("def function_3")[:n] for n in (1, 3)]
    lm.network.config = lm.config.model_copy(update={"eos_token_id": None})
    assert said(lm, prompts) == [left_to_right(lm, prompt, 12) for prompt in prompts]


def test_a_causal_checkpoint_goes_on_as_block_diffusion_and_keeps_its_shift(tmp_path):
    causal = train(config(tmp_path, "causal", objective__masking="causal"))
    block = train(config(tmp_path, "block", **BLOCKS, train__init_from=str(causal.folder)))
    lm = dlm.load(block.folder, device="cpu")
    assert (lm.config.attention, lm.config.block_length, lm.config.shifted_logits) == ("block_causal", BLOCK, True)
    assert said(lm, [[5, 6, 7]], cache="exact") == said(lm, [[5, 6, 7]], cache="none")


@pytest.mark.parametrize(
    "options", [{"train__lr": "0.01"}, BLOCKS, {"objective__masking": "causal"}], ids=["random", "block", "causal"]
)
def test_prompts_of_conversations_are_given(tmp_path, options):
    chats = tmp_path / "chats.jsonl"
    record = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
    chats.write_text((json.dumps(record) + "\n") * 8)
    data = {"source": "chat", "paths": json.dumps([str(chats)]), "messages_field": "messages", "pack": "row"}
    data_options = {f"data__{key}": value for key, value in data.items()} | {"data__heldout_fraction": "0"}
    run = Run(config(tmp_path, **{**options, **data_options, "train__length": "64", "eval__sequences": "0"}))
    batch = run._batch()
    text = run.model.lm.tokenizer.decode(batch.input_ids[0][batch.answer[0]].tolist())
    assert "two" in text and "one" not in text
    (view,) = run.objective.masking.views(batch)
    assert not (view.predicted & ~batch.answer).any() and view.predicted.any()
    losses = [sum(run.optimiser_step()[0].values()) for _ in range(8)]
    assert sum(losses[-2:]) < sum(losses[:2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective__masking": "block"}, "objective.*needs block_length"),
        ({**BLOCKS, "train__length": "18"}, "train.length = 18 is not a multiple of objective.block_length = 4"),
        ({"objective__block_length": "4"}, "block_length = 4 is only read with masking = block"),
        ({"objective__t_min": "0.5", "objective__t_max": "0.4"}, "t_min = 0.5 exceeds t_max = 0.4"),
    ],
    ids=str,
)
def test_wrong_combinations_are_refused_before_any_work(tmp_path, options, message):
    refused(message, config, tmp_path, **options)


def test_autoregression_needs_an_end_of_text():
    with pytest.raises(UserError, match=r"objective\.masking = causal.*model\.eos_token_id"):
        CausalMasking(ObjectiveConfig(masking="causal"), ModelConfig(vocab_size=8), seed=0)


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
