"""All layers of a plain network in one call of C: the engine's forward on the path "c"."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm.inference.layout import Layout
from dlm.kernels.c import products, structs
from dlm.kernels.c.structs import Network, Product, Run
from dlm.kernels.int8 import int16_weight
from dlm.kernels.paths import UNITS
from dlm.kernels.threads import threads_now
from dlm.models.attention import Attention, RMSNorm
from dlm.models.device import free_memory
from dlm.models.int8 import Int8Linear
from dlm.models.transformer import MLP, Layer, Transformer

SHARE_OF_COPIES = 0.1
"""Of the free memory, what weights in the products' own layout may take."""


class FrozenLayers:
    """A network's weights as C reads them. Later changes are not seen; replaced tensors stay alive with it.

    `shared` are those of a network with the same head.
    """

    def __init__(
        self,
        network: Transformer,
        linears: list[nn.Linear],
        norms: list[RMSNorm | None],
        unit: str | None = None,
        shared: "FrozenLayers | None" = None,
    ) -> None:
        dtype = network.embed.weight.dtype
        self.kind = UNITS[unit] if unit is not None and dtype == torch.bfloat16 else products.fastest(dtype)
        head: Any = network.embed if network.lm_head is None else network.lm_head
        copied = [x.weight.numel() for x in (head, *linears) if type(x) is not Int8Linear]
        size = dtype.itemsize * sum(copied)
        self.copies = size <= SHARE_OF_COPIES * free_memory(torch.device("cpu"))
        """Whether products read copies in the layout that is fastest: twice the speed at 8 rows."""
        self.kept: list[Tensor] = []
        """What the structs point to."""
        self.table, self.norm = self._keep(network.embed.weight), self._keep(network.norm.weight.float())
        self.layers = (structs.Layer * len(network.layers))()
        for number, layer in enumerate(self.layers):
            own = linears[7 * number : 7 * number + 7]
            layer.qkv[:] = self._side_by_side(own[:3])
            layer.o, layer.gate, layer.up, layer.down = map(self._product_of, own[3:])
            addresses = [
                None if norm is None else self._keep(norm.weight.float()).data_ptr()
                for norm in norms[4 * number : 4 * number + 4]
            ]
            layer.attn_norm, layer.q_norm, layer.k_norm, layer.mlp_norm = addresses
        self.head = self._product_of(head) if shared is None else shared.head
        self.shared = shared

    def _keep(self, x: Tensor) -> Tensor:
        self.kept.append(x.detach())
        return self.kept[-1]

    def _side_by_side(self, linears: list[nn.Linear]) -> list[Product]:
        """One product of all, and nothing after it, if their weights are parts of one; else one of each."""
        if any(type(linear) is Int8Linear for linear in linears):
            return [self._product_of(each) for each in linears]
        weights, first = [linear.weight for linear in linears], linears[0].weight
        end, ld = first.data_ptr(), first.stride(0)
        for linear in linears:
            if linear.bias is not None or linear.weight.data_ptr() != end or linear.weight.stride(0) != ld:
                return [self._product(each.weight, each.bias) for each in linears]
            end += first.element_size() * ld * len(linear.weight)
        whole = first.detach().as_strided((sum(len(w) for w in weights), first.shape[1]), (ld, 1))
        return [self._product(whole, None), *(Product() for _ in linears[1:])]

    def _product_of(self, linear: Any) -> Product:
        bias = getattr(linear, "bias", None)
        if type(linear) is not Int8Linear:
            return self._product(linear.weight, bias)
        weight = linear.int8
        self.kept += [weight.panels, scales := weight.scales.float()]
        bias = None if bias is None else self._keep(bias.float())
        return products.whole_product(replace(weight, scales=scales), bias)

    def _product(self, w: Tensor, bias: Tensor | None) -> Product:
        if self.kind == "int16-dots":
            weight = int16_weight(w.detach(), products.panel_width())
            self.kept += [weight.panels, weight.scales]
            return products.whole_product(weight, None if bias is None else self._keep(bias.float()))
        kind = "bf16-dots" if self.kind == "bf16-tiles" and w.shape[1] % TILE else self.kind
        words = products.words(w.detach())
        panels = self._keep(products.panels(words)) if self.copies else None
        parts = self._keep(words), panels, None if bias is None else self._keep(bias.float())
        addresses = (None if x is None else x.data_ptr() for x in parts)
        return Product(*addresses, *w.shape, words.stride(0), products.KINDS.index(kind))


