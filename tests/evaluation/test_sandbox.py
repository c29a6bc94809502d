"""The sandbox against hostile programs: none passes, and none reaches what is not its own."""

import os
import socket
import threading

import pytest

from dlm.errors import UserError
from dlm.evaluation import run_program
from dlm.evaluation.sandbox import Sandbox
from dlm.evaluation.worker import Limits, Zygote

LONG = 120.0
"""Seconds for programs that end by themselves: on a busy machine none of them may run out of time."""
SHORT = {"change what reports", "threads"}
"""Those that may be ended by the clock as well."""


@pytest.fixture(scope="module")
def sandbox():
    try:
        with Sandbox(1) as made:
            made.run("")
            yield made
    except UserError as error:
        pytest.skip(str(error))


HOSTILE = {
    "network": ("import socket; socket.create_connection(('1.1.1.1', 80), 2)", "unreachable"),
    "memory": ("x = bytearray(2 * 1024**3)", "MemoryError"),
    "file": ("open('big', 'wb').write(bytes(5_000_000))", "File too large"),
    "disk": ("for i in range(99): open(str(i), 'wb').write(bytes(900_000))", "No space left"),
    "descriptors": ("files = [open('/dev/null') for _ in range(99)]", "Too many open files"),
    "exit": ("import os; os._exit(0)", "left before its end, with status 0"),
    "sys.exit": ("import sys; sys.exit(0)", "SystemExit: 0"),
    "quit in a handler": ("import atexit, os; atexit.register(os._exit, 0); raise SystemExit", "SystemExit"),
    "read /root": ("import os; os.listdir('/root')", "/root"),
    "read /home": ("import os; os.listdir('/home')", "/home"),
    "read a file of ours": (f"open({str(__file__)!r}).read()", "Error"),
    "read /etc/passwd": ("open('/etc/passwd').read()", "No such file"),
    "our environment": ("import os; assert 'DLM_TEST_SECRET' in os.environ", "AssertionError"),
    "a process's environment": ("import os; open(f'/proc/{os.getppid()}/environ').read()", "No such file"),
    "our own environment": ("open('/proc/self/environ').read()", "No such file"),
    "write outside": ("open('/usr/written', 'w')", "Read-only|denied"),
    "write to the root": ("open('/written', 'w')", "Read-only|denied"),
    "kill the parent": ("import os; os.kill(os.getppid(), 9)", "not permitted"),
    "kill all": ("import os; os.kill(-1, 9)", "not permitted|SIGKILL|No such process"),
    "be root again": ("import os; os.setuid(0)", "not permitted"),
    "mount": ("import ctypes; c = ctypes.CDLL(None); assert c.mount(b'n', b'/tmp', b'tmpfs', 0, None) == 0", "Assertion"),
    "trace the parent": ("import ctypes, os; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0", "Assertion"),
    "change the checker": ("import builtins\nbuiltins.AssertionError = ValueError\nassert False", "AssertionError"),
    "change what ends it": ("import os\nos._exit = lambda code: None\nassert False", "AssertionError"),
    "change what reports": (
        "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\n"
        "f.f_globals['_report'] = lambda e: None\nf.f_globals['os']._exit = lambda c: None\nassert False",
        "left|timed out|Error",
    ),
    "say it has passed": ("print('passed'); import os\nfor f in range(3, 64):\n  try: os.write(f, b'passed')\n  except OSError: pass\nos._exit(0)", "left"),
    "signal": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "signal without a name": ("import os; os.kill(os.getpid(), 40)", "killed by signal 40"),
    "recursion": ("def f(): return f()\nf()", "RecursionError"),
    "no Python": ("x = (", "SyntaxError"),
    "null": ("x = '\0'", "null bytes"),
    "surrogate": ("x = '\ud800'", "surrogates"),
    "threads": ("import threading, time\nfor _ in range(99): threading.Thread(target=time.sleep, args=(9,)).start()", "start new thread|time"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_none_passes(sandbox, name, monkeypatch):
    monkeypatch.setenv("DLM_TEST_SECRET", "1")
    source, reason = HOSTILE[name]
    found = sandbox.run(source, timeout=2 if name in SHORT else LONG)
    assert not found.passed
    assert any(word in found.reason for word in reason.split("|")), found


ENDLESS = {
    "loop": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "deaf": "import signal, time\nfor s in (1, 2, 14, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "talk": "while True: print('x' * 1000)",
    "a child in a session of its own": "import os, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(60)",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_is_ended_with_all_its_children(sandbox, name):
    found = sandbox.run(ENDLESS[name], timeout=0.3)
    assert not found.passed and ("timed out" in found.reason or "processes" in found.reason)
    assert len(found.output) <= Limits().output
    # The process that ran it is alive and has no other child: the next program sees a machine of its own.
    left = "import os\ntry: os.kill(-1, 0)\nexcept ProcessLookupError: pass\nelse: raise ValueError"
    assert sandbox.run(left, LONG).reason in ("passed", "PermissionError: [Errno 1] Operation not permitted")
    assert sandbox.run("import os; assert os.listdir('.') == []", LONG).passed


FINDER = """
import gc, os, sys, threading
found, seen = set(), set()
def walk(o, depth=0):
    if id(o) in seen or depth > 8 or isinstance(o, type(walk.__code__)): return  # code has tables of bytes
    seen.add(id(o))
    if isinstance(o, bytes) and len(o) == 16: found.add(o)
    for other in gc.get_referents(o): walk(other, depth + 1)
gc.unfreeze()
for o in gc.get_objects(): walk(o)
frame = sys._getframe()
while frame:
    walk(frame); walk(frame.f_locals); walk(frame.f_globals); walk(frame.f_code)
    frame = frame.f_back
try: 1 / 0
except Exception as e: walk(e.__traceback__.tb_frame)
for number in range(64):
    try:
        os.set_blocking(number, False)
        found.add(os.read(number, 16))
    except OSError: pass
random = [word for word in found if len(set(word)) > 9 and not word.isascii()]
print(len(found), len(random))
for number in range(64):
    try: os.write(number, random[0])
    except (OSError, IndexError): pass
os._exit(0)
"""


def test_the_nonce_is_not_found_in_frames_objects_and_files(sandbox):
    found = sandbox.run(FINDER, timeout=LONG)
    assert not found.passed, found


def test_what_ends_well_passes(sandbox):
    found = sandbox.run("def f(x):\n    return x + 1\nassert f(1) == 2\nprint('so')", LONG)
    assert found.passed and found.reason == "passed" and found.output == "so\n"
    for source in (
        "",
        "assert __name__ == '__main__'",
        "import tempfile; tempfile.NamedTemporaryFile().write(b'x')",
        "import os, sys; assert sys.stdin.read() == ''",
        "import numpy; assert numpy.ones(3).sum() == 3",
        "import os\nif os.fork() == 0: os._exit(3)\nos.wait()",
        "import threading; t = threading.Thread(target=print); t.start(); t.join()",
    ):
        assert sandbox.run(source, timeout=LONG).passed, (source, sandbox.run(source, timeout=LONG))


def test_a_program_leaves_nothing_to_the_next(sandbox):
    assert sandbox.run(
        "import os; os.makedirs('a/b'); open('a/b/c', 'w').write('x'); import math; math.pi = 3", LONG
    ).passed
    assert sandbox.run("import os, math; assert os.listdir('.') == [] and math.pi > 3.1", LONG).passed


def test_together_they_get_no_more_memory(monkeypatch):
    with Sandbox(1, limits=Limits(memory=256 * 2**20)) as sandbox:
        many = "import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (120 * 2**20)\ntime.sleep(99)"
        assert sandbox.run(many, timeout=LONG).reason == "more than 256 MiB of memory"


def test_listeners_outside_are_not_reached(sandbox):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        assert not sandbox.run(
            f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        ).passed


def test_many_side_by_side_keep_their_order():
    with Sandbox(2) as sandbox:
        sources = [f"assert {i} % 3" for i in range(12)]
        seen = []
        found = sandbox.run_all(sources, LONG, tick=seen.append)
        assert [verdict.passed for verdict in found] == [i % 3 > 0 for i in range(12)] and sum(seen) == 12
        threads = [threading.Thread(target=lambda: seen.append(sandbox.run("1", LONG).passed)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen[-6:] == [True] * 6


def test_a_lost_worker_is_replaced(sandbox):
    with sandbox._worker() as zygote:
        zygote.process.kill()
        zygote.process.wait()
        while (found := zygote.run("1", 1)).passed:  # its inner process may live a moment longer
            pass
        assert found.reason == "the sandbox was lost"
    assert sandbox.run("1", LONG).passed


def test_after_an_interrupt_no_program_gets_another_s_verdict(sandbox, monkeypatch):
    def interrupted(self, timeout):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Zygote, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sandbox.run("raise ValueError('the first')", LONG)
    assert sandbox.run("1", LONG).passed and not sandbox.run("assert False", LONG).passed


def test_without_namespaces_it_refuses(monkeypatch):
    script = "import json, sys, time\nb = json.dumps({'ready': False, 'why': 'unshare: not permitted'}).encode()\n"
    script += "sys.stdout.buffer.write(len(b).to_bytes(4, 'little') + b)"
    real = Zygote.__init__

    def nowhere(self, sandboxed=True, limits=Limits()):  # noqa: B008
        if sandboxed:
            raise UserError("programs cannot be run in a sandbox here (unshare: not permitted): --allow-unsandboxed")
        real(self, sandboxed, limits)

    monkeypatch.setattr(Zygote, "__init__", nowhere)
    with Sandbox(1) as sandbox, pytest.raises(UserError, match="--allow-unsandboxed"):
        sandbox.run("1")
    with Sandbox(1, allow_unsandboxed=True) as sandbox:
        assert sandbox.run("1", LONG).passed
        for name in ("loop", "sleep", "deaf"):
            assert "timed out" in sandbox.run(ENDLESS[name], timeout=0.3).reason
        for name in ("memory", "file", "exit", "sys.exit", "our environment", "change the checker"):
            assert not sandbox.run(HOSTILE[name][0], LONG).passed, name
    os.kill(os.getpid(), 0)  # we are still there


def test_what_is_no_program():
    for source, timeout, says in ((3, 1, "must be Python source"), ("", 0, "timeout = 0"), ("", "3", "timeout = '3'")):
        with pytest.raises(UserError, match=says):
            run_program(source, timeout)
    with pytest.raises(UserError, match="workers = 0"):
        Sandbox(0)
