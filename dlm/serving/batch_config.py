"""What `dlm-batch` reads, and how both commands find Ray. Nothing here needs torch."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from dlm.inference.config import MOST, EngineConfig, ModelSection, SamplerConfig
from dlm.inference.readers import SAMPLER_READERS
from dlm.reading import judged, unread


class BatchSection(BaseModel):
    """[batch]: prompts in, answers out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: str | None = Field(
        default=None, description="JSONL or Parquet of prompts: a path, or a URL that fsspec knows (s3://…)."
    )
    output: str | None = Field(
        default=None, description="Folder of the answers: a path or a URL; one that is there goes on."
    )
    rows_per_part: int = Field(default=64, ge=1, le=MOST, description="Rows of a part, which is decoded together.")
    seed: int = Field(default=0, ge=0, description="With a row's id, the seed of rows that have none of their own.")
    actors: int = Field(default=1, ge=1, le=4096, description="Engines that work side by side; more than one need Ray.")


class RaySection(BaseModel):
    """[ray]: the cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str | None = Field(
        default=None, min_length=1, description="Address of the cluster, or auto; none: a Ray of this machine's own."
    )
    num_cpus: float = Field(default=1.0, gt=0, le=1024, description="CPUs of each engine; its threads, too.")
    num_gpus: float = Field(default=0.0, ge=0, le=64, description="GPUs of each engine.")


class BatchConfig(BaseModel):
    """Everything `dlm-batch` reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    model: ModelSection = Field(default=ModelSection(), description="The model.")
    sampler: SamplerConfig = Field(default=SamplerConfig(), description="The sampler of rows that say nothing else.")
    engine: EngineConfig = Field(default=EngineConfig(), description="How rows run together.")
    batch: BatchSection = Field(default=BatchSection(), description="Prompts in, answers out.")
    ray: RaySection = Field(default=RaySection(), description="The cluster.")

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> "BatchConfig":
        rows = {"seed": "[batch] seed, or seeds in the rows", "num_samples": "a row for each"}
        require_shared(self.sampler, info, rows, "row")
        return self


def require_shared(sampler: SamplerConfig, info: ValidationInfo, instead: Mapping[str, str], what: str) -> None:
    """Raises ValueError for a setting of [sampler] that nothing reads, and for one that each row or request has itself."""
    for name in judged(sampler, SAMPLER_READERS, info, "sampler"):
        if (problem := unread(sampler, SAMPLER_READERS, [name])) is not None:
            raise ValueError(f"[sampler] {problem}")
    for name, words in instead.items():
        if name in sampler.model_fields_set and getattr(sampler, name) != SamplerConfig.model_fields[name].default:
            raise ValueError(f"[sampler] {name} is each {what}'s own here: leave it out, and give {words}")
