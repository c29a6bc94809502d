"""Every model, decoding and task of a config in turn: records as they come, then one file of results.

The results hold no time and no name of a machine, so the same evaluation gives the same file, killed and run again or not;
how long things took stands beside it.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm.atomic import write_text
from dlm.errors import UserError
from dlm.evaluation.sandbox import Sandbox
from dlm.evaluation.suite.compare import paired
from dlm.evaluation.suite.config import EvalConfig
from dlm.evaluation.suite.decoded import Decoded, Recording
from dlm.evaluation.suite.decoding_section import DecodingSection
from dlm.evaluation.suite.records import Records, plain
from dlm.evaluation.suite.task_section import TaskSection
from dlm.evaluation.suite.trial import Record, Setting, Trial, Whole
from dlm.evaluation.suite.trials import TRIALS

if TYPE_CHECKING:
    from dlm.models.lm import LM

Say = Callable[[str], None]
WATCHED = ("dlm", "torch", "transformers", "numpy", "lm_eval")
"""Packages whose versions are noted."""
NONE = DecodingSection(name="–")
"""The decoding of a task that needs none."""


@dataclass
class Results:
    """What `evaluate_all` found: `values` is what the file holds."""

    values: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)


def evaluate_all(config: EvalConfig, say: Say = lambda line: None) -> Results:
    """Run everything that is not done yet, and write the file. Raises UserError before anything is decoded."""
    if not config.task:
        raise UserError(
            "nothing to evaluate: give a --config with a [[task]], as in --config eval/pico, or --task FILE.py"
        )
    file = config.output.file
    _require_folder(file)
    with Evaluation(config, say) as evaluation:
        for name in config.eval.models:
            evaluation.add(name)
    about = {**evaluation.about, "versions": versions()}
    values = plain({"config": settings_of(config), "about": about, "runs": evaluation.runs})
    write_text(file, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    write_text(file.with_suffix(".times.json"), json.dumps(evaluation.seconds, indent=1, ensure_ascii=False) + "\n")
    return Results(values, evaluation.seconds)


class Evaluation:
    """What an evaluation has found so far, and the files and processes that it keeps open."""

    def __init__(self, config: EvalConfig, say: Say) -> None:
        self.config, self.say = config, say
        self.about: dict[str, Any] = {"models": {}, "data": {}}
        self.runs: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        file = config.output.file
        self.records = Records(file.with_suffix(".records.jsonl"))
        self.sandbox = Sandbox(config.eval.workers, allow_unsandboxed=config.eval.allow_unsandboxed)
        self.store = None
        if config.output.traces:
            from dlm.trace.store import TraceStore

            self.store = TraceStore(file.with_suffix(".traces.db"), overwrite=True)

    def __enter__(self) -> "Evaluation":
        return self

    def __exit__(self, *_: object) -> None:
        self.sandbox.close()
        self.records.close()
        if self.store is not None:
            self.store.close()

    def add(self, model: str) -> None:
        """All tasks and decodings of one model; every mistake in the settings is said before any work."""
        from dlm.models.loading import load

        config = self.config
        lm = load(model, dtype=config.eval.dtype, device=config.eval.device)
        self.about["models"][model] = facts_of(lm)
        setting = Setting(config=config, sandbox=self.sandbox)
        trials = [TRIALS[task.kind](lm, task, setting) for task in config.tasks()]
        for trial in trials:
            for way in config.decodings() if trial.decodes else ():
                trial.check(way)
        for trial in trials:
            self.about["data"][trial.task.label] = {"digest": trial.digest(), "items": len(trial.names)}
            self.runs += self._rows(model, trial)

    def _rows(self, model: str, trial: Trial) -> list[dict[str, Any]]:
        """A task under each decoding, compared with the reference."""
        ways = self.config.decodings() if trial.decodes else [NONE]
        found = [(way, self._records_of(model, trial, way)) for way in ways]
        names, seed = [way.label for way in ways], self.config.eval.seed
        reference = self.config.eval.reference if self.config.eval.reference in names else names[0]
        base = found[names.index(reference)][1]
        rows = []
        for way, done in found:
            row = {"model": model, "task": trial.task.label, "kind": trial.task.kind, "decoding": way.label}
            row |= {"way": way.way} if trial.decodes else {}
            row |= {"items": len(done), "measure": trial.measure, "metrics": trial.summary(done)}
            if isinstance(trial, Decoded) and done and way.label != reference:
                ours, theirs = ([trial.value(record) for record in run] for run in (done, base))
                sizes = [trial.size(record) for record in done], [trial.size(record) for record in base]
                compared = paired(ours, theirs, seed, None if {*sizes[0], *sizes[1]} == {1.0} else sizes)
                row["against"] = {"reference": reference, **compared}
            rows.append(row)
        return rows

    def _records_of(self, model: str, trial: Trial, way: DecodingSection) -> list[Record]:
        """A run's records: those of an earlier attempt, and the rest made now."""
        key = {"model": self.about["models"][model], "seed of the items' seeds": self.config.eval.seed}
        key |= {"task": _facts(trial.task), "decoding": _facts(way), "engine": _engine(self.config)}
        run = blake2b(json.dumps(plain(key), sort_keys=True).encode(), digest_size=8).hexdigest()
        label, started = f"{model} · {trial.task.label} · {way.label}", time.perf_counter()

        def say(line: str) -> None:
            self.say(f"{label}: {line}")

        try:
            if isinstance(trial, Whole):
                return self._whole(trial, way, run, say)
            assert isinstance(trial, Decoded)
            return self._decoded(trial, way, run, say)
        finally:
            self.seconds[label] = time.perf_counter() - started

    def _whole(self, trial: Whole, way: DecodingSection, run: str, say: Say) -> list[Record]:
        records, data = self.records, trial.digest()
        if (listed := records.of(run, data, "all items")) is None:
            say("measuring")
            items = trial.measured(way)
            listed = {"item": "all items", "names": [record["item"] for record in items]}
            records.add(run, [data] * (len(items) + 1), [*items, listed])
        return [record for name in listed["names"] if (record := records.of(run, data, name)) is not None]

    def _decoded(self, trial: Decoded, way: DecodingSection, run: str, say: Say) -> list[Record]:
        records, size = self.records, self.config.eval.batch_size
        into = None if self.store is None else Recording(store=self.store, run=run)
        items = [(trial.digest_of(number), name) for number, name in enumerate(trial.names)]
        todo = [number for number, (digest, name) in enumerate(items) if records.of(run, digest, name) is None]
        for start in range(0, len(todo), size):
            numbers = todo[start : start + size]
            made = trial.judge(numbers, trial.answers(numbers, way, into))
            if self.store is not None:
                self.store.flush()  # no record without its trace
            records.add(run, [items[number][0] for number in numbers], made)
            say(f"{len(items) - len(todo) + start + len(numbers)} of {len(items)}")
        return [record for digest, name in items if (record := records.of(run, digest, name)) is not None]


