"""Digests of a canvas, and of a whole trace."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from dlm.trace.facts import DIGEST, facts, facts_digest

if TYPE_CHECKING:
    from jaxtyping import Int32
    from numpy import ndarray

    from dlm.trace.trace import Trace


def digest_of(canvas: Int32[ndarray, " l"]) -> bytes:
    """A digest of eight bytes of a canvas."""
    return blake2b(np.ascontiguousarray(canvas, "<i4").tobytes(), digest_size=8).digest()


def digest(trace: Trace) -> bytes:
    """BLAKE2b-128 of a trace's content; the same for every form it is stored in."""
    later, name, own = trace.later, trace.request_id.encode(), facts(trace.own)
    options = [trace.accepted, trace.confidence, trace.topk_tokens, trace.topk_logits]
    options = [option for option in options if option is not None]
    shapes = [(option.dtype.str, option.shape) for option in options] if options else ""
    m, g = len(later.step), len(trace.growth)
    sizes = f"({len(name)}, {len(own)}, {m}, {g}, {len(trace.digests)})"
    head = f"{trace.mask_id} {trace.num_steps} {len(trace.first_step)} {sizes}{shapes}"
    total = blake2b(
        b"".join((head.encode(), name, own, facts_digest(trace.context), trace.digests)), digest_size=DIGEST
    )
    total.update(trace.first_step.data)
    total.update(trace.first_token.data)
    if m:
        for column in (later.step, later.position, later.kind, later.token):
            total.update(column.data)
    if g:
        total.update(trace.growth.data)
    for option in options:
        total.update(option.data)
    return total.digest()
