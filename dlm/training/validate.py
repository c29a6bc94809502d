"""Validation on held-out sequences: the likelihood, or its bound."""

import torch
from torch import Tensor

from dlm.data.config import DataConfig
from dlm.data.loader import BatchLoader, SampleStream
from dlm.data.source import build_stream
from dlm.data.tokenizer import Tokenizer
from dlm.diffusion.bound import Estimate, estimate
from dlm.training.scoring import TokenCosts
from dlm.training.trainable import Trainable


class HeldOut:
    """A fixed set of held-out sequences, read once; `bytes` counts what their answers decode to."""

    def __init__(self, stream: SampleStream, sequences: int, batch_size: int, token_bytes: Tensor | None) -> None:
        self.batches = []
        loader = BatchLoader(stream, min(batch_size, sequences), keep_partial=True)
        taken = 0
        for batch in loader:
            keep = min(len(batch["input_ids"]), sequences - taken)
            prompt = batch["prompt_mask"]
            ids = batch["input_ids"][:keep]
            answer = torch.ones_like(ids, dtype=torch.bool) if prompt is None else ~prompt[:keep]
            self.batches.append((ids, answer))
            taken += keep
            if taken >= sequences:
                break
        self.sequences, self.length = taken, max((ids.shape[1] for ids, _ in self.batches), default=0)
        self.tokens = sum(int(answer.sum()) for _, answer in self.batches)
        self.bytes = None
        if token_bytes is not None:
            self.bytes = sum(int(token_bytes[ids][answer].sum()) for ids, answer in self.batches)

    @classmethod
    def of(
        cls, data: DataConfig, tokenizer: Tokenizer | None, length: int, sequences: int, batch_size: int, seed: int
    ) -> "HeldOut | None":
        """The first `sequences` of the held-out split of `data`, or all of it where it has fewer; None where it is empty.

        A split with less text than one sequence is one shorter sequence.
        """
        stream = build_stream(data, tokenizer, length, "heldout", seed, shorten=True)
        sizes = None if tokenizer is None or data.source == "sudoku" else torch.as_tensor(tokenizer.token_bytes)
        found = cls(stream, sequences, batch_size, sizes)
        return found if found.batches else None

    @torch.no_grad()
    def bound(self, model: Trainable | TokenCosts, draws: int, seed: int = 0) -> Estimate:
        """The cost of all sequences, or a bound on it, from the same masks at every call."""
        was_training = model.network.training
        model.network.eval()
        nats, first = [], 0
        for ids, answer in self.batches:
            index = torch.arange(first, first + len(ids))
            nats.append(model.nats(ids, answer, index, draws, seed).cpu())
            first += len(ids)
        model.network.train(was_training)
        return estimate(torch.cat(nats), self.tokens, self.bytes, model.exact)
