"""The frozen causal teacher of [align]: finds the model, and computes its states of clean text."""

from collections.abc import Callable
from copy import copy
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm.errors import UserError
from dlm.models.attention import AttentionSpec
from dlm.models.finding import find
from dlm.models.fingerprint import files_digest
from dlm.models.lm import LM
from dlm.models.loading import load
from dlm.models.shards import weight_files
from dlm.training.config import TrainConfig
from dlm.training.sections import AlignConfig

States = Callable[[int, Int[Tensor, " n"], Int[Tensor, " n"]], Float[Tensor, "n d"]]
"""(layer, sequences, positions) -> the teacher's states there, in any dtype."""
WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float32}
"""dtype of a teacher's weights, by train.precision."""


class Teacher(Protocol):
    """Gives states of clean text, computed now or before; `identity` is the digest of the teacher's weights."""

    identity: str
    width: int
    layers: tuple[int, ...]

    def states(self, input_ids: Int[Tensor, "b l"], positions: Int[Tensor, "b l"] | None = None) -> States: ...

    def compile(self) -> None: ...


class LiveTeacher:
    """A frozen model, run up to the last layer in use. It is no submodule of the student, so it is not saved."""

    def __init__(self, lm: LM, name: str, layers: tuple[int, ...]) -> None:
        self.identity, self.width, self.layers = weights_of(name), lm.config.hidden_size, layers
        network = copy(lm.network.requires_grad_(False))
        network._modules = dict(network._modules)
        network.layers, network.lm_head = network.layers[: max(layers) + 1], None
        self.hidden = network.hidden

    @classmethod
    def of(cls, config: TrainConfig, student: LM, device: torch.device) -> "LiveTeacher":
        """The teacher that [align] means; a UserError where it cannot be the student's."""
        name, t = teacher_name(config), config.train
        if name is None:
            raise UserError("alignment needs a teacher: set align.teacher or train.init_from")
        lm = load(name, dtype=WEIGHTS[t.precision], device=device)
        if lm.config.attention != "causal":
            raise UserError(f"align.teacher = {name!r} is {lm.config.attention}: a teacher is a causal model")
        theirs, ours = (None if m.tokenizer is None else m.tokenizer.with_mask().fingerprint for m in (lm, student))
        if theirs != ours and theirs is not None and ours is not None:
            raise UserError(f"align.teacher = {name!r} has another tokenizer than the network: ids would not match")
        return cls(lm, name, chosen_layers(config.align, lm.config.num_hidden_layers))

    def compile(self) -> None:
        self.hidden = torch.compile(self.hidden, dynamic=False)

    def outputs(
        self, input_ids: Int[Tensor, "b l"], positions: Int[Tensor, "b l"] | None = None
    ) -> dict[int, Float[Tensor, "b l d"]]:
        """The outputs of its layers for clean text, by layer number; `positions` begin anew where a document does."""
        taps: dict[int, Tensor] = {}
        with torch.no_grad(), torch.autocast(input_ids.device.type, enabled=False):
            attention = AttentionSpec("causal", apart=positions is not None and bool((positions[:, 1:] == 0).any()))
            self.hidden(input_ids, positions, attention=attention, taps=taps)
        return taps

    def states(self, input_ids: Int[Tensor, "b l"], positions: Int[Tensor, "b l"] | None = None) -> States:
        """Run one forward; the result returns states of it."""
        outputs = self.outputs(input_ids, positions)
        return lambda layer, sequences, positions: at(outputs[layer], sequences, positions)


def at(states: Float[Tensor, "b l d"], sequences: Int[Tensor, " n"], positions: Int[Tensor, " n"]) -> Tensor:
    """The states at these places, (n, d)."""
    return states.flatten(0, 1).index_select(0, sequences * states.shape[1] + positions)


def teacher_name(config: TrainConfig) -> str | None:
    """The causal model that [align] means, if any."""
    return config.align.teacher or config.train.init_from


def weights_of(name: str) -> str:
    """The digest of a model's weights as they lie in its folder."""
    return files_digest(weight_files(find(name)))


def chosen_layers(config: AlignConfig, count: int) -> tuple[int, ...]:
    """The numbers that align.layers stands for in a network of `count` layers."""
    layers = tuple(range(count)) if config.layers == "all" else config.layers
    if max(layers) >= count:
        raise UserError(f"align.layers names layer {max(layers)}, but there are layers 0 to {count - 1}")
    if (config.num_sample_layers or 1) > len(layers):
        raise UserError(f"align.num_sample_layers = {config.num_sample_layers}, but there are {len(layers)} layers")
    return layers
