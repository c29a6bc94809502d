"""Warming up: what compiling and recording cost is paid before the first request, by decoding texts that nobody reads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dlm.inference.config import SamplerConfig
from dlm.inference.plan import Plan
from dlm.inference.readers import FILLS

if TYPE_CHECKING:
    from dlm.inference.engine import Engine

Progress = Callable[[int, int], None]
"""How many batches are done, and of how many."""
LEFT_OUT = frozenset({"gen_length", "max_gen_length", "steps", "num_samples", "stop", *FILLS})
"""Settings that say how much is written, and how much of it is given out."""
STEPS = 8
"""Of a block."""


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


def start_up(engine: "Engine", sampler: SamplerConfig, batches: Sequence[int] | None, progress: Progress) -> None:
    """Warm an engine on a GPU up for requests of these settings, before it takes the first one; nothing elsewhere.

    Two blocks of a few steps each meet the sizes that a whole text has.
    """
    config = engine.lm.config
    if engine.lm.device.type != "cuda":
        return
    settings = {name: getattr(sampler, name) for name in sampler.model_fields_set - LEFT_OUT}
    wanted = None if sampler.gen_length == "auto" else sampler.gen_length
    block = Plan(config=config, block_length=sampler.block_length).length_of_block(wanted)
    blocks = 2 if wanted is None else max(1, min(2, wanted // block))
    settings["gen_length"] = min(wanted or STEPS, STEPS) if config.attention == "causal" else blocks * block
    if config.attention != "causal":
        settings["steps"] = blocks * min(STEPS, sampler.steps or STEPS)
    length = min(64, config.context_length - settings["gen_length"])
    engine.warm_up(batches=batches, lengths=(max(1, length),), progress=progress, **settings)


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
