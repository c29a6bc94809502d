"""The task `sudoku`: puzzles with one solution, graded by hand-made answers, and by a model that knows all but one."""

import numpy as np
import pytest

from dlm.evaluation.sudoku import Puzzles, heldout_puzzles
from dlm.evaluation.suite.config import EvalConfig
from dlm.evaluation.suite.decoding_section import DecodingSection
from dlm.evaluation.suite.task_section import TaskSection
from dlm.evaluation.suite.texts import Sudoku
from dlm.evaluation.suite.trial import Setting
from dlm.inference.request import Generation
from dlm.sudoku import follows_rules, solutions
from tests.evaluation.knowing import sudoku_lm
from tests.inference.tiny import text_lm
from tests.refusals import refused

EMPTY = (33, 48)


@pytest.fixture(scope="module")
def puzzles() -> Puzzles:
    return heldout_puzzles(6, EMPTY, seed=3)


def trial(lm) -> Sudoku:
    config = EvalConfig.model_validate({"eval": {"seed": 3, "batch_size": 4}})
    return Sudoku(lm, TaskSection(kind="sudoku", empty=EMPTY, limit=6), Setting(config=config, sandbox=None))  # type: ignore[arg-type]


def test_puzzles_are_unique_and_a_subset_is_a_prefix(puzzles):
    assert ((puzzles.empty >= 33) & (puzzles.empty <= 48)).all()
    assert all(len(solutions(p)) == 1 for p in puzzles.puzzles)
    assert (heldout_puzzles(2, EMPTY, seed=3).puzzles == puzzles.puzzles[:2]).all()
    refused("0 puzzles", heldout_puzzles, 0)


def test_grading_by_hand(puzzles):
    """Six right but for: one cell wrong, a valid grid of another puzzle, one full of ones."""
    answers, holes = puzzles.solutions.astype(int), puzzles.puzzles == 0
    answers[0, np.flatnonzero(holes[0])[0]] = answers[0, holes[0]][0] % 9 + 1
    a = answers[1][np.flatnonzero(holes[1])[0]]
    answers[1] = np.select([answers[1] == a, answers[1] == a % 9 + 1], [a % 9 + 1, a], answers[1])
    assert follows_rules(answers[1:2])[0]
    answers[2][holes[2]] = 1
    own = trial(sudoku_lm(puzzles.solutions.tolist()))
    written = [
        Generation(text="", tokens=answer[hole].tolist(), nfe=nfe, tpf=1.0, finish_reason="length", request_id="0")
        for answer, hole, nfe in zip(answers, holes, [2, 2, 2, 2, 2, 5], strict=True)
    ]
    records = own.judge(range(6), [[one] for one in written])
    assert [record["solved"] for record in records] == [False] * 3 + [True] * 3
    found, empty = own.summary(records), puzzles.empty
    assert (found["solved"]["hits"], found["solved"]["total"]) == (3, 6)
    assert found["tpf"] == pytest.approx(empty.sum() / 15) and found["nfe"] == pytest.approx(2.5)
    assert found["cells_right"] == pytest.approx((answers == puzzles.solutions)[holes].mean())
    assert sum(rate["total"] for rate in found["by_empty"].values()) == 6 and "51–55 empty" not in found["by_empty"]
    for band, rate in found["by_empty"].items():
        low, high = map(int, band.removesuffix(" empty").split("–"))
        inside = (empty >= low) & (empty <= high)
        assert (rate["hits"], rate["total"]) == (inside[3:].sum(), inside.sum())


@pytest.mark.parametrize(
    ("way", "steps"),
    [
        ({"rule": "margin", "tokens_per_step": 1}, lambda n: n),
        ({"rule": "random", "tokens_per_step": 8}, lambda n: -(-n // 8)),
        ({"rule": "low_confidence", "tokens_per_step": 2, "block_length": 9}, lambda n: 5 * -(-n // 9)),
        ({"rule": "threshold", "threshold": 0.9}, lambda n: 1),
    ],
)
def test_a_model_that_knows_solves_all_but_what_it_has_wrong(puzzles, way, steps):
    known = puzzles.solutions.astype(int)
    cell = np.flatnonzero(puzzles.puzzles[4] == 0)[-1]
    known[4, cell] = known[4, cell] % 9 + 1
    own = trial(sudoku_lm(known.tolist()))
    records = own.judge(range(6), own.answers(range(6), DecodingSection(**way)))
    assert [record["solved"] for record in records] == [True] * 4 + [False, True]
    found = own.summary(records)
    assert found["cells_right"] == pytest.approx(1 - 1 / puzzles.empty.sum())
    nfe = [record["nfe"] for record in records]
    if "block_length" not in way:
        assert nfe == [steps(int(n)) for n in puzzles.empty]
    assert all(n <= steps(int(empty)) for n, empty in zip(nfe, puzzles.empty, strict=True))


def test_a_model_of_text_is_refused():
    refused(r"'tiny' is no Sudoku model", trial, text_lm())
