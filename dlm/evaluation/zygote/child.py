"""A program's process, from the fork to its end: limits, no rights, then the program."""

import builtins
import os
import resource
import sys
import types

from .walls import drop, no_new_rights

SECRET, SAYING = 50, 51  # descriptors: where it reads the nonce, where it reports


def become(request: dict, home: str, inside: bool, pipes: tuple[int, int, int]) -> None:
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
        os.chdir(home if inside else request["folder"])
        no_new_rights()
        if inside:
            drop()
        os.environ.clear()
        os.environ.update(PATH="/usr/bin:/bin", HOME=home, TMPDIR=home, LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1")
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
