"""The public kernels, each computed by the path that `dlm.kernels.paths` finds for its tensors."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm.kernels.paths import PATHS, path_of
from dlm.kernels.picked import Picked
from dlm.kernels.routing import Routing
from dlm.kernels.spans import Spans


def _run(name: str, x: Tensor, *arguments: Any) -> Any:
    path = path_of(x)
    if name not in path.modules:
        path = PATHS["torch"]
    with path.launching(x):
        return path.kernel(name)(x, *arguments)


def paged_attention(
    q: Float[Tensor, "n h e"],
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    spans: Spans,
    block_length: int | None,
    scale: float | None = None,
) -> Float[Tensor, "n h e"]:
    """Attention of n query rows to the pages of their sequences, spans of all lengths in one launch.

    p pages of s positions, g key heads, each shared by h / g query heads; keys are stored rotated. Key j is seen by a
    row at position x if j < visible and (`block_length` is None or j // block_length <= x // block_length); 1 is causal
    attention. A row that sees nothing gives zeros. What lies in slots that no row of its span sees, NaN included, has no
    effect. `scale` is 1/sqrt(e) unless given. A row's result does not depend on the rest of the launch, bit for bit.
    """
    return _run("paged_attention", q, k_pages, v_pages, spans, block_length, scale)


def rope_write(
    q: Float[Tensor, "n h e"],
    k: Float[Tensor, "n g e"],
    v: Float[Tensor, "n g e"],
    cos: Float[Tensor, "n r"] | None,
    sin: Float[Tensor, "n r"] | None,
    k_pages: Float[Tensor, "p s g e"],
    v_pages: Float[Tensor, "p s g e"],
    slots: Int[Tensor, " n"],
    q_weight: Float[Tensor, " e"] | None = None,
    k_weight: Float[Tensor, " e"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "n h e"]:
    """Rotate q and k by their rows' cos and sin (both None: not at all), write k and v to pages, return q.

    The first r channels of each head are turned, half-split. With `q_weight` and `k_weight`, in the dtype of q, each head
    is first normed as by `rms_norm`. `slots` are page * s + offset; -1 writes nothing. The pools must be contiguous.
    """
    return _run("rope_write", q, k, v, cos, sin, k_pages, v_pages, slots, q_weight, k_weight, eps)


def rms_norm(
    x: Float[Tensor, "n d"], weight: Float[Tensor, " d"], eps: float, residual: Float[Tensor, "n d"] | None = None
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """(norm of x + residual, x + residual): the sum in x's dtype, the norm in fp32, cast back, then times weight."""
    return _run("rms_norm", x, weight, eps, residual)


def gated(gate_up: Float[Tensor, "n two_f"]) -> Float[Tensor, "n f"]:
    """silu of a row's first half times its second half; silu and product are each rounded to the dtype."""
    return _run("gated", gate_up)


def gated_product(x: Float[Tensor, "n d"], weight: Float[Tensor, "two_f d"]) -> Float[Tensor, "n f"]:
    """`gated` of x weight^T. In Triton one launch, and a row's result does not depend on the others: for few rows, since
    each 64 of them read the weight again."""
    return _run("gated_product", x, weight)


def route(
    x: Float[Tensor, "n d"], weight: Float[Tensor, "e d"], bias: Float[Tensor, " e"] | None, routing: Routing
) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
    """Each row's experts, the best first, and their weights: scores in fp32; bias and groups take part in the choice only."""
    return _run("route", x, weight, bias, routing)


def mixture(
    x: Float[Tensor, "n d"],
    chosen: Int[Tensor, "n k"],
    weights: Float[Tensor, "n k"],
    gate_up: Float[Tensor, "e two_f d"],
    down: Float[Tensor, "e d f"],
    shared: Float[Tensor, "n d"] | None = None,
    first: int = 0,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "n d"]:
    """Each row through its experts' SwiGLUs, weighted and summed in fp32, cast to x's dtype (or `dtype`), plus `shared`.

    The e experts are those from `first` on; others, which other processes have, add nothing.
    """
    return _run("mixture", x, chosen, weights, gate_up, down, shared, first, dtype)


def confidence(
    logits: Float[Tensor, "n v"],
    *,
    mask_id: int | None,
    keep_mask: bool = True,
    temperature: float = 0.0,
    seed: Int[Tensor, " n"] | None = None,
    sample: Int[Tensor, " n"] | None = None,
    step: Int[Tensor, " n"] | None = None,
    position: Int[Tensor, " n"] | None = None,
) -> Picked:
    """A token for each row and how sure the row is of it, in one pass over the vocabulary.

    Never the mask: the argmax at temperature 0 (ties to the lower id), else a draw whose noise has the row's address
    (seed, sample, step, position). `keep_mask` leaves the mask token in the softmax's denominator and entropy. At
    temperature 0 p is the plain softmax.
    """
    path = path_of(logits)
    if not (path.draws or temperature == 0):
        path = PATHS["torch"]
    address = {"seed": seed, "sample": sample, "step": step, "position": position}
    with path.launching(logits):
        return path.kernel("confidence")(
            logits, mask_id=mask_id, keep_mask=keep_mask, temperature=temperature, **address
        )


def one_pass(logits: Tensor, temperature: float) -> bool:
    """Whether `confidence` reads these logits in one pass; where not, choosing step by step costs as much."""
    path = path_of(logits)
    return path.draws if temperature > 0 else path.confident
