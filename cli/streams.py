"""Standard streams, and how a command ends: with an exit status, and with one line instead of a traceback."""

import errno
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from dlm.errors import UserError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of writing to a full or broken disk."""


def run(name: str, work: Callable[[], int | None]) -> int:
    """Do the work and return its status: 2 after a mistake, 130 after Ctrl-C, 141 where the reader of a pipe left."""
    try:
        _write_any_text()
        status = work() or 0
        if sys.stdout is not None:
            sys.stdout.flush()  # a failed write shows here, not when Python exits
        return status
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        _drop_the_rest()
        return 141
    except OSError as error:
        if error.errno not in NO_ROOM and error.filename is None:
            raise
        if error.errno in NO_ROOM:
            _drop_the_rest()
        cannot = " cannot be written" if error.errno in NO_ROOM else ""
        print(f"{name}: {str(error.filename or 'the output')[:200]}{cannot}: {error.strerror}", file=sys.stderr)
        return 2


def standard_input() -> Any:
    """Standard input, read as UTF-8 whatever the locale; invalid bytes become surrogates."""
    if sys.stdin is None:
        raise UserError("standard input is closed")
    reconfigure = getattr(sys.stdin, "reconfigure", None)  # a stream of a test has none
    if reconfigure is not None:
        reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin


def unicode(text: str, place: str) -> str:
    """The text with its surrogates decoded as UTF-8 bytes. UserError, naming `place`, where it is no Unicode text."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{place}: is no Unicode text: character {error.start} is {ascii(text[error.start])[1:-1]}, half of a surrogate "
            "pair: write both halves, or leave it out"
        ) from None
    except UnicodeDecodeError as error:
        found = error.object[error.start]
        raise UserError(
            f"{place}: is no UTF-8 text: {error.reason} at byte {error.start} (0x{found:02x}): convert it first"
        ) from None


def to_json(value: Any) -> str:
    """JSON on one line for standard output: characters as they are, or escaped where it takes ASCII only."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return json.dumps(value, ensure_ascii=not encoding.lower().startswith("utf"))


def _write_any_text() -> None:
    """Print characters that a stream cannot encode (LANG=C) as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a stream of a test has none
        if reconfigure is not None and stream.errors in ("strict", "surrogateescape"):
            reconfigure(errors="backslashreplace")


def _drop_the_rest() -> None:
    """Discard buffered output: Python would try to write it again at exit, and fail with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
