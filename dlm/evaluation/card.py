"""The model card: how a run went and what was measured, as Markdown. It states only figures it is given."""

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm.errors import UserError
from dlm.evaluation.table import markdown
from dlm.fields import NOTHING


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run, read from its folder."""

    steps: int
    tokens: int
    seconds: float
    """Spent in optimiser steps; validation and saving are not counted."""
    bound: tuple[float, float | None] | None
    """The last validation's, in nats a token, with its standard error; of one draw it has none."""
    settings: dict[str, Any]
    """What the run's config says beyond the defaults, without folders."""

    @classmethod
    def read(cls, folder: str | Path) -> "Run":
        """From metrics.jsonl and the newest checkpoint's config.json."""
        from dlm.training.checkpoint import found

        folder = Path(folder)
        metrics = folder / "metrics.jsonl"
        if not metrics.is_file():
            raise UserError(f"{folder} has no metrics.jsonl, so it is no run folder: give the folder train.out named")
        rows = [json.loads(line) for line in metrics.read_text("utf-8").splitlines() if line.strip()]
        steps = [row for row in rows if "loss" in row]
        if not steps:
            raise UserError(f"{metrics} has no training step yet: wait for the first")
        bounds = [row for row in rows if "bound" in row]
        checkpoints = found(folder / "checkpoints")
        if not checkpoints:
            raise UserError(f"{folder} has no checkpoint, so no config of the run: keep checkpoints/ for the card")
        config = json.loads((checkpoints[0] / "config.json").read_text("utf-8"))
        return cls(
            steps=steps[-1]["step"],
            tokens=steps[-1]["tokens"],
            seconds=steps[-1]["seconds"],
            bound=(bounds[-1]["bound"], bounds[-1]["bound_error"]) if bounds else None,
            settings=changed(config),
        )


