"""Looking at a run while it runs: gradients by group, loss by mask ratio, a trajectory, a strip, epochs. Draws nothing itself."""

from collections import deque
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlm.diffusion.loss import token_losses
from dlm.inference.request import Generation
from dlm.models.lm import LM
from dlm.models.transformer import Transformer
from dlm.training import pictures
from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.masking import MASKINGS, View
from dlm.training.objective import Objective
from dlm.training.optim import parameter_groups
from dlm.training.pictures import Point, Strip
from dlm.training.processes import whole
from dlm.training.report import Report
from dlm.training.scoring import in_slices
from dlm.training.validate import HeldOut

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 16  # of a batch, in the scatter
LEVELS = 4  # of masking, in the strip
POINTS = 512  # that the scatter remembers
DECODED = 64  # tokens, and steps, of the trajectory
DRAWN = 256  # tokens of a longer one
# A held-out row has no trajectory, and one pass is enough to see.
STRIP_MASKING = {"trajectory": "random", "complementary": "random"}


class Watch:
    """Every [watch].every steps: `measure` inside the step, before gradients are clipped, and `look` after it."""

    def __init__(self, config: TrainConfig, held_out: HeldOut | None) -> None:
        self.config, self.every, self.pictures = config, config.watch.every, config.watch.pictures
        self.row = None if held_out is None else tuple(part[0] for part in held_out.batches[0])
        self.points: deque[Point] = deque(maxlen=POINTS)
        self.numbers: dict[str, float] = {}
        self.batch: Batch | None = None

    def due(self, step: int) -> bool:
        """Whether optimiser step `step` is looked at."""
        return self.every > 0 and step % self.every == 0

    def measure(self, objective: Objective, batch: Batch) -> None:
        """Gradient norms and cosines as the step finds them; every process has to ask."""
        self.numbers = {f"grad_norm/{name}": norm for name, norm in gradient_norms(objective.network).items()}
        self.numbers |= {f"cosine/layer_{n}": float(c) for n, c in objective.cosines.items()}
        self.batch = batch.rows(0, min(ROWS, self.config.train.micro_batch_size or ROWS))

    def look(self, lm: LM, report: Report, step: int) -> None:
        """Log what there is to see of the model after `step`; pictures of a held-out row where there is one."""
        assert self.batch is not None
        row: dict[str, float | str] = {**self.numbers}
        points = self._points(lm.network, self.batch, step)
        self.points.extend(points)
        for part in range(LEVELS):
            losses = [p.loss for p in points if part < p.ratio * LEVELS <= part + 1]
            if losses:
                row[f"loss_by_mask_ratio/{(part + 1) / LEVELS:.0%}"] = sum(losses) / len(losses)
        figures: dict[str, Figure] = {}
        draws = self._draws(report)
        if draws and self.points:
            figures["loss"] = pictures.loss_by_ratio(self.points)
        if self.row is not None:
            ids, answer = (part.to(lm.device) for part in self.row)
            found = decode(lm, ids, answer)
            row["sample"] = found.text
            if draws:
                figures["trajectory"] = pictures.trajectory(_spelt(lm, found.tokens[:DRAWN]), found.steps[:DRAWN])
                figures["strip"] = pictures.confidence_strip(_spelt(lm, ids.tolist()), self._strips(lm, ids, answer))
        report.watched(step, row, figures)

    def _draws(self, report: Report) -> bool:
        if self.pictures and find_spec("matplotlib") is None:
            report.say("watch.pictures needs matplotlib: pip install 'dlm[plot]'; numbers are logged without it")
            self.pictures = False
        return self.pictures

    def _points(self, network: Transformer, batch: Batch, step: int) -> list[Point]:
        """Each row of the batch as training masked it in this step."""
        masking = MASKINGS[self.config.objective.masking](self.config.objective, network.config, self.config.train.seed)
        points = []
        for view in masking.views(batch):
            loss, _, _ = answers(network, view)
            asked = view.asked.sum(-1)
            ratio = asked / batch.answer[:, : view.asked.shape[1]].sum(-1).clamp(min=1)
            rows = zip(ratio.tolist(), (loss.sum(-1) / asked.clamp(min=1)).tolist(), asked.tolist(), strict=True)
            points += [Point(step, r, l) for r, l, count in rows if count]
        return points

    def _strips(self, lm: LM, ids: Tensor, answer: Tensor) -> list[Strip]:
        """The row under masks that are the same at every look, from the fewest to the most."""
        c = self.config.objective.model_copy(update={"truncate_probability": 0.0})
        masking = MASKINGS[STRIP_MASKING.get(c.masking, c.masking)](c, lm.config, self.config.train.seed)
        index = torch.arange(LEVELS, device=ids.device)
        batch = Batch(ids.expand(LEVELS, -1), answer.expand(LEVELS, -1), index, step=0, samples=LEVELS)
        view = masking.views(batch)[0]
        _, right, confidence = answers(lm.network, view)
        strips = [
            Strip(*(part.tolist() for part in parts)) for parts in zip(view.asked, right, confidence, strict=True)
        ]
        unlike = {tuple(strip.asked): strip for strip in strips}  # one for the masks of an autoregressive model
        return sorted(unlike.values(), key=lambda strip: strip.level)


