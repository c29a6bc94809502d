"""Records how a teacher decodes prompts, or in which order it would write given answers, in a trace store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dlm.data.source import build_stream
from dlm.errors import UserError
from dlm.inference.config import EngineConfig
from dlm.inference.generation import engine_for
from dlm.inference.recording import Store
from dlm.models.lm import LM
from dlm.models.loading import load
from dlm.prepare.config import TrajectoriesConfig
from dlm.prepare.tasks import Task, Tasks
from dlm.trace.record import Recorder
from dlm.trace.store import TraceStore

COLUMNS = (TextColumn("[bold]prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


@dataclass(frozen=True)
class Prepared:
    """What `prepare` returns: prompts of the data, their trajectories, and trajectories recorded by this call."""

    prompts: int
    trajectories: int
    made: int


def prepare(config: TrajectoriesConfig) -> Prepared:
    """Record a trajectory for each prompt of the data's training split; what `dlm-prepare trajectories` calls.

    What the store has already is not made again, so a stopped run goes on where it was. A batch with anything missing
    is decoded as a whole, so that every request runs with the same others.
    """
    t = config.trajectories
    lm = load(**config.model.model_dump())
    stream = build_stream(config.data, lm.tokenizer, t.length, "train", config.sampler.seed, epochs=1)
    tasks, console = Tasks(lm, config), Console(stderr=True)
    prompts, made, names = 0, 0, set[str]()
    with TraceStore(t.store) as store, Progress(*COLUMNS, console=console, disable=not console.is_terminal) as bar:
        sizes = [size for size in (t.samples, getattr(stream, "samples_per_epoch", None)) if size is not None]
        task = bar.add_task("prompts", total=min(sizes, default=None))
        samples = islice(stream, t.samples)
        while batch := list(islice(samples, t.batch_size)):
            new = [one for sample in batch for one in tasks.of(sample) if one.name not in names]
            new = list({one.name: one for one in new}.values())
            names |= {one.name for one in new}
            made += record(lm, config.engine, new, store, {"responses": t.responses})
            prompts += len(batch)
            bar.advance(task, len(batch))
        if t.parquet is not None:
            store.export(t.parquet)
    return Prepared(prompts, len(names), made)


def record(lm: LM, engine: EngineConfig, tasks: Sequence[Task], store: TraceStore, facts: Mapping[str, Any]) -> int:
    """Decode a batch, if anything of it is missing in the store; returns how many traces, with these facts, that made."""
    missing = {task.name for task in tasks if task.name not in store}
    if not missing:
        return 0
    decodings = [task.decoding for task in tasks]
    decoder = engine_for(lm, decodings, engine, len(tasks), trace=cast(Store, _Missing(store, missing)))
    for task in tasks:
        decoder.submit(task.decoding, task.given, dict(facts))
    for event in decoder.stream():
        if event.error is not None:
            raise UserError(f"request {event.request_id!r}: {event.error}")
    store.flush()
    return len(missing)


class _Missing:
    """A store that records these requests alone."""

    def __init__(self, store: TraceStore, names: set[str]) -> None:
        self.store, self.names = store, names

    def add_tokenizer(self, tokenizer: str, content: str) -> None:
        self.store.add_tokenizer(tokenizer, content)

    def recorder(self, request_id: str, prompt: Any, **facts: Any) -> Recorder | None:
        return self.store.recorder(request_id, prompt, **facts) if request_id in self.names else None
