import json

import numpy as np
import pytest

from dlm.evaluation.filling import Filling
from dlm.evaluation.rate import Rate
from dlm.evaluation.sudoku import HEADINGS, MAIN, SWEEP, Puzzles, evaluate_sudoku, grade, heldout_puzzles
from dlm.evaluation.table import markdown
from dlm.sudoku import follows_rules, solutions
from tests.evaluation.knowing import sudoku_lm
from tests.inference.tiny import text_lm
from tests.refusals import refused


@pytest.fixture(scope="module")
def puzzles() -> Puzzles:
    return heldout_puzzles(6, (33, 48), seed=3)


def test_puzzles_are_unique_and_a_subset_is_a_prefix(puzzles):
    assert ((puzzles.empty >= 33) & (puzzles.empty <= 48)).all()
    assert all(len(solutions(p)) == 1 for p in puzzles.puzzles)
    assert (heldout_puzzles(2, (33, 48), seed=3).puzzles == puzzles.first(2).puzzles).all()
    refused("0 puzzles", heldout_puzzles, 0)


def test_grading_by_hand(puzzles):
    """Six right but for: one cell wrong, one given overwritten by a valid grid's digit, one full of ones."""
    answers = puzzles.solutions.astype(int)
    hole, given = np.flatnonzero(puzzles.puzzles[0] == 0)[0], np.flatnonzero(puzzles.puzzles[1])[0]
    answers[0, hole] = answers[0, hole] % 9 + 1
    swap = answers[1].copy()  # digits a and b exchanged everywhere: a valid grid, but not of this puzzle
    a, b = swap[given], swap[given] % 9 + 1
    answers[1] = np.select([swap == a, swap == b], [b, a], swap)
    assert follows_rules(answers[1:2])[0]
    answers[2][puzzles.puzzles[2] == 0] = 1
    result = grade(puzzles, answers, [2, 2, 2, 2, 2, 5], "mine", 1.0)
    assert result.solved == Rate(3, 6)
    empty = puzzles.empty
    assert result.easy == Rate(int((empty[3:] <= 45).sum()), int((empty <= 45).sum()))
    assert sum(rate.total for rate in result.bands.values()) == 6
    assert sum(rate.hits for rate in result.bands.values()) == 3
    assert result.bands["51-55"].value is None
    assert result.tpf == pytest.approx(empty.sum() / 15)
    assert result.nfe == pytest.approx(2.5)
    right = (answers == puzzles.solutions)[puzzles.puzzles == 0].mean()
    assert result.cell_accuracy == pytest.approx(right)
    assert json.loads(json.dumps(result.to_dict()))["solved"]["hits"] == 3
    assert set(HEADINGS) == set(result.row())


@pytest.mark.parametrize("decoding", [MAIN[2], MAIN[-1], SWEEP[0], Filling(rule="random", tokens_per_step=8)])
def test_a_model_that_knows_solves_all_but_what_it_has_wrong(puzzles, decoding):
    known = puzzles.solutions.astype(int)
    cell = np.flatnonzero(puzzles.puzzles[4] == 0)[-1]
    known[4, cell] = known[4, cell] % 9 + 1
    result = evaluate_sudoku(sudoku_lm(known.tolist()), puzzles, decoding, batch_size=4)
    assert result.solved == Rate(5, 6)
    assert result.cell_accuracy == pytest.approx(1 - 1 / puzzles.empty.sum())
    steps = {"margin": puzzles.empty, "random": -(-puzzles.empty // 8), "threshold": np.ones(6)}
    expected = steps.get(decoding.rule, puzzles.empty)
    assert result.nfe == pytest.approx(expected.mean())
    assert "83.3 %" in markdown([result.row()], HEADINGS)


def test_every_decoding_of_the_card_is_one_the_sampler_takes(puzzles):
    lm, one = sudoku_lm(puzzles.solutions.tolist()), puzzles.first(1)
    labels = [evaluate_sudoku(lm, one, decoding).decoding for decoding in (*MAIN, *SWEEP)]
    assert len(set(labels)) == len(labels)


def test_a_model_of_text_is_refused(puzzles):
    refused(r"'tiny' is no Sudoku model", evaluate_sudoku, text_lm(), puzzles, MAIN[0])
