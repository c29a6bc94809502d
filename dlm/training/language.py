"""A language model under training: a `Transformer` with its tokenizer, under [objective], [align] and [adapter]."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from accelerate import Accelerator
from torch import Tensor, nn

from dlm.inference.generation import generate, infill
from dlm.models.lm import LM
from dlm.models.transformer import Transformer
from dlm.training import adapters
from dlm.training.align import build_align
from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.masking import masking_of
from dlm.training.masking.block import BlockMasking
from dlm.training.objective import Objective
from dlm.training.processes import SPREAD
from dlm.training.profile import Ranges, flops_a_token
from dlm.training.scoring import TokenCosts
from dlm.training.snapshots import Snapshots
from dlm.training.start import starting_point
from dlm.training.trainable import Matrices, Trainable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class LanguageModel(TokenCosts, Trainable):
    """trainable.kind = "language"."""

    network: Transformer
    sections = ("model", "objective", "align", "adapter")

    def __init__(self, lm: LM, config: TrainConfig, a: Accelerator) -> None:
        super().__init__(lm.network)
        self.config, self.accelerator, self.tokenizer, self._lm = config, a, lm.tokenizer, lm
        self.network.gradient_checkpointing = config.train.gradient_checkpointing
        self.masking = masking_of(config.objective, lm.config, config.train.seed)
        self.align = None
        self.snapshots = Snapshots(config)

    @classmethod
    def start(cls, config: TrainConfig, a: Accelerator) -> Self:
        """The model with its adapters attached; then only these are trained."""
        adapters.check(config, a)
        lm = starting_point(config)
        adapters.attach(config, lm, a.device)
        return cls(lm, config, a)

    @property
    def lm(self) -> LM:
        """The model as `dlm.load` returns it, with its current weights."""
        return replace(self._lm, network=self.network)

    def matrices(self) -> Matrices:
        """Embeddings and an untied head apart from the layers' matrices."""
        return matrices_of(self.network)

    def objective(self, ranges: Ranges) -> Objective:
        """The masking's loss, and the alignment's where there is any."""
        c, t = self.config, self.config.train
        self.align = build_align(c, self.lm, self.accelerator.device)
        ranges.name_layers(self.network.layers)
        objective = Objective(self.network, c.objective, t.seed, t.length, self.align, ranges, t.precision == "fp16")
        if c.adapter.kind != "none" and self.accelerator.distributed_type not in SPREAD:
            adapters.keep_trained(objective)
        return objective

    def compile(self, objective: nn.Module) -> None:
        """torch.compile the network's body and the loss, each by itself."""
        assert isinstance(objective, Objective)
        objective.compile_parts()

    def flops_a_token(self) -> float:
        """Of the network's own shape under this masking."""
        size = sum(p.numel() for p in self.network.parameters())
        block = self.masking.block_length if isinstance(self.masking, BlockMasking) else None
        return flops_a_token(self.network.config, size, self.config.train.length, *self.masking.work, block)

    def state_dict(self) -> dict[str, Any]:
        """Which teacher the run is aligned to."""
        return {"align": self.align.state_dict() if self.align else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint with another teacher."""
        if self.align:
            self.align.load_state_dict(state["align"])

    def sample(self, prompt: str, gen_length: int) -> str:
        """What follows the prompt, or the prompt with its [MASK:n] filled in."""
        if "[MASK" in prompt:
            return infill(self.lm, [prompt])[0].text
        return generate(self.lm, [prompt], gen_length=gen_length)[0].text

    def numbers(self) -> dict[str, float]:
        """The cosines of the layers aligned in this step."""
        return {f"cosine/layer_{n}": float(c) for n, c in self.align.cosines.items()} if self.align else {}

    def snapshot(
        self, batch: Batch, row: tuple[Tensor, Tensor] | None, step: int, draw: bool
    ) -> tuple[dict[str, float | str], dict[str, "Figure"]]:
        """Loss by mask ratio of the batch; of the held-out row its decoding, and how sure the model is of its tokens."""
        return self.snapshots.snapshot(self.lm, self.masking, batch, row, step, draw)

    def save(self, config: TrainConfig) -> None:
        """A folder that `dlm.load` and `from_pretrained` read."""
        adapters.save(config, self.lm, Path(config.train.out))


def matrices_of(network: Transformer) -> Matrices:
    """A network's parameters by optimiser group; all others are `scalar`."""
    return {
        "hidden": [p for _, p in network.matrices() if p.ndim == 2],
        "embed": [m.weight for m in (network.embed, network.positions) if m is not None],
        "head": [] if network.lm_head is None else [network.lm_head.weight],
    }
