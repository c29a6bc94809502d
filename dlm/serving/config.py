"""[serve] and what else `dlm-serve` reads. Nothing here needs torch or a web framework."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from dlm.inference.config import MOST, DraftSection, EngineConfig, ModelSection, SamplerConfig
from dlm.serving.batch_config import RaySection, require_shared
from dlm.trace.config import TraceConfig

KEYS_VARIABLE = "DLM_API_KEYS"
"""Environment variable with keys, separated by white space, where there is no file of them."""

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class ServeSection(BaseModel):
    """[serve]: where the server listens, who may ask, and how much."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen at; 0.0.0.0 is every one.")
    port: int = Field(default=8000, ge=0, le=65_535, description="Port to listen at; 0 takes a free one.")
    name: str | None = Field(
        default=None, min_length=1, description="The model's id in requests; none: model.name as it was given."
    )
    api_keys_file: Path | None = Field(
        default=None,
        description=f"File of the keys that may ask, one a line; none: those in {KEYS_VARIABLE}, else nobody needs one.",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description='Origins whose pages may ask, as in "https://example.org"; "*" is all.'
    )
    max_waiting: int = Field(default=256, ge=0, le=MOST, description="Requests that may wait; more are answered 429.")
    max_wait: Seconds = Field(
        default=60.0, description="Seconds a request may wait for its first step; then it gets 429."
    )
    timeout: Seconds = Field(default=600.0, description="Seconds a request may take in all.")
    grace: float = Field(
        default=30.0, ge=0, le=86_400, description="Seconds that requests under way have after SIGTERM."
    )
    max_tokens: int = Field(default=4096, ge=1, le=MOST, description="Tokens of one answer, at most.")
    max_choices: int = Field(default=64, ge=1, le=4096, description="Prompts times n of one request, at most.")
    max_body: int = Field(default=2**20, ge=1024, le=2**30, description="Bytes of a request's body, at most.")
    max_failures: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="Failing steps one after the other, at which the server ends with status 1.",
    )
    max_unread: int = Field(
        default=4096, ge=16, le=MOST, description="Events a slow reader may leave unread; then its request ends."
    )
    log: bool = Field(default=True, description="A line of JSON to standard error for each request.")
    log_text: bool = Field(default=False, description="Put prompts and answers into these lines.")

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            scheme, found, rest = origin.partition("://")
            if origin != "*" and (not found or scheme not in ("http", "https") or not rest or "/" in rest):
                raise ValueError(f'{origin!r} is no origin: write scheme and host alone, as in "https://example.org"')
        return origins


class ReplicaSection(BaseModel):
    """[replicas]: the same server several times, behind Ray Serve."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    least: int = Field(default=0, ge=0, le=4096, description="Replicas; 0: one process without Ray.")
    most: int | None = Field(
        default=None, ge=1, le=4096, description="Replicas while it is busy; none: as many as least."
    )
    busy: float = Field(
        default=16.0, gt=0, description="Requests under way in a replica, from which on there are more."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> "ReplicaSection":
        if self.most is not None and self.most < max(self.least, 1):
            raise ValueError(f"most = {self.most} replicas are fewer than least = {self.least}: make it larger")
        if self.most is not None and not self.least:
            raise ValueError(
                f"most = {self.most} is only read with Ray, and least = 0 is one process without: make it 1"
            )
        return self


class ServeConfig(BaseModel):
    """Everything `dlm-serve` reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    model: ModelSection = Field(default=ModelSection(), description="The model that is served.")
    sampler: SamplerConfig = Field(default=SamplerConfig(), description="What requests get that do not say otherwise.")
    engine: EngineConfig = Field(default=EngineConfig(), description="How requests run together.")
    serve: ServeSection = Field(default=ServeSection(), description="Where, for whom, how much.")
    trace: TraceConfig = Field(default=TraceConfig(), description="Whether and where every step is recorded.")
    replicas: ReplicaSection = Field(default=ReplicaSection(), description="Several of them, behind Ray Serve.")
    ray: RaySection = Field(default=RaySection(), description="The cluster of [replicas].")
    draft: DraftSection = Field(default=DraftSection(), description="A draft model.")

    @property
    def served_name(self) -> str:
        """The id that requests name."""
        return self.serve.name or self.model.name

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> "ServeConfig":
        requests = {"num_samples": '"n" in a request', "seed": '"seed" in a request'}
        require_shared(self.sampler, info, requests, "request")
        if not self.replicas.least and self.ray != RaySection():
            raise ValueError(
                "[ray] is only read with replicas, and replicas.least = 0: make it 1 or more, or leave [ray] out"
            )
        if self.engine.max_waiting is not None:
            raise ValueError("[engine] max_waiting is set by [serve] max_waiting here: give that one")
        return self
