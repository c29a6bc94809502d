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
from dlm.evaluation.suite.config import DecodingSection, EvalConfig, TaskSection
from dlm.evaluation.suite.records import Records, plain
from dlm.evaluation.suite.trial import Record, Setting, Trial
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
    from dlm.models.loading import load

    if not config.task:
        raise UserError(
            "nothing to evaluate: give a --config with a [[task]], as in --config eval/pico, or --task FILE.py"
        )
    file = config.output.file
    _require_folder(file)
    records = Records(file.with_suffix(".records.jsonl"))
    runs: list[dict[str, Any]] = []
    about: dict[str, Any] = {"models": {}, "data": {}}
    seconds: dict[str, float] = {}
    workers = config.eval.workers
    try:
        with Sandbox(workers, allow_unsandboxed=config.eval.allow_unsandboxed) as sandbox:
            for name in config.eval.models:
                lm = load(name, dtype=config.eval.dtype, device=config.eval.device)
                about["models"][name] = facts_of(lm)
                trials = [TRIALS[task.kind](lm, task, Setting(config=config, sandbox=sandbox)) for task in config.task]
                for trial in trials:  # every mistake in the settings, before any work
                    _check(trial, config)
                for trial in trials:
                    about["data"][trial.task.label] = {"digest": trial.digest(), "items": len(trial.names)}
                    runs += _runs(config, name, lm, trial, about, records, seconds, say)
    finally:
        records.close()
    values = plain({"config": settings_of(config), "about": {**about, "versions": versions()}, "runs": runs})
    write_text(file, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    write_text(file.with_suffix(".times.json"), json.dumps(seconds, indent=1, ensure_ascii=False) + "\n")
    return Results(values, seconds)


def _check(trial: Trial, config: EvalConfig) -> None:
    if trial.names and trial.decodes and not hasattr(trial, "measured_with"):
        for way in config.decodings():
            trial.decoding(0, way)


def _runs(
    config: EvalConfig,
    model: str,
    lm: "LM",
    trial: Trial,
    about: dict[str, Any],
    records: Records,
    seconds: dict[str, float],
    say: Say,
) -> list[dict[str, Any]]:
    """A task under each decoding, compared with the reference."""
    ways = config.decodings() if trial.decodes else [NONE]
    found: list[tuple[DecodingSection, list[Record]]] = []
    for way in ways:
        key = {"model": about["models"][model], "data": about["data"][trial.task.label], "seed": config.eval.seed}
        key |= {"task": _facts(trial.task), "decoding": _facts(way), "engine": _engine(config)}
        run = blake2b(json.dumps(plain(key), sort_keys=True).encode(), digest_size=8).hexdigest()
        started = time.perf_counter()
        label = f"{model} · {trial.task.label} · {way.label}"
        done = _measured(trial, way, run, records, config.eval.batch_size, lambda line, l=label: say(f"{l}: {line}"))
        seconds[label] = time.perf_counter() - started
        found.append((way, done))
    names = [way.label for way, _ in found]
    reference = config.eval.reference if config.eval.reference in names else names[0]
    base = found[names.index(reference)][1]
    rows = []
    for way, done in found:
        row = {"model": model, "task": trial.task.label, "kind": trial.task.kind, "decoding": way.label}
        row |= {"items": len(done), "measure": trial.measure, "metrics": trial.summary(done)}
        if trial.decodes and way.label != reference and trial.measure in (done[0] if done else {}):
            compared = paired([trial.value(r) for r in done], [trial.value(r) for r in base], config.eval.seed)
            row["against"] = {"reference": reference, **compared}
        rows.append(row)
    return rows


def _measured(trial: Trial, way: DecodingSection, run: str, records: Records, size: int, say: Say) -> list[Record]:
    """The records of a run: those of an earlier attempt, and the rest made now."""
    measured = getattr(trial, "measured", None)
    if measured is not None or hasattr(trial, "measured_with"):
        items = [record for name in trial.names if (record := records.of(run, name)) is not None]
        if len(items) < len(trial.names) or records.of(run, "all items") is None:
            say("measuring")
            items = [measured()] if measured is not None else trial.measured_with(way)  # type: ignore[attr-defined]
            names = [record["item"] for record in items]
            records.add(run, [*items, {"item": "all items", "names": names}])
        listed = records.of(run, "all items")
        assert listed is not None
        return [record for name in listed["names"] if (record := records.of(run, name)) is not None]
    todo = [number for number, name in enumerate(trial.names) if records.of(run, name) is None]
    for start in range(0, len(todo), size):
        numbers = todo[start : start + size]
        records.add(run, trial.judge(numbers, trial.answers(numbers, way)))
        say(f"{len(trial.names) - len(todo) + start + len(numbers)} of {len(trial.names)}")
    found = [records.of(run, name) for name in trial.names]
    return [record for record in found if record is not None]


def _facts(section: TaskSection | DecodingSection) -> dict[str, Any]:
    """What decides a run: what is called how does not."""
    return section.model_dump(mode="json", exclude={"name", "limit"}, exclude_defaults=True)


def _engine(config: EvalConfig) -> dict[str, Any]:
    return config.engine.model_dump(mode="json", exclude_defaults=True)


def settings_of(config: EvalConfig) -> dict[str, Any]:
    """The config as the file keeps it, for `--again`: without where results go."""
    return config.model_dump(mode="json", exclude_defaults=True, exclude={"output"})


def facts_of(lm: "LM") -> dict[str, Any]:
    """Which model this is: what another one would differ in."""
    from dlm.models.fingerprint import weights_digest

    tokenizer = (
        None if lm.tokenizer is None else blake2b(lm.tokenizer.backend.to_str().encode(), digest_size=16).hexdigest()
    )
    return {
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
