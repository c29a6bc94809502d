"""The process that runs programs: a script of its own, standard library only, started by `sandbox`. Judges nothing.

It enters namespaces of its own, builds a root file system without anybody's files, and then forks a child for each program
that it reads. It is PID 1 of its namespace, so a program can neither kill it nor outlive it.
"""

import builtins
import ctypes
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time
import types
from contextlib import suppress

USER, MOUNT, PID, NET, IPC, UTS = 0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000
REC, PRIVATE, BIND, DETACH = 0x4000, 1 << 18, 0x1000, 2
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
READ_ONLY = 0x1 | 0x2 | 0x4  # MOUNT_ATTR_RDONLY, NOSUID, NODEV
NO_NEW_PRIVS, DIE_WITH_PARENT = 38, 1
NOBODY = 65534
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
PRELOADED = (
    "collections",
    "copy",
    "datetime",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
)
PRELOADED += (
    "re",
    "string",
    "traceback",
    "typing",
    "bisect",
    "statistics",
    "fractions",
    "decimal",
    "enum",
    "dataclasses",
)
HOME = "/tmp"
OTHER_HOME = "/scratch"
"""In place of it where Python itself lies in /tmp, which an empty folder would hide."""
POLL = 0.02  # seconds between two looks at how much memory and how many processes a program has
BUSY = 3  # times its own time that a program may get where the processors are busy with others
SECRET, SAYING = 50, 51  # a child's descriptors: where it reads the nonce, where it reports
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    check(libc.mount(*texts, ctypes.c_ulong(flags), None if data is None else data.encode()), f"mount {target}")


def read_only(path: str) -> None:
    """Make a mount and those below it read-only."""
    attributes = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    flags = 0x8000  # AT_RECURSIVE
    result = libc.syscall(MOUNT_SETATTR, -100, path.encode(), flags, attributes, ctypes.c_size_t(len(attributes)))
    check(result, f"read-only {path}")


def enter(root: str, paths: list[str]) -> None:
    """Move into new namespaces; returns in a process that is PID 1 there. The two others wait for it."""
    uid, gid = os.geteuid(), os.getegid()
    asking, asked = os.pipe()
    told, telling = os.pipe()
    child = os.fork()
    if child:  # a process outside writes the maps: it may name a second user
        os.close(asked)
        if os.read(asking, 1):
            _map_users(child, uid, gid)
            os.write(telling, b"1")
        os.closerange(0, 2)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    check(libc.unshare(USER | MOUNT | PID | NET | IPC | UTS), "unshare")
    os.write(asked, b"1")
    os.close(telling)
    if not os.read(told, 1):
        raise OSError("the user map of the namespace cannot be written")
    for descriptor in (asking, asked, told):
        os.close(descriptor)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    child = os.fork()
    if child:
        os.closerange(0, 2)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    _build(root, paths)


def _map_users(child: int, uid: int, gid: int) -> None:
    """Inside, 0 is the caller. Root gives programs a user of their own, for no limit on processes binds root."""
    second = f"\n1 {NOBODY} 1" if uid == 0 else ""
    if uid:
        _write(f"/proc/{child}/setgroups", "deny")
    _write(f"/proc/{child}/uid_map", f"0 {uid} 1{second}")
    _write(f"/proc/{child}/gid_map", f"0 {gid} 1{second}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _build(root: str, paths: list[str]) -> None:
    """A root of empty folders, the system's read-only, and a proc that only this process can reach."""
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", 2 | 4, "size=1m,mode=755")
    for path in dict.fromkeys((*SYSTEM, *paths, *DEVICES)):
        target = root + path
        if not os.path.exists(path) or os.path.lexists(target):
            continue
        _folders(root, os.path.dirname(path))
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT))
        mount(path, target, None, BIND | REC)
        if path not in DEVICES:
            read_only(target)
    os.mkdir(root + HOME)
    os.mkdir(root + "/proc")
    mount("proc", root + "/proc", "proc", 2 | 4 | 8)
    WATCH.append(os.open(root + "/proc", os.O_RDONLY | os.O_DIRECTORY))
    check(libc.umount2((root + "/proc").encode(), DETACH), "umount proc")
    os.chdir(root)
    check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount")
    os.chdir("/")
    attributes = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    check(libc.syscall(MOUNT_SETATTR, -100, b"/", 0, attributes, ctypes.c_size_t(len(attributes))), "read-only /")


