"""Holes that are filled until the text passes a check."""

import numpy as np
import pytest

import dlm
from dlm import replay
from dlm.inference import checks
from dlm.trace.events import MASK as BACK
from dlm.trace.events import SET
from tests.refusals import refused
from tests.serving.live import config, live

from .requests import FAMILIES, tokens
from .tiny import MASK, text_lm, tiny_lm

PROMPTS = ["ab[MASK:3]cd[MASK:5]e", "x = [MASK:6]\ny", "f([MASK:2], [MASK:2])", "q[MASK:9]"]


def model(family: str = "llada"):
    fields = {name: value for name, value in FAMILIES[family].items() if name != "mask_token_id"}
    return text_lm(spread=0.2, **fields)


def picky(pieces, fills) -> bool:
    """Passes a text by the sum of its fills' characters: about one in four."""
    assert len(pieces) == len(fills) + 1
    return sum(map(ord, "".join(fills))) % 4 == 0


@pytest.fixture(autouse=True)
def check(monkeypatch):
    monkeypatch.setitem(checks.CHECKS, "python", picky)


def fill(lm, prompts=PROMPTS, attempts=6, **settings):
    return dlm.infill(lm, prompts, check="python", attempts=attempts, **settings)


@pytest.mark.parametrize("family", ["llada", "Dream", "sdar"])
def test_holes_are_filled_until_the_text_passes(family):
    lm = model(family)
    once, results = dlm.infill(lm, PROMPTS), fill(lm)
    assert {result.attempts for result in results} - {1}, "nothing was filled again: the test shows nothing"
    for prompt, first, result in zip(PROMPTS, once, results, strict=True):
        holes = [sum(map(ord, hole)) for hole in result.holes]
        assert result.passed == (sum(holes) % 4 == 0) and (result.passed or result.attempts == 6)
        assert (result.tokens == first.tokens) == (result.attempts == 1), "other attempts draw other tokens"
        assert result.nfe == first.nfe * result.attempts
        last = (first.nfe + 1) * (result.attempts - 1)  # a step without a forward masks them again
        assert min(result.steps) >= last and max(result.steps) < last + first.nfe
        begin, end = prompt.split("[MASK")[0], prompt.rsplit("]")[-1]
        assert result.text.startswith(begin) and result.text.endswith(end)
    assert tokens(fill(lm, attempts=1)) == tokens(once)
    assert all(result.attempts is None for result in once)


@pytest.mark.parametrize(
    ("asked", "again", "then"), [(0.0, {}, 0.7), (0.2, {}, 0.7), (1.3, {}, 1.3), (0.2, {"retry_temperature": 0.4}, 0.4)]
)
def test_the_temperature_of_further_attempts(asked, again, then):
    checks.CHECKS["python"] = lambda pieces, fills: False
    engine = dlm.Engine(model())
    name = engine.add_request(PROMPTS[0], infill=True, check="python", attempts=3, temperature=asked, **again)
    seq, seen = engine.batch.sequences[name], {}
    while engine.has_work:
        seen.setdefault(seq.attempt, seq.decoding.settings.temperature)
        engine.step()
    assert seen == {1: asked, 2: then, 3: then}


@pytest.mark.parametrize("room", ["ample", "scarce"])
@pytest.mark.parametrize("family", ["llada", "sdar"])
@pytest.mark.parametrize("settings", [{}, {"cfg_scale": 0.5, "block_length": 2}, {"strategy": "multi_block"}])
def test_any_batch_equals_one_alone(family, settings, room):
    """In one engine with others, that come when they like, and where pages are short: token for token, step for step."""
    lm = model(family)
    settings = {"rule": "threshold", "threshold": 0.3, **settings} if "cfg_scale" not in settings else settings
    alone = [fill(lm, [prompt], **settings)[0] for prompt in PROMPTS * 2]
    limits = {"num_pages": 24, "max_num_tokens": 64, "max_num_requests": 3} if room == "scarce" else {}
    engine = dlm.Engine(lm, page_size=4, **limits)
    names = [engine.add_request(prompt, infill=True, check="python", attempts=6, **settings) for prompt in PROMPTS[:3]]
    names.append(engine.add_request("ab", gen_length=8))
    engine.step()
    names += [
        engine.add_request(prompt, infill=True, check="python", attempts=6, **settings)
        for prompt in [PROMPTS[3], *PROMPTS]
    ]
    found = {event.request_id: event.result for event in engine.stream() if event.result is not None}
    del found[names.pop(3)]
    for name, expected in zip(names, alone, strict=True):
        result = found[name]
        assert (result.tokens, result.steps, result.nfe) == (expected.tokens, expected.steps, expected.nfe)
        assert (result.attempts, result.passed) == (expected.attempts, expected.passed)
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.pages_used == 0


