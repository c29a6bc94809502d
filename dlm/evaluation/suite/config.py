"""The settings of `dlm-eval`: which models, which decodings, which tasks. Importing it costs no torch."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from dlm.evaluation.suite.decoding_section import DecodingSection
from dlm.evaluation.suite.task_section import TaskSection
from dlm.inference.config import EngineConfig


class EvalSection(BaseModel, frozen=True, extra="forbid"):
    """[eval]: what holds for all runs."""

    models: tuple[str, ...] = Field(
        default=("pico",), min_length=1, description="Models: bundled names, folders or hub ids."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(default="auto", description="As in [model].")
    device: str = Field(default="auto", min_length=1, description="As in [model].")
    limit: int | None = Field(default=None, ge=1, description="Items of each task at most; none: all.")
    data: Path | None = Field(
        default=None, description="Folder of the tasks' files; none: their names are paths as they stand."
    )
    batch_size: int = Field(
        default=32, ge=1, description="Items decoded at a time, and lost at most when killed. It changes no result."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Of every random number.")
    reference: str | None = Field(
        default=None, description="Name of the decoding that the others are compared with; none: the first."
    )
    workers: int | None = Field(default=None, ge=1, description="Programs run side by side; none: one a core.")
    allow_unsandboxed: bool = Field(
        default=False, description="Run programs in your own account where the machine offers no sandbox."
    )


class OutputSection(BaseModel, frozen=True, extra="forbid"):
    """[output]: where results go."""

    file: Path = Field(default=Path("eval.json"), description="JSON; beside it records, a Markdown table and plots.")
    plot: bool = Field(default=True, description="Draw plots beside it (needs the extra `plot`).")
    traces: bool = Field(
        default=False,
        description="Record every denoising step in FILE.traces.db, under the run's and the item's names as in the records "
        "(of tasks whose items the engine decodes: not lm_eval).",
    )


class EvalConfig(BaseModel, frozen=True, extra="forbid"):
    """Everything `dlm-eval` reads."""

    eval: EvalSection = Field(default=EvalSection(), description="What holds for all runs.")
    task: tuple[TaskSection, ...] = Field(default=(), description="The tasks.")
    decoding: tuple[DecodingSection, ...] = Field(default=(), description="Ways of decoding; none: the default.")
    sweep: tuple[dict[str, Any], ...] = Field(
        default=(), description="Tables of [[decoding]] whose values may be lists: each combination is one decoding."
    )
    engine: EngineConfig = Field(default=EngineConfig(), description="The engine, but for its cache.")
    output: OutputSection = Field(default=OutputSection(), description="Where results go.")

    @model_validator(mode="after")
    def _fits_together(self) -> "EvalConfig":
        for what, entries in (("task", self.task), ("decoding", self.decodings())):
            labels = [entry.label for entry in entries]
            twice = next((label for label in labels if labels.count(label) > 1), None)
            if twice is not None:
                raise ValueError(f'two entries of [[{what}]] are called "{twice}": give one of them a name of its own')
        if self.eval.data is not None and all(task.data is None for task in self.task):
            raise ValueError(f"eval.data = {self.eval.data} is only read by tasks with data, and none has")
        names = [entry.label for entry in self.decodings()]
        if self.eval.reference is not None and self.eval.reference not in names:
            raise ValueError(f'reference = "{self.eval.reference}" is no decoding; they are {", ".join(names)}')
        return self

    def tasks(self) -> list[TaskSection]:
        """The tasks, with their files in `eval.data`."""
        folder = self.eval.data
        return [
            task
            if folder is None or task.data is None
            else task.model_copy(update={"data": str(folder / task.data), "name": task.label})
            for task in self.task
        ]

    def decodings(self) -> list[DecodingSection]:
        """Those written down, then those of the sweeps; the default one where there is none."""
        found = list(self.decoding)
        for table in self.sweep:
            found += [DecodingSection.model_validate(one) for one in _combinations(table)]
        return found or [DecodingSection()]


def _combinations(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Each choice of one value from every list."""
    found: list[dict[str, Any]] = [{}]
    for name, value in table.items():
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        found = [{**one, name: each} for one in found for each in values]
    return found
