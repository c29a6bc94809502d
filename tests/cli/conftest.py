"""`dlm` with a fake model behind it, and a way to run a command in this process."""

import io
import sys
from collections.abc import Callable

import pytest

import dlm
from dlm.cli import infer, show
from tests.cli import fake


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Run `dlm-infer` on the fake model: (exit status, standard output, standard error)."""
    monkeypatch.setitem(vars(dlm), "load", fake.load)  # not setattr: it would fetch the real one first
    monkeypatch.setitem(sys.modules, "dlm.inference.generation", fake)
    show._load.cache_clear()

    def run(*argv: str, stdin: str | None = None, terminal: bool = False) -> tuple[int, str, str]:
        stream = io.StringIO(stdin or "")
        stream.isatty = lambda: terminal or stdin is None  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stream)
        status = infer.main(list(argv))
        return status, *capsys.readouterr()

    yield run
    show._load.cache_clear()
