"""All layers of a plain network in one call of C, on a CPU in fp32. Knows nothing of requests.

Where products are small the host's work between them is most of a step: at width 256 torch's own calls take as long as
the products. And here a row's result does not depend on how many rows are run together, bit for bit.
"""

import ctypes
from itertools import starmap
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm.inference.layout import Layout
from dlm.inference.memory import free_memory
from dlm.kernels import native
from dlm.kernels.native import Product
from dlm.kernels.threads import threads_now
from dlm.models.attention import Attention, RMSNorm
from dlm.models.transformer import MLP, Transformer

SHARE_OF_COPIES = 0.1
"""Of the free memory, what weights in the products' own layout may take."""
Place = tuple[dict[str, Any], str]
_P, _I = ctypes.c_void_p, ctypes.c_int64


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, _P) for name in ("attn_norm", "q_norm", "k_norm", "mlp_norm")],
        *[("qkv", Product * 3), ("o", Product), ("gate", Product), ("up", Product), ("down", Product)],
        ("apart", _I),
    ]


class _Network(ctypes.Structure):
    _fields_ = [
        *[(name, _I) for name in ("layers", "d", "h", "g", "e", "f", "r")],
        *[("eps", ctypes.c_float), ("threads", ctypes.c_int32)],
    ]


class _Run(ctypes.Structure):
    _fields_ = [
        *[(name, _I) for name in ("n", "spans", "page_size", "table_width", "layer_stride")],
        *[(name, _P) for name in ("cos", "sin", "slots", "all_rows", "starts", "positions", "visible", "tables")],
        *[(name, _P) for name in ("sights", "keys", "values", "room", "first", "known")],
    ]


class _Panels:
    """Copies of a network's weights in the layout that products read fastest: twice the speed at 8 rows.

    A copy goes stale when its weight changes. Ordinary changes show in a tensor's version, which every step looks at;
    what does not show (a write through `.data`) is found by `renew`, which reads all weights.
    """

    def __init__(self) -> None:
        self.copies: dict[tuple[int, ...], tuple[int, Tensor]] = {}
        self.asked: set[tuple[int, ...]] = set()

    def of(self, w: Float[Tensor, "n k"]) -> Tensor:
        key, now = (w.data_ptr(), w.stride(0), *w.shape), native.checksum(w)
        if key not in self.copies or self.copies[key][0] != now:
            self.copies[key] = now, native.panels(w)
        self.asked.add(key)
        return self.copies[key][1]

    def forget_others(self) -> None:
        """What was not asked for since the last time."""
        self.copies = {key: copy for key, copy in self.copies.items() if key in self.asked}
        self.asked = set()


_PANELS: WeakKeyDictionary[Transformer, _Panels] = WeakKeyDictionary()