@pytest.mark.parametrize("cache", ["none", "dual", "prefix"])
def test_every_attempt_stands_in_the_trace(cache, tmp_path):
    checks.CHECKS["python"] = lambda pieces, fills: False
    lm, seen = model(), []
    with dlm.TraceStore(tmp_path / "traces.db") as store:
        store.keep = ("confidence", "topk", "digests")
        settings = {"cache": cache, "steps": 4}
        (result,) = fill(lm, PROMPTS[:1], trace=store, request_ids=["a"], on_step=seen.append, **settings)
        trace = store["a"]
        trace.check()
        assert result.attempts == 6 and trace.num_steps == len(seen)
        holes = trace.state(0) == MASK
        for k, event in enumerate(seen, start=1):
            assert event.step == k - 1
            assert trace.state(k).tolist() == event.canvas[0].tolist()
            if event.remasked.any():
                assert not event.committed.any() and (event.remasked[0].numpy() == holes).all()
        kinds = [event.kind for event in trace.events()]
        assert kinds.count(BACK) == (result.attempts - 1) * holes.sum()
        assert kinds.count(SET) == result.attempts * holes.sum() and trace.meta["nfe"] == result.nfe
        assert np.isfinite(trace.confidence[: trace.length][holes].astype(float)).all()
        assert [trace.tokens[at] for at in np.flatnonzero(holes)] == result.tokens
        verified = replay.verify(lm, trace)
        assert verified.position is None and verified.same_steps == trace.num_steps
        half = trace.num_steps // 2
        again = replay.fork(lm, trace, half, request_id="b")
        assert again.num_steps == trace.num_steps and again.tokens.tolist() == trace.tokens.tolist()
        other = replay.fork(lm, trace, half, request_id="c", temperature=1.0, seed=9)
        assert all(other.state(k).tolist() == trace.state(k).tolist() for k in range(half + 1))
        refused("fork\\(\\): attempts cannot change", replay.fork, lm, trace, half, attempts=2)
        assert "check" not in _context(lm, store)


def _context(lm, store) -> dict:
    """What a trace says of a request that nothing checks."""
    dlm.infill(lm, PROMPTS[:1], trace=store, request_ids=["plain"])
    return store["plain"].context["sampler"]


def test_confidence_is_that_of_the_last_attempt():
    checks.CHECKS["python"] = lambda pieces, fills: False
    engine = dlm.Engine(model())
    engine.add_request(PROMPTS[1], infill=True, check="python", attempts=3, confidence=True)
    *_, last = engine.stream()
    assert last.result.attempts == 3 and not last.result.passed
    assert len(last.confidence) == len(last.result.tokens) and all(0 < p <= 1 for p in last.confidence)


def test_who_leaves_between_attempts_leaves_nothing_behind():
    lm = model()
    engine = dlm.Engine(lm, page_size=4)
    names = [engine.add_request(prompt, infill=True, check="python", attempts=1000) for prompt in PROMPTS]
    checks.CHECKS["python"] = lambda pieces, fills: False
    for _ in range(40):
        engine.step()
    for name in names:
        engine.cancel(name)
    stats = engine.stats()
    assert stats.running == stats.waiting == stats.pages_used == 0 and not engine.has_work


def test_what_cannot_be_checked_is_refused():
    lm = model()
    refused("attempts = 3 is only read with a check", dlm.infill, lm, PROMPTS, attempts=3)
    refused("attempts = 3 is only read with a check", dlm.generate, lm, ["a"], attempts=3)
    refused("attempts = 3 is only read with a check", dlm.infill, lm, PROMPTS, attempts=3, check="none")
    refused("retry_temperature = 1.0 is only read with a check", dlm.infill, lm, PROMPTS, retry_temperature=1.0)
    refused("none.*python", dlm.infill, lm, PROMPTS, check="pascal")
    refused("check = 'python' is of holes", dlm.generate, lm, ["a"], check="python")
    refused("check = 'python' is of holes", dlm.Engine(lm).add_request, "a", check="python")
    refused("has no tokenizer", dlm.infill, tiny_lm(), [[1, 63, 2]], check="python")


def test_a_server_checks_what_it_fills_and_nothing_else():
    sampler = {"check": "python", "attempts": 6}
    with live(config(sampler=sampler)) as running:
        lm, body = running.server.lm, {"prompt": PROMPTS[1], "infill": True}
        assert running.text(body) == dlm.infill(lm, [PROMPTS[1]], **sampler)[0].text
        facts, known = running.post(body).json()["dlm"], dlm.infill(lm, [PROMPTS[1]], **sampler)[0]
        assert (facts["attempts"], facts["passed"]) == (known.attempts, known.passed)
        assert running.text({**body, "check": "none"}) == dlm.infill(lm, [PROMPTS[1]])[0].text
        assert running.text({"prompt": "ab", "max_tokens": 4}) == dlm.generate(lm, ["ab"], gen_length=4)[0].text
        assert running.post({"prompt": "ab", "check": "python"}).status_code == 400
        chunks = running.chunks({**body, "stream_mode": "denoise"})
        steps = [chunk["dlm"] for chunk in chunks if "commit" in chunk.get("dlm", {})]
        assert sum(bool(step["remask"]) for step in steps) == dlm.infill(lm, [PROMPTS[1]], **sampler)[0].attempts - 1


def test_the_bundled_model_is_used_with_its_check(monkeypatch):
    monkeypatch.undo()
    lm = dlm.load("pico", device="cpu")
    prompts = [f"def {name}(a, b):\n    [MASK:9]\n    return c\n" for name in ("mean", "join", "find", "read")]
    once, results = dlm.infill(lm, prompts, check="none"), dlm.infill(lm, prompts)
    assert [result.passed for result in results] == [checks.python(("", ""), (result.text,)) for result in results]
    assert sum(result.passed for result in results) >= sum(checks.python(("", ""), (result.text,)) for result in once)
    most = max(result.attempts for result in results)
    assert most > 1 == max(result.attempts for result in dlm.infill(lm, prompts, attempts=1))
    refused("attempts = 2 is only read", dlm.infill, lm, prompts, attempts=2, check="none")
