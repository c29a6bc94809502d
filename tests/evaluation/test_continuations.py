"""Loops, entropy and the judge's perplexity of continuations, against counts made by hand and numpy's formulas."""

import math
from pathlib import Path

import numpy as np
import pytest

import dlm
from dlm.data.config import DataConfig
from dlm.errors import UserError
from dlm.evaluation.continuations import entropy, evaluate_continuations, heldout_prompts, loops, references

from ..inference.tiny import text_lm


def brute(tokens: list[int]) -> bool:
    text = " ".join(f"<{token}>" for token in tokens)
    grams = {" ".join(f"<{token}>" for token in tokens[i : i + 4]) for i in range(len(tokens) - 3)}
    return any(sum(text[at:].startswith(gram) for at in range(len(text))) > 3 for gram in grams)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4] * 4, True),
        ([1, 2, 3, 4] * 3 + [1, 2, 3], False),  # three times, and a start
        ([7] * 7, True),  # four overlapping runs
        ([7] * 6, False),
        (list(range(64)), False),
        ([], False),
        ([1, 2, 3], False),
    ],
)
def test_a_loop_is_a_four_gram_more_than_three_times(tokens, expected):
    assert loops(tokens) is expected is brute(tokens)


def test_loops_agree_with_a_search_in_text():
    draw = np.random.default_rng(0)
    cases = [draw.integers(0, 3, 40).tolist() for _ in range(60)]
    assert [loops(c) for c in cases] == [brute(c) for c in cases] and len({loops(c) for c in cases}) == 2


def test_entropy_in_bits():
    assert entropy([5] * 8) == 0 and entropy([1, 2, 3, 4]) == 2 and entropy([]) == 0
    assert entropy([1, 1, 2]) == pytest.approx(-(2 / 3 * math.log2(2 / 3) + 1 / 3 * math.log2(1 / 3)))


@pytest.fixture
def files(tmp_path: Path) -> DataConfig:
    held = tmp_path / "held.txt"
    held.write_text("".join(f"line {n} says {n * n}\n" for n in range(60)))
    (tmp_path / "train.txt").write_text("nothing\n")
    return DataConfig(source="text", paths=(str(tmp_path / "train.txt"),), heldout_paths=(str(held),))


def test_prompts_are_whole_lines_before_the_real_text(files):
    lm = text_lm(max_position_embeddings=512)
    text = Path(files.heldout_paths[0]).read_text()
    places = heldout_prompts(files, lm, count=9, context=50, tokens=12)
    assert len(places) == 9 and len({place.name for place in places}) == 9
    for place in places:
        real = lm.decode(place.real)
        assert place.prompt + real in text and place.prompt.endswith("\n") and 30 < len(place.prompt) <= 50
        assert place.prompt.startswith("line") and len(place.real) == 12
    assert places == heldout_prompts(files, lm, count=9, context=50, tokens=12)
    with pytest.raises(UserError, match="characters before"):
        heldout_prompts(files, lm, context=10**6)


def test_results_are_those_of_the_parts(files):
    lm = text_lm(max_position_embeddings=512)
    judge = text_lm(attention="causal", max_position_embeddings=512)
    places = heldout_prompts(files, lm, count=5, context=50, tokens=12)
    result, found = evaluate_continuations(lm, judge, places, tokens=12, temperature=1.0)
    plain = dlm.generate(lm, [place.prompt for place in places], gen_length=12, temperature=1.0)
    assert [r.tokens for r in found] == [r.tokens for r in plain]
    assert result.tpf == sum(len(r.tokens) for r in plain) / sum(r.nfe for r in plain)
    assert result.loops.total == 5 and result.settings == "temperature = 1.0"
    real, shuffled = references(lm, judge, places)
    costs = dlm.score(judge, [(place.prompt, lm.decode(place.real)) for place in places])
    expected = math.exp(sum(c.nats for c in costs) / sum(c.tokens for c in costs))
    assert real.perplexity == pytest.approx(expected) and real.entropy == pytest.approx(shuffled.entropy)
    assert real.perplexity != shuffled.perplexity and real.row()["loops"] == str(real.loops)
