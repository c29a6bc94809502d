"""A strategy from outside the package: one class and one line, under every cache, in a crowd, traced and replayed."""

import pytest
import torch

import dlm
from dlm.inference.strategies import STRATEGIES
from dlm.inference.strategies.block import Block
from dlm.replay import verify

from .requests import FAMILIES, prompts, tokens
from .tiny import tiny_lm

CACHES = [
    *(("llada", cache) for cache in ("none", "prefix", "dual")),
    *((family, cache) for family in ("sdar", "Fast_dLLM_Qwen", "llama") for cache in ("none", "exact")),
]


class RightToLeft(Block):
    """The last block first. Beside the network it computes a sum over what it has decided, which then decides with it."""

    left_to_right = False

    def __init__(self, lm, pool) -> None:
        super().__init__(lm, pool)
        self.computed, self.observed, self.resolved, self.parked, self.resumed, self.live = 0, 0, 0, 0, 0, set()

    def begin(self, seq) -> bool:
        seq.memory = torch.tensor(7)
        self.live.add(seq)
        seq.blocks = iter(list(seq.decoding.plan.blocks(seq.request))[::-1])
        return self._open_more(seq)

    def ends(self, seq, block) -> bool:
        return False  # what stands before the block is not decided yet

    def prepare(self, scheduled) -> None:
        sums = torch.stack([item.sequence.memory for item in scheduled])  # for all of them at once
        for item, value in zip(scheduled, (sums * 31 + 5) % 1009, strict=True):
            item.sequence.memory = value
        self.computed += 1

    def observe(self, scheduled, forward) -> None:
        assert forward.layout.rows >= len(scheduled)
        self.observed += 1

    def resolve(self, seq, proposed):
        """Where the sum is odd, only the first of the chosen tokens is committed, and all else waits."""
        self.resolved += 1
        if seq.memory % 2 and proposed.commit.any():
            proposed.commit[proposed.commit.argmax() + 1 :] = False
        return proposed

    def advance(self, seq, decision) -> bool:
        seq.memory = seq.memory + int(decision.token[decision.commit].sum())
        return super().advance(seq, decision)

    def park(self, seq):
        self.parked += 1
        memory, seq.memory = seq.memory.numpy().copy(), None
        return memory

    def resume(self, seq, parked) -> None:
        self.resumed += 1
        seq.memory = torch.from_numpy(parked)

    def forget(self, seq) -> None:
        self.live.discard(seq)


@pytest.fixture(autouse=True)
def _one_line(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "right_to_left", RightToLeft)


def settings(**more):
    rule = {"rule": "threshold", "threshold": 0.3}
    return {"gen_length": 12, "block_length": 4, "strategy": "right_to_left", "seed": 3, **rule, **more}


@pytest.mark.parametrize(("family", "cache"), CACHES)
def test_it_gives_the_same_tokens_alone_and_in_a_crowd_that_is_parked(family, cache):
    lm = tiny_lm(3, spread=0.5, **FAMILIES[family])
    alone = [dlm.generate(lm, [prompt], cache=cache, **settings())[0] for prompt in prompts(9)]
    grows = {"gen_length": 24, "block_length": 4}  # page by page, where keys are cached exactly: then others are parked
    other = dlm.generate(lm, prompts(3), cache=cache, **grows)
    engine = dlm.Engine(lm, cache=cache, page_size=4, num_pages=28, max_num_tokens=160)
    beside = [engine.add_request(prompt, **grows) for prompt in prompts(3)]
    crowd = [engine.add_request(prompt, **settings()) for prompt in prompts(9)]
    results = {event.request_id: event.result for event in engine.stream() if event.result is not None}
    assert tokens([results[name] for name in crowd]) == tokens(alone)
    assert tokens([results[name] for name in beside]) == tokens(other)
    strategy = engine.batch.strategies["right_to_left"]
    assert strategy.computed == strategy.observed > 0 and strategy.resolved >= strategy.computed
    assert strategy.parked == strategy.resumed and not strategy.live
    if cache == "exact":
        assert strategy.parked > 0
    assert engine.stats().pages_used == 0


def test_it_goes_from_right_to_left_and_a_cache_changes_nothing():
    lm = tiny_lm(3, spread=0.5, **FAMILIES["sdar"])
    (result,) = dlm.generate(lm, [[1, 2, 3, 4]], cache="none", **settings())
    blocks = [result.steps[i : i + 4] for i in (0, 4, 8)]
    assert max(blocks[2]) < min(blocks[1]) and max(blocks[1]) < min(blocks[0])
    assert dlm.generate(lm, [[1, 2, 3, 4]], cache="exact", **settings())[0].tokens == result.tokens
    assert dlm.generate(lm, [[1, 2, 3, 4]], **{**settings(), "strategy": "block"})[0].tokens != result.tokens


def test_a_long_prompt_is_read_in_pieces_before_it():
    lm = tiny_lm(3, spread=0.5, **FAMILIES["sdar"])
    prompt = list(range(40))
    whole = dlm.generate(lm, [prompt], **settings())[0]
    engine = dlm.Engine(lm, page_size=4, max_num_tokens=56)
    assert engine.generate([list(range(60, 20, -1)), prompt], **settings())[1].tokens == whole.tokens


@pytest.mark.parametrize(("family", "cache"), [("llada", "dual"), ("sdar", "exact")])
def test_it_is_traced_and_replayed(family, cache, tmp_path):
    lm = tiny_lm(3, spread=0.5, **FAMILIES[family])
    with dlm.TraceStore(tmp_path / "t.db") as store:
        names = ["a", "b", "c"]
        results = dlm.generate(lm, prompts(3), cache=cache, trace=store, request_ids=names, **settings(temperature=0.8))
        store.flush()
        for name, prompt, result in zip(names, prompts(3), results, strict=True):
            trace = store[name]
            assert trace.context["sampler"]["strategy"] == "right_to_left"
            assert verify(lm, trace).identical, name
            assert trace.state(trace.num_steps)[len(prompt) :].tolist()[:12] == result.tokens


def test_an_unknown_strategy_names_the_known_ones():
    with pytest.raises(dlm.UserError, match=r"strategy.*'middle_out'.*block, multi_block"):
        dlm.generate(tiny_lm(), [[1]], gen_length=4, strategy="middle_out")
