import os
import subprocess
import sys
import types

import pytest
import torch

from dlm.kernels import paths, threads
from dlm.kernels.c import binding
from dlm.kernels.threads import Watch


class Machine:
    """Four cores, on which others work as `load` says, while the clock goes on second by second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, load: float) -> None:
        self.load, self.now, self.busy = load, 0.0, 0.0
        monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
        monkeypatch.setattr(threads.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(threads.time, "process_time", lambda: self.now)  # this process keeps one core busy
        monkeypatch.setattr(Watch, "_busy", lambda watch: self.busy)
        monkeypatch.setattr(threads, "FIXED", False)
        monkeypatch.setattr(threads, "WATCH", Watch())
        monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
        self.passes(1.0)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds * (1 + self.load)


@pytest.mark.parametrize(("load", "used"), [(0, 4), (0.3, 4), (0.8, 3), (2.1, 2), (3, 1), (4, 1), (9, 1)])
def test_cores_that_others_use_are_left_to_them(load, used, monkeypatch):
    Machine(monkeypatch, load)
    assert threads.threads_now() == used
    assert paths.described(torch.float16) == "4 threads"
    if binding.unavailable() is None:
        assert paths.described().startswith("4 threads, k" if used == 4 else f"{used} of 4 threads, since other")


def test_the_number_follows_the_load(monkeypatch):
    machine = Machine(monkeypatch, 3.0)
    assert threads.threads_now() == 1
    machine.load = 0.0
    machine.passes(0.1)
    assert threads.threads_now() == 1  # too short a time to tell
    machine.passes(5.0)
    assert threads.threads_now() == 4


def test_the_users_number_is_obeyed(monkeypatch):
    Machine(monkeypatch, 3.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # not what torch chose
    assert threads.threads_now() == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threads, "FIXED", True)  # OMP_NUM_THREADS
    assert threads.threads_now() == 4


def test_a_program_that_imports_dlm_keeps_its_environment_and_threads():
    """A stand-in for torch, which takes a while to import, would not let its number of threads be set."""
    code = """
import os, sys, types
sys.modules["torch"] = types.ModuleType("torch")
before = dict(os.environ)
import dlm
from dlm.kernels import threads
print(threads.FIXED, dict(os.environ) == before)
"""
    environment = {key: text for key, text in os.environ.items() if key not in threads.FIXED_BY}
    for given, fixed in (({}, False), ({"OMP_NUM_THREADS": "2"}, True), ({"OMP_WAIT_POLICY": "PASSIVE"}, True)):
        done = subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True)
        assert done.stdout == f"{fixed} True\n", done.stderr


def test_idle_cores_and_those_of_others_do_not_count(monkeypatch):
    counts = "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 10 1 20 4000 500 2 3 4 0 0\ncpu1 9 9 9 9 9 9 9 9 0 0\nintr 7\n"
    monkeypatch.setattr(threads, "Path", lambda name: types.SimpleNamespace(read_text=lambda: counts))
    monkeypatch.setattr(threads.os, "sysconf", lambda name: 100)
    watch = Watch()
    watch.names = {"cpu0"}
    assert watch._busy() == pytest.approx((10 + 1 + 20 + 2 + 3 + 4) / 100)


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs Linux's counts")
def test_the_counts_of_the_cores_grow_by_the_work_done():
    watch = Watch()
    assert 0 < watch._busy() <= watch._busy()
    assert watch.names


STACK_KIB = 128
WORK = """
import torch
from dlm.kernels import Spans, reference
from dlm.kernels.c import binding, native, products

def product(w):
    return products.Product(w.data_ptr(), None, None, *w.shape, w.stride(0))

def on_three_threads(kernel, *given):
    torch.set_num_threads(3)
    found = kernel(*given)
    torch.set_num_threads(1)  # torch's own kernels may need more stack
    return found

torch.manual_seed(0)
with torch.inference_mode():
    for e in (64, 128, 256):
        spans = Spans.of([range(90, 110), range(33)], [110, 33], [list(range(4)), list(range(4, 6))])
        q, pages = torch.randn(53, 8, e), torch.randn(6, 32, 4, e)
        given = q, pages, pages, spans, 8
        torch.testing.assert_close(on_three_threads(native.paged_attention, *given), reference.paged_attention(*given))
    many = Spans.of([[0]] * 30000, [1] * 30000, [[0]] * 30000)
    page = pages[:, :, :1, :4].contiguous()
    on_three_threads(native.paged_attention, torch.ones(30000, 1, 4), page, page, many, None)
    weight, x = torch.randn(700, 1500), torch.randn(40, 1500)
    found = on_three_threads(products.linear, product(weight), x)
    torch.testing.assert_close(found, x @ weight.T, rtol=0, atol=1e-3)
    small = product(weight[:, :512])
    on_three_threads(products.gated, small, small, x[:, :512])
    on_three_threads(lambda x: native.confidence(x, mask_id=3), torch.randn(9, 50000))
"""


@pytest.mark.skipif(binding.library()[0] is None, reason=binding.library()[1])
@pytest.mark.skipif(sys.platform != "linux", reason="sets the stack of Linux's threads")
def test_threads_with_little_stack_compute_all_shapes():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_STACKSIZE": f"{STACK_KIB}k", "DLM_NATIVE": "1"}
    limited = ["bash", "-c", 'ulimit -s 512 && exec "$@"', "bash", sys.executable, "-c", WORK]
    done = subprocess.run(limited, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
