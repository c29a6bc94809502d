"""What [watch] shows of a language model: loss by mask ratio, a decoded text, and its confidence in each token."""

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dlm.diffusion.loss import token_losses
from dlm.inference.generation import generate, infill
from dlm.inference.request import Generation
from dlm.models.lm import LM
from dlm.models.transformer import Transformer
from dlm.training import pictures
from dlm.training.batch import Batch
from dlm.training.config import TrainConfig
from dlm.training.masking import masking_of
from dlm.training.masking.view import Masking, View
from dlm.training.pictures import Point, Strip
from dlm.training.scoring import in_slices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEVELS = 4  # of masking, in the strip
POINTS = 512  # that the scatter remembers
DECODED = 64  # tokens, and steps, of the trajectory
DRAWN = 256  # tokens of a longer one
# A held-out row has no trajectory, and one pass is enough to see.
STRIP_MASKING = {"trajectory": "random", "complementary": "random", "spans": "random"}


class Snapshots:
    """Takes snapshots of a model during training; remembers the points of the scatter plot."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.points: deque[Point] = deque(maxlen=POINTS)

    def snapshot(
        self, lm: LM, masking: Masking, batch: Batch, held: tuple[Tensor, Tensor] | None, step: int, draw: bool
    ) -> tuple[dict[str, float | str], dict[str, "Figure"]]:
        """Values to log and, with `draw`, figures; the decoded text is the held-out row's answer."""
        row: dict[str, float | str] = {}
        points = self._points(lm.network, masking, batch, step)
        self.points.extend(points)
        for part in range(LEVELS):
            losses = [p.loss for p in points if part < p.ratio * LEVELS <= part + 1]
            if losses:
                row[f"loss_by_mask_ratio/{(part + 1) / LEVELS:.0%}"] = sum(losses) / len(losses)
        figures: dict[str, Figure] = {}
        if draw and self.points:
            figures["loss"] = pictures.loss_by_ratio(self.points)
        if held is not None:
            ids, answer = (part.to(lm.device) for part in held)
            found = decode(lm, ids, answer)
            row["sample"] = found.text
            if draw:
                figures["trajectory"] = pictures.trajectory(_token_texts(lm, found.tokens[:DRAWN]), found.steps[:DRAWN])
                figures["strip"] = pictures.confidence_strip(
                    _token_texts(lm, ids.tolist()), self._strips(lm, ids, answer)
                )
        return row, figures

    def _points(self, network: Transformer, masking: Masking, batch: Batch, step: int) -> list[Point]:
        """The loss of each row of the batch, masked as training masked it in this step."""
        points = []
        for view in masking.views(batch):
            loss, _, _ = answers(network, view)
            predicted = view.predicted.sum(-1)
            ratio = predicted / batch.answer[:, : view.predicted.shape[1]].sum(-1).clamp(min=1)
            rows = zip(
                ratio.tolist(), (loss.sum(-1) / predicted.clamp(min=1)).tolist(), predicted.tolist(), strict=True
            )
            points += [Point(step, r, l) for r, l, count in rows if count]
        return points

    def _strips(self, lm: LM, ids: Tensor, answer: Tensor) -> list[Strip]:
        """The row under the same masks in every snapshot, from the fewest to the most."""
        c = self.config.objective.model_copy(update={"truncate_probability": 0.0})
        c = c.model_copy(update={"masking": STRIP_MASKING.get(c.masking, c.masking)})
        masking = masking_of(c, lm.config, self.config.train.seed)
        index = torch.arange(LEVELS, device=ids.device)
        batch = Batch(ids.expand(LEVELS, -1), answer.expand(LEVELS, -1), index, step=0, samples=LEVELS)
        view = masking.views(batch)[0]
        _, right, confidence = answers(lm.network, view)
        rows = zip(view.predicted, right, confidence, strict=True)
        strips = [Strip(*(part.tolist() for part in row)) for row in rows]
        unlike = {tuple(strip.predicted): strip for strip in strips}  # without masks all are the same
        return sorted(unlike.values(), key=lambda strip: strip.level)


@torch.no_grad()
def answers(network: Transformer, view: View) -> tuple[Tensor, Tensor, Tensor]:
    """Of each position that a view predicts, (b, l): cross-entropy of the true token, whether the most probable token is
    the true one, and the probability of the most probable one."""

    def score(states: Tensor, targets: Tensor) -> Tensor:
        logits = network.suppress(network.head(states).float(), always=True)
        best = logits.softmax(-1).max(-1)
        return torch.stack((token_losses(logits, targets), (best.indices == targets).float(), best.values), dim=-1)

    was_training = network.training
    network.eval()
    hidden = network.hidden(view.input_ids, view.positions, attention=view.attention)
    states = view.states(hidden, network.config.shifted_logits)[view.predicted]
    found = torch.zeros(*view.predicted.shape, 3, device=states.device)
    found[view.predicted] = in_slices(score, network.config.vocab_size, states, view.targets[view.predicted])
    network.train(was_training)
    loss, right, confidence = found.unbind(-1)
    return loss, right.bool(), confidence


def decode(lm: LM, ids: Tensor, answer: Tensor) -> Generation:
    """The row's answer as the model writes it, a token a step. Where the whole row is answer, its second half is
    written; an answer between given tokens is filled in.
    """
    given = (~answer).nonzero()
    if len(given) and lm.config.attention == "bidirectional":
        canvas = torch.where(answer, lm.require_mask_id(), ids).tolist()
        return infill(lm, [canvas], steps=min(int(answer.sum()), DECODED))[0]
    start = int(given.max()) + 1 if len(given) and answer[-1] else len(ids) // 2
    block = lm.config.block_length or 1
    length = max(block, min(DECODED, len(ids) - start) // block * block)
    block = block if lm.config.attention == "block_causal" else length
    prompt = [ids[:start].tolist()]
    # A whole block may reach past the row, and the row past the context.
    return generate(lm, prompt, gen_length=length, block_length=block, steps=length, allow_long=True)[0]


def _token_texts(lm: LM, ids: list[int]) -> list[str]:
    return [lm.decode([token], skip_special=False) if lm.tokenizer else str(token) for token in ids]
