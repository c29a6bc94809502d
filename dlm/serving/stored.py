"""A trace of the store for the key that asked for it."""

from typing import TYPE_CHECKING

from dlm.serving.refusal import Refusal

if TYPE_CHECKING:
    from dlm.trace.store import TraceStore
    from dlm.trace.trace import Trace


def stored(store: "TraceStore", name: str, owner: str | None) -> "Trace":
    """The trace of that name. Raises Refusal where there is none, or none that this owner may read: both look the same."""
    missing = Refusal(404, f"no trace {name[:100]!r} that you may read")
    try:
        trace = store[name]
    except (KeyError, ValueError):
        raise missing from None
    if trace.meta.get("owner") != owner:
        raise missing
    return trace
