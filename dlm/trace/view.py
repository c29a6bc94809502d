"""Shows a trace, or two side by side, as one self-contained HTML page. view.html is its template."""

from __future__ import annotations

import html
import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from dlm.errors import UserError
from dlm.trace.events import GIVEN, NEVER, NO_MASK
from dlm.trace.pieces import MASK_SIGN, Pieces
from dlm.trace.times import moment

if TYPE_CHECKING:
    from pathlib import Path

    from dlm.trace.trace import Trace

MOST = 2**18  # tokens and events of a page
RUNNERS = 4  # of the likeliest tokens, shown on hover


def page(trace: Trace, other: Trace | None = None) -> str:
    """The HTML of a trace; with another, both side by side and their differences marked."""
    traces = [trace] if other is None else [trace, other]
    for each in traces:
        if each.length + len(each.later) > MOST:
            raise UserError(f"trace {each.request_id[:60]!r}: {each.length} tokens are too many for a page ({MOST})")
    title = " / ".join(each.request_id[:80] for each in traces)
    # No `<` may reach a script element from data, nor a line separator that old parsers end a line at.
    data = json.dumps([described(each) for each in traces], ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")
    return _template().replace("{{title}}", html.escape(title)).replace("{{data}}", data)


def write(path: Path, trace: Trace, other: Trace | None = None) -> None:
    try:
        path.write_text(page(trace, other), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None


def frame(trace: Trace) -> str:
    """The page inside a frame, for notebooks."""
    return (
        f'<iframe srcdoc="{html.escape(page(trace))}" title="trace" loading="lazy" '
        'style="width:100%;height:640px;border:0;border-radius:12px"></iframe>'
    )


def described(trace: Trace) -> dict[str, Any]:
    """The trace as JSON values for the page."""
    steps = np.where(trace.first_step == NEVER, trace.num_steps + 1, trace.first_step)
    used = set(trace.first_token.tolist()) | set(trace.later.token.tolist())
    runners = None
    if trace.topk_tokens is not None and trace.topk_logits is not None:
        best = trace.topk_tokens[:, :RUNNERS]
        used |= set(best.ravel().tolist())
        runners = [
            [[token, _number(logit)] for token, logit in zip(tokens, logits, strict=True) if token >= 0]
            for tokens, logits in zip(best.tolist(), trace.topk_logits[:, :RUNNERS].tolist(), strict=True)
        ]
    return {
        "id": trace.request_id,
        "steps": trace.num_steps,
        "mask": trace.mask_id,
        "given": GIVEN,
        "never": trace.num_steps + 1,
        "at": steps.tolist(),
        "token": trace.first_token.tolist(),
        "later": np.stack(list(trace.later), axis=1).tolist(),
        "growth": trace.growth.tolist(),
        "confidence": None if trace.confidence is None else [_number(c) for c in trace.confidence.tolist()],
        "runners": runners,
        "accepted": None if trace.accepted is None else trace.accepted.astype(int).tolist(),
        "block": _block(trace),
        "start": _start(trace),
        "prompt": trace.prompt_length,
        "text": trace.pieces is not None,
        "pieces": {str(token): _piece(trace.pieces, token, trace.mask_id) for token in sorted(used)},
        "meta": {key: _words(value) for key, value in trace.meta.items()}
        | ({"stored": moment(trace.at)} if trace.at else {}),
    }


def _piece(pieces: Pieces | None, token: int, mask_id: int) -> str:
    if token in (mask_id, NO_MASK):
        return MASK_SIGN
    if pieces is None:
        return str(token)
    try:
        return pieces.text([token]) if token < 0 else pieces[token].decode()
    except UnicodeDecodeError:  # part of a character
        return f"‹{pieces[token].hex()}›"


def _block(trace: Trace) -> int:
    """Length of the diffusion blocks, where the facts say."""
    sampler = trace.meta.get("sampler")
    block = sampler.get("block_length") if isinstance(sampler, dict) else trace.meta.get("block_length")
    return block if isinstance(block, int) and block > 0 else 0


def _start(trace: Trace) -> int:
    """Where the first block begins: at the prompt's end, or where the facts say (0 for blocks at fixed places)."""
    start = trace.meta.get("block_start")
    return start if isinstance(start, int) else trace.prompt_length


def _number(value: float) -> float | None:
    return round(value, 4) if abs(value) < 1e9 else None  # neither NaN nor infinite


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@cache
def _template() -> str:
    return files("dlm.trace").joinpath("view.html").read_text("utf-8")
