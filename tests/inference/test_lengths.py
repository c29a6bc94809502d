import numpy as np
import pytest
import torch

import dlm
from dlm.errors import UserError
from dlm.inference.prompts import Piece, parse_holes, spell
from dlm.inference.request import Interrupted
from tests.evaluation.knowing import Knowing
from tests.evaluation.knowing import text_lm as knowing_lm

from .requests import FAMILIES
from .tiny import MASK, text_lm

RANGES = [
    "def f(x): [MASK:2-7] y",
    "[MASK:1-4], then [MASK:2-9] and [MASK:3].",
    "to the end [MASK:3-6]",
    "x [MASK:5] y",
]


class Guessing(Knowing):
    """Like `Knowing`, but of a canvas that agrees with no text it thinks nothing in particular."""

    def _look(self, ids: torch.Tensor) -> torch.Tensor:
        shown = ids != self.config.mask_token_id
        fits = any(len(text) == len(ids) and bool((text == ids)[shown].all()) for text in self.texts)
        return super()._look(ids) if fits else torch.zeros(len(ids), self.config.vocab_size)


def knows(*texts: str) -> dlm.LM:
    lm = knowing_lm([])
    network = Guessing(lm.network.config).know([lm.encode(text) for text in texts]).eval()
    return dlm.LM(network, lm.tokenizer, "guessing")


def test_ranges_are_cut_out_and_spelt():
    assert parse_holes("a[MASK:4-16]b[MASK:3-3]") == [Piece("a"), Piece(hole=4, most=16), Piece("b"), Piece(hole=3)]
    for text in (r"\[MASK:4-16] [MASK:4-16][MASK:2] \\[MASK:7]", "x[MASK:1]y"):
        assert spell(parse_holes(text)) == text
    assert spell(parse_holes("[MASK][MASK]")) == "[MASK:2]"


def test_a_model_that_knows_the_answer_finds_its_length():
    lm = knows("return pi * r * r", "a = 12345; b = 678\n", "a = 12345; b = and so on, long\n", "x = 1")
    found = dlm.infill(lm, ["return [MASK:2-15]r", "a = [MASK:1-9]; b = [MASK:1-30]\n", "x[MASK:1-9]1", "x = [MASK:1]"])
    assert [r.text for r in found] == ["return pi * r * r", "a = 12345; b = 678\n", "x = 1", "x = 1"]
    assert [r.holes for r in found] == [["pi * r * "], ["12345", "678"], [" = "], ["1"]]
    # Two forwards a length. Of 30 lengths 16 come first, then those between the best one's neighbours.
    assert [r.nfe - len(r.tokens) for r in found] == [2 * 14, 2 * (9 + 16 + 2), 2 * 9, 0]
    assert found[2].tpf == 3 / (2 * 9 + 3)


def test_a_hole_that_ends_the_prompt_ends_the_text():
    lm = knows("the end<|endoftext|>", "the ending", "the e")
    assert len(dlm.infill(lm, "the [MASK:1-8]")[0].tokens) == 3  # without end-of-text it is surer of six, or of one


@pytest.mark.parametrize("name", ["llada", "Dream", "sdar", "Fast_dLLM_Qwen"])
def test_a_prompt_gets_the_same_alone_and_in_a_crowd(name):
    lm = text_lm(**FAMILIES[name], seed=2, spread=0.5)
    prompts = [f"so {text}" for text in RANGES]  # shifted families need a token to begin from
    together = dlm.infill(lm, prompts, temperature=0.8, seed=3, steps=4)
    for prompt, result in zip(prompts, together, strict=True):
        alone = dlm.infill(lm, prompt, temperature=0.8, seed=3, steps=4, batch_size=2)[0]
        assert {**alone.to_dict(), "request_id": result.request_id} == result.to_dict()
        pieces = [p for p in parse_holes(prompt) if p.hole]
        sizes = iter(result.tokens)
        assert len(result.holes) == len(pieces) and len(list(sizes)) >= sum(p.hole for p in pieces)
        assert len(result.tokens) <= sum(p.most or p.hole for p in pieces)


