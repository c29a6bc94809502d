"""Commands let threads wait briefly, unless the user said how they wait or torch runs already."""

import os
import sys

import pytest

from dlm.cli import options, waiting


@pytest.fixture
def environment(monkeypatch):
    for name in waiting.NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    yield lambda: {name: os.environ[name] for name in waiting.NAMES if name in os.environ}
    for name in waiting.NAMES:
        os.environ.pop(name, None)  # before what stood there comes back


def test_threads_wait_briefly(environment):
    waiting.wait_briefly()
    assert environment() == {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


@pytest.mark.parametrize("name", waiting.NAMES)
def test_what_the_user_says_stays(name, environment, monkeypatch):
    monkeypatch.setenv(name, "7")
    waiting.wait_briefly()
    assert environment() == {name: "7"}


def test_where_torch_runs_already_nothing_changes(environment, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    waiting.wait_briefly()
    assert environment() == {}


def test_every_command_does_so_before_its_work(monkeypatch):
    from dlm.cli.infer import COMMAND

    order: list[str] = []
    monkeypatch.setattr(options, "wait_briefly", lambda: order.append("wait"))
    assert COMMAND.run(lambda config, given: order.append("work"), []) == 0
    assert order == ["wait", "work"]
