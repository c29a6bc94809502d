from collections.abc import Iterator

import numpy as np
import pytest

from dlm.trace import Pieces, TraceStore
from tests.trace.synthetic import run

PIECES = Pieces.of([b"<pad>", b"<end>", b"?", b"[MASK]", *(f" w{i}".encode() for i in range(4, 40))])


@pytest.fixture
def store(tmp_path) -> Iterator[TraceStore]:
    with TraceStore(tmp_path / "traces.db") as store:
        yield store


@pytest.fixture
def filled(store) -> TraceStore:
    """Three traces of a small vocabulary, the store told of its pieces."""
    store.add_pieces("tok", PIECES)
    rng = np.random.default_rng(0)
    for name, model in (("first", "pico"), ("second", "pico"), ("third/1", "sudoku")):
        made = run(rng, 20, 6, vocab=40, prompt=4, edits=0.05, remasks=0.05, keep=("confidence", "digests"), name=name)
        made.trace.context = {"model": model, "tokenizer": "tok", "sampler": {"block_length": 8}}
        made.trace.own = {"seed": len(name)}
        store.put(made.trace)
    store.flush()
    return store