def _folders(root: str, path: str) -> None:
    """Folders on the way to a mount: they can be passed through, not listed."""
    for end in [at for at, letter in enumerate(path + "/") if letter == "/" and at]:
        if not os.path.lexists(root + path[:end]):
            os.mkdir(root + path[:end])
            os.chmod(root + path[:end], 0o711)


WATCH: list[int] = []
"""The folder /proc of the namespace, open, where there is one."""


def serve(inside: bool) -> None:
    """Run programs, one after the other, until nobody asks for more."""
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()  # children share these pages as long as no collection touches them
    if inside:
        _empty_home()
    _answer({"ready": True})
    while (request := _request()) is not None:
        found = _run(request, inside)
        if inside and os.listdir(HOME):  # a new one costs more than to look
            check(libc.umount2(HOME.encode(), DETACH), "umount")
            _empty_home()
        _answer(found)


def _empty_home() -> None:
    mount("tmpfs", HOME, "tmpfs", 2 | 4, "size=16m,nr_inodes=1000,mode=777")


def _request() -> dict | None:
    head = _read(4)
    return None if head is None else json.loads(_read(int.from_bytes(head, "little")) or b"null")


def _read(count: int) -> bytes | None:
    found = b""
    while len(found) < count:
        part = os.read(0, count - len(found))
        if not part:
            return None
        found += part
    return found


def _answer(found: dict) -> None:
    body = json.dumps(found).encode()
    left = len(body).to_bytes(4, "little") + body
    while left:
        left = left[os.write(1, left) :]


def _run(request: dict, inside: bool) -> dict:
    """Fork, watch, kill everything that is left, and say what came of it."""
    said, saying = os.pipe()
    shown, showing = os.pipe()
    secret, keep = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if not child:
        _become(request, inside, (secret, saying, showing))
    for descriptor in (saying, showing, secret):
        os.close(descriptor)
    nonce = os.urandom(16)  # after the fork: no copy of it is in the child's memory but the one that it reads
    with suppress(BrokenPipeError):
        os.write(keep, nonce)
    os.close(keep)
    verdict, output, why = _watch(request, child, said, shown, started)
    _kill(child, inside)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    while inside and _reap():
        pass
    verdict += _rest(said)
    for descriptor in (said, shown):
        os.close(descriptor)
    passed = why is None and verdict == nonce
    failed = verdict[1:].decode("utf-8", "replace") if verdict[:1] == b"!" else None
    return {
        "passed": passed,
        "reason": "passed" if passed else why or failed or _left(status),
        "output": output.decode("utf-8", "replace"),
        "seconds": time.monotonic() - started,
    }


def _watch(request: dict, child: int, said: int, shown: int, started: float) -> tuple[bytes, bytes, str | None]:
    """Until the program ends, or must: what it reported, what it printed, and why it was ended."""
    end = started + request["timeout"]
    process = os.pidfd_open(child)
    poll = select.poll()
    for descriptor in (said, shown, process):
        poll.register(descriptor, select.POLLIN)
    poll.register(0, 0)  # whoever asked is gone
    verdict = output = b""
    try:
        while True:
            now = time.monotonic()
            if (
                now >= end
                and (end := started + min(BUSY, 1 + _delayed(child) / request["timeout"]) * request["timeout"]) <= now
            ):
                return verdict, output, f"timed out after {request['timeout']:g} s"
            for descriptor, event in poll.poll(1000 * min(POLL, end - now) + 1):
                if descriptor == process:
                    return verdict, output + _rest(shown)[: request["output"] - len(output)], None
                if descriptor == 0:
                    os._exit(1)
                part = os.read(descriptor, 1 << 16) if event & select.POLLIN else b""
                if not part:
                    poll.unregister(descriptor)
                elif descriptor == said:
                    verdict = (verdict + part)[:4096]
                else:
                    output += part[: request["output"] - len(output)]  # the rest is read and forgotten
            if (why := _excess(request)) is not None:
                return verdict, output, why
    finally:
        os.close(process)


def _delayed(child: int) -> float:
    """Seconds that the program was ready to run and had no processor: on a busy machine they are not its own."""
    try:
        file = os.open(f"{child}/schedstat", os.O_RDONLY, dir_fd=WATCH[0])
    except (OSError, IndexError):
        return 0.0
    try:
        return int(os.read(file, 200).split()[1]) / 1e9
    finally:
        os.close(file)


