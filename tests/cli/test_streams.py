import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dlm
from dlm.atomic import write_text
from dlm.cli import infer as command_line
from dlm.cli import show, streams
from dlm.errors import UserError
from tests.cli import fake
from tests.cli.test_infer import lines
from tests.refusals import refused
from tests.trace.synthetic import run

FAKE = """
import sys
import dlm
from tests.cli import fake
vars(dlm).update(load=fake.load)
sys.modules["dlm.inference.generation"] = fake
from dlm.cli.infer import main
raise SystemExit(main(sys.argv[1:]))
"""
ROOT = Path(__file__).parents[2]
ASCII = {"PYTHONIOENCODING": "ascii"}
C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(
    not FULL.exists() or not stat.S_ISCHR(FULL.stat().st_mode), reason="needs the device /dev/full"
)


def infer(*argv: str | bytes, stdin: bytes | None = None, stdout=subprocess.PIPE, **environment: str):
    """`dlm-infer` around a fake model, in a process of its own."""
    command = [sys.executable, "-c", FAKE, *argv]
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    given = subprocess.DEVNULL if stdin is None else None
    ends = {"input": stdin, "stdin": given, "stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.run(command, **ends, cwd=ROOT, env={**buffered, **environment})


@needs_full
@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["--prompt", "a", "--quiet"], ["--prompt", "a", "--json"]])
def test_a_full_disk_behind_standard_output(argv):
    with open("/dev/full", "wb") as full:
        done = infer(*argv, stdout=full)
    assert done.returncode == 2
    assert done.stderr == b"dlm-infer: the output cannot be written: No space left on device\n"