def _facts(section: TaskSection | DecodingSection) -> dict[str, Any]:
    """What decides a run: what is called how does not. A default that is named counts: a model may recommend another."""
    return section.model_dump(mode="json", exclude={"name", "limit"}, exclude_unset=True)


def _engine(config: EvalConfig) -> dict[str, Any]:
    return config.engine.model_dump(mode="json", exclude_defaults=True)


def settings_of(config: EvalConfig) -> dict[str, Any]:
    """The config as it was written down, for `--again`: without where results go."""
    return config.model_dump(mode="json", exclude_unset=True, exclude={"output"})


def facts_of(lm: "LM") -> dict[str, Any]:
    """Which model this is: what another one would differ in."""
    from dlm.models.fingerprint import weights_digest

    tokenizer = (
        None if lm.tokenizer is None else blake2b(lm.tokenizer.backend.to_str().encode(), digest_size=16).hexdigest()
    )
    advice = lm.generation.get("dlm")
    return {
        **({"recommended": advice} if advice else {}),
        "family": lm.config.model_type,
        "weights": weights_digest(lm.network),
        "tokenizer": tokenizer,
        "dtype": str(lm.dtype).removeprefix("torch."),
    }


def versions() -> dict[str, str]:
    """Of the packages that matter, those that are installed."""
    found = {}
    for name in WATCHED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _require_folder(file: Path) -> None:
    if not file.parent.is_dir():
        raise UserError(f"output.file = {file}: no such folder: {file.parent} (make it, or give another)")
    if file.is_dir() or file.suffix != ".json":
        raise UserError(f"output.file = {file}: give a file that ends in .json")
