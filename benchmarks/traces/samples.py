"""Traces of real text, unmasked in a random order: what is stored and timed."""

from collections.abc import Iterator
from random import Random

import numpy as np

from dlm.data.tokenizer import Tokenizer
from dlm.trace.trace import Trace

LENGTH, STEPS, VOCABULARY = 128, 64, 32_000
MASK_ID = 1
TEACH = 3  # one file in this many is used for the dictionary alone
CONTEXT = {
    "model": "pico",
    "weights": "6f1c" * 8,
    "tokenizer": "a0b3" * 8,
    "sampler": {"steps": STEPS, "temperature": 0.0},
}


def samples(traces: int, tokenizer: str | None) -> tuple[list[Trace], list[Trace]]:
    """`traces` traces to store, and half as many of other files to learn a dictionary from; ids have 8 characters."""
    stored, lessons = _ids(_tokenizer(tokenizer), traces * LENGTH, traces // 2 * LENGTH)
    rng, name = np.random.default_rng(0), Random(0)
    return [list(_traces(ids, rng, name)) for ids in (stored, lessons)]  # type: ignore[return-value]


def _traces(ids: np.ndarray, rng: np.random.Generator, name: Random) -> Iterator[Trace]:
    rows = ids.reshape(-1, LENGTH)
    for i in rng.permutation(len(rows)).tolist():
        yield Trace(
            request_id=f"{name.getrandbits(32):08x}",
            mask_id=MASK_ID,
            num_steps=STEPS,
            first_step=rng.permutation(np.repeat(np.arange(STEPS, dtype=np.int32), LENGTH // STEPS)),
            first_token=rows[i],
            own={"seed": i},
            context=CONTEXT,
        )


def _ids(tokenizer: Tokenizer, store: int, teach: int) -> list[np.ndarray]:
    """Token ids of Python's source files: `store` of them and, of other files, `teach`. Too few are repeated."""
    from dlm.data.lines import STDLIB
    from dlm.data.source import rows_of

    sizes, found = (store, teach), ([], [])
    for number, row in enumerate(rows_of(STDLIB, "train")):
        sort = int(number % TEACH == 0)
        if len(found[sort]) < sizes[sort]:
            found[sort].extend(tokenizer.encode(row.value["text"], special=False))
        if all(len(ids) >= size for ids, size in zip(found, sizes, strict=True)):
            break
    return [np.resize(np.array(ids, np.int32), size) for ids, size in zip(found, sizes, strict=True)]


def _tokenizer(name: str | None) -> Tokenizer:
    """The named one, or a byte-level BPE of 32,000 tokens learnt from the same files."""
    from dlm.data.tokenizer import load_tokenizer
    from dlm.models.finding import find_tokenizer

    if name is not None:
        return load_tokenizer(find_tokenizer(name))
    import tokenizers

    from dlm.data.lines import STDLIB
    from dlm.data.source import training_texts

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learn = tokenizers.trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["[MASK]"], show_progress=False)
    backend.train_from_iterator(training_texts(STDLIB), learn)
    return Tokenizer(backend)
