"""Maps the tensors of a checkpoint to ours and back."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

Names = Mapping[str, str | tuple[str, ...]]
"""Our module or parameter name -> the hub's. `*` is the layer number, the same on both sides.

Two of ours with the same hub name are one tensor there, stacked by rows in our order. A tuple means that two hub
tensors are one of ours.
`#` in the hub's name counts along our first dimension: one hub tensor for each expert of ours.
"""


@dataclass(frozen=True)
class Part:
    """`ours[index]`, `length` rows from `start`, are rows of a hub tensor; rows are counted along `axis`."""

    ours: str
    index: tuple[int, ...]
    axis: int
    start: int
    length: int


@dataclass(frozen=True)
class HubTensor:
    """One tensor of the checkpoint: its full shape and the parts of ours that it holds, in row order."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def hub_layout(names: Names, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, HubTensor]:
    """The checkpoint's tensors, by hub name, for a network whose parameters have these names and shapes."""
    found: dict[str, list[tuple[Part, tuple[int, ...]]]] = defaultdict(list)
    for ours, shape in shapes.items():
        targets = _translate(names, ours)
        experts = range(shape[0]) if "#" in targets[0] else (None,)
        inner = shape[1:] if "#" in targets[0] else shape
        axis = max(len(inner) - 2, 0)  # rows of a matrix, also inside a stack of experts; entries of a vector
        rows = inner[axis] // len(targets)
        for expert in experts:
            for i, target in enumerate(targets):
                part = Part(ours, () if expert is None else (expert,), axis, i * rows, rows)
                found[target.replace("#", str(expert))].append((part, inner))
    layout = {}
    for hub, pieces in found.items():
        parts = tuple(part for part, _ in pieces)
        axis, inner = parts[0].axis, pieces[0][1]
        layout[hub] = HubTensor((*inner[:axis], sum(p.length for p in parts), *inner[axis + 1 :]), parts)
    return layout


def _translate(names: Names, ours: str) -> tuple[str, ...]:
    """Hub names of one of our parameters: the longest rule that is a dotted prefix of its name wins."""
    layer = re.search(r"(?<=^layers\.)\d+", ours)
    prefix, rest = ours if layer is None else f"layers.*{ours[layer.end() :]}", ""
    while prefix not in names:
        prefix, _, last = prefix.rpartition(".")
        if not prefix:
            raise KeyError(f"no hub name for {ours}")
        rest = f".{last}{rest}"
    rule = names[prefix]
    targets = (rule,) if isinstance(rule, str) else rule
    return tuple((t + rest).replace("*", layer.group() if layer else "*") for t in targets)
