"""[align]: moves the states of masked tokens towards those of a frozen causal teacher (arXiv 2605.06885)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm.diffusion.noise import smallest
from dlm.diffusion.rng import Purpose, uniform
from dlm.errors import UserError
from dlm.models.lm import LM
from dlm.training.anchors import Anchors
from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.masking.view import View
from dlm.training.sections import AlignConfig
from dlm.training.teacher import LiveTeacher, States, Teacher, at, chosen_layers


class Align:
    """The term weight * (1 - mean cosine of the student's and the teacher's states).

    The mean is over the layers and masked tokens of each sequence, then over the sequences of the global batch. So the
    shares of a split batch add up, and each sequence counts the same whatever its noise level, as in the likelihood
    bound. Addressed random numbers choose the layers and tokens of a step.
    """

    def __init__(self, config: AlignConfig, teacher: Teacher, seed: int) -> None:
        self.config, self.teacher, self.seed = config, teacher, seed
        self.step, self.counted, self.sums = -1, torch.zeros(()), dict[int, Tensor]()

    def weight(self, progress: float) -> float:
        """The term's weight when this share of the run is done."""
        c = self.config
        left = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[c.decay]
        return c.weight if c.decay == "constant" else c.final_weight + (c.weight - c.final_weight) * left

    def layers(self, step: int) -> list[int]:
        """The layers that are aligned in this step, the same in every process."""
        every = self.teacher.layers
        order = uniform(Purpose.LAYER, seed=self.seed, step=step, position=torch.arange(len(every))).argsort()
        return sorted(every[i] for i in order[: self.config.num_sample_layers].tolist())

    def loss(self, taps: dict[int, Tensor], states: States, view: View, batch: Batch, shifted: bool, of: int) -> Tensor:
        """The term's share of one of the step's `of` views; `taps` are the outputs of the student's layers."""
        where = view.predicted
        if shifted:  # the state before a token predicts it, and the first token has none
            where = where & (torch.arange(where.shape[1], device=where.device) > 0)
        if self.config.sub_sample_ratio < 1:
            where = self._some(where, batch)
        sequences, positions = where.nonzero(as_tuple=True)
        weight = (1 / (where.sum(-1).clamp(min=1) * batch.samples * of))[sequences]
        if batch.step != self.step:
            self.step, self.counted, self.sums = batch.step, weight.new_zeros(()), {}
        self.counted = self.counted + weight.sum()
        layers = self.layers(batch.step)
        total = weight.new_zeros(())
        for layer in layers:
            student = at(view.states(taps[layer], shifted), sequences, positions)
            teacher = states(layer, sequences, positions - int(shifted))
            cosine = F.cosine_similarity(student.float(), teacher.float(), dim=-1)
            total = total + (weight * (1 - cosine)).sum()
            self.sums[layer] = self.sums.get(layer, 0) + (weight * cosine).sum().detach()
        return self.weight(batch.progress) / len(layers) * total

    def _some(self, where: Tensor, batch: Batch) -> Tensor:
        """A random share of each sequence's tokens, `sub_sample_ratio`, at least one."""
        position = torch.arange(where.shape[1], device=where.device)
        number = uniform(Purpose.ALIGN, seed=self.seed, sample=batch.index[:, None], step=batch.step, position=position)
        count = (self.config.sub_sample_ratio * where.sum(-1, keepdim=True)).round().long().clamp(min=1)
        return smallest(number, where, count)

    # --- for [watch] and checkpoints ------------------------------------------------------------------------------

    @property
    def cosines(self) -> dict[int, Tensor]:
        """The mean cosine of each layer aligned in the last step, over this process's sequences."""
        return {layer: total / self.counted for layer, total in self.sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self.teacher.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint of a run with another teacher."""
        if state["teacher"] != self.teacher.identity:
            raise UserError(
                f"the checkpoint was aligned to a teacher with weights {state['teacher']}, but align.teacher now has "
                f"{self.teacher.identity}: give the same model, another train.out, or set train.resume = false"
            )


def build_align(config: TrainConfig, student: LM, device: torch.device) -> Align | None:
    """The alignment term with its teacher or its anchors; None where align.weight = 0."""
    c = config.align
    if not c.weight:
        return None
    layers = chosen_layers(c, student.config.num_hidden_layers)
    teacher: Teacher = Anchors(config, layers) if c.anchors else LiveTeacher.of(config, student, device)
    if teacher.layers != layers:
        raise UserError(
            f"align.layers = 'all', but the teacher has {len(teacher.layers)} layers and the network {len(layers)}"
        )
    if teacher.width != student.config.hidden_size:
        raise UserError(
            f"align.teacher has states of width {teacher.width}, the network of {student.config.hidden_size}: "
            "alignment needs equal widths"
        )
    return Align(c, teacher, config.train.seed)
