"""A call that is refused, in one line."""

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
