"""Stores in a forked process: each opens the file anew, and leaves the parent's connection alone."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlm.trace.database import Database
    from dlm.trace.store import TraceStore

STORES: weakref.WeakSet[TraceStore] = weakref.WeakSet()
"""All that are open in this process."""
INHERITED: list[Database] = []
"""The parent's: neither used nor closed, only kept from being collected."""


def _after_fork() -> None:
    for store in STORES:
        store._forget()


os.register_at_fork(after_in_child=_after_fork)
