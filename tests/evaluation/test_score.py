"""`dlm.score` against enumeration of all masks, a numpy softmax and transformers, and what it says of bad texts."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import dlm
from dlm.data.config import DataConfig
from dlm.evaluation.bound import HEADINGS, measure_bound
from dlm.evaluation.score import Score
from dlm.models import LM
from tests.diffusion.enumeration import exact_bound
from tests.inference.requests import FAMILIES
from tests.inference.tiny import EOS, MASK, byte_tokenizer, text_lm, tiny_lm
from tests.refusals import refused, told

KINDS = {"llada": {}, "Dream": FAMILIES["Dream"], "sdar": FAMILIES["sdar"]}
KINDS |= {"Fast_dLLM_Qwen": FAMILIES["Fast_dLLM_Qwen"]}
KINDS |= {"causal": {"model_type": "qwen3", "attention": "causal", "shifted_logits": True}}
TEXTS = ["abcd", ("ab", "cd"), "", ("ab", ""), "a", ("some context, ", "and more"), "one two three four", ("", "abcd")]


def table(lm: LM, given: list[int], ids: list[int]) -> dict[tuple[bool, ...], float]:
    """For each mask of `ids` behind `given`: the summed cross-entropy, each in a forward of its own."""
    found = {}
    for number in range(1, 2 ** len(ids)):
        mask = tuple(bool(number >> i & 1) for i in range(len(ids)))
        shown = torch.tensor([[*given, *(MASK if m else t for m, t in zip(mask, ids, strict=True))]])
        rows = torch.zeros_like(shown, dtype=torch.bool)
        rows[0, len(given) :] = torch.tensor(mask)
        with torch.no_grad():
            log_p = lm.predict(shown, rows).double().log_softmax(-1)
        masked = [t for m, t in zip(mask, ids, strict=True) if m]
        found[mask] = -sum(log_p[i, t].item() for i, t in enumerate(masked))
    return found


def blocks(lm: LM, given: list[int], ids: list[int]) -> float:
    """The bound by enumeration, block by block where the family has blocks."""
    size, total, whole = lm.network.attention.block_length or len(given) + len(ids), 0.0, given + ids
    for first in range(0, len(whole), size):
        known = whole[: max(first, len(given))]
        part = whole[len(known) : first + size]
        if part:
            total += exact_bound(table(lm, known, part), len(part))
    return total


@pytest.mark.parametrize("name", ["llada", "Dream", "sdar", "Fast_dLLM_Qwen"])
def test_the_bound_is_that_of_all_masks_and_its_error_is_honest(name):
    lm = text_lm(**KINDS[name], seed=3, spread=0.5)
    context, text = ("ab", "cdefg")
    exact = blocks(lm, lm.encode(context), lm.encode(text))
    (many,) = dlm.score(lm, [(context, text)], draws=31)
    assert many.error == 0 and many.nats == pytest.approx(exact, rel=1e-5)
    few = 16 if lm.network.attention.block_length is None else 2
    found = [dlm.score(lm, [(context, text)], draws=few, seed=seed)[0] for seed in range(16)]
    spread = np.std([score.nats for score in found])
    reported = np.sqrt(np.mean([score.error**2 for score in found]))
    assert 0.6 * spread < reported < 3 * spread  # draws are stratified, so it errs on the safe side
    assert abs(np.mean([score.nats for score in found]) - exact) < 4 * reported / 16**0.5
    (alone,) = dlm.score(lm, [(context, "c")])
    assert alone.error == 0 and alone.nats == pytest.approx(blocks(lm, lm.encode(context), lm.encode("c")), rel=1e-5)


def test_a_text_alone_follows_end_of_text_where_tokens_are_predicted_from_the_one_before():
    for name, given in (("llada", []), ("Dream", [EOS])):
        lm = text_lm(**KINDS[name], seed=3, spread=0.5)
        (found,) = dlm.score(lm, "abc")
        assert found.error == 0 and found.nats == pytest.approx(blocks(lm, given, lm.encode("abc")), rel=1e-5)


def test_a_causal_model_is_scored_exactly():
    lm = text_lm(**KINDS["causal"], seed=1, spread=0.5)
    scores = dlm.score(lm, ["abcd", ("ab", "cd"), ("", "abcd"), "a", ("xy", "a")], batch_size=4)
    pairs = [([EOS], "abcd"), (lm.encode("ab"), "cd"), ([EOS], "abcd"), ([EOS], "a"), (lm.encode("xy"), "a")]
    for score, (given, text) in zip(scores, pairs, strict=True):
        ids = [*given, *lm.encode(text)]
        with torch.no_grad():
            logits = lm.network(torch.tensor([ids]))[0].double().numpy()
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = -sum(log_p[i - 1, ids[i]] for i in range(len(given), len(ids)))
        assert score.nats == pytest.approx(expected, rel=1e-5)
        assert (score.error, score.tokens, score.bytes) == (0, len(text), len(text))
    assert scores[0] == scores[2]
    assert scores[0].bits_per_byte == pytest.approx(scores[0].nats / 4 / math.log(2))


def test_it_is_transformers_own_loss(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, intermediate_size=40, eos_token_id=EOS, initializer_range=0.3)
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    lm = dlm.load(str(tmp_path), device="cpu")
    lm.tokenizer = byte_tokenizer()
    ids = torch.tensor([[EOS, *lm.encode("a longer text")]])
    with torch.no_grad():
        loss = theirs(ids, labels=ids).loss.item() * 13
        rest = theirs(ids[:, 1:], labels=ids[:, 1:].masked_fill(torch.arange(13) < 8, -100)).loss.item() * 5
    scores = dlm.score(lm, ["a longer text", ("a longer", " text")])
    assert [score.nats for score in scores] == pytest.approx([loss, rest], rel=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_a_score_depends_on_nothing_but_its_text(name):
    lm = text_lm(**KINDS[name], seed=2)
    together = dlm.score(lm, TEXTS, draws=4)
    assert [(s.tokens, s.bytes) for s in together] == [(n, n) for n in (4, 2, 0, 0, 1, 9, 18, 4)]  # a space moves over
    backwards = dlm.score(lm, TEXTS[::-1], draws=4, batch_size=3)[::-1]
    alone = [dlm.score(lm, [text], draws=4)[0] for text in TEXTS]
    for others in (backwards, alone):
        assert [s.nats for s in others] == pytest.approx([s.nats for s in together], rel=1e-5)
        assert [s.error for s in others] == pytest.approx([s.error for s in together], rel=1e-3, abs=1e-6)
    assert together[2] == Score(nats=0.0, error=0.0, tokens=0, bytes=0) and math.isnan(together[2].bits_per_byte)
    assert together[0] == together[7] or together[0].nats == pytest.approx(together[7].nats, rel=1e-6)
    other = dlm.score(lm, TEXTS, draws=4, seed=1)
    assert (other[6].nats == pytest.approx(together[6].nats, rel=1e-6)) == (name == "causal")


def test_continuations_of_one_context_are_compared_under_the_same_masks():
    lm = tiny_lm(tokenizer=byte_tokenizer(), vocab_size=258, mask_token_id=MASK, eos_token_id=EOS)
    seen = []
    lm.network.embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0] == MASK))
    dlm.score(lm, [("so", "abcd"), ("so", "efgh"), ("no", "efgh")], draws=6)
    one, two, other = torch.cat(sorted(seen, key=len)).split(6)[::-1]
    assert torch.equal(one, two) and not torch.equal(two, other)
    assert not one[:, :2].any()
    seen.clear()
    dlm.score(lm, [("so", "a"), ("so", "b")], draws=6)
    assert [len(rows) for rows in seen] == [2]  # a single token is exact after one forward


def test_token_ids_are_texts_too():
    lm = text_lm(seed=2)
    texts = dlm.score(lm, ["abcd", ("ab", "cde")])
    assert dlm.score(lm, [lm.encode("abcd"), (lm.encode("ab"), lm.encode("cde"))]) == texts
    assert dlm.score(tiny_lm(), [[1, 2, 3]])[0].bytes == 0


def test_what_is_spelt_like_the_mask_is_text():
    lm = text_lm(seed=2)
    (found,) = dlm.score(lm, "a[MASK]b", draws=4)
    assert (found.tokens, found.bytes) == (8, 8)
    assert dlm.score(lm, [("x [MASK:3] [MASK]", "[MASK]")], draws=4)[0].tokens == 6
    assert dlm.score(lm, "é<|endoftext|>", draws=4)[0].tokens == 3


def test_a_token_across_the_cut_is_cut():
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens(["bc", " d"])
    lm = tiny_lm(tokenizer=type(tokenizer)(tokenizer.backend), vocab_size=260, mask_token_id=MASK, eos_token_id=EOS)
    cases = [("ab", "cd"), ("ab", "c"), ("a ", "d"), ("a", " d"), ("a", "bc"), (" \n", "bc")]
    found = dlm.score(lm, cases, draws=2)
    assert [(s.tokens, s.bytes) for s in found] == [(2, 2), (1, 1), (1, 2), (1, 2), (1, 2), (3, 4)]
    assert found[2].nats == pytest.approx(found[3].nats, rel=1e-6)


BAD = [
    (3, {}, "texts must be a list of strings or pairs (context, continuation), not int"),
    (["a", 3], {}, "text 1 is '3': give a string, or a pair"),
    ([("a", "b", "c")], {}, "text 0 is"),
    ([("a", None)], {}, "text 0 is"),
    (("a", "b"), {}, "texts is a single pair: write [(context, continuation)]"),
    (["a", "x" * 2000], {}, "text 1 has 2000 tokens, but model 'tiny' a context of 64: score it in parts"),
    (["\ud800"], {}, "text 0 holds a lone surrogate"),
    ([[1, 999]], {}, "text 0: token 999 is none of the model's: they go from 0 to 257"),
    ([("a", [1])], {}, "text 0 is"),
    (["a"], {"draws": 1}, "draws = 1 must be at least 2"),
    (["a"], {"batch_size": 0}, "batch_size = 0 must be at least 1"),
]


@pytest.mark.parametrize(("texts", "settings", "says"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_cannot_be_scored_is_said(texts, settings, says):
    told(says, dlm.score, text_lm(max_position_embeddings=64), texts, **settings)


def test_a_model_without_what_it_takes_is_said():
    assert dlm.score(text_lm(), []) == []
    refused("has no tokenizer", dlm.score, tiny_lm(), ["a"])
    lm = text_lm(**KINDS["causal"])
    lm.network.config.__dict__["eos_token_id"] = None
    refused("eos_token_id", dlm.score, lm, ["a"])


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """100 held-out bytes, each document with its end-of-text."""
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("".join(chr(97 + (i * j) % 26) for j in range(25)))
    return DataConfig(source="text", paths=(f"{tmp_path}/*",), heldout_paths=(f"{tmp_path}/*",), cache=False)


def indifferent(lm: LM) -> LM:
    with torch.no_grad():
        for p in lm.network.parameters():
            p.zero_()
    return lm


@pytest.mark.parametrize("family", ["llada", "sdar", "causal"])
def test_an_indifferent_model_needs_the_logarithm_of_its_vocabulary(data, family):
    lm = indifferent(text_lm(**{**KINDS[family], "mask_in_softmax": False}))
    found = measure_bound(lm, data, length=26, draws=3)
    assert (found.sequences, found.tokens, found.bytes) == (4, 104, 100)
    tokens = 258 if family == "causal" else 257  # a checkpoint of qwen3 knows no mask: its softmax is whole
    assert found.nats_per_token == pytest.approx(math.log(tokens), rel=1e-5)
    assert found.nats_error == pytest.approx(0, abs=1e-5) and found.bits_error == pytest.approx(0, abs=1e-5)
    assert found.bits_per_byte == pytest.approx(104 / 100 * math.log2(tokens), rel=1e-5)
    assert found.perplexity == pytest.approx(tokens, rel=1e-4)
    assert set(HEADINGS) == set(found.row())


def test_few_sequences_and_repeated_masks(data):
    lm = text_lm()
    once, again = (measure_bound(lm, data, length=26, sequences=2, draws=4, seed=5) for _ in range(2))
    assert once.sequences == 2
    assert once.nats_error > 0
    assert (once.nats_per_token, once.nats_error) == (again.nats_per_token, again.nats_error)


def test_nothing_to_measure(data):
    refused("draws = 0", measure_bound, text_lm(), data, length=26, draws=0)


def test_a_causal_network_needs_no_mask_but_an_end_of_text(data):
    lm = text_lm(attention="causal", shifted_logits=True, model_type="qwen3")
    bare = lm.network.config.model_copy(update={"mask_token_id": None})
    lm.network.config = bare
    found = measure_bound(lm, data, length=26)
    assert found.nats_error == 0 and found.bits_per_byte is not None
    lm.network.config = bare.model_copy(update={"eos_token_id": None})
    refused("eos_token_id", measure_bound, lm, data, length=26)


def test_one_draw_has_no_error_and_says_so(data):
    found = measure_bound(text_lm(), data, length=26, draws=1)
    assert found.nats_error is None and found.bits_error is None
    assert found.row()["nats"].endswith(" (one draw: no error)") and "nan" not in str(found.row())
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["bits_error"] is None


def test_the_length_is_that_of_what_was_scored(tmp_path):
    (tmp_path / "a.txt").write_text("some words, and others " * 6)
    for kind in ({}, {"attention": "block_causal", "block_length": 4}):
        lm = text_lm(model_type="dlm", **kind)
        data = DataConfig(source="text", paths=str(tmp_path), cache=False)
        found = measure_bound(lm, data, length=500, draws=2)
        assert found.sequences == 1 and found.tokens == found.length < 40
