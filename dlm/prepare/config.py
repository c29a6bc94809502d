"""The settings of `dlm-prepare trajectories`: which teacher, how it decodes, which prompts."""

from typing import Literal

from pydantic import BaseModel, Field, ValidationInfo, model_validator

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