class Fused:
    """A network's layers as C sees them: where their weights lie now.

    Every step looks whether they still lie there and are the same, since weights may be trained or moved between two;
    what took another's place (an adapter, a parameter) is seen when a layout is run for the first time.
    """

    def __init__(self, network: Transformer) -> None:
        self.network = network
        self.other = False
        """Whether the network was found to be of another kind."""
        self.places: list[Place] = []
        self.parts: list[Any] = []
        self.hooks: list[dict[int, Any]] = []
        self.weights: list[Tensor] = []
        self.addresses: list[int] = []
        self.versions: list[int] = []
        self.shape: Any = None
        self.layers: Any = None
        self.output: Product | None = None
        self.kept: list[Tensor] = []
        """What these point to, even if another engine has the copies made anew."""
        self.room = torch.empty(0)
        self.first: tuple[Tensor, Tensor] | None = None
        """The first layer's projections, of tokens that were met: they depend on the token alone."""
        self.last: tuple[Layout, _Run, list[Tensor]] | None = None

    def renew(self) -> None:
        """Look at every weight's content before the next step, too."""
        self.weights = []

    def usable(self, anew: bool = False) -> bool:
        """Whether the network is of the plain kind, fp32 on a CPU, and the kernels are there.

        `anew` looks at every module, too.
        """
        if type(self.network) is not Transformer or (self.other and not anew):
            return False
        table = self.network.embed.weight
        if not table.is_cpu or table.dtype != torch.float32 or not native.available():
            return False
        same = self.weights and self.addresses == [w.data_ptr() for w in self.weights]
        same = same and self.versions == [w._version for w in self.weights]
        if same and not (anew and self._altered()):
            return True
        found = _plain(self.network)
        self.other = found is None
        if found is None:
            return False
        linears, norms, weights, self.places, self.hooks = found
        self.parts = [where.get(name) for where, name in self.places]
        self._point(linears, norms)
        self.weights = weights
        self.addresses = [w.data_ptr() for w in weights]
        self.versions = [w._version for w in weights]
        return True

    def _altered(self) -> bool:
        """Whether a module or parameter is not the one that was found, or somebody listens to a module."""
        return any(self.hooks) or not all(map(is_, starmap(dict.get, self.places), self.parts))

    def __call__(self, layout: Layout, ids: Int[Tensor, " n"], wanted: Int[Tensor, " w"]) -> Float[Tensor, "w d"]:
        """Final hidden states of the wanted rows, (w,) in ascending order."""
        network, c = self.network, self.network.config
        self.shape.threads = threads_now()
        room = self._room_of(native.layers_room(self.shape, layout.rows, len(layout.spans)))
        if self.last is None or self.last[0] is not layout:
            self.last = layout, *_run(layout, room, self.first)
        table = network.embed.weight
        if network.positions is not None:
            table, ids = network.embedded(ids, layout.positions), torch.arange(layout.rows)
        out = torch.empty(wanted.shape[0], c.hidden_size)
        native.layers(self.shape, self.layers, self.last[1], network.norm.weight, table, ids, wanted, out)
        return out

    def head(self, hidden: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Logits."""
        assert self.output is not None
        return native.linear(self.output, hidden, self.room)

    def _room_of(self, floats: int) -> Tensor:
        """Where C works; it grows, and is kept, since to get memory anew costs more than many steps' sums."""
        if self.room.shape[0] < floats:
            self.room, self.last = torch.empty(floats), None
        return self.room

    def _point(self, linears: list[nn.Linear], norms: list[RMSNorm | None]) -> None:
        """Fill in the structures that C reads."""
        network = self.network
        head = network.embed.weight if network.lm_head is None else network.lm_head.weight
        size = 4 * (head.numel() + sum(linear.weight.numel() for linear in linears))
        copies = None
        if network in _PANELS or size <= SHARE_OF_COPIES * free_memory(torch.device("cpu")):
            copies = _PANELS.setdefault(network, _Panels())
        self.shape, self.layers = _shape(network), (_Layer * len(network.layers))()
        for number, layer in enumerate(self.layers):
            own = linears[7 * number : 7 * number + 7]
            layer.apart = number == len(network.layers) - 1
            if layer.apart:  # the last layer's queries are not of all rows
                layer.qkv[:] = [*_products(own[0:1], copies), *_products(own[1:3], copies)]
            else:
                layer.qkv[:] = _products(own[0:3], copies)
            layer.o, layer.gate, layer.up, layer.down = (_product(each.weight, each.bias, copies) for each in own[3:])
            addresses = [
                None if norm is None else norm.weight.data_ptr() for norm in norms[4 * number : 4 * number + 4]
            ]
            layer.attn_norm, layer.q_norm, layer.k_norm, layer.mlp_norm = addresses
        self.output = _product(head, None, copies)
        if copies is not None:
            copies.forget_others()
            self.kept = [copy for _, copy in copies.copies.values()]
        width = sum(linear.weight.shape[0] for linear in linears[:3])
        table = network.embed.weight.shape[0], width
        self.first = self.last = None
        if network.positions is None and 4 * table[0] * width <= SHARE_OF_COPIES * free_memory(torch.device("cpu")):
            self.first = (
                torch.empty(table),
                torch.zeros(table[0], dtype=torch.uint8),
            )  # pages are had as they are written


def _plain(
    network: Transformer,
) -> tuple[list[nn.Linear], list[RMSNorm | None], list[Tensor], list[Place], list[dict[int, Any]]] | None:
    """Seven linear layers and four norms of each layer, all weights, where modules and weights hang, and all hooks.

    None where C does not do as a module does.
    """
    if network.group is not None:
        return None
    linears: list[Any] = []
    norms: list[Any] = []
    parents: list[nn.Module] = [network]
    for layer in network.layers:
        attn, mlp = layer.attn, layer.mlp
        if type(attn) is not Attention or type(mlp) is not MLP:
            return None
        parents += [layer, attn, mlp]
        linears += [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        norms += [layer.attn_norm, attn.q_norm, attn.k_norm, layer.mlp_norm]
    ends = [(network.embed, nn.Embedding), (network.norm, RMSNorm)]
    ends += [] if network.lm_head is None else [(network.lm_head, nn.Linear)]
    kinds = [*((x, nn.Linear) for x in linears), *((x, RMSNorm) for x in norms if x is not None), *ends]
    if any(type(x) is not kind for x, kind in kinds):
        return None
    modules = [*parents, *(x for x, _ in kinds)]
    hooks = [hooks for x in modules for hooks in (x._forward_hooks, x._forward_pre_hooks)]
    weights = [w for x, _ in kinds for w in x._parameters.values() if w is not None]
    if any(hooks) or not all(map(_readable, weights)):
        return None
    places: list[Place] = [(x._modules, name) for x in parents for name in x._modules]
    places += [(x._parameters, name) for x, _ in kinds for name in x._parameters]
    return linears, norms, weights, places, hooks


def _shape(network: Transformer) -> _Network:
    c = network.config
    turned = 0 if network.rope is None else 2 * network.rope[0].shape[0]
    heads = c.num_attention_heads, network.kv_heads, c.head_dim
    return _Network(len(network.layers), c.hidden_size, *heads, c.intermediate_size, turned, c.rms_norm_eps)


def _readable(x: Tensor) -> bool:
    return (
        x.dtype == torch.float32 and x.is_cpu and type(x.data) is Tensor and x.stride(-1) == 1 and not x.is_inference()
    )


def _products(linears: list[nn.Linear], copies: _Panels | None) -> list[Product]:
    """One product of all, and nothing after it, if their weights are parts of one; else one of each."""
    weights, first = [linear.weight for linear in linears], linears[0].weight
    end, ld = first.data_ptr(), first.stride(0)
    for linear in linears:
        if linear.bias is not None or linear.weight.data_ptr() != end or linear.weight.stride(0) != ld:
            return [_product(each.weight, each.bias, copies) for each in linears]
        end += 4 * ld * len(linear.weight)
    whole = first.detach().as_strided((sum(len(w) for w in weights), first.shape[1]), (ld, 1))
    return [_product(whole, None, copies), *(Product() for _ in linears[1:])]


def _product(w: Tensor, bias: Tensor | None, copies: _Panels | None) -> Product:
    addresses = [None if x is None else x.data_ptr() for x in (w, copies and copies.of(w), bias)]
    return Product(*addresses, *w.shape, w.stride(0))


def _run(layout: Layout, room: Tensor, first: tuple[Tensor, Tensor] | None) -> tuple[_Run, list[Tensor]]:
    """What a layout tells C, and the tensors it points to."""
    pool, parts = layout.pool, layout.spans.packed(None)
    cos, sin = (None, None) if layout.rope is None else (table[0, :, 0].contiguous() for table in layout.rope)
    kept = [cos, sin, layout.slots, torch.arange(layout.rows), *parts, pool.k, pool.v, room, *(first or ())]
    numbers = layout.rows, len(layout.spans), pool.page_size, parts[3].shape[1], pool.k.stride(0)
    return _Run(*numbers, *(None if x is None else x.data_ptr() for x in kept)), [x for x in kept if x is not None]
