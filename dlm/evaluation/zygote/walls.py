"""The walls around programs: namespaces, a root file system without anybody's files, users without rights."""

import ctypes
import os
import signal
import struct

USER, MOUNT, PID, NET, IPC, UTS = 0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000
REC, PRIVATE, BIND, DETACH = 0x4000, 1 << 18, 0x1000, 2
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
READ_ONLY = 0x1 | 0x2 | 0x4  # MOUNT_ATTR_RDONLY, NOSUID, NODEV
NO_NEW_PRIVS, DIE_WITH_PARENT = 38, 1
NOBODY = 65534
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
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


def enter(root: str, paths: list[str], home: str) -> int:
    """Move into new namespaces; returns in a process that is PID 1 there. The two others wait for it.

    Gives the namespace's /proc, an open folder that stands nowhere: a program cannot reach it.
    """
    uid, gid = os.geteuid(), os.getegid()
    alone, now_alone = os.pipe()
    mapped, now_mapped = os.pipe()
    child = os.fork()
    if child:  # a process outside writes the maps: it may name a second user
        os.close(now_alone)
        if os.read(alone, 1):
            _map_users(child, uid, gid)
            os.write(now_mapped, b"1")
        os.closerange(0, 2)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    check(libc.unshare(USER | MOUNT | PID | NET | IPC | UTS), "unshare")
    os.write(now_alone, b"1")
    os.close(now_mapped)
    if not os.read(mapped, 1):
        raise OSError("the user map of the namespace cannot be written")
    for descriptor in (alone, now_alone, mapped):
        os.close(descriptor)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    child = os.fork()
    if child:
        os.closerange(0, 2)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc.prctl(DIE_WITH_PARENT, signal.SIGKILL)
    return _build(root, paths, home)


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


def _build(root: str, paths: list[str], home: str) -> int:
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
    os.mkdir(root + home)
    os.mkdir(root + "/proc")
    mount("proc", root + "/proc", "proc", 2 | 4 | 8)
    proc = os.open(root + "/proc", os.O_RDONLY | os.O_DIRECTORY)
    check(libc.umount2((root + "/proc").encode(), DETACH), "umount proc")
    os.chdir(root)
    check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount")
    os.chdir("/")
    attributes = struct.pack("QQQQ", READ_ONLY, 0, 0, 0)
    check(libc.syscall(MOUNT_SETATTR, -100, b"/", 0, attributes, ctypes.c_size_t(len(attributes))), "read-only /")
    return proc


def _folders(root: str, path: str) -> None:
    """Folders on the way to a mount: they can be passed through, not listed."""
    for end in [at for at, letter in enumerate(path + "/") if letter == "/" and at]:
        if not os.path.lexists(root + path[:end]):
            os.mkdir(root + path[:end])
            os.chmod(root + path[:end], 0o711)


def empty(home: str) -> None:
    """An empty folder for programs, in memory."""
    mount("tmpfs", home, "tmpfs", 2 | 4, "size=16m,nr_inodes=1000,mode=777")


def emptied(home: str) -> None:
    """What a program left goes; a new folder costs more than to look."""
    if os.listdir(home):
        check(libc.umount2(home.encode(), DETACH), "umount")
        empty(home)


def drop() -> None:
    """Become the second user or, where there is none, stay who we are: without any capability in both cases."""
    try:
        os.setresgid(1, 1, 1)
        os.setresuid(1, 1, 1)
    except OSError:  # there is one user only
        header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", *[0] * 6)
        check(libc.capset(header, none), "capset")


def no_new_rights() -> None:
    """No program that is started may get more rights than its starter."""
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
