"""`Batch`: the rows of one optimiser step, as an objective gets them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlm.data.loader import Batch as Rows


@dataclass(frozen=True)
class Batch:
    """Rows of one optimiser step: ids (b, l); where a loss may be taken (b, l); each row's global number (b,)."""

    input_ids: Tensor
    answer: Tensor
    index: Tensor
    step: int
    samples: int  # sequences of the whole step, over all processes
    progress: float = 0.0  # share of the run that is done, for curricula
    order: Tensor | None = None  # (b, l): when a decoder committed each token, counted from 0; trajectories have it
    total: float = 0.0  # what the step's loss is divided by, where `Trainable.total` counts it

    @classmethod
    def of(cls, rows: Rows, device: torch.device, step: int, steps: int, samples: int) -> "Batch":
        """One process's rows as the loader gives them, on the device, in step `step` of `steps`."""
        ids, prompt, order = rows["input_ids"].to(device), rows["prompt_mask"], rows.get("order")
        answer = torch.ones_like(ids, dtype=torch.bool) if prompt is None else ~prompt.to(device)
        order = None if order is None else order.to(device)
        return cls(ids, answer, rows["index"].to(device), step, samples, step / steps, order)

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows start..stop as a batch of the same step."""
        cut = slice(start, stop)
        order = None if self.order is None else self.order[cut]
        return replace(self, input_ids=self.input_ids[cut], answer=self.answer[cut], index=self.index[cut], order=order)

    def until(self, length: int) -> "Batch":
        """The first `length` tokens of every row."""
        order = None if self.order is None else self.order[:, :length]
        return replace(self, input_ids=self.input_ids[:, :length], answer=self.answer[:, :length], order=order)
