"""Which tokens attend to which, and dense attention under that. The engine has its own `Attend`, over pages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm.kernels.c import trained
from dlm.kernels.dispatch import rms_norm
from dlm.kernels.paths import path_of
from dlm.models.config import AttentionKind, ModelConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q (b, l, h, e), k (b, l, g, e), v (b, l, g, e)) -> (b, l, h, e); q and k come as projected, not yet rotated.

Packed rows, as the engine has them, come without b and l: (n, h, e)."""

HeadNorms = tuple[Tensor, Tensor, float]
"""Weights of the norms of each query and key head, and their epsilon. An `Attend` whose `takes_norms` is True is given
them after v and computes these norms itself."""

Rope = tuple[Tensor, Tensor]
"""cos and sin of every position, (b, l, 1, r) each."""


@dataclass(frozen=True)
class AttentionSpec:
    """An attention pattern: the same weights serve as bidirectional student, causal teacher or block-causal decoder.

    `two_stream` trains a block-causal network: the canvas is [noisy text | clean text], with the same positions twice,
    and each noisy block sees itself and the clean blocks before it (see dlm.models.streams).
    """

    kind: AttentionKind | Literal["two_stream"] = "bidirectional"
    block_length: int | None = None
    apart: bool = False
    """Whether documents that share a row cannot see each other; a document begins wherever a position is 0."""

    def __post_init__(self) -> None:
        if self.kind in ("block_causal", "two_stream") and (self.block_length or 0) < 1:
            raise ValueError(f"{self.kind} attention needs block_length >= 1, not {self.block_length}")

    @classmethod
    def of(cls, config: ModelConfig) -> "AttentionSpec":
        """The pattern a checkpoint was trained with."""
        return cls(config.attention, config.block_length)

    def allowed(self, queries: Int[Tensor, "*b q"], keys: Int[Tensor, "*b k"]) -> Bool[Tensor, "*b q k"] | None:
        """Which key positions each query position may see; None when all of them."""
        assert self.kind != "two_stream", "where a row stands there does not tell what it sees"
        if self.kind == "bidirectional":
            return None
        if self.kind == "block_causal":
            assert self.block_length is not None
            queries, keys = queries // self.block_length, keys // self.block_length
        return keys.unsqueeze(-2) <= queries.unsqueeze(-1)

    def states(self, hidden: Float[Tensor, "b m d"], shifted: bool) -> Float[Tensor, "b l d"]:
        """For each position the state that predicts its token: its own or, in `shifted` networks, the one before it.

        Of two streams it is the noisy one's; but the state before a block is the clean one's, for what stands there is
        clean by the time the block is decoded. The first position has none before it, and is predicted by its own.
        """
        noisy, clean = hidden.chunk(2, dim=1) if self.kind == "two_stream" else (hidden, hidden)
        if not shifted:
            return noisy
        before = torch.cat((noisy[:, :1], noisy[:, :-1]), dim=1)
        if self.kind == "two_stream" and self.block_length is not None:
            before[:, self.block_length :: self.block_length] = clean[:, self.block_length - 1 : -1 : self.block_length]
        return before


def dense_attend(
    spec: AttentionSpec, positions: Int[Tensor, "b l"], rope: Rope | None, valid: Bool[Tensor, "b l"] | None = None
) -> Attend:
    """Attention over the whole sequence with SDPA (two streams on a GPU: FlexAttention); `valid` is False on padding,
    which nobody sees."""
    causal = spec.kind == "causal" and valid is None and not spec.apart
    allowed = blocks = None
    if spec.kind == "two_stream":
        # Imported here: FlexAttention imports torch._dynamo, which takes a second.
        from dlm.models.streams import block_mask, dense_mask

        assert spec.block_length is not None and not spec.apart
        streams = positions.shape[1] // 2, spec.block_length, positions.device
        if positions.is_cuda and valid is None:
            blocks = block_mask(*streams)
        else:
            allowed = dense_mask(*streams)
    elif not causal:
        allowed = spec.allowed(positions, positions)
    if spec.apart:
        document = (positions == 0).cumsum(-1)
        same = document.unsqueeze(-2) == document.unsqueeze(-1)
        allowed = same if allowed is None else allowed & same
    if valid is not None:
        allowed = valid[:, None, :] if allowed is None else allowed & valid[:, None, :]
    mask = None if allowed is None else allowed[:, None]  # (b, 1, l or 1, l)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        here = None if mask is None else mask.to(q.device)  # layers may lie on several devices
        if rope is not None:
            cos, sin = (table.to(q.device) for table in rope)
            rotated = trained.rotate if trained.takes(q, k, cos, sin) else rotate
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        grouped = q.shape[2] != k.shape[2]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if blocks is not None:
            from dlm.models.streams import flex_attend

            return flex_attend(q, k, v, blocks.to(q.device)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=here, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attend


def fusing(x: Tensor) -> bool:
    """Whether the kernels that do several of a network's operations at once compute on x."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling()) and path_of(x).fuses


def unhooked(module: nn.Module) -> bool:
    """Whether nobody notices that the module's forward is not called."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 and scaled in the input's dtype (as LLaMA, LLaDA and Qwen do)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        if fusing(x):
            return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps)[0].view(x.shape)
        if trained.takes(x, self.weight):
            return trained.rms_norm(x, self.weight, self.eps)
        if x.dtype == torch.float32 and not x.is_cuda and not torch.is_grad_enabled():
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def of_sum(self, x: Float[Tensor, "... d"], found: Float[Tensor, "... d"]) -> tuple[Tensor, Tensor]:
        """The norm of x + found, and x + found: one launch where a kernel computes norms and nobody listens."""
        if not (fusing(x) and unhooked(self)) or x.dtype != found.dtype:
            total = x + found
            return self(total), total
        rows = (-1, x.shape[-1])
        normed, total = rms_norm(found.reshape(rows), self.weight, self.eps, x.reshape(rows))
        return normed.view(x.shape), total.view(x.shape)


