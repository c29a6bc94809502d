"""Which tokens a draft can draft: those that the answers it learns from are made of."""

from itertools import islice

import numpy as np

from dlm.data.source import build_stream
from dlm.data.tokenizer import Tokenizer
from dlm.errors import UserError
from dlm.training.config import TrainConfig

SEQUENCES = 4096
"""Read at most."""


def frequent_tokens(config: TrainConfig, tokenizer: Tokenizer | None, vocab_size: int) -> list[int] | None:
    """The draft.vocabulary tokens that stand most often in the answers that training reads first, all where it is not set.

    Where there are fewer, the lowest ids are taken beside them. Says on standard output what share they make up.
    """
    size = config.draft.vocabulary
    if size is None:
        return None
    if size > vocab_size:
        raise UserError(f"draft.vocabulary = {size:,} is more than the {vocab_size:,} tokens of draft.target")
    stream = build_stream(config.data, tokenizer, config.train.length, "train", config.train.seed, epochs=1)
    counts = np.zeros(vocab_size, np.int64)
    for sample in islice(stream, SEQUENCES):
        ids, prompt = sample["input_ids"], sample.get("prompt_mask")
        counts += np.bincount(ids if prompt is None else ids[~prompt], minlength=vocab_size)
    chosen = np.argsort(-counts, kind="stable")[:size]
    share, met = counts[chosen].sum() / max(1, counts.sum()), int((counts > 0).sum())
    print(
        f"draft: {size:,} of {vocab_size:,} tokens can be drafted, {share:.2%} of the answers' ({met:,} different ones)"
    )
    return sorted(chosen.tolist())
