"""`Trainable`: everything that the training loop calls on a model, and the table of kinds of models."""

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import Tensor, nn

from dlm.errors import UserError, nearest
from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.masking import MASKINGS
from dlm.training.profile import Ranges

if TYPE_CHECKING:
    from accelerate import Accelerator
    from matplotlib.figure import Figure

    from dlm.data.tokenizer import Tokenizer
    from dlm.training.validate import HeldOut

Matrices = Mapping[str, Sequence[Tensor]]
"""Parameters by the group of [optim] that they belong to: hidden, embed, head. All others are `scalar`."""
TRAINABLES = {
    "language": "dlm.training.language:LanguageModel",
    "draft": "dlm.training.drafting.model:DraftModel",
    "latent": "dlm.latent.trainable:LatentModel",
}
"""trainable.kind -> module:class. To add a kind of model: its file, and one line here."""
ANYBODYS = {"train", "data", "trainable", "replay", "optim", "eval", "checkpoint", "log", "watch", "profile"}
"""The sections that the loop reads itself, for every kind."""


class Trainable(Protocol):
    """A model under training. Inherit from this; methods without a body must be written.

    The loop brings data, optimiser, averaging, checkpoints, resuming, validation and reports. It may replace `network`
    in a copy of the object (by averaged weights, or by weights gathered from all processes), so a method must not keep
    another reference to it.
    """

    network: nn.Module
    """Holds everything that is trained and saved."""
    tokenizer: "Tokenizer | None"
    """What turns the data into tokens; None where the data are no text."""
    likelihood: bool = True
    """Whether validation calls `nats`; else it calls only `figures`."""
    exact: bool = False
    """Whether `nats` gives the likelihood itself and not draws of a bound on it."""
    layerwise: bool = True
    """Whether each layer's weights are used in its forward alone. If not, FSDP gathers all weights for a step at once, and
    DeepSpeed is refused."""
    sections: tuple[str, ...] = ()
    """The sections of the config that this kind reads beside those that the loop reads."""

    @classmethod
    def start(cls, config: TrainConfig, a: "Accelerator") -> Self:
        """The model, new or loaded, on the CPU. Settings of its own are in `config.trainable.own`."""
        ...

    def objective(self, ranges: Ranges) -> nn.Module:
        """A module that turns a `Batch` into the named parts of this process's share of the loss, which is their sum.

        It holds `network` under that name. It is made once, after the optimiser has frozen what is not trained.
        """
        ...

    def nats(self, ids: Tensor, answer: Tensor, index: Tensor, draws: int, seed: int) -> Tensor:
        """The cost in nats of the `answer` of each row of ids (b, l), or upper bounds on it: (b, draws) or (b, 1)."""
        ...

    def save(self, config: TrainConfig) -> None:
        """Write the final model into `config.train.out`."""
        ...

    def matrices(self) -> Matrices:
        """The parameters by optimiser group, without those of group `scalar`."""
        return {"hidden": [p for p in self.network.parameters() if p.ndim == 2]}

    def flops_a_token(self) -> float:
        """Training FLOPs for each token of a batch."""
        return 6.0 * sum(p.numel() for p in self.network.parameters())

    def compile(self, objective: nn.Module) -> None:
        """torch.compile what is worth it."""
        objective.compile()

    def state_dict(self) -> dict[str, Any]:
        """Plain data for the checkpoint, beside the objective's own tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, from a dict that also holds the run's own entries."""

    def sample(self, prompt: str, gen_length: int) -> str:
        """The model's answer to one of eval.prompts."""
        raise UserError(f"{type(self).__name__} writes no text: leave eval.sample_every out")

    def total(self, batch: Batch) -> Tensor | None:
        """This process's share of the divisor of the step's loss, where that depends on the rows; else None.

        The sum over all processes then stands in `Batch.total` of every micro-batch, so shares of the loss add up.
        """
        return None

    def figures(self, held_out: "HeldOut") -> tuple[dict[str, float], str]:
        """Other figures of held-out sequences for validation: values to log, and a line to print."""
        return {}, ""

    def numbers(self) -> dict[str, float]:
        """Numbers of the current step that [watch] logs, after its backward pass; called in every process."""
        return {}

    def snapshot(
        self, batch: Batch, row: tuple[Tensor, Tensor] | None, step: int, draw: bool
    ) -> tuple[dict[str, float | str], dict[str, "Figure"]]:
        """What [watch] shows of rows of the step's batch and of a held-out row (ids, answer): values, and figures if `draw`."""
        return {}, {}


def kind_of(config: TrainConfig) -> str:
    """The key of `TRAINABLES` that a run trains: the masking's, unless [trainable] names another."""
    own = MASKINGS[config.objective.masking].kind
    return own if config.trainable.kind == "language" else config.trainable.kind


def class_of(config: TrainConfig) -> type[Trainable]:
    """What [trainable] names; a UserError for sections that it does not read."""
    kind = kind_of(config)
    if kind not in TRAINABLES:
        raise UserError(
            f"trainable.kind = {kind!r}: no such kind{nearest(kind, TRAINABLES)} (known: {', '.join(TRAINABLES)})"
        )
    cls: type[Trainable] = resolve_name(TRAINABLES[kind])
    for section, info in type(config).model_fields.items():
        if section not in {*ANYBODYS, *cls.sections} and getattr(config, section) != info.default:
            raise UserError(f"[{section}] is not read with trainable.kind = {kind!r}: leave it out")
    return cls


def start(config: TrainConfig, a: "Accelerator") -> Trainable:
    """The model, new or loaded."""
    return class_of(config).start(config, a)