@torch.no_grad()
def answers(network: Transformer, view: View) -> tuple[Tensor, Tensor, Tensor]:
    """Where a view asks, (b, l): cross-entropy of the truth, whether the best token is it, and that token's probability."""

    def score(states: Tensor, targets: Tensor) -> Tensor:
        logits = network.suppress(network.head(states).float(), always=True)
        best = logits.softmax(-1).max(-1)
        return torch.stack((token_losses(logits, targets), (best.indices == targets).float(), best.values), dim=-1)

    was_training = network.training
    network.eval()
    hidden = network.hidden(view.input_ids, view.positions, attention=view.attention)
    states = view.states(hidden, network.config.shifted_logits)[view.asked]
    found = torch.zeros(*view.asked.shape, 3, device=states.device)
    found[view.asked] = in_slices(score, network.config.vocab_size, states, view.targets[view.asked])
    network.train(was_training)
    loss, right, confidence = found.unbind(-1)
    return loss, right.bool(), confidence


def gradient_norms(network: Transformer) -> dict[str, float]:
    """The norm of each optimiser group's gradients."""
    norms = {}
    for name, parameters in parameter_groups(network).items():
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            norms[name] = whole(torch.nn.utils.get_total_norm(gradients)).item()
    return norms


def decode(lm: LM, ids: Tensor, answer: Tensor) -> Generation:
    """The row's answer written by the model, a token a step: its end or, where all of it is answer, its second half.

    An answer that lies between given tokens is filled in.
    """
    import dlm

    given = (~answer).nonzero()
    if len(given) and lm.config.attention == "bidirectional":
        canvas = torch.where(answer, lm.require_mask_id(), ids).tolist()
        return dlm.infill(lm, [canvas], steps=min(int(answer.sum()), DECODED))[0]
    start = int(given.max()) + 1 if len(given) and answer[-1] else len(ids) // 2
    block = lm.config.block_length or 1
    length = max(block, min(DECODED, len(ids) - start) // block * block)
    block = block if lm.config.attention == "block_causal" else length
    prompt = [ids[:start].tolist()]
    # A whole block may reach past the row, and the row past the context.
    return dlm.generate(lm, prompt, gen_length=length, block_length=block, steps=length, allow_long=True)[0]


def _spelt(lm: LM, ids: list[int]) -> list[str]:
    return [lm.decode([token], skip_special=False) if lm.tokenizer else str(token) for token in ids]


class Epochs:
    """Notices that the data has gone round; what it remembers of the epoch under way is part of a checkpoint."""

    def __init__(self, watched: bool) -> None:
        self.watched = watched
        self.epoch, self.tokens, self.seconds = 0, 0, 0.0

    def ended(self, epoch: int | None, tokens: int, seconds: float) -> dict[str, Any]:
        """The figures of the epoch that ended with this step, from totals of the run; empty when none did."""
        if not self.watched or epoch is None or epoch == self.epoch:
            return {}
        tokens_of, seconds_of = tokens - self.tokens, seconds - self.seconds
        figures = {"epoch": epoch, "epoch_tokens": tokens_of, "epoch_seconds": round(seconds_of, 2)}
        self.epoch, self.tokens, self.seconds = epoch, tokens, seconds
        return {**figures, "epoch_tokens_per_second": round(tokens_of / max(seconds_of, 1e-9), 1)}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.tokens, self.seconds = state["epoch"], state["tokens"], state["seconds"]