def test_the_fill_is_that_of_the_chosen_length():
    lm = text_lm(seed=2, spread=0.5)
    chosen = dlm.infill(lm, "ab [MASK:2-7] cd", temperature=0.5, num_samples=2, request_ids=["x"])
    fixed = dlm.infill(lm, f"ab [MASK:{len(chosen[0].tokens)}] cd", temperature=0.5, num_samples=2, request_ids=["x"])
    assert [(r.text, r.steps, r.request_id) for r in chosen] == [(r.text, r.steps, r.request_id) for r in fixed]
    assert [r.nfe for r in chosen] == [r.nfe + 2 * 6 for r in fixed]


def test_the_choice_is_that_of_the_formula():
    """By hand: mean p of the best tokens of the empty hole, over the same where the prompt ends with it; left to right."""
    lm = text_lm(seed=2, spread=0.5)
    words = [lm.encode(part) for part in ("ab ", " cd ", " e")]

    def sure(sizes: list[int], number: int, cut: bool) -> float:
        ids: list[int] = []
        for i, size in enumerate(sizes):
            ids += [*words[i], *[MASK] * size]
            if i == number:
                hole = slice(len(ids) - size, len(ids))
            if i == number and cut:
                break
        canvas = torch.tensor([ids if cut else [*ids, *words[2]]])
        rows = torch.zeros_like(canvas, dtype=torch.bool)
        rows[0, hole] = True
        with torch.no_grad():
            return lm.network.suppress(lm.predict(canvas, rows)).softmax(-1).max(-1)[0].mean().item()

    sizes, ranges = [3, 4], [range(2, 5), range(1, 8)]  # first in the middle of their ranges
    for number, tried in enumerate(ranges):
        scores = {}
        for size in tried:
            probe = [size if i == number else other for i, other in enumerate(sizes)]
            scores[size] = sure(probe, number, cut=False) / sure(probe, number, cut=True)
        sizes[number] = max(scores, key=scores.__getitem__)
    found = dlm.infill(lm, "ab [MASK:2-4] cd [MASK:1-7] e")[0]
    assert found.nfe - len(found.tokens) == 2 * (3 + 7) and len(found.tokens) == sum(sizes)
    fixed = dlm.infill(lm, f"ab [MASK:{sizes[0]}] cd [MASK:{sizes[1]}] e")[0]
    assert (found.text, found.holes) == (fixed.text, fixed.holes)


def test_only_the_chosen_length_is_recorded(tmp_path):
    lm = text_lm(seed=2)
    with dlm.TraceStore(tmp_path / "traces.db") as store:
        result = dlm.infill(lm, "ab[MASK:2-7]cd", trace=store, request_ids=["a"])[0]
        assert len(store) == 1
        trace = store["a"]
        assert np.count_nonzero(trace.state(0) == MASK) == len(result.tokens) == trace.meta["nfe"]
        assert dlm.replay.verify(lm, trace).identical
        seen = []
        dlm.infill(lm, "ab[MASK:2-7]cd", on_step=seen.append)
        assert len(seen) == trace.num_steps


def test_a_single_request_takes_no_range():
    engine = dlm.Engine(text_lm())
    with pytest.raises(UserError, match=r"\[MASK:4-16\]: one request has holes of one length each: dlm.infill chooses"):
        engine.add_request("a [MASK:4-16]", infill=True)


def test_prompts_of_every_form_may_stand_beside_a_range():
    lm = text_lm(seed=2)
    array = np.array([[97, MASK, MASK, 98], [98, MASK, MASK, 99]])
    assert len(dlm.infill(lm, array)) == len(dlm.infill(lm, torch.from_numpy(array))) == 2
    mixed = dlm.infill(lm, (array[0], "a[MASK:2-4]b", [97, MASK]), num_samples=2, temperature=1.0)
    assert [len(r.tokens) for r in mixed] == [2, 2, *[len(mixed[2].tokens)] * 2, 1, 1]
    assert [r.nfe - len(r.tokens) for r in mixed] == [0, 0, 6, 6, 0, 0]


def test_an_interrupted_choice_has_no_results():
    lm = text_lm()

    def interrupt(module, inputs):
        raise KeyboardInterrupt

    hook = lm.network.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupted) as caught:
        dlm.infill(lm, "a[MASK:2-4]b")
    hook.remove()
    assert caught.value.results == []
