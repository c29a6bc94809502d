"""The settings of `dlm-eval`: which models, which decodings, which tasks. Importing it costs no torch."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from dlm.inference.config import Cache, EngineConfig, SamplerConfig
from dlm.inference.readers import SAMPLER_READERS
from dlm.reading import Reader, judged, unread

Kind = Literal[
    "humaneval", "mbpp", "infilling", "lines", "sudoku", "questions", "file", "bound", "perplexity", "lm_eval"
]


class Section(BaseModel):
    """One table of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EvalSection(Section):
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


def _only(*kinds: str) -> Reader:
    where = f"by tasks of kind {', '.join(kinds)}"
    return Reader(decides="kind", where=where, reads=lambda task, kinds=kinds: task.kind in kinds)


TASK_READERS = {
    "data": _only("humaneval", "mbpp", "infilling", "questions", "file", "bound", "perplexity"),
    "samples": _only("humaneval", "mbpp"),
    "k": _only("humaneval", "mbpp"),
    "timeout": _only("humaneval", "mbpp", "infilling"),
    "hole": _only("infilling", "lines"),
    "hole_tokens": Reader(decides="hole", where='with hole = "fixed"', reads=lambda task: task.hole == "fixed"),
    "hole_range": Reader(decides="hole", where='with hole = "unknown"', reads=lambda task: task.hole == "unknown"),
    "length": _only("infilling", "lines", "bound", "perplexity"),
    "gen_length": _only("humaneval", "mbpp", "questions", "file", "perplexity"),
    "shots": _only("mbpp", "lm_eval"),
    "chat": _only("lm_eval"),
    "tasks": _only("lm_eval"),
    "include": _only("lm_eval"),
    "draws": _only("bound", "lm_eval"),
    "judge": _only("perplexity"),
    "source": _only("questions"),
    "empty": _only("sudoku"),
}
"""Which tasks read which settings."""


class TaskSection(Section):
    """[[task]]: a task, and how it is put to the models."""

    kind: Kind = Field(description="What is asked.")
    name: str | None = Field(default=None, min_length=1, description="What tables call it; none: its kind and data.")
    data: str | None = Field(
        default=None,
        min_length=1,
        description="File of records, as the data set's authors publish it (JSONL, gzip or not); of bound and perplexity a "
        "text file or folder, none: Python's standard library; of file a Python file with a task.",
    )
    limit: int | None = Field(default=None, ge=1, description="Items at most; none: that of [eval].")
    samples: int = Field(default=1, ge=1, description="Answers to each problem.")
    k: tuple[int, ...] = Field(default=(1,), min_length=1, description="Of which pass@k is estimated.")
    timeout: float = Field(default=10.0, gt=0, le=3600, description="Seconds a program may take.")
    hole: Literal["oracle", "in_place", "given", "fixed", "unknown"] = Field(
        default="oracle",
        description="Tokens of a hole: oracle, the true text's, alone; in_place, in its text; given, the first rounded up to "
        "a multiple of 8; fixed, hole_tokens; unknown, chosen by the model from hole_range.",
    )
    hole_tokens: tuple[int, ...] = Field(
        default=(8, 16, 32, 64), min_length=1, description="hole = fixed: lengths that are each tried, and averaged."
    )
    hole_range: tuple[int, int] = Field(default=(4, 64), description="hole = unknown: the least and the most tokens.")
    length: int = Field(default=512, ge=16, description="Tokens that the model sees of a text, at most.")
    gen_length: int = Field(default=256, ge=1, description="Tokens to generate for each item, at most.")
    shots: int | None = Field(default=None, ge=0, description="Examples in the prompt; none: the task's own number.")
    chat: bool = Field(default=False, description="Put the prompt through the model's chat template.")
    tasks: tuple[str, ...] = Field(default=(), description="lm_eval: names of its tasks or groups.")
    include: str | None = Field(default=None, description="lm_eval: a folder of task files of your own.")
    draws: int = Field(default=8, ge=2, description="Draws of each likelihood bound.")
    judge: str | None = Field(default=None, description="perplexity: the causal checkpoint that judges the texts.")
    source: str | None = Field(default=None, description="questions: those of this source only.")
    empty: tuple[int, int] = Field(default=(30, 55), description="sudoku: empty cells, least and most.")

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.name is not None:
            return self.name
        words = [self.kind, *self.tasks, *([Path(self.data).name.partition(".")[0]] if self.data else [])]
        return " ".join(words + ([self.hole] if self.kind in ("infilling", "lines") else []))

    @model_validator(mode="after")
    def _reads_all(self, info: ValidationInfo) -> "TaskSection":
        if (problem := unread(self, TASK_READERS, judged(self, TASK_READERS))) is not None:
            raise ValueError(problem)
        needed = {"humaneval": "data", "mbpp": "data", "infilling": "data", "questions": "data", "file": "data"}
        needed |= {"lm_eval": "tasks", "perplexity": "judge"}
        field = needed.get(self.kind)
        if field == "tasks" and not self.tasks:
            raise ValueError('tasks = []: name tasks of lm-eval, as in tasks = ["gsm8k"]')
        if max(self.k) > self.samples or min(self.k) < 1:
            raise ValueError(
                f"k = {list(self.k)} needs {max(self.k)} samples of each problem, and samples = {self.samples}"
            )
        if not 1 <= self.hole_range[0] <= self.hole_range[1]:
            raise ValueError(f"hole_range = {list(self.hole_range)}: give the least first, and at least 1")
        return self

    def require(self, field: str) -> Any:
        """A setting without which this task cannot run."""
        from dlm.errors import UserError

        value = getattr(self, field)
        if value is None:
            raise UserError(f'task "{self.label}": {field} is missing: give it in the file, or as --task.N.{field}')
        return value


