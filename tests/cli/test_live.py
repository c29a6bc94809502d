import io

import numpy as np
from rich.console import Console

from dlm.cli.live import GIVEN, HEAT, Canvas, View, draw_sudoku, draw_text
from tests.cli.fake import MASK, PUZZLE, Event, FakeLM

LM = FakeLM()


def event(step: int, text: str, *committed: int) -> Event:
    canvas = np.array([[MASK if character == "░" else ord(character) for character in text]])
    flags = np.zeros(canvas.shape, bool)
    flags[0, list(committed)] = True
    return Event(step, step + 1, canvas, flags)


def plain(drawn) -> str:
    console = Console(file=io.StringIO(), width=60)
    console.print(drawn)
    return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]


def test_a_canvas_knows_when_each_token_came():
    canvas = Canvas(MASK)
    canvas.update(event(0, "ab░d░", 3))
    assert (canvas.filled, canvas.share) == (1, 1 / 3)
    canvas.update(event(1, "abcd░", 2))
    assert canvas.when.tolist() == [GIVEN, GIVEN, 1, 0, GIVEN]
    assert [canvas.style(i) for i in range(4)] == ["", "", HEAT[0], HEAT[1]]
    canvas.update(event(9, "abcd░"))
    assert canvas.style(3) == HEAT[-1]


def test_a_canvas_may_grow_and_may_lose_tokens():
    canvas = Canvas(MASK)
    canvas.update(event(0, "a░", 0))
    canvas.update(event(1, "a░░░", 0))
    assert (len(canvas.when), canvas.filled) == (4, 1)
    canvas.update(event(2, "░░░░"))  # remasked
    assert canvas.filled == 0


def test_a_canvas_follows_the_first_request_of_its_batch():
    canvas = Canvas(MASK)
    ids, flags = np.array([[MASK, MASK], [MASK, MASK]]), np.zeros((2, 2), bool)
    canvas.update(Event(0, 1, ids, flags, ("a", "b")))
    canvas.update(Event(1, 2, ids[:1] + 9, ~flags[:1], ("b",)))  # "a" is done
    assert (canvas.request_id, canvas.step, canvas.tokens.tolist()) == ("a", 0, [MASK, MASK])
    canvas.update(Event(2, 3, np.array([[7, 8], [5, 6]]), ~flags, ("b", "a")))
    assert canvas.tokens.tolist() == [5, 6]


def test_text_shows_masks_and_keeps_its_last_lines():
    canvas = Canvas(MASK)
    canvas.update(event(0, "one\ntwo░\nth░ee", 1))
    assert plain(draw_text(LM.decode, room=9)(canvas)) == "one\ntwo░\nth░ee"
    assert plain(draw_text(LM.decode, room=2)(canvas)) == "two░\nth░ee"
    # What a tokenizer begins with is left out:
    assert plain(draw_text(LM.decode, 9, [ord("o"), ord("n")])(canvas)) == "e\ntwo░\nth░ee"
    assert plain(draw_text(LM.decode, 9, [ord("n")])(canvas)) == "one\ntwo░\nth░ee"


def test_a_tokenizer_that_drops_the_first_space_loses_none():
    def decode(ids):
        return "".join(" w" for _ in ids).removeprefix(" ")

    canvas = Canvas(MASK)
    canvas.update(event(0, "xy", 0))
    assert plain(draw_text(decode, room=9)(canvas)) == " w w"


def test_sudoku_has_nine_rows_in_boxes():
    canvas = Canvas(MASK)
    canvas.update(Event(0, 1, np.array([LM.encode(PUZZLE)]), np.zeros((1, 81), bool)))
    rows = plain(draw_sudoku(LM.decode)(canvas)).split("\n")
    assert len(rows) == 13
    assert rows[1] == "│ 5 3 · │ · 7 · │ · · · │"


def test_a_terminal_gets_an_animation():
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system="standard")
    with View("T", MASK, draw_text(LM.decode, 9), console, delay=0.0, snapshots=0) as view:
        view.on_step(event(0, "ab░d░", 3))
        view.on_step(event(1, "abcd░", 2))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 0 · 1 NFE · 1 of 3 tokens" in shown
    assert "step 1 · 2 NFE · 2 of 3 tokens" in shown
    assert "\x1b[1;30;103mc" in shown  # just committed: on bright yellow
    assert view.seconds >= 0


def test_elsewhere_snapshots_are_plain():
    console = Console(file=io.StringIO(), width=60)
    with View("T", MASK, draw_text(LM.decode, 9), console, delay=9.0, snapshots=1) as view:
        for step, text in enumerate(["░░░░", "a░░░", "ab░░", "abc░", "abcd"]):
            view.on_step(event(step, text, *([step - 1] if step else [])))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in shown
    assert shown.count("step") == 1
    assert "ab░░" in shown
