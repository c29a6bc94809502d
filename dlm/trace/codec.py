"""Encodes a trace as a record of bytes and decodes it; every read checks the digest, and nothing read is executed.

A record is: format (one byte), BLAKE2b-128 of the content in canonical form, one zstd frame. The frame holds counts as
varints, the request's own facts as JSON, and columns; bit-packed ones where that is smaller, else byte planes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from threading import get_ident
from typing import Any

import numpy as np
import zstandard

from dlm.errors import UserError
from dlm.trace.columns import PACKED_LIMIT, Broken, Reader, Writer
from dlm.trace.events import GIVEN, NEVER, REDACTED, Later
from dlm.trace.facts import DIGEST, Facts, digest, facts
from dlm.trace.trace import Trace

FORMAT = 1
HEAD = 1 + DIGEST
FRAME_HEADER = 18  # bytes of zstd's, at most
MAX_CONTENT = 2**23  # most bytes of a decompressed record; checked before anything is allocated
MAX_LENGTH, MAX_STEPS, MAX_LATER, MAX_TOPK = 2**18, 2**20, 2**20, 2**21
MAX_TOKEN = 2**30
LEVEL = 9
# Bits of a record's first number: how columns are written, and what it has beside steps and tokens.
WHOLE, PLANES, HOLES, MASKS, LATER, CONFIDENCE, GROWTH, TOPK, DIGESTS, ACCEPTED, REDACT = (1 << i for i in range(11))
FORMS = (WHOLE | PLANES, WHOLE, 0)
SHORT = 256  # up to so many positions, byte planes never win: they are not tried
PACKED_COST = 1.1  # bit-packed tokens take longer to read, so they must save a tenth


class CorruptTrace(UserError):
    """A record that is not what was written."""


def encode(trace: Trace, dictionary: zstandard.ZstdCompressionDict | None = None, level: int = LEVEL) -> bytes:
    """The record of a trace. It does not hold the context, but its digest covers the context too."""
    _refuse_what_does_not_fit(trace)
    trace = replace(trace, own=Facts.of(trace.own), context=Facts.of(trace.context))
    compressor = _compressor(get_ident(), level, dictionary)
    size = max(trace.length, len(trace.later), 0 if trace.topk_tokens is None else trace.topk_tokens.size)
    forms = [WHOLE] if size <= PACKED_LIMIT else []
    if size > SHORT:
        forms.append(WHOLE | PLANES)
    if size <= PACKED_LIMIT and dictionary is None:
        forms.append(0)
    contents = {form: content(trace, form) for form in forms}
    frames = {form: compressor.compress(data) for form, data in contents.items()}
    best = min(frames, key=lambda form: len(frames[form]) * (1 if form else PACKED_COST))
    proof = digest(trace)
    # Refuse an inconsistent trace now, not when it is read.
    if digest(_parse(contents[best], trace.request_id, trace.context)) != proof:
        raise UserError(f"trace {trace.request_id[:60]!r}: it contradicts itself, and would not come back as it is")
    return bytes((FORMAT,)) + proof + frames[best]


def decode(
    record: bytes,
    request_id: str,
    context: Mapping[str, Any] | None = None,
    dictionary: Callable[[int], zstandard.ZstdCompressionDict | None] | None = None,
) -> Trace:
    """The trace of a record that was stored under this id with this context. Raises CorruptTrace if the digest differs.
    `dictionary(number)` returns the dictionary that a record was written with, or raises LookupError.
    """
    try:
        trace = _parse(_unfold(record, dictionary), request_id, {} if context is None else context)
        if digest(trace) != record[1:HEAD]:
            raise Broken("its content is not what was written")
    except (Broken, ValueError, LookupError, zstandard.ZstdError) as error:
        raise CorruptTrace(f"trace {request_id[:60]!r}: its record is damaged: {error}") from None
    return trace


def dictionary_of(record: bytes) -> int:
    """The number of the dictionary that a record's first bytes name; 0 for none, and for bytes that are no record."""
    try:
        return zstandard.get_frame_parameters(record[HEAD:]).dict_id
    except zstandard.ZstdError:
        return 0


def content(trace: Trace, form: int) -> bytes:
    """What the frame holds, in one of FORMS."""
    given, never = trace.first_step == GIVEN, trace.first_step == NEVER
    prefix, later = trace.prompt_length, trace.later
    parts = {
        HOLES: bool(given[prefix:].any()),
        MASKS: bool(never.any()),
        LATER: len(later) > 0,
        CONFIDENCE: trace.confidence is not None,
        GROWTH: len(trace.growth) > 0,
        TOPK: trace.topk_tokens is not None,
        DIGESTS: trace.digests != b"",
        ACCEPTED: trace.accepted is not None,
        REDACT: bool((trace.first_token == REDACTED).any()),
    }
    out = Writer(bool(form & WHOLE), bool(form & PLANES))
    out.number(form | sum(part for part, present in parts.items() if present))
    for number in (trace.num_steps, trace.length, prefix):
        out.number(number)
    out.signed(trace.mask_id)
    out.bytes(facts(trace.own))
    stored = trace.first_token
    if parts[MASKS] or parts[REDACT]:
        stored = stored[~never & ~given if parts[REDACT] else ~never]
        out.number(len(stored))
    out.tokens(stored)
    out.column((np.where(never, trace.num_steps, trace.first_step) + parts[HOLES])[prefix:])
    if len(later):
        out.number(len(later))
        for column in (later.step, later.position, later.kind):
            out.column(column)
        out.tokens(later.token)
    if len(trace.growth):
        out.number(len(trace.growth))
        out.column(trace.growth[:, 0] + 1)
        out.column(trace.growth[:, 1])
    if trace.accepted is not None:
        out.column(trace.accepted.astype(np.int32))
    if trace.confidence is not None:
        out.halves(trace.confidence)
    if trace.topk_tokens is not None and trace.topk_logits is not None:
        out.number(trace.topk_tokens.shape[1])
        out.tokens(trace.topk_tokens.ravel())
        out.halves(trace.topk_logits.ravel())
    if trace.digests:
        out.bytes(trace.digests)
    return b"".join(out.parts)