class DecodingSection(SamplerConfig):
    """[[decoding]]: how tokens are decided, by the names of `dlm.generate`; what is left out is the task's or the default."""

    name: str | None = Field(default=None, min_length=1, description="What tables call it; none: its settings.")
    cache: Cache = Field(default="auto", description="The engine's cache.")
    draft: str = Field(
        default="none",
        min_length=1,
        description='What guesses tokens that the model then checks: "none", "ngram", "self" (diffusion models), or a '
        "draft's or a model's folder or hub id. Holes take none.",
    )
    tokens_per_step: int | None = Field(
        default=None, ge=1, description="In place of steps: so many tokens of each item are decided a step."
    )

    @property
    def given(self) -> dict[str, Any]:
        """The sampler's settings that were written down."""
        names = [name for name in SamplerConfig.model_fields if name in self.model_fields_set]
        return {name: getattr(self, name) for name in names}

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.name is not None:
            return self.name
        given = self.given
        words = [str(given.pop("rule", self.rule))]
        words += [f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in given.items()]
        words += [f"{self.tokens_per_step}/step"] if self.tokens_per_step else []
        words += [
            f"{name}={value}"
            for name, value in self.way.items()
            if name in ("cache", "draft") and value not in ("auto", "none")
        ]
        return " ".join(words)

    @property
    def way(self) -> dict[str, str]:
        """What kind of decoding this is, apart from the rule's settings."""
        blocks = "none" if self.block_length is None else str(self.block_length)
        return {name: str(getattr(self, name)) for name in ("rule", "strategy", "cache", "draft")} | {"blocks": blocks}

    @model_validator(mode="after")
    def _fits_together(self) -> "DecodingSection":
        """What is generated is the task's, and made whole blocks, unless it stands here."""
        if "gen_length" in self.model_fields_set:
            SamplerConfig.model_validate(self.given)
        return self

    @model_validator(mode="after")
    def _reads_all(self) -> "DecodingSection":
        if (problem := unread(self, SAMPLER_READERS, judged(self, SAMPLER_READERS))) is not None:
            raise ValueError(problem)
        for name in ("draft_length", "verify"):
            if self.draft == "none" and name in self.model_fields_set:
                raise ValueError(f"{name} = {getattr(self, name)} is only read with a draft, and there is none")
        if self.tokens_per_step is not None and "steps" in self.model_fields_set:
            raise ValueError(f"steps = {self.steps} and tokens_per_step = {self.tokens_per_step}: give one of them")
        return self


class OutputSection(Section):
    """[output]: where results go."""

    file: Path = Field(default=Path("eval.json"), description="JSON; beside it records, a Markdown table and plots.")
    plot: bool = Field(default=True, description="Draw plots beside it (needs the extra `plot`).")
    traces: bool = Field(
        default=False,
        description="Record every denoising step in FILE.traces.db, under the run's and the item's names as in the records "
        "(of tasks whose items the engine decodes: not lm_eval).",
    )


class EvalConfig(Section):
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
