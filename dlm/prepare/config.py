"""The settings of `dlm-prepare trajectories`, `responses` and `fillings`: which model, how it decodes, which prompts."""

from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from dlm.data.config import DataConfig
from dlm.inference.config import EngineConfig, ModelSection, SamplerConfig
from dlm.inference.readers import SAMPLER_READERS
from dlm.reading import judged, unread


class TrajectoriesSection(BaseModel, frozen=True, extra="forbid"):
    """[trajectories]: what is decoded of the data, and where the traces go."""

    responses: Literal["free", "forced"] = Field(
        default="free",
        description="free: the teacher answers each prompt itself; forced: the data's own answers, of which the teacher "
        "decides the order alone: the rule picks positions as ever, and each gets the given token.",
    )
    samples: int | None = Field(default=None, ge=1, description="Prompts to take; none: one pass over the data.")
    length: int = Field(default=256, ge=2, description="Tokens read of a prompt and its answer, at most.")
    prompt_length: int | Literal["all"] = Field(
        default=32,
        description='Data without marked prompts: so many tokens of each text are the prompt; "all": the whole text is.',
    )
    batch_size: int = Field(default=32, ge=1, description="Prompts decoded at a time, and lost at most when killed.")
    store: str = Field(default="runs/trajectories.db", min_length=1, description="Trace store to add to.")
    parquet: str | None = Field(
        default=None, min_length=1, description="Folder or fsspec URL for an export at the end."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "TrajectoriesSection":
        if self.prompt_length == "all":
            if self.responses == "forced":
                raise ValueError('prompt_length = "all" leaves no response, and responses = "forced" needs one')
        elif not 0 <= self.prompt_length < self.length:
            raise ValueError(f"prompt_length = {self.prompt_length} must be from 0 to length - 1 = {self.length - 1}")
        return self


class TrajectoriesConfig(BaseModel, frozen=True, extra="forbid"):
    """Everything `dlm-prepare trajectories` reads."""

    model: ModelSection = Field(default=ModelSection(), description="The teacher.")
    sampler: SamplerConfig = Field(
        default=SamplerConfig(),
        description="How it decodes. d3LLM: rule = entropy_threshold. block_length = 1 is the order from left to right.",
    )
    engine: EngineConfig = Field(default=EngineConfig(), description="How prompts are run together.")
    data: DataConfig = Field(default=DataConfig(), description="Where prompts and answers come from.")
    trajectories: TrajectoriesSection = Field(default=TrajectoriesSection(), description="What is decoded, where to.")

    @model_validator(mode="after")
    def _possible(self, info: ValidationInfo) -> "TrajectoriesConfig":
        t, s = self.trajectories, self.sampler
        if (problem := unread(s, SAMPLER_READERS, judged(s, SAMPLER_READERS, info, "sampler"))) is not None:
            raise ValueError(f"[sampler] {problem}")
        if self.data.source == "sudoku" and t.samples is None:
            raise ValueError('trajectories.samples is not set, and data.source = "sudoku" has no end')
        if self.data.source == "chat" and self.data.answers != "last":
            raise ValueError('data.source = "chat" needs data.answers = "last": a trajectory is of the last one')
        if t.prompt_length == "all" and self.data.source != "chat" and self.data.pack != "row":
            needs = f'needs data.pack = "row", not "{self.data.pack}"'
            raise ValueError(f'trajectories.prompt_length = "all" {needs}: a text is then a prompt')
        if t.responses == "forced" and s.edit_threshold is not None:
            what = 'what trajectories.responses = "forced" gives'
            raise ValueError(f"sampler.edit_threshold = {s.edit_threshold} changes {what}: leave it out")
        return self


class ResponsesSection(BaseModel, frozen=True, extra="forbid"):
    """[responses]: which prompts are answered, and where the answers go."""

    paths: tuple[str, ...] = Field(
        default=(),
        description="JSON lines with prompts, or globs or folders of them: a text a line, or an object with one of the two "
        "fields below. An answer that is there already is left out and made anew.",
    )
    prompt_field: str = Field(default="prompt", min_length=1, description="The column with a prompt.")
    messages_field: str = Field(
        default="messages", min_length=1, description="The column with a conversation, which goes before a prompt."
    )
    system: str | None = Field(default=None, description="A system message for conversations that have none.")
    samples: int | None = Field(default=None, ge=1, description="Prompts to answer; none: all.")
    out: str = Field(
        default="runs/responses.jsonl",
        min_length=1,
        description='JSON lines that are added to: data.source = "chat" trains on them. Answers that reach the limit '
        "before their end go into a file beside it, OUT.unfinished.jsonl.",
    )
    unfinished: Literal["apart", "keep"] = Field(
        default="apart", description="keep: answers without an end go into `out`, too."
    )
    batch_size: int = Field(default=32, ge=1, description="Answers decoded at a time.")

    @field_validator("paths", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class ResponsesConfig(BaseModel, frozen=True, extra="forbid"):
    """Everything `dlm-prepare responses` reads."""

    model: ModelSection = Field(default=ModelSection(), description="The model that answers.")
    sampler: SamplerConfig = Field(
        default=SamplerConfig(temperature=0.7, gen_length="auto"), description="How it decodes."
    )
    engine: EngineConfig = Field(default=EngineConfig(), description="How prompts are run together.")
    responses: ResponsesSection = Field(
        default=ResponsesSection(), description="Which prompts are answered, and where the answers go."
    )

    @model_validator(mode="after")
    def _possible(self, info: ValidationInfo) -> "ResponsesConfig":
        s = self.sampler
        if (problem := unread(s, SAMPLER_READERS, judged(s, SAMPLER_READERS, info, "sampler"))) is not None:
            raise ValueError(f"[sampler] {problem}")
        return self


class FillingsSection(BaseModel, frozen=True, extra="forbid"):
    """[fillings]: which holes are made in the texts, which of the fills are kept, and where their traces go."""

    holes: int = Field(default=1000, ge=1, description="Holes to make, a line missing each.")
    functions: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the holes that are in a small function alone, not in a whole text.",
    )
    hole_tokens: tuple[int, int] = Field(default=(4, 16), description="Least and most masks of a hole.")
    as_long: float = Field(
        default=0.4, ge=0, le=1, description="Share of the holes with as many masks as the line had tokens."
    )
    context: tuple[int, int] = Field(
        default=(40, 110), description="Least and most tokens that are shown before a hole, and after it."
    )
    check: Literal["parses", "none"] = Field(
        default="parses",
        description="parses: a fill is kept if Python can parse the whole text with it; none: all are.",
    )
    judge: str | None = Field(
        default=None,
        min_length=1,
        description="An autoregressive model with the same tokens: of the fills of a hole that pass the check, it keeps the "
        "one that makes the text likeliest. None: the first is kept.",
    )
    truths: float = Field(
        default=0.7, ge=0, le=1, description="For so many of the holes the line that was there is kept, too."
    )
    batch_size: int = Field(default=32, ge=1, description="Holes filled at a time, and lost at most when killed.")
    store: str = Field(default="runs/fillings.db", min_length=1, description="Trace store to add to.")

    @model_validator(mode="after")
    def _in_order(self) -> "FillingsSection":
        for name, low in (("hole_tokens", 1), ("context", 0)):
            least, most = getattr(self, name)
            if not low <= least <= most:
                raise ValueError(f"{name} = [{least}, {most}]: give the least, from {low}, and then the most")
        return self


class FillingsConfig(BaseModel, frozen=True, extra="forbid"):
    """Everything `dlm-prepare fillings` reads."""

    model: ModelSection = Field(default=ModelSection(), description="The model that fills.")
    sampler: SamplerConfig = Field(
        default=SamplerConfig(temperature=0.8, num_samples=4),
        description="How it decodes; num_samples fills of each hole, of which one at most is kept.",
    )
    engine: EngineConfig = Field(default=EngineConfig(), description="How holes are filled together.")
    data: DataConfig = Field(default=DataConfig(), description="Where texts come from: stdlib, or local files.")
    fillings: FillingsSection = Field(default=FillingsSection(), description="Which holes and fills, and where to.")

    @model_validator(mode="after")
    def _possible(self, info: ValidationInfo) -> "FillingsConfig":
        s = self.sampler
        if (problem := unread(s, SAMPLER_READERS, judged(s, SAMPLER_READERS, info, "sampler"))) is not None:
            raise ValueError(f"[sampler] {problem}")
        if s.check != "none":
            raise ValueError(f"[sampler] check = {s.check!r}: [fillings] says which fills are kept; leave it out")
        if self.data.source not in ("stdlib", "text"):
            raise ValueError(f'data.source = "{self.data.source}": holes are made in texts, so "stdlib" or "text"')
        return self
