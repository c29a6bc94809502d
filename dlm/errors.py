"""The one exception that is meant for users, and what its messages are made of."""

from collections.abc import Iterable

COMMAND_LINE = "command line"
"""Where a value came from that stands in no file."""


class UserError(ValueError):
    """Bad input: the message names the value, where it came from, and the fix.

    Command-line tools print the message alone and exit with status 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean "…"?`, or nothing when no known name is near."""
    import difflib  # a command without a mistake starts without it

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else ""
