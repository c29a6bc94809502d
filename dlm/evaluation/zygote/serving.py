"""Programs one after the other: read, forked, watched, answered for."""

import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import NamedTuple

from .child import become
from .walls import emptied, empty, enter
from .watch import kill, left, reap, rest, watch

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


class Place(NamedTuple):
    """Where programs run."""

    home: str
    """The only folder that they may write to."""
    proc: int | None
    """The folder /proc of the namespace, open."""
    inside: bool
    """Whether there is a namespace."""


def serve(place: Place) -> None:
    """Run programs, one after the other, until nobody asks for more."""
    for name in PRELOADED:
        __import__(name)
    gc.collect()
    gc.freeze()  # children share these pages as long as no collection touches them
    if place.inside:
        empty(place.home)
    _answer({"ready": True})
    while (request := _request()) is not None:
        found = _run(request, place)
        if place.inside:
            emptied(place.home)
        _answer(found)


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


def _run(request: dict, place: Place) -> dict:
    """Fork, watch, kill everything that is left, and say what came of it."""
    said, saying = os.pipe()
    shown, showing = os.pipe()
    secret, keep = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if not child:
        become(request, place.home, place.inside, (secret, saying, showing))
    for descriptor in (saying, showing, secret):
        os.close(descriptor)
    nonce = os.urandom(16)  # after the fork: no copy of it is in the child's memory but the one that it reads
    with suppress(BrokenPipeError):
        os.write(keep, nonce)
    os.close(keep)
    verdict, output, why = watch(request, child, said, shown, started, place.proc)
    kill(child, place.inside)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    while place.inside and reap():
        pass
    verdict += rest(said)
    for descriptor in (said, shown):
        os.close(descriptor)
    passed = why is None and verdict == nonce
    failed = verdict[1:].decode("utf-8", "replace") if verdict[:1] == b"!" else None
    return {
        "passed": passed,
        "reason": "passed" if passed else why or failed or left(status),
        "output": output.decode("utf-8", "replace"),
        "seconds": time.monotonic() - started,
    }


def start() -> None:
    """`inside|outside ROOT PATH…`"""
    where, root, *paths = sys.argv[1:]
    home = OTHER_HOME if any(path.startswith(HOME + "/") for path in paths) else HOME
    sys.path += [path for path in paths if path.endswith("site-packages") and path not in sys.path]
    proc = None
    if where == "inside":
        try:
            proc = enter(root, paths, home)
        except Exception as error:
            _answer({"ready": False, "why": str(error)})
            os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is for the one that asks
    serve(Place(home=home, proc=proc, inside=where == "inside"))
    os._exit(0)