def rotate_into(out: Tensor, x: Float[Tensor, "l h e"], cos: Float[Tensor, "l 1 r"], signed_sin: Tensor) -> Tensor:
    """`rotate` written to where the result belongs; the first half of `signed_sin` is negative. Not differentiable."""
    r, turned = cos.shape[-1], out
    if r < x.shape[-1]:
        out[..., r:] = x[..., r:]
        turned, x = out[..., :r], x[..., :r]
    torch.mul(x, cos, out=turned).addcmul_(x.roll(r // 2, -1), signed_sin)
    return out


def rotate(x: Float[Tensor, "b l h e"], cos: Float[Tensor, "b l 1 r"], sin: Float[Tensor, "b l 1 r"]) -> Tensor:
    """Rotary embedding (half-split layout) of the first r channels of each head; r = e unless rotary_dim is set."""
    r = cos.shape[-1]
    turned, rest = x[..., :r], x[..., r:]
    half = torch.cat((-turned[..., r // 2 :], turned[..., : r // 2]), dim=-1)
    turned = (turned * cos + half * sin).to(x.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with optional biases and per-head norms; the `Attend` chooses the keys."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.packed: Tensor | None = None
        """The three projections' weights side by side; see dlm.models.packing."""
        self.packed_bias: Tensor | None = None
        """Their biases."""

    def forward(self, x: Float[Tensor, "*b d"], attend: Attend, output_rows: Tensor | None = None) -> Tensor:
        """With `output_rows`, only these rows of a packed input come out; keys and values are of all."""
        shape = *x.shape[:-1], -1, self.head_dim
        q, k, v = (part.view(shape) for part in self._project(x))
        found = self._attended(attend, q, k, v).flatten(-2)
        return self.o_proj(found if output_rows is None else found.index_select(0, output_rows))

    def _attended(self, attend: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a, b = self.q_norm, self.k_norm
        if a is None or b is None:
            return attend(self.layer, q, k, v)
        plain = fusing(q) and unhooked(a) and unhooked(b) and q.dtype == a.weight.dtype == b.weight.dtype
        if plain and getattr(attend, "takes_norms", False):
            return attend(self.layer, q, k, v, (a.weight, b.weight, a.eps))
        return attend(self.layer, a(q), b(k), v)

    def _project(self, x: Float[Tensor, "*b d"]) -> tuple[Tensor, ...]:
        packed = self.packed
        if packed is not None and not torch.is_grad_enabled() and shares(self.q_proj, packed, self.packed_bias):
            query, key = len(self.q_proj.weight), len(self.k_proj.weight)
            return F.linear(x, packed, self.packed_bias).split((query, key, key), dim=-1)
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def shares(linear: nn.Module, packed: Tensor, packed_bias: Tensor | None = None) -> bool:
    """Whether the layer's weight, and its bias, are still the first parts of packed ones."""
    if type(linear) is not nn.Linear or linear.weight.data_ptr() != packed.data_ptr():
        return False
    if linear.bias is None or packed_bias is None:
        return linear.bias is packed_bias
    return linear.bias.data_ptr() == packed_bias.data_ptr()
