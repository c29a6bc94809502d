"""Speculative decoding: drafts change no text, whoever drafts and in whatever company; what is counted."""

import numpy as np
import pytest
import torch

import dlm
from dlm.inference.strategies import speculative as strategy
from dlm.models.draft import Draft
from dlm.replay import verify

from ..diffusion.chi2 import p_value
from . import speculative
from .requests import FAMILIES, prompts
from .speculative import draft_of, plain, small, target, told
from .tiny import byte_tokenizer, likes, tiny_lm


@pytest.mark.parametrize("seed", range(16))
def test_crowds_drawn_at_random_write_what_no_draft_writes(seed):
    assert speculative.run(seed) == ""


@pytest.mark.parametrize("length", [1, 3, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_perfect_draft_is_always_kept(length, temperature):
    lm, given = target(0), small(4)
    settings = {"gen_length": 20, "temperature": temperature, "seed": 5}
    results = dlm.generate(lm, given, draft=told(lm, given, **settings), draft_length=length, **settings)
    for result, tokens in zip(results, plain(lm, given, **settings), strict=True):
        assert result.tokens == tokens
        left, expected = len(tokens) - 1, []
        while left > 0:
            expected.append(min(length + 1, left))
            left -= expected[-1]
        assert result.accepted == expected
        assert result.target_nfe == result.nfe == 1 + len(expected)
        assert result.tau == (np.mean(expected) if expected else 0)
        # the last token of a full text is the target's own: where it alone is left, nothing is drafted
        assert result.draft_nfe == len(expected) - (len(tokens) == 20 and expected[-1:] == [1])


def test_the_worst_draft_is_never_kept():
    lm, given = target(1), small(3)
    results = dlm.generate(lm, given, draft=told(lm, given, 0.0, gen_length=12), gen_length=12)
    assert [result.tokens for result in results] == plain(lm, given, gen_length=12)
    assert all(result.accepted == [1] * (len(result.tokens) - 1) for result in results)


def test_end_of_text_inside_a_block_ends_the_text():
    lm = target(0)
    given = small(30)
    settings = {"gen_length": 24}
    texts = plain(lm, given, **settings)
    ended = [tokens for tokens in texts if tokens[-1] == 3]
    assert ended, "no text ends"
    drafter = told(lm, given, **settings)
    drafter.texts = {name: [*tokens, 5, 6, 7, 8] for name, tokens in drafter.texts.items()}  # goes on after the end
    results = dlm.generate(lm, given, draft=drafter, **settings)
    assert [result.tokens for result in results] == texts
    assert all(sum(result.accepted) == len(result.tokens) - 1 for result in results)
    assert all(result.nfe == 1 + len(result.accepted) for result in results)  # nothing is decoded after the end


def test_a_text_that_ends_with_its_first_token():
    lm = likes(target(0), 3, 1e4)
    (result,) = dlm.generate(lm, [[1, 2]], draft="ngram", gen_length=9)
    assert (result.tokens, result.accepted, result.tau, result.nfe) == ([3], [], 0.0, 1)
    (result,) = dlm.generate(target(0), [[1, 2]], draft="ngram", gen_length=1)
    assert (len(result.tokens), result.accepted, result.nfe) == (1, [], 1)


def test_stop_strings_are_found_in_what_was_kept_alone():
    shape = {**FAMILIES["llama"], "vocab_size": 258, "eos_token_id": 257}
    lm = tiny_lm(2, spread=0.5, tokenizer=byte_tokenizer(), **shape)
    given, settings = [[1, 2, 3], [70, 71]], {"gen_length": 30, "temperature": 0.8}
    texts = dlm.generate(lm, given, **settings)
    stop = lm.decode(texts[0].tokens[9:11])
    expected = dlm.generate(lm, given, stop=stop, **settings)
    for right in (1.0, 0.5):
        drafter = told(lm, given, right, **settings)
        found = dlm.generate(lm, given, stop=stop, draft=drafter, **settings)
        assert [(r.text, r.tokens, r.finish_reason) for r in found] == [
            (r.text, r.tokens, r.finish_reason) for r in expected
        ]
        assert all(sum(result.accepted) == len(result.tokens) - 1 for result in found)


def test_a_crowd_with_and_without_a_draft_some_cancelled_pages_short():
    lm = target(2)
    draft = draft_of("dflash", lm, 1, block_size=6)
    given = small(32)
    settings = [
        {"gen_length": 6 + i % 13, "temperature": (0.0, 0.9)[i % 2], "seed": i, **({"top_k": 9} if i % 4 == 3 else {})}
        for i in range(32)
    ]
    alone = [plain(lm, [prompt], **each)[0] for prompt, each in zip(given, settings, strict=True)]
    engine = dlm.Engine(lm, draft=draft, page_size=4, num_pages=40, max_num_tokens=64)
    for i, (prompt, each) in enumerate(zip(given, settings, strict=True)):
        engine.add_request(prompt, request_id=str(i), draft=i % 3 != 0, **each)
    results, cancelled = {}, {"4", "9", "17", "30"}
    while engine.has_work:
        for event in engine.step():
            if event.last:
                results[event.request_id] = event.result
        for seq in engine.batch.sequences.values():  # no draft outlives its step
            assert (seq.canvas.tokens[seq.canvas.masked] == seq.canvas.mask_id).all()
        under_way = cancelled & set(engine.batch.sequences)
        for name in under_way:
            if engine.batch.sequences[name].nfe >= 3 or name == "30":
                engine.cancel(name)
    assert {name: result.tokens for name, result in results.items()} == {
        str(i): tokens for i, tokens in enumerate(alone) if str(i) in results
    }
    assert set(results) >= {str(i) for i in range(32)} - cancelled
    assert all((results[name].accepted is None) == (int(name) % 3 == 0) for name in results)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.pages_used == 0


def test_a_request_parked_in_the_middle_drafts_as_if_nothing_had_been():
    """The draft's keys are parked and taken up with the target's: the same tokens are drafted and kept."""
    lm = target(3)
    draft = draft_of("dflash", lm, 2, block_size=6)
    given, settings = small(6), {"gen_length": 18}
    whole = dlm.generate(lm, given, draft=draft, **settings)
    engine = dlm.Engine(lm, draft=draft, page_size=4, num_pages=11)
    parked = engine.generate(given, **settings)
    assert engine.stats().preemptions > 0
    assert [(r.tokens, r.accepted) for r in parked] == [(r.tokens, r.accepted) for r in whole]


def test_a_shared_beginning_brings_the_draft_s_context_along():
    lm = target(3)
    draft = draft_of("dflash", lm, 2, block_size=6)
    start = [int(x) for x in np.random.default_rng(0).integers(0, 39, 12)]
    given = [[*start, i, 7] for i in range(5)]
    apart = [dlm.generate(lm, [prompt], draft=draft, gen_length=16)[0] for prompt in given]
    engine = dlm.Engine(lm, draft=draft, page_size=4)
    engine.generate([[*start, 1]], gen_length=4, draft=False)  # fills pages that have no context of the draft's
    for prompt, one in zip(given, apart, strict=True):
        (result,) = engine.generate([prompt], gen_length=16)
        assert (result.tokens, result.accepted) == (one.tokens, one.accepted)


def test_rejection_through_the_engine_keeps_the_distribution(monkeypatch):
    """All texts of length 3 over 8 tokens, as often as the target's own probabilities say; a wrong judgement does not."""
    lm = tiny_lm(5, spread=0.25, **{**FAMILIES["llama"], "vocab_size": 8, "num_hidden_layers": 3})
    draft = Draft.fresh(lm, num_layers=1, block_size=4, generator=torch.Generator().manual_seed(0), mask_token_id=7)
    draws, prompt, kept = 6000, [1, 2], []

    def probabilities(tokens):
        ids = torch.tensor(tokens)
        rows = torch.zeros(ids.shape, dtype=torch.bool)
        rows[:, -1] = True
        ids = torch.cat((ids, ids[:, :1]), dim=1)
        rows = torch.cat((torch.zeros_like(rows), rows[:, -1:]), dim=1)
        with torch.no_grad():
            return lm.predict(ids, rows).double().softmax(-1).numpy()

    first = probabilities([prompt])[0]
    second = probabilities([[*prompt, a] for a in range(8)])
    third = probabilities([[*prompt, a, b] for a in range(8) for b in range(8)]).reshape(8, 8, 8)
    expected = (first[:, None, None] * second[:, :, None] * third).reshape(-1) * draws

    def chance() -> float:
        settings = {"gen_length": 3, "temperature": 1.0, "num_samples": draws, "verify": "reject", "batch_size": 512}
        results = dlm.generate(lm, [prompt], draft=draft, **settings)
        texts = np.array([result.tokens for result in results]).T
        kept.append(np.mean([result.tau for result in results]))
        return p_value(np.bincount(np.ravel_multi_index(tuple(texts), (8, 8, 8)), minlength=512), expected)

    assert chance() > 1e-3
    assert 1.05 < kept[0] < 2  # some are kept, some are not
    monkeypatch.setattr(strategy, "judge", lambda p, q, drafted, address: drafted)  # keeps every draft
    assert chance() < 1e-6


@pytest.mark.parametrize("family", ["llada", "Dream", "sdar", "Fast_dLLM_Qwen"])
def test_a_diffusion_model_s_jumps_are_its_own_steps(family, tmp_path):
    lm = tiny_lm(2, spread=0.4, **FAMILIES[family])
    saved = 0
    cases = {"steps": 16}, {"steps": 8, "temperature": 0.8}, {"rule": "threshold", "threshold": 0.5}
    for number, more in enumerate(cases):
        settings = {"gen_length": 16, "block_length": 8, **more}
        alone = dlm.generate(lm, prompts(5), **settings)
        with dlm.TraceStore(tmp_path / f"{number}.db") as store:
            names = list("abcde")
            found = dlm.generate(lm, prompts(5), draft="self", trace=store, request_ids=names, **settings)
            store.flush()
            assert all(verify(lm, store[name]).identical for name in names)
        assert [(r.tokens, r.steps) for r in found] == [(r.tokens, r.steps) for r in alone]
        assert all(r.nfe <= a.nfe for r, a in zip(found, alone, strict=True))
        saved += sum(a.nfe - r.nfe for r, a in zip(found, alone, strict=True))
    assert saved > 0
