import pytest

from dlm.data.lines import LineTask
from dlm.errors import UserError
from dlm.evaluation.infill import answer_of, grade, window
from dlm.evaluation.suite.config import EvalConfig
from dlm.evaluation.suite.decoding_section import DecodingSection
from dlm.evaluation.suite.task_section import TaskSection
from dlm.evaluation.suite.texts import Lines
from dlm.evaluation.suite.trial import Setting
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


def lines_trial(lm, tasks, hole, monkeypatch) -> Lines:
    monkeypatch.setattr("dlm.evaluation.suite.texts.heldout_lines", lambda *_: tasks)
    setting = Setting(config=EvalConfig(), sandbox=None)  # type: ignore[arg-type]
    return Lines(lm, TaskSection(kind="lines", hole=hole, length=64), setting)


@pytest.mark.parametrize("hole", ["oracle", "given"])
def test_a_model_that_knows_gets_what_it_knows(hole, monkeypatch):
    """One right, one wrong but Python, one broken; with the given length the rest is thrown away."""
    written = {"return x": "return x", "return xx": "return xy", "return xxx": "return (xx"}
    tasks = [LineTask(name=line, prefix=TASK.prefix, line=line, suffix=f"\ny = {len(line)}\n") for line in written]
    rest = {"oracle": lambda line: "", "given": lambda line: "\n#######"[: -len(line) % 8]}[hole]
    lm = text_lm([ids(t.filled(written[t.line] + rest(t.line))) for t in tasks])
    own = lines_trial(lm, tasks, hole, monkeypatch)
    for way in (DecodingSection(tokens_per_step=1), DecodingSection(rule="threshold", threshold=0.9)):
        records = own.judge(range(3), own.answers(range(3), way))
        assert [record["text"] for record in records] == list(written.values())
        found = own.summary(records)
        rates = {name: found[name]["hits"] for name in ("exact", "stripped", "parses", "parses_left_empty")}
        assert rates == {"exact": 1, "stripped": 1, "parses": 2, "parses_left_empty": 0}
        assert found["hole_tokens"] == pytest.approx({"oracle": 9, "given": 40 / 3}[hole])
        assert found["tpf"] == pytest.approx(1.0 if way.tokens_per_step else found["hole_tokens"])


def test_what_a_decoding_leaves_out_is_the_default_and_no_recommendation(monkeypatch):
    """A decoding that names nothing is the model's own; one that names anything is what its name says."""
    tasks = [TASK, OPEN]
    plain, advised = (lines_trial(random_lm(seed=3), tasks, "oracle", monkeypatch) for _ in range(2))
    advised.lm.generation["dlm"] = {"infill": {"temperature": 1.0}}
    for way in ({"tokens_per_step": 1}, {"rule": "margin"}):
        texts = [[a.tokens for (a,) in own.answers(range(2), DecodingSection(**way))] for own in (plain, advised)]
        assert texts[0] == texts[1]
    assert DecodingSection().label == "as recommended" and DecodingSection(seed=1).label == "low_confidence seed=1"
    texts = [[a.tokens for (a,) in own.answers(range(2), DecodingSection())] for own in (plain, advised)]
    assert texts[0] != texts[1]