TILE = 32
"""Inputs that AMX multiplies at a time."""
_FROZEN: WeakKeyDictionary[Transformer, tuple[Any, FrozenLayers]] = WeakKeyDictionary()


def frozen_layers(network: Transformer, state: Any, unit: str | None = None) -> FrozenLayers | None:
    """The network's weights as C reads them; None where C does not compute what its modules do.

    `unit` is how bfloat16 is multiplied: see `dlm.kernels.paths`.

    Engines of one network share them as long as `state` (see `weights_state`) is the same.
    """
    parts = _plain(network)
    if parts is None:
        _FROZEN.pop(network, None)
        return None
    known, key = _FROZEN.get(network), (state, unit)
    if known is None or known[0] != key:
        _FROZEN.pop(network, None)  # before the new copies are made
        _FROZEN[network] = known = key, FrozenLayers(network, *parts, unit)
    return known[1]


def freeze(network: Transformer, shared: FrozenLayers | None) -> FrozenLayers | None:
    """The weights of a network, with another one's head if any, as they are now; None where C does not compute what it
    does."""
    parts = _plain(network)
    return None if parts is None else FrozenLayers(network, *parts, shared=shared)


def forget(network: Transformer) -> None:
    """Read the weights again at the next use."""
    _FROZEN.pop(network, None)


