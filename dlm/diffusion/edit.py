"""Changes of committed tokens: replaced by others, or masked again."""

from jaxtyping import Bool, Int
from torch import Tensor

from dlm.diffusion.choose import Signals

MAX_REMASKS = 1
"""Times one position may return to the mask: what bounds the number of steps."""


def edits(
    signals: Signals, current: Int[Tensor, " n"], committed: Bool[Tensor, " n"], threshold: float
) -> tuple[Bool[Tensor, " n"], Int[Tensor, " n"]]:
    """The committed tokens to replace, and their replacements: the most probable token, if it is another one and p > threshold.

    Joint threshold decoding of LLaDA2.1.
    """
    p, token = signals.top[0][:, 0], signals.top[1][:, 0]
    return committed & (token != current) & (p > threshold), token


def remasks(
    signals: Signals,
    current: Int[Tensor, " n"],
    committed: Bool[Tensor, " n"],
    times: Int[Tensor, " n"],
    threshold: float,
    limit: int = MAX_REMASKS,
) -> Bool[Tensor, " n"]:
    """Which committed tokens return to the mask: p of the token < threshold, and fewer than `limit` returns before."""
    return committed & (signals.of(current) < threshold) & (times < limit)