def changed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a `TrainConfig`, as a table, that differs from the defaults; where files lie says nothing of the model."""
    from dlm.training.config import TrainConfig

    found = _difference(config, TrainConfig.model_validate({}).model_dump(mode="json"))
    for key in ("out", "resume", "threads"):
        found.get("train", {}).pop(key, None)
    found.get("model", {}).pop("vocab_size", None)  # the tokenizer's; the card states it
    found.get("data", {}).pop("site_packages_path", None)
    for key in ("log", "checkpoint"):
        found.pop(key, None)
    if found.get("train", {}).get("tokenizer"):
        found["train"]["tokenizer"] = f"runs/{Path(found['train']['tokenizer']).name}"
    return {section: values for section, values in found.items() if values != {}}


def _difference(table: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in table.items():
        usual = default.get(key)
        if isinstance(value, dict) and isinstance(usual, dict):
            if inner := _difference(value, usual):
                found[key] = inner
        elif value != usual:
            found[key] = NOTHING if value is None else value  # TOML has no null
    return found


@dataclass(frozen=True, kw_only=True)
class Table:
    """A heading, what to know when reading it, and rows."""

    title: str
    text: str
    headings: dict[str, str]
    rows: list[dict[str, Any]]

    def __str__(self) -> str:
        return f"### {self.title}\n\n{self.text}\n\n{markdown(self.rows, self.headings)}"


@dataclass(frozen=True, kw_only=True)
class About:
    """What a card says in words. Every field is a paragraph of Markdown."""

    summary: str
    use: str
    data: str
    limits: str
    tags: tuple[str, ...] = ()
    method: str = "masked-diffusion"
    """How the model writes, as a tag."""
    config: str | None = None
    """The shipped config that trains it, where it has another name than the model."""
    before: tuple[str, ...] = ()
    """Commands that come before its training."""


def render_card(
    name: str,
    *,
    about: About,
    run: Run,
    tables: Sequence[Table],
    facts: Mapping[str, str],
    hardware: str,
    recommended: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """README.md of a model's folder. `facts` are further lines of the training table; `hardware` is what it ran on.

    `recommended` is what its generation_config.json says under "dlm": sampler settings for generate and infill.
    """
    header = ["---", "license: apache-2.0", "library_name: dlm", "tags:"]
    header += [f"- {tag}" for tag in (about.method, *about.tags)] + ["---"]
    speed = run.tokens / run.seconds if run.seconds else 0.0
    training = {
        **facts,
        "steps": f"{run.steps:,}",
        "tokens seen": f"{run.tokens:,}",
        "wall-clock of the steps": _duration(run.seconds),
        "tokens a second": f"{speed:,.0f}",
        "hardware": hardware,
    }
    if run.bound is not None:
        from dlm.diffusion.bound import with_error

        training["last validation"] = f"{with_error(*run.bound, '.4f')} nats a token (bound)"
    return "\n\n".join(
        [
            "\n".join(header),
            f"# {name}",
            about.summary,
            about.use,
            *([advice(recommended)] if any((recommended or {}).values()) else []),
            f"## Data\n\n{about.data}",
            f"## Training\n\n{markdown([{'k': k, 'v': v} for k, v in training.items()], {'k': 'what', 'v': 'value'})}",
            f"### Again\n\n{again(about.config or name, run.settings, about.before)}",
            "## Results\n\nRates carry Wilson's 95 % interval. NFE is forward passes, TPF tokens a forward pass.",
            *map(str, tables),
            f"## Limits\n\n{about.limits}\n",
        ]
    )


def advice(recommended: Mapping[str, Mapping[str, Any]] | None) -> str:
    """The settings that a call takes where it names none."""
    lines = []
    for kind, settings in (recommended or {}).items():
        if settings:
            words = ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in settings.items())
            lines.append(f"- `dlm.{kind}`: {words}")
    return "Where a call names no settings, these of generation_config.json hold:\n\n" + "\n".join(lines)


def again(name: str, settings: Mapping[str, Any], before: Sequence[str] = ()) -> str:
    """How to repeat the run: by the shipped config of that name and what the run changed of it, or else by that config itself."""
    import tomli_w

    text = f"The config, where it departs from the defaults:\n\n```toml\n{tomli_w.dumps(settings).strip()}\n```"
    options, file = _options(_shipped(name), settings), f"{name}.toml"
    save = f"Save the config below as `{file}`, then:\n\n" if options is None else ""
    commands = list(before)
    tokenizer = settings.get("train", {}).get("tokenizer")
    if tokenizer and not commands:
        known = _shipped_file(f"{name}-tokenizer")
        commands.append(f"dlm-tokenizer --config {name}-tokenizer" if known else f"# first, a tokenizer in {tokenizer}")
    commands.append(" ".join(["dlm-train --config", file if options is None else name, *(options or ())]))
    return f"{save}```bash\n" + "\n".join(commands) + f"\n```\n\n{text}"


def _options(shipped: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> list[str] | None:
    """What the command line adds to the shipped config; None where that is not enough."""
    if shipped is None:
        return None
    given, wanted = _flat(shipped), _flat(settings)
    added = {key: value for key, value in wanted.items() if given.get(key, NOTHING) != value}
    if given.keys() - wanted.keys() or any(isinstance(value, list | dict) for value in added.values()):
        return None
    return [f"--{key} {value}" for key, value in added.items()]


def _flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found = {}
    for key, value in table.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return found


def _shipped_file(name: str) -> Path | None:
    from dlm.config import SHIPPED

    file = SHIPPED / f"{name}.toml"
    return file if re.fullmatch(r"[\w/-]+", name) and file.is_file() else None


def _shipped(name: str) -> dict[str, Any] | None:
    file = _shipped_file(name)
    if file is None:
        return None
    from dlm import config
    from dlm.training.config import TrainConfig

    return changed(config.load(TrainConfig, [file]).model_dump(mode="json"))


def machine() -> str:
    """This machine's processor and the versions that decide how fast it is."""
    import torch

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        named = re.search(r"^model name\s*:\s*(.+)$", info.read_text("utf-8", "replace"), re.MULTILINE)
        model = named[1].strip() if named else model
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{model}, {os.cpu_count()} logical cores{gpu}; {versions}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