def _parse(data: bytes, request_id: str, context: Mapping[str, Any]) -> Trace:
    read = Reader(data)
    parts = read.number(2 * REDACT - 1)
    read.whole, read.planes = bool(parts & WHOLE), bool(parts & PLANES)
    num_steps, length = read.number(MAX_STEPS), read.number(MAX_LENGTH)
    prefix, mask_id = read.number(length), read.signed()
    own = Facts(read.bytes())
    stored = read.number(length) if parts & (MASKS | REDACT) else length
    first_token = read.tokens(stored)
    first_step = read.column(length - prefix)
    if parts & HOLES:
        first_step -= 1
    if prefix:
        first_step = np.concatenate((np.full(prefix, GIVEN, np.int32), first_step))
    if parts & (MASKS | REDACT):
        never, given = first_step == num_steps, first_step == GIVEN
        first_step[never] = NEVER
        tokens = np.where(given, np.int32(REDACTED), np.int32(mask_id))
        tokens[~never & ~given if parts & REDACT else ~never] = first_token
        first_token = tokens
    beside: dict[str, Any] = {}
    if parts & LATER:
        m = read.number(MAX_LATER)
        step, position, kind = (read.column(m) for _ in range(3))
        if m and (int(position.max()) >= length or int(step.max()) >= num_steps):
            raise Broken("an event outside the canvas")
        beside["later"] = Later(step=step, position=position, kind=kind, token=read.tokens(m))
    rows = length + len(beside.get("later", ()))
    if parts & GROWTH:
        g = read.number(MAX_LATER)
        beside["growth"] = np.stack((read.column(g) - 1, read.column(g)), axis=1)
    if parts & ACCEPTED:
        beside["accepted"] = read.column(length).astype(bool)
    if parts & CONFIDENCE:
        beside["confidence"] = read.halves(rows)
    if parts & TOPK:
        k = read.number(MAX_TOPK // max(rows, 1))
        beside["topk_tokens"] = read.tokens(rows * k).reshape(rows, k)
        beside["topk_logits"] = read.halves(rows * k).reshape(rows, k)
    if parts & DIGESTS:
        beside["digests"] = read.bytes()
    read.end()
    steps = {"num_steps": num_steps, "first_step": first_step, "first_token": first_token}
    return Trace(request_id=request_id, mask_id=mask_id, own=own, context=context, **steps, **beside)


def _unfold(record: bytes, dictionary: Callable[[int], zstandard.ZstdCompressionDict | None] | None) -> bytes:
    """The decompressed frame; one that declares too large a size is refused before it is read."""
    if len(record) <= HEAD or record[0] != FORMAT:
        raise Broken(f"format {record[0] if record else 'none'}, this version reads {FORMAT}")
    frame = record[HEAD:]
    head = zstandard.get_frame_parameters(frame)
    if head.content_size > MAX_CONTENT:  # also where no size is declared
        raise Broken(f"it declares {head.content_size} bytes, over {MAX_CONTENT}")
    if head.dict_id and dictionary is None:
        raise Broken(f"it needs dictionary {head.dict_id}")
    prefix = dictionary(head.dict_id) if head.dict_id and dictionary is not None else None
    return _decompressor(get_ident(), prefix).decompress(frame, allow_extra_data=False)


def _refuse_what_does_not_fit(trace: Trace) -> None:
    rows = trace.length + len(trace.later)
    limits = {
        "positions": (trace.length, MAX_LENGTH),
        "steps": (trace.num_steps, MAX_STEPS),
        "later events": (len(trace.later), MAX_LATER),
        "top-k tokens": (0 if trace.topk_tokens is None else trace.topk_tokens.shape[1], MAX_TOPK // max(rows, 1)),
    }
    for what, (count, most) in limits.items():
        if count > most:
            raise UserError(f"trace {trace.request_id[:60]!r}: {count} {what} are more than a record holds ({most})")
    for tokens in (trace.first_token, trace.later.token):
        if len(tokens) and not -MAX_TOKEN <= int(tokens.min()) <= int(tokens.max()) <= MAX_TOKEN:
            raise UserError(f"trace {trace.request_id[:60]!r}: a token id beyond {MAX_TOKEN}")


# zstandard's tools are not for two threads at once.
@lru_cache(maxsize=32)
def _compressor(thread: int, level: int, dictionary: zstandard.ZstdCompressionDict | None) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, dict_data=dictionary, write_checksum=False)


@lru_cache(maxsize=32)
def _decompressor(thread: int, dictionary: zstandard.ZstdCompressionDict | None) -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(dict_data=dictionary)
