import json

import pytest

from dlm.errors import UserError
from dlm.evaluation.filling import Filling, fill
from dlm.evaluation.infill import HEADINGS, answer_of, evaluate_infill, grade, window
from dlm.evaluation.lines import LineTask
from dlm.evaluation.rate import Rate
from tests.evaluation.knowing import text_lm
from tests.inference.tiny import EOS, MASK
from tests.inference.tiny import text_lm as random_lm
from tests.refusals import refused

TASK = LineTask(name="a:2", prefix="def f(x):\n    ", line="return x", suffix="\n\ny = f(1)\n")
OPEN = LineTask(name="b:2", prefix="def f(x):\n\n", line="    return x", suffix="\n\ny = f(1)\n")


def ids(text: str) -> list[int]:
    return random_lm().encode(text)


def test_window_holds_both_sides():
    shown = window(random_lm(), TASK, 200, "oracle")
    assert shown.ids == ids(TASK.prefix) + [MASK] * 8 + ids(TASK.suffix)
    assert (shown.hole, shown.lead) == (8, False)


@pytest.mark.parametrize(
    ("length", "left", "right"), [(20, 6, 6), (21, 7, 6), (30, 11, 11), (31, 12, 11), (60, 14, 11)]
)
def test_window_is_shared_between_the_sides(length, left, right):
    shown = window(random_lm(), TASK, length, "oracle").ids
    assert shown == ids(TASK.prefix)[-left:] + [MASK] * 8 + ids(TASK.suffix)[:right]
    assert len(shown) == min(length, 33)


def test_window_gives_a_short_side_s_room_to_the_other():
    task = LineTask(name="c", prefix="abcdefghijklmn", line="x=1", suffix="\n")
    assert window(random_lm(), task, 12, "oracle").ids == ids("ghijklmn") + [MASK] * 3 + ids("\n")


def test_given_length_is_rounded_up():
    assert window(random_lm(), TASK, 200, "given").hole == 8
    assert window(random_lm(), OPEN, 200, "given").hole == 16


def test_a_hole_with_indentation_begins_with_the_line_break():
    shown = window(random_lm(), OPEN, 200, "oracle")
    assert shown.ids == ids("def f(x):") + [MASK] * 14 + ids(OPEN.suffix)
    assert (shown.hole, shown.lead) == (14, True)


def test_masks_in_a_file_are_text():
    task = LineTask(name="d", prefix="[MASK]", line="x", suffix="")
    assert window(random_lm(), task, 50, "oracle").ids.count(MASK) == 1


def test_window_refuses_what_cannot_fit():
    refused("a:2: a hole of 8 tokens leaves no context in a window of 15", window, random_lm(), TASK, 15, "oracle")
    with pytest.raises(UserError, match="known hole lengths are oracle, given"):
        window(random_lm(), TASK, 50, "guess")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "lead", "answer"),
    [
        ("return x", False, "return x"),
        ("return x\n    y", False, "return x"),
        ("\nreturn x", False, ""),
        ("return x \r\n", False, "return x "),
        ("", False, ""),
        ("\n    return x", True, "    return x"),
        ("\n\n    return x\nmore", True, "    return x"),
        ("    return x", True, ""),
        ("\n", True, ""),
    ],
)
def test_answers(text, lead, answer):
    lm = random_lm()
    assert answer_of(lm, ids(text), lead) == answer
    assert answer_of(lm, [*ids(text), EOS, *ids("junk")], lead) == answer


def test_grades_by_hand():
    def verdict(task: LineTask, answer: str) -> tuple[bool, bool, bool]:
        found = grade(task, answer)
        return found.exact, found.stripped, found.parses

    assert verdict(TASK, "return x") == (True, True, True)
    assert verdict(TASK, "return x  ") == (False, True, True)
    assert verdict(TASK, "return y") == (False, False, True)
    assert verdict(TASK, "return (") == (False, False, False)
    assert verdict(TASK, "") == (False, False, False)
    assert verdict(OPEN, "    return x") == (True, True, True)
    assert verdict(OPEN, "  return x") == (False, True, True)
    assert verdict(OPEN, "return x") == (False, True, False)


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_model_that_knows_gets_what_it_knows(batch_size):
    """One right, one wrong but Python, one broken; with the given length the rest is thrown away."""
    written = {"return x": "return x", "return xx": "return xy", "return xxx": "return (xx"}
    tasks = [LineTask(name=line, prefix=TASK.prefix, line=line, suffix=f"\ny = {len(line)}\n") for line in written]
    full = [t.filled(written[t.line]) for t in tasks]
    oracle = evaluate_infill(text_lm([ids(t) for t in full]), tasks, length=64, batch_size=batch_size)
    assert (oracle.exact, oracle.stripped, oracle.parses) == (Rate(1, 3), Rate(1, 3), Rate(2, 3))
    assert (oracle.true_parses, oracle.blank_parses) == (Rate(3, 3), Rate(0, 3))
    assert oracle.tpf == 1.0
    longer = [t.filled(written[t.line] + "\n#######"[: -len(t.line) % 8]) for t in tasks]
    sure = Filling(rule="threshold", options={"threshold": 0.9})
    how = {"hole": "given", "length": 64, "batch_size": batch_size}
    given = evaluate_infill(text_lm([ids(t) for t in longer]), tasks, decoding=sure, **how)
    assert [g.answer for g in given.grades] == list(written.values())
    assert (given.exact, given.parses) == (Rate(1, 3), Rate(2, 3))
    assert given.hole_tokens == pytest.approx(40 / 3)
    assert given.tpf == pytest.approx(40 / 3)
    assert set(HEADINGS) == set(given.row())
    assert len(json.loads(json.dumps(given.to_dict(examples=2)))["examples"]) == 2


def test_a_random_model_is_wrong_and_nothing_breaks():
    result = evaluate_infill(random_lm(), [TASK, OPEN], length=64)
    assert result.exact == Rate(0, 2)
    refused("no lines", evaluate_infill, random_lm(), [])


def test_labels_and_steps():
    assert Filling(rule="margin").label == "margin 1/step"
    assert Filling(rule="threshold", options={"threshold": 0.9}).label == "threshold threshold=0.9"
    assert Filling(rule="margin", name="mine").label == "mine"
    assert [Filling(rule="margin", tokens_per_step=4).steps(n) for n in (1, 4, 5, 55)] == [1, 1, 2, 14]


def test_only_scheduled_rules_take_a_number_of_tokens():
    refused(r"tokens_per_step = 2 with rule 'threshold'.*low_confidence", Filling, rule="threshold", tokens_per_step=2)
    refused("at least one token", Filling, rule="margin", tokens_per_step=0)


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_results_keep_their_order_and_the_steps_their_size(tokens, batch_size):
    """Canvases of unlike length and masks, each filled in ceil(masks / tokens) steps, whatever shares its batch."""
    texts = [[10 * i + j for j in range(12 - i)] for i in range(6)]
    masks = [5, 1, 4, 2, 6, 3]
    canvases = [[MASK] * n + text[n:] for n, text in zip(masks, texts, strict=True)]
    done: list[int] = []
    decoding = Filling(rule="margin", tokens_per_step=tokens)
    found = fill(text_lm(texts), canvases, decoding, batch_size=batch_size, tick=done.append)
    assert [g.tokens for g in found] == [text[:n] for n, text in zip(masks, texts, strict=True)]
    assert [g.nfe for g in found] == [-(-n // tokens) for n in masks]
    assert sum(done) == 6
    assert max(done) <= batch_size
