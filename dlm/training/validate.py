"""Validation by the likelihood bound on held-out sequences. Knows nothing of optimisers."""

import torch
from torch import Tensor

from dlm.data.loader import BatchLoader, SampleStream
from dlm.diffusion.bound import Estimate, estimate, likelihood_bound
from dlm.models.transformer import Transformer


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
        self.sequences = taken
        self.tokens = sum(int(answer.sum()) for _, answer in self.batches)
        self.bytes = None
        if token_bytes is not None:
            self.bytes = sum(int(token_bytes[ids][answer].sum()) for ids, answer in self.batches)

    @torch.no_grad()
    def bound(self, network: Transformer, mask_id: int, draws: int, seed: int = 0) -> Estimate:
        """The bound of all sequences, with the same masks at every call."""
        device, was_training = network.embed.weight.device, network.training
        network.eval()
        nats, first = [], 0
        for ids, answer in self.batches:
            index = torch.arange(first, first + len(ids), device=device)
            nats.append(
                likelihood_bound(
                    network.predict,
                    ids.to(device),
                    mask_id,
                    answer=answer.to(device),
                    index=index,
                    samples=draws,
                    seed=seed,
                ).cpu()
            )
            first += len(ids)
        network.train(was_training)
        return estimate(torch.cat(nats), self.tokens, self.bytes)
