"""Warming up: what compiling and recording cost is paid before the first request, by decoding texts that nobody reads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm.inference.engine import Engine

Progress = Callable[[int, int], None]
"""How many batches are done, and of how many."""


def warm_up(
    engine: "Engine",
    batches: Sequence[int] | None,
    lengths: Sequence[int],
    progress: Progress | None,
    settings: dict[str, Any],
) -> int:
    """Decode each number of requests at each prompt length; returns how many graphs there are afterwards."""
    most = engine.config.max_num_requests
    sizes = [min(1 << i, most) for i in range((most - 1).bit_length() + 1)] if batches is None else list(batches)
    work = [(size, length) for length in lengths for size in dict.fromkeys(sizes)]
    graphs = engine.batch.stepper.compute.graphs
    with unheard(engine):
        for number, (size, length) in enumerate(work):
            engine.generate([[number % 2] * length] * size, **settings)
            if progress is not None:
                progress(number + 1, len(work))
    return 0 if graphs is None else len(graphs.recorded)


@contextmanager
def unheard(engine: "Engine") -> Iterator[None]:
    """What is decided here is neither traced nor counted, nor told to anyone."""
    batch, recording = engine.batch, engine.recording
    counted = batch.on_step, batch.finished, batch.tokens, batch.stepper.nfe, batch.stepper.rows
    engine.recording, batch.on_step = None, None
    try:
        yield
    finally:
        engine.recording = recording
        batch.on_step, batch.finished, batch.tokens, batch.stepper.nfe, batch.stepper.rows = counted
