import io
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

import dlm
from dlm.cli import live
from dlm.inference import EngineConfig, Interrupted, SamplerConfig
from tests.cli import fake

SCRIPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background ignores it
from dlm.cli.infer import main
from dlm.inference.batch import Batch

step, calls = Batch.step, []

def stepping(self):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGINT)
    return step(self)

Batch.step = stepping
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.fixture
def interrupted(monkeypatch):
    """Of three prompts the second is unfinished when Ctrl-C comes, the third has not begun."""

    def stopped(lm, prompts, sampler, engine, trace, request_ids, on_step=None, draft=None):
        first, second = decode(lm, prompts[:2], sampler, engine, trace, request_ids[:2], on_step)
        raise Interrupted([first, replace(second, text="an░░er", finish_reason="interrupted")])

    decode = fake.continue_all
    monkeypatch.setattr(fake, "continue_all", stopped)


PROMPTS = ("--prompt", "a", "--prompt", "b", "--prompt", "c")


def test_text(command, interrupted):
    status, out, err = command(*PROMPTS)
    assert (status, err) == (130, "interrupted; whole results: 1; unfinished: 1\n")
    assert out.startswith("answer\n6 generated tokens")
    assert out.endswith("an░░er\nunfinished: interrupted after 3 NFE; ░ was not decided yet\n\n")


def test_quiet(command, interrupted):
    said = "interrupted; whole results: 1; unfinished: 1\n"
    assert command(*PROMPTS, "--quiet") == (130, "answer\nan░░er\n", said)


def test_json(command, interrupted):
    status, out, err = command(*PROMPTS, "--json")
    assert [json.loads(line)["finish_reason"] for line in out.splitlines()] == ["length", "interrupted"]
    assert status == 130 and err == 'interrupted; whole results: 1; unfinished: 1 (finish_reason "interrupted")\n'


def test_a_file_holds_whole_results_alone(command, interrupted, tmp_path):
    status, out, err = command(*PROMPTS, "--output", str(tmp_path / "o.jsonl"))
    assert (status, out) == (130, "") and err.startswith("interrupted; whole results: 1\n")
    assert [json.loads(line)["text"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == ["answer"]


def test_the_store_is_named(command, interrupted, tmp_path):
    path = str(tmp_path / "t.db")
    status, _, err = command(*PROMPTS, "--quiet", "--trace", "--trace.store", path)
    assert status == 130 and f"; {path} keeps the traces of whole ones only" in err


def test_batches_before_stay(command, monkeypatch):
    def stopped(lm, prompts, *more, **named):
        if prompts == ["b"]:
            raise KeyboardInterrupt  # before anything began
        return decode(lm, prompts, *more, **named)

    decode = fake.continue_all
    monkeypatch.setattr(fake, "continue_all", stopped)
    assert command(*PROMPTS, "--quiet", "--batch_size", "1") == (130, "answer\n", "interrupted; whole results: 1\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_a_live_view_leaves_its_last_picture(error):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=20)
    view = live.View("title", fake.MASK, live.draw_text(fake.FakeLM().decode, room=9), console, delay=0, snapshots=0)
    try:
        with view:
            fake.continue_all(fake.FakeLM(), ["q"], SamplerConfig(), EngineConfig(), None, ["0"], view.on_step)
            if error is not None:
                raise error
    except KeyboardInterrupt:
        pass
    erased = "\x1b[2K" in screen.getvalue().rpartition("title")[2]  # lines are erased after the last picture
    assert erased == (error is None)


def test_a_real_interrupt(tmp_path):
    argv = ["--prompt", "import os\n", "--sampler.gen_length", "8", "--sampler.steps", "8", "--json", "--trace"]
    command = [sys.executable, "-c", SCRIPT, *argv, "--trace.store", str(tmp_path / "t.db")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONUTF8": "1"})
    assert done.returncode == 130 and "Traceback" not in done.stderr
    (line,) = done.stdout.splitlines()
    partial = json.loads(line)
    assert partial["finish_reason"] == "interrupted" and partial["nfe"] == 4  # the step under way was finished
    assert sum(step >= 0 for step in partial["steps"]) == 4
    assert "interrupted; whole results: 0; unfinished: 1" in done.stderr
    with dlm.TraceStore(tmp_path / "t.db") as store:
        assert len(store) == 0


# A trainer that sees no signal, as the real one: it says when it has everything, and then it is busy for ever.
DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.stdin.buffer.read()
with open(sys.argv[1], "w") as busy:
    busy.write(str(os.getpid()))
time.sleep(600)
"""


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner in the background ignores it, and so would this
from dlm.cli import tokenizer
from dlm.data import tokenizer_training
tokenizer_training.LEARN = (sys.executable, "-c", sys.argv[1], sys.argv[2])
raise SystemExit(tokenizer.main(sys.argv[3:]))
"""


def test_it_ends_the_training_of_a_tokenizer_at_once(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 100)
    os.mkfifo(tmp_path / "busy")
    data = ["--data.source", "text", "--data.paths", str(tmp_path / "a.txt")]
    command = [sys.executable, "-c", PARENT, DEAF, str(tmp_path / "busy"), "--output", str(tmp_path / "out"), *data]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            busy = os.open(tmp_path / "busy", os.O_RDONLY | os.O_NONBLOCK)
            assert select.select([busy], [], [], 120)[0], "the trainer did not start"
            child = int(os.read(busy, 20))
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
        finally:
            process.kill()
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read() + process.stderr.read() == b""
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not list((tmp_path / "out").iterdir())
