import os
import select
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dlm.kernels.c import binding, built, compiler
from dlm.kernels.c.compiler import BuildError, Unfinished
from dlm.kernels.paths import path_of
from tests.refusals import refused

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")

SOURCE = "int answer(void) { return 42; }"
FLAGS = ["-shared", "-fPIC"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "cache" / "dlm"


@pytest.fixture
def anew(monkeypatch):
    """The kernels are built at their first use in the test, and again after it."""
    monkeypatch.delenv("DLM_NATIVE", raising=False)
    binding.library.cache_clear()
    yield
    binding.library.cache_clear()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "small.c"
    path.write_text(SOURCE)
    return path


def load(source, command=("cc",), symbols=("answer",)):
    found = built.load("small", [source], list(command), FLAGS, symbols)
    assert found.answer() == 42
    return found


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def counting(tmp_path: Path) -> tuple[list[str], Path]:
    """A compiler that notes each time it compiles."""
    log = tmp_path / "compiled"
    return [
        script(tmp_path / "counting-cc", f'case "$*" in *--version*) ;; *) echo x >> {log};; esac\nexec cc "$@"')
    ], log


def kept(cache: Path) -> Path:
    [path] = cache.glob("*.so")
    return path


def test_a_library_that_lacks_a_function_is_forgotten(cache, source, tmp_path):
    """The next one may lie behind the same file number, by whose name the loader knows libraries."""
    for _ in range(2):
        refused("lacks question", built.load, "small", [source], ["cc"], FLAGS, ("question",), error=BuildError)
    other = tmp_path / "other.c"
    other.write_text("int question(void) { return 54; }")
    assert built.load("other", [other], ["cc"], FLAGS, ("question",)).question() == 54


def test_it_is_compiled_once_and_only_its_owner_may_enter(cache, source, tmp_path):
    command, log = counting(tmp_path)
    cache.parent.mkdir()
    cache.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        for _ in range(3):
            load(source, command)
    finally:
        os.umask(before)
    assert log.read_text().count("x") == 1
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in cache.iterdir()] == [kept(cache).name]  # nothing half done is left