def test_a_reader_that_leaves():
    reader, writer = os.pipe()
    os.close(reader)
    done = infer("--prompt", "a", "--quiet", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("environment", [ASCII, C], ids=["PYTHONIOENCODING", "LC_ALL"])
def test_output_that_takes_ascii_only(environment):
    argument = "é[MASK:2]".encode()  # under LC_ALL=C Python reads it as two bytes that are no ASCII
    done = infer("--prompt", argument, "--quiet", **environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\xe9xx\n", b"")
    done = infer("--prompt", argument, **environment)
    assert done.returncode == 0 and done.stdout.startswith(b"\\xe9xx\n2 generated tokens \\xb7 ")
    done = infer("--prompt", argument, "--json", **environment)
    assert done.stdout.isascii() and json.loads(done.stdout)["text"] == "éxx"


def test_bytes_that_are_no_utf8():
    done = infer("--prompt", b"ab\xff")
    assert done.returncode == 2
    said = b"dlm-infer: --prompt: is no UTF-8 text: invalid start byte at byte 2 (0xff): convert it first\n"
    assert done.stderr == said
    done = infer("--quiet", stdin=b"abc\xe9", PYTHONIOENCODING="utf-8")
    assert done.returncode == 2 and b"standard input: is no UTF-8 text: " in done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_errors_of_writing_are_told_apart_from_mistakes_in_the_program(number, monkeypatch, capsys):
    monkeypatch.setattr(streams, "_drop_the_rest", lambda: None)

    def work() -> None:
        raise OSError(number, os.strerror(number), "some.file")

    assert streams.run("dlm-x", work) == 2
    assert capsys.readouterr().err == f"dlm-x: some.file cannot be written: {os.strerror(number)}\n"

    def other() -> None:
        raise OSError(errno.EBADF, "a mistake of ours")

    refused("a mistake of ours", streams.run, "dlm-x", other, error=OSError)


@needs_full
def test_results_written_before_the_disk_was_full_stay(command, monkeypatch, tmp_path):
    path = tmp_path / "o.jsonl"
    argv = ("--prompt", "a", "--prompt", "b", "--batch_size", "1", "--output", str(path))

    written = []
    write = show.Printer._write

    def full(self, line):
        if written:
            self.sink.close()
            self.sink = open("/dev/full", "w")  # noqa: SIM115
        written.append(line)
        write(self, line)

    monkeypatch.setattr(show.Printer, "_write", full)
    status, out, err = command(*argv)
    assert (status, out) == (2, "") and lines(path.read_text())[0]["text"] == "answer"
    assert "o.jsonl: cannot be written: No space left on device; 1 results were written before" in err


def test_a_mistake_leaves_an_older_output_as_it_was(command, tmp_path):
    path = tmp_path / "o.jsonl"
    path.write_text("results of yesterday\n")
    assert command("--prompt", "a", "--model.name", "missing", "--output", str(path))[0] == 2
    assert path.read_text() == "results of yesterday\n"
    assert command("--prompt", "a", "--output", str(path))[0] == 0
    assert [line["text"] for line in lines(path.read_text())] == ["answer"]


@pytest.mark.parametrize("output", [pytest.param("/dev/full", marks=needs_full), "/proc/none/x", "a_file/x", "."])
def test_an_output_that_cannot_be(command, monkeypatch, tmp_path, output):
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    status, _, err = command("--prompt", "a", "--output", output)
    assert status == 2 and f"{output}: cannot be written: " in err
    if output != "/dev/full":  # which can be opened: it is found out before the model is loaded
        assert "no model" not in command("--prompt", "a", "--output", output, "--model.name", "missing")[2]


@pytest.mark.parametrize("store", ["/proc/none/t.db", "a_file/t.db", pytest.param("/dev/full", marks=needs_full), "."])
def test_a_store_that_cannot_be(command, monkeypatch, tmp_path, store):
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    status, out, err = command("--prompt", "a", "--trace", "--trace.store", store, "--model.name", "missing")
    assert (status, out) == (2, "") and err.startswith(f"dlm-infer: {store}: ")  # before the model is loaded


def test_jobs_with_an_id_that_is_taken_are_refused_before_the_model_is_loaded(command, tmp_path):
    rows = tmp_path / "in.jsonl"
    twice = '{"prompt": "b", "request_id": "y", "sampler": {"num_samples": 2, "temperature": 1}}'
    rows.write_text('{"prompt": "a", "request_id": "x"}\n' + twice + "\n")
    store = ("--trace", "--trace.store", str(tmp_path / "t.db"))

    with dlm.TraceStore(tmp_path / "t.db") as traces:
        traces.put(run(np.random.default_rng(0), 6, 2, name="y/1").trace)
    argv = ("--input", str(rows), *store)
    status, out, err = command(*argv, "--model.name", "missing")
    assert (status, out) == (2, "") and "request_id 'y/1': " in err and "--trace.overwrite (overwrite = true in" in err
    assert "no model called missing" in command(*argv, "--model.name", "missing", "--trace.overwrite")[2]


def test_an_error_of_decoding_names_the_line(command, monkeypatch, tmp_path):
    def refusing(lm, prompts, *more, **named):
        for i, prompt in enumerate(prompts):
            if prompt == "bad":
                raise UserError(f"prompt {i}: [MASK:0]: it is bad")
            if prompt == "long":
                raise UserError(f"prompt {i} has 9 tokens")
        return decode(lm, prompts, *more, **named)

    decode = fake.continue_all
    monkeypatch.setattr(fake, "continue_all", refusing)
    rows = tmp_path / "in.jsonl"
    for word, said in (("bad", ": [MASK:0]: it is bad"), ("long", ": has 9 tokens")):
        rows.write_text("\n".join(['"a"', "", '"b"', f'"{word}"', '"c"']))
        argv = ("--input", str(rows), "--batch_size", "2", "--quiet")
        assert command(*argv) == (2, "answer\nanswer\n", f"dlm-infer: {rows} line 4{said}\n")


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reader)
    write_text(tmp_path / "file", "a")
    write_text(tmp_path / "file", "b")
    assert (tmp_path / "file").read_text() == "b"


def test_a_closed_standard_input(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    for argv in (["--prompt-file", "-"], ["--input", "-"], ["--chat"]):
        assert command_line.main(argv) == 2
        assert capsys.readouterr().err == "dlm-infer: standard input is closed\n"
