"""Calls that are refused, by the code under test or by the system."""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from dlm.errors import UserError


def refused(
    match: str, call: Callable[..., Any], /, *args: Any, error: type[Exception] = UserError, **more: Any
) -> None:
    """`call(*args, **more)` raises `error`, and its message has a match."""
    with pytest.raises(error, match=match):
        call(*args, **more)


def told(words: str, call: Callable[..., Any], /, *args: Any, error: type[Exception] = UserError, **more: Any) -> None:
    """The same, and these words stand in its message as they are."""
    refused(re.escape(words), call, *args, error=error, **more)


def failing(number: int, *names: object) -> Callable[..., None]:
    """A call that the system refuses."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), *names)

    return fail