@pytest.mark.parametrize(
    "damage", ["empty", "half", "one bit", "other content", "a folder", "a link", "another's name"]
)
def test_a_damaged_library_is_reported_and_compiled_anew(damage, cache, source, tmp_path, caplog):
    command, log = counting(tmp_path)
    load(source, command)
    path, whole = kept(cache), kept(cache).read_bytes()
    path.unlink()
    if damage == "another's name":
        path = path.with_name(f"{path.stem[:-16]}{'0' * 16}.so")
        path.write_bytes(whole)
    elif damage == "a folder":
        path.mkdir()
    elif damage == "a link":
        elsewhere = tmp_path / "elsewhere.so"
        elsewhere.write_bytes(whole)
        path.symlink_to(elsewhere)
    else:
        flipped = bytes([*whole[:999], whole[999] ^ 1, *whole[1000:]])
        contents = {"empty": b"", "half": whole[: len(whole) // 2], "one bit": flipped, "other content": b"#!/bin/sh"}
        path.write_bytes(contents[damage])
    load(source, command)
    assert log.read_text().count("x") == 2
    assert len(caplog.messages) == 1 and str(path) in caplog.messages[0]
    if damage != "a folder":
        caplog.clear()
        load(source, command)
        assert not caplog.messages and log.read_text().count("x") == 2


@pytest.mark.parametrize("which", ["the folder", "the file"])
def test_what_belongs_to_another_user_is_not_loaded(which, cache, source, tmp_path, monkeypatch, caplog):
    command, log = counting(tmp_path)
    load(source, command)
    theirs, original = (cache if which == "the folder" else kept(cache)).stat(), os.fstat

    def fstat(file):
        facts = original(file)
        if (facts.st_dev, facts.st_ino) != (theirs.st_dev, theirs.st_ino):
            return facts
        return os.stat_result([*facts[:4], facts.st_uid + 1, *facts[5:]])

    monkeypatch.setattr(built.os, "fstat", fstat)
    load(source, command)
    assert log.read_text().count("x") == 2
    assert f"belongs to user {os.geteuid() + 1}" in caplog.messages[0]


def test_a_file_that_others_may_write_is_not_loaded(cache, source, tmp_path, caplog):
    command, log = counting(tmp_path)
    load(source, command)
    kept(cache).chmod(0o777)
    load(source, command)
    assert log.read_text().count("x") == 2
    assert "can be written by other users" in caplog.messages[0]


def test_a_folder_that_is_a_link_is_not_used(cache, source, tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    cache.parent.mkdir()
    cache.symlink_to(tmp_path / "elsewhere")
    load(source)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o755
    assert f"{cache} is a link: compiled kernels are not kept there" in caplog.messages[0]


@pytest.mark.parametrize("home", ["a file", "nothing"])
def test_without_a_place_to_keep_it_nothing_is_left_behind(home, source, tmp_path, monkeypatch):
    """As with a home folder that nobody may write: also for root, to whom permissions mean nothing."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home") if home == "a file" else "")
    (tmp_path / "home").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)
    load(source)
    assert not list((tmp_path / "temporary").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "small.c", "temporary"]


def test_many_may_build_at_once(cache, source):
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: load(source), range(6)))
    assert kept(cache).stat().st_size > 0
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("fact", ["compiler", "flags", "source", "header", "machine"])
def test_what_a_library_depends_on_is_in_its_name(fact, cache, source, monkeypatch):
    header = source.with_suffix(".h")
    header.write_text("")
    sources, flags = [source, header], FLAGS
    built.load("small", sources, ["cc"], flags, ["answer"])
    if fact == "flags":
        flags = [*FLAGS, "-O1"]
    elif fact in ("source", "header"):
        path = source if fact == "source" else header
        path.write_text(path.read_text() + "\n")
    elif fact == "compiler":
        original = built.run
        monkeypatch.setattr(built, "run", lambda command, seconds: original(command, seconds) + b"!")
    else:  # a home folder that machines share
        monkeypatch.setattr(built, "_machine", lambda: "another CPU")
    built.load("small", sources, ["cc"], flags, ["answer"])
    assert len(list(cache.glob("*.so"))) == 2


def test_the_name_holds_what_the_cpu_can_do():
    assert sys.platform in built._machine()
    if Path("/proc/cpuinfo").exists():
        assert len(built._machine()) > 100


BROKEN = {
    "an open quote": ("gcc '", 'CC = "gcc \'" is not a command: No closing quotation'),
    "not there": ("/nowhere/cc", "/nowhere/cc cannot be run: No such file or directory"),
    "no program": ("/dev/null", "/dev/null cannot be run: Permission denied"),
    "fails": ("false", "false ended with status 1"),
    "does nothing": ("true", "true ended without an error and wrote no library"),
    "prints garbage": ("echo", "echo ended without an error and wrote no library"),
    "writes garbage": ("SCRIPT for last; do case $last in *.so) echo rubbish > $last;; esac; done", "cannot be loaded"),
    "lacks symbols": ("cc -Dint=static\\ int", "lacks"),
    "hangs": ("SCRIPT sleep 600", "did not end within 0.2 s"),
    "hangs when it compiles": ('SCRIPT case "$*" in *--version*) ;; *) sleep 600;; esac', "did not end within 0.2 s"),
    "hangs in a child": ("SCRIPT sleep 600 & wait", "did not end within 0.2 s"),
    "prints without end": ("SCRIPT yes", "prints without end"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_compiler_is_reported_once_and_torch_does_the_work(kind, cache, anew, tmp_path, monkeypatch, caplog):
    words, says = BROKEN[kind]
    if words.startswith("SCRIPT "):
        words = script(tmp_path / "cc", words.removeprefix("SCRIPT "))
    monkeypatch.setenv("CC", words)
    if kind.startswith("hangs"):
        monkeypatch.setattr(built, "VERSION_SECONDS", 120.0 if "compiles" in kind else 0.2)
        monkeypatch.setattr(built, "COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(binding, "SOURCES", [tmp_path / "small.c"])
    (tmp_path / "small.c").write_text(SOURCE)
    assert binding.unavailable() and binding.unavailable()
    with torch.inference_mode():  # which C asks for
        assert path_of(torch.zeros(1)).name == "torch"
    assert len(caplog.messages) == 1
    assert says in caplog.messages[0] and "\n" not in caplog.messages[0]
    monkeypatch.setenv("DLM_NATIVE", "1")
    refused("DLM_NATIVE = 1", binding.unavailable)
    assert not list(cache.glob("*"))


def test_no_compiler_at_all_is_no_surprise(cache, anew, monkeypatch, caplog):
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    assert "install gcc or clang" in binding.unavailable()
    assert not caplog.messages


def test_what_a_stopped_command_started_is_stopped_too(tmp_path):
    """It prints without end once its child runs, which holds a pipe open."""
    os.mkfifo(tmp_path / "alive")
    pipe = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(Unfinished):
        compiler.run(["sh", "-c", f"exec 3> {tmp_path}/alive; sleep 600 & exec yes"], 120)
    os.set_blocking(pipe, True)
    assert select.select([pipe], [], [], 60)[0] and os.read(pipe, 1) == b""  # nobody holds it any more
    os.close(pipe)


def test_a_compiler_that_says_what_is_wrong_is_quoted(tmp_path):
    (tmp_path / "bad.c").write_text("int f(void) { return }\n")
    with pytest.raises(BuildError, match="error: expected expression"):
        compiler.run(["cc", "-c", str(tmp_path / "bad.c"), "-o", str(tmp_path / "bad.o")], 60)