def _excess(request: dict) -> str | None:
    """What a program and its children have too much of, all together."""
    if not WATCH:
        return None
    others = [name for name in os.listdir(WATCH[0]) if name.isdecimal() and name != "1"]
    if len(others) > request["processes"]:
        return f"more than {request['processes']} processes"
    pages = 0
    for name in others:
        try:
            file = os.open(f"{name}/statm", os.O_RDONLY, dir_fd=WATCH[0])
            try:
                fields = os.read(file, 200).split()
            finally:
                os.close(file)
        except OSError:  # it ended meanwhile
            continue
        pages += int(fields[1]) - int(fields[2]) if len(fields) > 2 else 0  # without what it shares with this process
    most = request["memory"]
    return f"more than {most >> 20} MiB of memory" if pages * resource.getpagesize() > most else None


def _rest(descriptor: int) -> bytes:
    """What lies in a pipe, without waiting for more."""
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def _kill(child: int, inside: bool) -> None:
    """All that runs in the namespace; without one, the program's process group."""
    with suppress(ProcessLookupError, PermissionError):
        if inside and os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)  # every process but this one, of this namespace alone
        else:
            os.killpg(child, signal.SIGKILL)


def _reap() -> bool:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        return False
    return True


def _left(status: int) -> str:
    if status >= 0:
        return f"left before its end, with status {status}"
    return f"killed by {signal.Signals(-status).name}"


def _become(request: dict, inside: bool, pipes: tuple[int, int, int]) -> None:
    """In the child: give up everything, then run the program. Never returns."""
    secret, saying, showing = pipes
    try:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor, place in ((null, 0), (showing, 1), (showing, 2), (secret, SECRET), (saying, SAYING)):
            os.dup2(descriptor, place)
        os.closerange(3, SECRET)
        os.closerange(SAYING + 1, 256)
        whole = int(request["timeout"]) + 2
        limits = {
            resource.RLIMIT_AS: request["address_space"],
            resource.RLIMIT_FSIZE: request["file_size"],
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_CPU: whole,
        }
        if inside:
            limits[resource.RLIMIT_NPROC] = request["processes"]
        for limit, value in limits.items():
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
        os.chdir(HOME if inside else request["folder"])
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        if inside:
            _drop()
        os.environ.clear()
        os.environ.update(PATH="/usr/bin:/bin", HOME=HOME, TMPDIR=HOME, LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1")
        main = types.ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __file__="program.py")
        sys.modules["__main__"], sys.argv = main, ["program.py"]
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        _play(request["source"], main.__dict__)
    except BaseException as error:  # whatever a program raises, SystemExit among it, is its end before its end
        _report(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        pass
    finally:
        os._exit(1)


def _drop() -> None:
    """Be the second user where there is one, and have no capability in any case."""
    try:
        os.setresgid(1, 1, 1)
        os.setresuid(1, 1, 1)
    except OSError:  # there is one user only
        header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", *[0] * 6)
        check(libc.capset(header, none), "capset")


def _play(source: str, namespace: dict) -> None:
    """Run the program, then send back the nonce that waits in a pipe.

    A program must not be able to send it before its end. So while it runs, the nonce is in no variable, constant or
    container that frames or `gc` lead to: it is read into the list that `sorted` builds, and CPython takes the items off a
    list while it sorts. If the program raises, nothing in this function catches it, and the list is gone. What could
    still find it is a search of the process's memory by machine code.
    """

    def key(nonce: object) -> int:
        del nonce
        os.close(SECRET)
        exec(compile(source, "program.py", "exec"), namespace)
        return 0

    os.write(SAYING, *sorted(map(os.read, [SECRET], [16]), key=key))


def _report(error: BaseException) -> None:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    os.write(SAYING, b"!" + text.encode("utf-8", "replace")[:500])


def start() -> None:
    """`zygote.py inside|outside ROOT PATH…`"""
    global HOME
    where, root, *paths = sys.argv[1:]
    if any(path.startswith(HOME + "/") for path in paths):
        HOME = OTHER_HOME
    sys.path += [path for path in paths if path.endswith("site-packages") and path not in sys.path]
    inside = where == "inside"
    if inside:
        try:
            enter(root, paths)
        except Exception as error:
            _answer({"ready": False, "why": str(error)})
            os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is for the one that asks
    serve(inside)
    os._exit(0)


if __name__ == "__main__":
    start()
