"""Fills holes in texts with a model, and records those that hold up: training on them is rejection sampling (RAFT, arXiv 2304.06767)."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dlm.data.documents import text_of
from dlm.data.lines import LineTask, lines_of, parses, small_functions
from dlm.data.source import rows_of
from dlm.errors import UserError
from dlm.inference.decoding import infillings
from dlm.inference.generation import engine_for
from dlm.models.fingerprint import weights_digest
from dlm.models.lm import LM
from dlm.models.loading import load
from dlm.prepare.config import FillingsConfig
from dlm.prepare.tasks import Given, Task
from dlm.prepare.trajectories import record
from dlm.trace.store import TraceStore
from dlm.training.scoring import sequence_nats

COLUMNS = (TextColumn("[bold]holes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
OF_A_TEXT = 6
"""Lines of a text that are tried, and functions."""
AHEAD = 16
"""Tokens after a hole whose likelihood the judge counts, too."""


@dataclass(frozen=True)
class Filled:
    """What `fill` returns: holes, those of them with a fill that was kept, and what was recorded by this call."""

    holes: int
    kept: int
    made: int


@dataclass(frozen=True)
class Hole:
    """A line missing from a text, as the model sees it."""

    name: str
    seed: int
    task: LineTask
    before: list[int]
    masks: int
    after: list[int]
    truth: list[int] | None
    """The line's own tokens, where they are to be kept, too."""

    def canvas(self, middle: Sequence[int]) -> list[int]:
        """The window with this in the hole."""
        return [*self.before, *middle, *self.after]


def fill(config: FillingsConfig) -> Filled:
    """Fill holes in the data's training split and record the fills that are kept; what `dlm-prepare fillings` calls.

    A trace has the kept tokens in the order in which the model would have written them. What the store has already is
    not made again, so a stopped run goes on where it was.
    """
    f, console = config.fillings, Console(stderr=True)
    lm = load(**config.model.model_dump())
    judge = _judge(config, lm)
    kept = made = count = 0
    with TraceStore(f.store) as store, Progress(*COLUMNS, console=console, disable=not console.is_terminal) as bar:
        task, holes = bar.add_task("holes", total=f.holes), islice(_holes(lm, config), f.holes)
        while batch := list(islice(holes, f.batch_size)):
            count += len(batch)
            done = [hole for hole in batch if f"{hole.name}-own" in store]
            new = {hole.name: hole for hole in batch if hole not in done}
            found = _chosen(lm, judge, config, list(new.values()))
            made += record(lm, config.engine, _tasks(lm, config, found), store, {"responses": "filled"})
            kept += len(done) + len(found)
            bar.advance(task, len(batch))
    if not count:
        raise UserError(
            f'data.source = "{config.data.source}": no text has a line of code to take out: holes are made in Python files'
        )
    return Filled(count, kept, made)


# --- holes ----------------------------------------------------------------------------------------------------------


def _holes(lm: LM, config: FillingsConfig) -> Iterator[Hole]:
    """Holes in texts drawn without end of order: every text once, in an order of the seed's."""
    f, tokenizer = config.fillings, lm.require_tokenizer()
    texts = [text_of(row, config.data) for row in rows_of(config.data, "train")]
    settings = {
        "weights": weights_digest(lm.network),
        "sampler": config.sampler.model_dump(),
        "engine": config.engine.model_dump(include={"cache", "refresh_interval", "cache_delay"}),
        "fillings": f.model_dump(include={"check", "judge"}),
    }
    identity = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    for number in np.random.default_rng(config.sampler.seed).permutation(len(texts)).tolist():
        rng = np.random.default_rng((config.sampler.seed, number))
        for task in _lines(texts[number], f.functions, rng):
            before, line, after = tokenizer.encode_batch([task.prefix, task.line, task.suffix], special=False)
            left, right = rng.integers(f.context[0], f.context[1] + 1, 2).tolist()
            masks = len(line) if rng.random() < f.as_long else int(rng.integers(f.hole_tokens[0], f.hole_tokens[1] + 1))
            truth = line if rng.random() < f.truths else None
            if not line or len(line) > 2 * f.hole_tokens[1]:
                continue
            shown = tokenizer.begun(before) if left >= len(before) else before[len(before) - left :]
            name = identity.copy()
            name.update(json.dumps([shown, masks, after[:right], truth]).encode())
            seed = int.from_bytes(name.digest()[:7], "big")
            yield Hole(f"filling-{name.hexdigest()}", seed, task, shown, masks, after[:right], truth)


