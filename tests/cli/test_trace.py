import json
import sqlite3
from datetime import UTC, datetime

import numpy as np
import pytest

from dlm.cli.trace import main
from dlm.trace import TraceStore
from tests.trace.synthetic import run


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run `dlm-trace` on a store of three traces: (exit status, standard output, standard error)."""
    monkeypatch.setenv("DLM_TRACES", str(tmp_path / "t.db"))
    with TraceStore() as store:
        for seed, name in enumerate(("first", "second", "th\x1b[31mird")):
            made = run(np.random.default_rng(seed), 12, 4, name=name, meta={"seed": seed})
            made.trace.context = {"model": "pico" if seed else "sudoku"}
            store.put(made.trace)

    def run_it(*argv):
        return main(argv), *capsys.readouterr()

    return run_it


def test_ls(command):
    status, out, _ = command("ls")
    assert status == 0 and [line.split()[-1] for line in out.splitlines()] == ["th�[31mird", "second", "first"]
    rows = [json.loads(line) for line in command("ls", "--json", "--model", "pico", "-n", "1")[1].splitlines()]
    assert [row["request_id"] for row in rows] == ["th\x1b[31mird"]
    assert command("ls", "--since", "soon")[2].startswith("dlm-trace: 'soon' is no time")


def test_show(command):
    assert json.loads(command("show", "second", "--json")[1])["model"] == "pico"
    assert "seed:           1" in command("show", "second")[1]


def test_diff(command, tmp_path):
    assert command("diff", "first", "first")[:2] == (0, "identical at 4 of 4 steps\n")
    page = tmp_path / "page.html"
    status, out, _ = command("diff", "first", "second", "--html", str(page))
    assert status == 1 and "they part at step 0" in out and "model: 'sudoku' / 'pico'" in out
    assert "second" in page.read_text()
    assert json.loads(command("diff", "first", "second", "--json")[1])["first"]["step"] == 0


def test_export_and_import(command, tmp_path):
    out = str(tmp_path / "out")
    assert command("export", out)[1] == f"{out}: 3 more traces\n"
    assert command("export", out)[1] == f"{out}: 0 more traces\n"
    other = str(tmp_path / "other.db")
    assert command("import", out, "--store", other)[1] == f"{out}: 3 traces taken in\n"
    status, _, error = command("import", out, "--store", other)
    assert (status == 2 and "--overwrite" in error) or "overwrite=True" in error
    assert command("import", out, "--store", other, "--overwrite")[0] == 0


def test_housekeeping(command):
    assert command("fsck")[:2] == (0, "3 traces are whole, 0 damaged\n")
    assert json.loads(command("stats", "--json")[1])["traces"] == 3
    assert command("redact", "first")[1] == "1 traces have no prompt any more\n"
    assert command("redact")[0] == command("redact", "first", "--all")[0] == 2
    assert "too few" in command("train-dict")[2]
    assert command("gc", "--keep", "1")[1] == "2 traces deleted, 1 kept\n"


def test_times_say_what_they_are(command):
    now = datetime.now(UTC)
    stats = json.loads(command("stats", "--json")[1])
    rows = [json.loads(line) for line in command("ls", "--json")[1].splitlines()]
    shown = json.loads(command("show", "first", "--json")[1])
    assert [stats["last"], stats["first"], shown["stored"]] == [rows[i]["stored"] for i in (0, -1, -1)]
    assert all(abs((datetime.fromisoformat(row["stored"]) - now).total_seconds()) < 600 for row in rows)
    assert set(rows[0]) == {"request_id", "stored", "context", "bytes"}
    lines = dict(line.split(maxsplit=1) for line in command("stats")[1].splitlines())
    local = datetime.fromisoformat(stats["first"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    assert lines["first:"] == local and lines["dictionaries:"] == "none" and lines["models:"] == "sudoku: 1, pico: 2"
    assert command("ls")[1].splitlines()[-1].startswith(f"{local}  ")
    assert len(command("ls", "--since", "99999999999d")[1].splitlines()) == 3
    command("gc", "--keep", "0")
    assert json.loads(command("stats", "--json")[1])["first"] is None
    assert "first:                  none" in command("stats")[1]


def test_fsck_does_not_send_one_to_fsck(command, tmp_path):
    path = tmp_path / "t.db"
    content = bytearray(path.read_bytes())
    for page in range(8192, len(content), 8192):  # every page but the first
        content[page : page + 8] = b"\xff" * 8
    path.write_bytes(content)
    status, out, error = command("fsck")
    assert status == 1 and "malformed" in out and "dlm-trace fsck" not in out + error
    assert "dlm-trace fsck says which traces are whole" in command("show", "first")[2]


def test_damage_is_exit_status_one(command, tmp_path):
    direct = sqlite3.connect(tmp_path / "t.db")
    with direct:
        direct.execute("UPDATE traces SET record = x'00' WHERE id = 'first'")
    direct.close()
    status, out, _ = command("fsck")
    assert status == 1 and "first: " in out and "2 traces are whole, 1 damaged" in out
    assert command("show", "first")[0] == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "frist"], "has none of this id; the nearest"),
        (["lss"], 'no such subcommand: "lss"; did you mean "ls"?'),
        (["--json", "ls"], "--json before a subcommand"),
        (["show"], "the following arguments are required: ID"),
        (["show", "a", "--store"], "--store needs a value"),
        (["ls", "--modle", "x"], 'unknown option --modle; did you mean "--model"?'),
        (["ls", "x"], 'unexpected word "x"'),
        (["gc"], "required: --keep"),
        (["gc", "--keep", "x"], "keep = 'x'"),
        (["ls", "--store", "none.db"], "none.db: there is no trace store here"),
        (["ls", "-n", "x"], "'x' is no number from 0 to"),
        (["ls", "-n", "-1"], "'-1' is no number from 0 to"),
        (["gc", "--keep", "-1"], "keep = '-1'"),
        (["gc", "--keep", "\u00b2"], "keep = '\u00b2'"),
    ],
)
def test_mistakes(command, argv, message):
    status, out, error = command(*argv)
    assert status == 2 and out == "" and message in error and error.startswith("dlm-trace: ")


def test_help_and_version(command, capsys):
    assert "train-dict" in command()[1]
    assert command("--version")[0] == 0
    status, page, _ = command("ls", "--help")
    assert status == 0 and "Usage: dlm-trace ls [OPTION]" in page and "-n N" in page and "--store FILE" in page
    assert "Usage: dlm-trace diff A B [OPTION]" in command("diff", "--help")[1]


def test_short_options_and_words_that_look_like_options(command):
    assert command("ls", "-n1") == command("ls", "-n", "1") == command("ls", "-n=1")
    assert len(command("ls", "-n1")[1].splitlines()) == 1
    assert "'--all'" in command("show", "--", "--all")[2]
