"""A draft under training: a `Draft` for a frozen target, under [draft]."""

from pathlib import Path
from typing import Any, Self

from accelerate import Accelerator
from torch import Tensor, nn

from dlm.errors import UserError
from dlm.inference.generation import generate
from dlm.models.draft import Draft
from dlm.training.anchors import Anchors
from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.drafting.objective import DraftObjective, total_of
from dlm.training.drafting.start import new_draft
from dlm.training.drafting.states import TargetStates
from dlm.training.drafting.tau import TauMeter
from dlm.training.masking.draft import DraftMasking
from dlm.training.profile import Ranges
from dlm.training.teacher import LiveTeacher
from dlm.training.trainable import Matrices, Trainable
from dlm.training.validate import HeldOut


class DraftModel(Trainable):
    """What objective.masking = "draft" trains."""

    network: Draft
    likelihood = False
    layerwise = False
    sections = ("objective", "draft")

    def __init__(self, draft: Draft, config: TrainConfig) -> None:
        self.network, self.config, self.tokenizer = draft, config, draft.target.tokenizer
        d, taps = config.draft, draft.config.target_layer_ids
        assert d.target is not None
        target = LiveTeacher(draft.target, d.target, taps)
        source = target if d.states is None else Anchors(config, taps)
        self.states, self.identity = TargetStates(source, draft, target), target.identity
        self.masking = DraftMasking(draft, d.num_anchors, config.objective.documents == "apart", config.train.seed)
        self.meter = TauMeter(d, self.masking, self.states)

    @classmethod
    def start(cls, config: TrainConfig, a: Accelerator) -> Self:
        """On the target's device. The target is no part of what is trained or saved."""
        return cls(new_draft(config, a.device), config)

    def objective(self, ranges: Ranges) -> DraftObjective:
        """The weighted loss of the drafted tokens."""
        ranges.name_layers(self.network.layers)
        half = self.config.train.precision == "fp16"
        return DraftObjective(self.network, self.masking, self.config.draft, self.states, ranges, half)

    def total(self, batch: Batch) -> Tensor:
        """The weights of these rows' drafted tokens, or their anchors."""
        return total_of(self.masking.blocks(batch).asked, self.config.draft)

    def matrices(self) -> Matrices:
        """A selector's codebooks are embeddings; all other matrices are hidden ones."""
        codebooks = [p for name, p in self.network.named_parameters() if name.endswith("codebook")]
        rest = [p for name, p in self.network.named_parameters() if p.ndim == 2 and not name.endswith("codebook")]
        return {"hidden": rest, "embed": codebooks}

    def flops_a_token(self) -> float:
        """Each block's rows go through the layers and the head; the text itself through the context's products."""
        c, d, length = self.network.config, self.config.draft, self.config.train.length
        rows = min(d.num_anchors, length) * c.block_size / length
        head = (c.draft_vocab_size or c.network.vocab_size) * c.network.hidden_size
        layers = sum(p.numel() for p in self.network.layers.parameters())
        reading = 0 if d.states is not None else sum(p.numel() for p in self.states.live_layers())
        return 6.0 * (rows * layers + self.network.fc.weight.numel()) + 4.0 * rows * head + 2.0 * reading

    def compile(self, objective: nn.Module) -> None:
        """The draft's layers; masks differ at every step and stay outside."""
        raise UserError("train.compile is not possible with objective.masking = draft: leave it out")

    def figures(self, held_out: HeldOut) -> tuple[dict[str, float], str]:
        """tau in the decoding loop, beside what training promises of it."""
        self.network.eval()
        found = self.meter.measure(self.network, held_out)
        self.network.train()
        return found.row(), str(found)

    def sample(self, prompt: str, gen_length: int) -> str:
        """The target's own text, and how many tokens a verification the draft is good for there."""
        (result,) = generate(self.network.target, [prompt], draft=self.network, gen_length=gen_length)
        return f"{result.text}\n(tau {result.tau:.2f})"

    def state_dict(self) -> dict[str, Any]:
        """Which target the draft is for."""
        return {"target": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A UserError where the target is another one."""
        if state["target"] != self.identity:
            raise UserError(
                f"the checkpoint is of a draft for a target with weights {state['target']}, but draft.target now has "
                f"{self.identity}: give the same model, another train.out, or set train.resume = false"
            )

    def save(self, config: TrainConfig) -> None:
        """A folder in z-lab's format, which `dlm.load_draft` reads."""
        self.network.save(Path(config.train.out), dtype=config.train.save_dtype, overwrite=True)
