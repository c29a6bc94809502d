import json
import subprocess
import sys
import types

import numpy as np
import pytest

import dlm
from dlm.cli.replay import main
from dlm.trace import Pieces, TraceStore, diff
from tests.trace.synthetic import MASK_ID, run

PIECES = Pieces.of([b"a", b"b", b"c", b"[MASK]", *(f" w{i}".encode() for i in range(4, 40))])


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("DLM_TRACES", str(tmp_path / "t.db"))
    made = run(np.random.default_rng(0), 12, 4, vocab=40, prompt=3, name="one", edits=0.1)
    made.trace.context = {"model": "fake", "tokenizer": "tok"}
    with TraceStore() as store:
        store.add_pieces("tok", PIECES)
        store.put(made.trace)
        store.put(run(np.random.default_rng(1), 6, 2, name="bare").trace)
    return made


@pytest.fixture
def command(store, capsys):
    def run_it(*argv):
        return main(argv), *capsys.readouterr()

    return run_it


def text(tokens) -> str:
    return "".join("░" if token == MASK_ID else f" w{token}" for token in tokens)


def test_the_final_text(command, store):
    assert command("one") == (0, text(store.canvases[-1]) + "\n", "")
    assert command("bare")[1].split() != []


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--steps", "one"], range(5)),
        (["one", "--steps"], range(5)),
        (["one", "--steps", "1:3"], range(1, 4)),
        (["one", "--steps", "2"], range(2, 3)),
        (["one", "--steps=-2:"], range(3, 5)),
    ],
)
def test_steps(command, store, argv, expected):
    out = command(*argv)[1]
    assert [line for line in out.splitlines() if line.startswith(" w")] == [text(store.canvases[k]) for k in expected]
    assert out.count("── step") == len(expected)


def test_json(command, store):
    told = json.loads(command("one", "--json", "--steps")[1])
    assert [told["states"][str(k)] for k in range(5)] == [canvas.tolist() for canvas in store.canvases]
    assert told["text"] == text(store.canvases[-1]) and told["meta"]["model"] == "fake"


def test_animation_ends_with_the_final_text(command, store):
    assert text(store.canvases[-1]).strip() in command("one", "--animate", "--delay", "0")[1].replace("\n", "")


def test_a_page(command, tmp_path):
    status, out, _ = command("one", "--html", str(tmp_path / "p.html"))
    assert status == 0 and out == "" and "<!doctype html>" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["onne"], "the nearest"),
        ([], "which one?"),
        (["one", "--steps", "3:9"], "the trace has steps 0 to 4"),
        (["one", "--steps", "x"], "expected steps such as 3:10"),
        (["one", "--stepz"], 'did you mean "--steps"?'),
        (["one", "--sampler.temperature", "1"], "needs --fork-at"),
        (["one", "--fork-at", "9"], "the trace has steps 0 to 4"),
        (["one", "--fork-at", "1", "--sampler.temprature", "1"], 'did you mean "sampler.temperature"?'),
        (["one", "--fork-at", "1", "--sampler.temperature"], "needs a value"),
        (["bare", "--verify"], "does not say which model"),
        (["one", "--store", "none.db"], "no trace store here"),
        (["one", "--html", "no/such/folder/p.html"], "cannot be written"),
    ],
)
def test_mistakes(command, replayed, argv, message):
    status, out, error = command(*argv)
    assert (status, out) == (2, "") and message in error


@pytest.fixture
def replayed(monkeypatch):
    """`dlm.replay` without a model; a fork's tokens look like those of `PIECES`."""
    calls = []

    def fork(lm, trace, step, request_id=None, **settings):
        calls.append({"as": request_id, "step": step, **settings})
        child = run(np.random.default_rng(2), 12, 4, vocab=40, name=request_id or "child").trace
        child.context, child.source = {"tokenizer": "other"}, lambda name: PIECES if name == "other" else None
        return child

    fake = types.ModuleType("dlm.replay")
    fake.calls, fake.fork = calls, fork
    monkeypatch.setitem(vars(dlm), "replay", fake)
    monkeypatch.setitem(sys.modules, "dlm.replay", fake)
    monkeypatch.setitem(vars(dlm), "load", lambda name, device: name)
    return fake


class Report:
    identical = False

    def __str__(self) -> str:
        return "parts at step 2"


def test_verify_and_fork_ask_the_model(command, replayed):
    replayed.verify = lambda lm, trace, draft=None: Report()
    assert command("one", "--verify")[:2] == (1, "parts at step 2\n")
    asked = ("--sampler.temperature", "0.7", "--sampler.seed=3", "--as", "kid")
    status, _, error = command("one", "--fork-at", "2", *asked)
    assert status == 0 and error == "stored as kid\n"
    assert replayed.calls == [{"as": "kid", "step": 2, "temperature": 0.7, "seed": 3}]
    with TraceStore() as again:
        assert "kid" in again and not diff(again["kid"], again["one"]).identical


def test_a_forks_page_shows_text(command, replayed, tmp_path):
    page = tmp_path / "p.html"
    status, out, err = command("one", "--fork-at", "2", "--as", "kid", "--html", str(page))
    assert (status, err) == (0, f"{page}: open it in a browser\nstored as kid\n") and out.startswith(" w")
    assert '"id":"kid"' in page.read_text() and '"text":true' in page.read_text()
    assert command("kid")[1].startswith(" w")  # the store has learned what the child's tokens look like
    assert command("kid", "--html", str(page))[0] == 0 and '"text":true' in page.read_text()


def test_a_childs_id_that_is_taken_is_refused_before_it_is_made(command, replayed):
    argv = ("one", "--fork-at", "2", "--as", "bare")
    status, _, err = command(*argv)
    assert status == 2 and replayed.calls == []
    assert "--as 'bare': " in err and "has a trace of this id: give another id, or replace it with --overwrite" in err
    assert command(*argv, "--overwrite")[0] == 0 and [call["as"] for call in replayed.calls] == ["bare"]


def test_the_parent_is_looked_for_in_the_store(command, replayed, monkeypatch):
    child = run(np.random.default_rng(2), 12, 4, vocab=40, name="kid").trace
    child.context, child.own = {"model": "fake"}, {"parent": "one", "parent_step": 2}
    with TraceStore() as traces:
        traces.put(child)

    def verify(lm, trace, parents, draft=None):
        assert parents["one"].request_id == "one" and "nobody" not in parents
        return Report()

    replayed.verify = verify
    monkeypatch.setattr(Report, "identical", True)
    assert command("kid", "--verify")[0] == 0


LIGHT = """
import sys
from dlm.cli.replay import main
main(sys.argv[1:])
heavy = ("torch", "transformers", "pydantic", "rich", "pyarrow", "tokenizers")
print("loaded:", [name for name in heavy if name in sys.modules])
print("modules:", len(sys.modules))
"""


def test_it_starts_without_torch(store):
    done = subprocess.run([sys.executable, "-c", LIGHT, "one"], check=True, capture_output=True, text=True)
    shown, loaded, modules = done.stdout.splitlines()
    assert (shown, loaded) == (text(store.canvases[-1]), "loaded: []")
    assert int(modules.split()[1]) < 400  # some 240 of Python's own, numpy's and ours: a third of a second
