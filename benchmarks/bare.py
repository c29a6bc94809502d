"""Nothing but the matrix products and the attention of a network's forwards: what a decoder cannot do without."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm.kernels.c.products import Product, linear, panels
from dlm.models import LM

Multiply = Callable[[Tensor, Tensor], Tensor]


def by_ours() -> Multiply:
    """The C kernels' matrix product, with copies of the weights as it reads them fastest."""

    @cache
    def product_of(weight: Tensor) -> tuple[Product, Tensor, Tensor]:
        rows = weight.detach().contiguous()
        copied = panels(rows)
        return Product(rows.data_ptr(), copied.data_ptr(), None, *rows.shape, rows.stride(0)), rows, copied

    return lambda x, weight: linear(product_of(weight)[0], x)


@cache
def _as_torch_likes(weight: Tensor) -> Tensor:
    """On a CPU input-major; made once."""
    return weight if weight.is_cuda else weight.detach().t().contiguous().t()


def products(lm: LM, rows: int, forwards: int, decided: int | None = None, multiply: Multiply = F.linear) -> None:
    """Nothing but the matrix products of forwards of so many rows.

    Half the `decided` ones are masks, as over a block: the last layer's products after its attention, and the logits, are
    of these alone.
    """
    masks = max(1, (decided or rows) // 2)
    asked_for: list[tuple[torch.Tensor, int]] = []
    for number, layer in enumerate(lm.network.layers, start=1):
        attn, mlp = layer.attn, layer.mlp
        apart = [attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]
        packed = apart if attn.packed is None else [attn.packed]
        after = [attn.o_proj.weight, mlp.down_proj.weight]
        after += [mlp.packed] if mlp.packed is not None else [mlp.gate_proj.weight, mlp.up_proj.weight]
        asked_for += [(weight, rows) for weight in packed]
        asked_for += [(weight, masks if number == len(lm.network.layers) else rows) for weight in after]
    head = lm.network.lm_head
    asked_for.append((lm.network.embed.weight if head is None else head.weight, masks))
    inputs = {(n, weight.shape[1]): weight.new_ones(n, weight.shape[1]) for weight, n in asked_for}
    if multiply is F.linear:
        asked_for = [(_as_torch_likes(weight), n) for weight, n in asked_for]
    with torch.inference_mode():
        for _ in range(forwards):
            for weight, n in asked_for:
                multiply(inputs[n, weight.shape[1]], weight)


def attention(lm: LM, rows: int, context: int, forwards: int) -> None:
    """Nothing but the attention of forwards of so many rows over the context: torch's own kernel on whole tensors."""
    c = lm.config
    query = torch.ones(1, c.num_attention_heads, rows, c.head_dim, device=lm.device, dtype=lm.dtype)
    key = torch.ones(1, c.num_key_value_heads, context, c.head_dim, device=lm.device, dtype=lm.dtype)
    with torch.inference_mode():
        for _ in range(forwards * c.num_hidden_layers):
            F.scaled_dot_product_attention(query, key, key, enable_gqa=True)


def dual(lm: LM, context: int, block: int, blocks: int, steps: int) -> int:
    """The products and the attention of all forwards with a dual cache: a full one a block, then the block's rows.

    Returns how many forwards that are.
    """
    for _ in range(blocks):
        products(lm, context, 1, decided=block)
        attention(lm, context, context, 1)
        products(lm, block, steps // blocks - 1)
        attention(lm, block, context, steps // blocks - 1)
    return steps
