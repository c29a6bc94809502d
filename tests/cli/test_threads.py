import math
import os
import sys

import pytest

from dlm.cli import options, threads
from dlm.cli.infer import COMMAND

ALL = (*threads.NAMES, "OMP_NUM_THREADS")


@pytest.fixture
def environment(monkeypatch):
    """The variables that are set, without those of the tests."""
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(threads, "cores_granted", lambda: math.inf)
    yield lambda: {name: os.environ[name] for name in ALL if name in os.environ}
    for name in ALL:
        os.environ.pop(name, None)  # before what stood there comes back


def test_threads_wait_briefly(environment):
    threads.settle_threads()
    assert environment() == {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


@pytest.mark.parametrize("name", threads.NAMES)
def test_what_the_user_says_stays(name, environment, monkeypatch):
    monkeypatch.setenv(name, "7")
    threads.settle_threads()
    assert environment() == {name: "7"}


def test_where_torch_runs_already_nothing_changes(environment, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    threads.settle_threads()
    assert environment() == {}


@pytest.mark.parametrize(("granted", "chosen"), [(math.inf, None), (64, None), (2, "2"), (1.4, "1"), (0.2, "1")])
def test_a_container_gets_as_many_threads_as_it_may_keep_busy(granted, chosen, environment, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(threads, "cores_granted", lambda: granted)
    threads.settle_threads()
    assert environment().get("OMP_NUM_THREADS") == chosen
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    threads.settle_threads()
    assert environment()["OMP_NUM_THREADS"] == "8"


V1 = {"cpu/job/cpu.cfs_quota_us": "150000\n", "cpu/job/cpu.cfs_period_us": "100000\n", "cpu/cpu.cfs_quota_us": "-1\n"}
GROUPS = [
    ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
    ("0::/a/b\n", {"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "max 100000\n"}, 0.5),
    ("3:cpuset:/\n2:cpu,cpuacct:/job\n0::/\n", V1, 1.5),
    ("2:cpu:/docker/seen/from/outside\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000"}, 3.0),
    ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
    ("0::/\n", {"cpu.max": "rubbish\n"}, math.inf),
    ("rubbish\n", {}, math.inf),
]


@pytest.mark.parametrize(("own", "files", "granted"), GROUPS)
def test_the_least_of_all_limits_counts(own, files, granted, tmp_path):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert threads.cores_granted(tmp_path / "root", tmp_path / "own") == granted
    assert threads.cores_granted(tmp_path / "root", tmp_path / "nowhere") == math.inf


def test_every_command_does_so_before_its_work(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(options, "settle_threads", lambda: order.append("settle"))
    assert COMMAND.run(lambda config, given: order.append("work"), []) == 0
    assert order == ["settle", "work"]