def _lines(text: str, functions: float, rng: np.random.Generator) -> Iterator[LineTask]:
    """Lines of the text, and of its small functions as texts by themselves."""
    whole = list(lines_of("text", text, context=0))
    small = list(small_functions(text))
    for number in rng.permutation(len(whole))[:OF_A_TEXT].tolist():
        if rng.random() >= functions:
            yield whole[number]
    for number in rng.permutation(len(small))[:OF_A_TEXT].tolist():
        inner = [task for task in lines_of("function", small[number], context=0, shortest=4) if "\n" in task.prefix]
        if inner and rng.random() < functions:
            yield inner[int(rng.integers(len(inner)))]


# --- fills ----------------------------------------------------------------------------------------------------------


def _chosen(lm: LM, judge: LM | None, config: FillingsConfig, holes: Sequence[Hole]) -> list[tuple[Hole, list[int]]]:
    """Each hole that has a fill worth keeping, with the best one."""
    found = []
    for hole, fills in zip(holes, _fills(lm, config, holes), strict=True):
        good = [fill for fill in fills if _holds(lm, config, hole, fill)]
        if good:
            costs = [0.0] * len(good) if judge is None else _costs(lm, judge, hole, good)
            found.append((hole, good[costs.index(min(costs))]))
    return found


def _fills(lm: LM, config: FillingsConfig, holes: Sequence[Hole]) -> list[list[list[int]]]:
    """The tokens of every sample of every hole, each once."""
    if not holes:
        return []
    mask, owners, decodings = lm.require_mask_id(), [], []
    for number, hole in enumerate(holes):
        settings = config.sampler.model_copy(update={"seed": hole.seed, "check": "none"})
        made = infillings(lm, [hole.canvas([mask] * hole.masks)], settings, where="[sampler]", request_ids=[hole.name])
        owners += [number] * len(made)
        decodings += made
    engine = engine_for(lm, decodings, config.engine, len(decodings))
    for decoding in decodings:
        engine.submit(decoding)
    tokens: dict[str, list[int]] = {}
    for event in engine.stream():
        if event.error is not None:
            raise UserError(f"request {event.request_id!r}: {event.error}")
        if event.result is not None:
            tokens[event.request_id] = list(event.result.tokens)
    found: list[list[list[int]]] = [[] for _ in holes]
    for number, decoding in zip(owners, decodings, strict=True):
        if (fill := tokens[decoding.request.request_id]) not in found[number]:
            found[number].append(fill)
    return found


def _holds(lm: LM, config: FillingsConfig, hole: Hole, fill: Sequence[int]) -> bool:
    if lm.eos_id in fill or lm.mask_id in fill:
        return False
    return config.fillings.check == "none" or parses(hole.task.filled(lm.decode(fill)))


def _judge(config: FillingsConfig, lm: LM) -> LM | None:
    if config.fillings.judge is None:
        return None
    judge, where = (
        load(config.fillings.judge, device=config.model.device),
        f'fillings.judge = "{config.fillings.judge}"',
    )
    if judge.config.attention != "causal":
        raise UserError(f"{where} is no autoregressive model: its likelihoods would be bounds alone")
    if judge.require_tokenizer().fingerprint != lm.require_tokenizer().fingerprint:
        raise UserError(
            f"{where} has other tokens than model {lm.name!r}: take one that was trained with the same tokenizer"
        )
    return judge


def _costs(lm: LM, judge: LM, hole: Hole, fills: Sequence[Sequence[int]]) -> list[float]:
    """Nats of each fill and of what comes right after it, given what comes before."""
    first, *before = lm.require_tokenizer().begun(hole.before) or [judge.eos_id]
    ids = torch.tensor([[*before, *fill, *hole.after[:AHEAD]] for fill in fills], device=judge.device)
    answer = torch.zeros_like(ids, dtype=torch.bool)
    answer[:, len(before) :] = True
    with torch.inference_mode():
        return sequence_nats(judge.network, ids, answer=answer, first=first)[:, 0].tolist()


def _tasks(lm: LM, config: FillingsConfig, found: Sequence[tuple[Hole, list[int]]]) -> list[Task]:
    """What is to be recorded: the fills, and the lines that were there where they are kept, too."""
    tasks, mask = [], lm.require_mask_id()
    settings = config.sampler.model_copy(update={"temperature": 0.0, "num_samples": 1, "check": "none"})
    for hole, fill in found:
        for kind, middle in (("own", fill), ("true", hole.truth)):
            if middle is not None:
                name: dict[str, Any] = {"where": "[sampler]", "request_ids": [f"{hole.name}-{kind}"]}
                (decoding,) = infillings(lm, [hole.canvas([mask] * len(middle))], settings, **name)
                tasks.append(Task(decoding, Given(np.array(hole.canvas(middle)))))
    return tasks
