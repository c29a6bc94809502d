"""Everything `dlm-infer` reads: the library's own sections, and the jobs and the output, which only commands have."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from dlm.inference.config import DraftSection, EngineConfig, ModelSection, SamplerConfig
from dlm.inference.readers import SAMPLER_READERS
from dlm.reading import judged, unread
from dlm.trace.config import TraceConfig

SHARED = ("model", "draft", "sampler")
"""Sections that a job inherits and may override."""

# defer_build: validators are built at the first validation, which --help does not need.


class JobConfig(BaseModel):
    """[[job]]: one thing to decode. It inherits [model], [draft] and [sampler], and overrides what it names."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    title: str = Field(default="", description="Heading of what is shown.")
    request_id: str = Field(default="", description="Returned with the result; the job's number from 0 when empty.")
    prompt: str | None = Field(
        default=None, description="Text to continue, or to fill where it says [MASK:12] (twelve tokens) or [MASK:4-16]."
    )
    sudoku: str | None = Field(
        default=None, description="81 cells row by row; 0 or . is empty; spaces and lines are ignored."
    )
    model: ModelSection = Field(default=ModelSection(), description="This job's model; [model] when absent.")
    draft: DraftSection = Field(default=DraftSection(), description="What drafts for this job; [draft] when absent.")
    sampler: SamplerConfig = Field(default=SamplerConfig(), description="This job's sampler; [sampler] when absent.")
    _place: str = PrivateAttr(default="")

    @field_validator("title", "request_id", "prompt", "sudoku")
    @classmethod
    def _is_text(cls, text: str | None) -> str | None:
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"is no Unicode text: character {error.start} is half of a surrogate pair") from None
        return text

    @property
    def place(self) -> str:
        """Where the job is from, for messages: a file's line, an option."""
        return self._place

    @model_validator(mode="after")
    def _fits_together(self) -> "JobConfig":
        if self.prompt is None and self.sudoku is None:
            raise ValueError("this job has nothing to do: give it `prompt` or `sudoku`")
        if self.prompt is not None and self.sudoku is not None:
            raise ValueError("this job has both `prompt` and `sudoku`: give it one of them")
        return self


class OutputConfig(BaseModel):
    """[output]: what is shown while it runs and after."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    live: bool = Field(default=True, description="On a terminal: show tokens as they are committed.")
    delay: float = Field(
        default=0.05, ge=0, le=5, description="Seconds to rest after a step of the live view, to be watchable."
    )
    snapshots: int = Field(
        default=0, ge=0, le=10_000, description="Without a terminal: times the half-done canvas is printed as it fills."
    )
    json_lines: bool = Field(default=False, description="One JSON object a line instead of text (same as --json).")
    quiet: bool = Field(
        default=False, description="The text only: no view, no heading, no summary line (same as --quiet)."
    )


class InferConfig(BaseModel):
    """Everything `dlm-infer` reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    model: ModelSection = Field(default=ModelSection(), description="The model of every job that names no other.")
    draft: DraftSection = Field(default=DraftSection(), description="What drafts for every job that continues a text.")
    sampler: SamplerConfig = Field(
        default=SamplerConfig(), description="The sampler of every job, where it sets nothing else."
    )
    engine: EngineConfig = Field(default=EngineConfig(), description="How the jobs are run together.")
    trace: TraceConfig = Field(default=TraceConfig(), description="Whether and where every step is recorded.")
    output: OutputConfig = Field(default=OutputConfig(), description="What is shown.")
    batch_size: int = Field(
        default=8, ge=1, le=2**16, description="Jobs alike in model and sampler are decoded so many at a time."
    )
    job: tuple[JobConfig, ...] = Field(
        default=(), description="The jobs, done in order; --prompt and its like replace them."
    )

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, data: Any) -> Any:
        """Give every [[job]] the shared sections under its own."""
        if not isinstance(data, dict) or not isinstance(data.get("job"), (tuple, list)):
            return data
        shared = {name: data[name] for name in SHARED if isinstance(data.get(name), dict)}
        jobs = (_under(shared, job) if isinstance(job, dict) else job for job in data["job"])
        return {**data, "job": tuple(jobs)}

    @model_validator(mode="after")
    def _read_at_all(self, info: ValidationInfo) -> "InferConfig":
        """Refuse settings of [sampler] that neither it nor a job reads, and settings of a job that it does not read."""
        samplers = (self.sampler, *(job.sampler for job in self.job))
        for name in judged(self.sampler, SAMPLER_READERS, info, "sampler"):
            problems = [unread(sampler, SAMPLER_READERS, [name]) for sampler in samplers]
            if all(problems):
                raise ValueError(f"[sampler] {problems[0]}")
        for number, job in enumerate(self.job):
            if (problem := unread_of(job.sampler, self.sampler)) is not None:
                raise ValueError(f"[job.{number}.sampler] {problem}")
        drafts = any(part.draft.model is not None for part in (self, *self.job))
        _read_by_a_draft(self.sampler, SamplerConfig(), drafts, "[sampler]")
        for number, job in enumerate(self.job):
            _read_by_a_draft(job.sampler, self.sampler, job.draft.model is not None, f"[job.{number}.sampler]")
        return self


class ForkConfig(BaseModel):
    """Settings that `dlm-replay --fork-at` takes: they replace those of the trace."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    sampler: SamplerConfig = Field(default=SamplerConfig(), description="What is different from there on.")


def unread_of(sampler: SamplerConfig, shared: SamplerConfig) -> str | None:
    """What is wrong with a job's own settings, without those that it inherits from `shared`; None if nothing is."""
    inherited = {name for name in shared.model_fields_set if getattr(shared, name) == getattr(sampler, name)}
    return unread(
        sampler, SAMPLER_READERS, (name for name in judged(sampler, SAMPLER_READERS) if name not in inherited)
    )


def _read_by_a_draft(sampler: SamplerConfig, shared: SamplerConfig, drafts: bool, where: str) -> None:
    """Refuse a draft's settings, other than those of `shared`, where nothing drafts."""
    for name in ("draft_length", "verify"):
        if not drafts and getattr(sampler, name) != getattr(shared, name):
            raise ValueError(f"{where} {name} is only read with a draft: set model in [draft], or leave {name} out")


def _under(shared: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    merged = dict(job)
    for name, section in shared.items():
        own = job.get(name, {})
        merged[name] = {**section, **own} if isinstance(own, dict) else own
    return merged
