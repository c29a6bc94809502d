"""What `confidence` returns for each row."""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Picked:
    """A token for each of n rows and how sure the row is of it. Where `finite` is False the rest means nothing."""

    token: Int[Tensor, " n"]
    """int64: the chosen token."""
    p: Float[Tensor, " n"]
    """p of the chosen token: softmax after temperature, no noise."""
    first: Float[Tensor, " n"]
    """The highest p of a candidate: any token but the mask."""
    first_token: Int[Tensor, " n"]
    """int64: that candidate; the lower id among equals."""
    second: Float[Tensor, " n"]
    """p of the runner-up; 0 where there is no other candidate."""
    entropy: Float[Tensor, " n"]
    """Of the row's p, in nats."""
    finite: Bool[Tensor, " n"]
    """False for a row with NaN, +inf, or no finite candidate."""
