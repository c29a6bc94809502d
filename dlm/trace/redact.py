"""Traces without their prompts."""

from dataclasses import replace
from typing import Literal

import numpy as np

from dlm.errors import UserError
from dlm.trace.events import GIVEN, REDACTED, Later
from dlm.trace.facts import proof
from dlm.trace.trace import Trace

Prompts = Literal["plain", "hash", "omit"]
TELLING = ("prompt", "text", "messages")
"""Facts that may hold the prompt's words."""


def redacted(trace: Trace, how: Prompts) -> Trace:
    """The trace with its given tokens taken out; "hash" leaves their BLAKE2b-128, by which equal prompts are known.

    A short prompt can be guessed from its hash. What later steps did to given positions goes too.
    """
    if how not in ("plain", "hash", "omit"):
        raise UserError(f'prompts = {how!r}: expected "plain", "hash" or "omit"')
    given = trace.first_step == GIVEN
    if how == "plain" or (trace.first_token[given] == REDACTED).all():
        return trace
    own = {key: value for key, value in trace.own.items() if key not in TELLING}
    own["redacted"] = how
    if how == "hash":
        prompt = np.ascontiguousarray(trace.first_token[given], "<i4").tobytes()
        own["prompt_digest"] = proof(prompt).hex()
    context = {key: value for key, value in trace.context.items() if key not in TELLING}
    kept = ~given[trace.later.position]
    rows = np.concatenate((np.ones(trace.length, bool), kept))
    return replace(
        trace,
        first_token=np.where(given, np.int32(REDACTED), trace.first_token),
        later=Later(**{name: column[kept] for name, column in vars(trace.later).items()}),
        confidence=None if trace.confidence is None else trace.confidence[rows],
        topk_tokens=None if trace.topk_tokens is None else trace.topk_tokens[rows],
        topk_logits=None if trace.topk_logits is None else trace.topk_logits[rows],
        digests=b"",  # of whole canvases: a guessed prompt could be checked against them
        own=own,
        context=context,
    )