def _plain(network: Transformer) -> tuple[list[nn.Linear], list[RMSNorm | None]] | None:
    """Seven linear layers and four norms of each layer; None where a module is of another kind or has hooks."""
    if type(network) is not Transformer or network.group is not None:
        return None
    linears: list[Any] = []
    norms: list[Any] = []
    parents: list[nn.Module] = [network]
    for layer in network.layers:
        attn, mlp = layer.attn, layer.mlp
        if type(layer) is not Layer or type(attn) is not Attention or type(mlp) is not MLP:
            return None
        parents += [layer, attn, mlp]
        linears += [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms += [layer.attn_norm, attn.q_norm, attn.k_norm, layer.mlp_norm]
    ends = [(network.embed, nn.Embedding), (network.norm, RMSNorm)]
    ends += [] if network.lm_head is None else [(network.lm_head, nn.Linear)]
    kinds = [*((x, nn.Linear) for x in linears), *((x, RMSNorm) for x in norms if x is not None), *ends]
    if any(type(x) is not kind and not (kind is nn.Linear and type(x) is Int8Linear) for x, kind in kinds):
        return None
    modules = [*parents, *(x for x, _ in kinds)]
    weights = [w for x, _ in kinds for w in _read(x) if w is not None]
    dtype = network.embed.weight.dtype
    if any(x._forward_hooks or x._forward_pre_hooks for x in modules) or not all(_readable(w, dtype) for w in weights):
        return None
    return linears, norms


def _read(module: nn.Module) -> Iterable[Tensor | None]:
    """What must have the network's dtype."""
    return (module.bias,) if type(module) is Int8Linear else module._parameters.values()


def _readable(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether C reads it: rows of whole 32-bit words."""
    if x.dtype != dtype or not x.is_cpu or type(x.data) is not Tensor or x.stride(-1) != 1:
        return False
    if dtype == torch.bfloat16:
        return x.ndim == 1 or (x.shape[1] % 2 == 0 and x.stride(0) % 2 == 0 and x.data_ptr() % 4 == 0)
    return dtype == torch.float32


class FusedLayers:
    """One engine's calls of C: the frozen weights, and memory to work in."""

    def __init__(self, network: Transformer, frozen: FrozenLayers, keep_tokens: bool = True) -> None:
        """`keep_tokens`: keep the first layer's projections of tokens that were met."""
        c = network.config
        heads = c.num_attention_heads, network.kv_heads, c.head_dim
        rotated = 0 if network.rope is None else 2 * network.rope[0].shape[0]
        self.network, self.frozen = network, frozen
        half = network.embed.weight.dtype == torch.bfloat16
        sizes = len(network.layers), c.hidden_size, *heads, c.intermediate_size, rotated
        self.shape = Network(*sizes, c.rms_norm_eps, 1, half)
        self.room = torch.empty(0)
        self.projected: tuple[Tensor, ...] = ()
        """The first layer's projections of tokens, and of which: made as they are met, where memory is plenty."""
        tokens, width = network.embed.weight.shape[0], (heads[0] + 2 * heads[1]) * heads[2]
        if (
            keep_tokens
            and network.positions is None
            and 4 * tokens * width <= SHARE_OF_COPIES * free_memory(torch.device("cpu"))
        ):
            self.projected = torch.empty(tokens, width), torch.zeros(tokens, dtype=torch.uint8)
        self.last: tuple[Layout, Run, list[Tensor]] | None = None
        self.taps: Tensor = torch.empty(0)
        """Of the last call, (n, m, d): the outputs of the tapped layers of all rows."""

    def __call__(
        self, layout: Layout, ids: Int[Tensor, " n"], output_rows: Int[Tensor, " w"], tapped: tuple[int, ...] = ()
    ) -> Float[Tensor, "w d"]:
        """Final hidden states of the `output_rows`, (w,) in ascending order."""
        network, table = self.network, self.frozen.table
        self.shape.threads = threads_now()
        room = self._room_of(products.layers_room(self.shape, layout.rows, len(layout.spans)))
        if self.last is None or self.last[0] is not layout:
            self.last = layout, *_run(layout, room, self.projected)
        if network.positions is not None:
            table, ids = network.embedded(ids, layout.positions).contiguous(), torch.arange(layout.rows)
        out = torch.empty(output_rows.shape[0], network.config.hidden_size)
        layers = self.shape, self.frozen.layers, self.last[1], self.frozen.norm
        if tapped:
            numbers, self.taps = torch.tensor(tapped), torch.empty(layout.rows, len(tapped), out.shape[1])
            products.layers(*layers, table, ids, output_rows, out, numbers, self.taps)
            self.taps = self.taps.to(network.embed.weight.dtype)
        else:
            products.layers(*layers, table, ids, output_rows, out)
        return out

    def head(self, hidden: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Logits, in float32."""
        return products.linear(self.frozen.head, hidden.float(), self.room)

    def _room_of(self, floats: int) -> Tensor:
        """C's scratch memory. It grows and is kept: allocating it costs more than many steps compute."""
        if self.room.shape[0] < floats:
            self.room, self.last = torch.empty(floats), None
        return self.room


def _run(layout: Layout, room: Tensor, projected: tuple[Tensor, ...]) -> tuple[Run, list[Tensor]]:
    """A layout as C reads it, and the tensors it points to."""
    pool, parts = layout.pool, layout.spans.packed(None)
    cos, sin = (None, None) if layout.rope is None else (table[0, :, 0].float().contiguous() for table in layout.rope)
    kept = [cos, sin, layout.slots, torch.arange(layout.rows), *parts, pool.k, pool.v, room, *projected]
    numbers = layout.rows, len(layout.spans), pool.page_size, parts[3].shape[1], pool.k.stride(0)
    return Run(*numbers, *(None if x is None else x.data_ptr() for x in kept)), [x for x in kept if x is not None]
