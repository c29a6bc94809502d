"""The [trace] section: whether requests are recorded, what is kept of them, and where."""

from typing import Literal

from pydantic import BaseModel, Field, field_validator


class TraceConfig(BaseModel, frozen=True, extra="forbid"):
    """What is kept of each request's denoising."""

    enabled: bool = Field(default=False, description="Record every step of the requests that are decoded.")
    store: str | None = Field(
        default=None, min_length=1, description="File of the trace store; none: DLM_TRACES, else runs/traces.db."
    )
    keep: str = Field(
        default="tokens",
        description='What is kept: tokens, and any of "+confidence", "+topk", "+digests". '
        "tokens+masks is the same as tokens: where the masks were follows from the steps.",
    )
    topk: int = Field(default=4, ge=1, le=64, description='Likeliest tokens that "+topk" keeps of each position.')
    fraction: float = Field(default=1.0, ge=0, le=1, description="Share of requests that are recorded, chosen by id.")
    durability: Literal["trace", "group", "none"] = Field(
        default="group",
        description="When a trace is on the disk: each before the next, in groups, or when the system sees fit.",
    )
    dictionary: str | None = Field(
        default=None, description="File of a zstd dictionary to compress with; none: the store's newest, if any."
    )
    prompts: Literal["plain", "hash", "omit"] = Field(
        default="plain", description="What is kept of prompts: their ids, a hash of them, or nothing."
    )
    overwrite: bool = Field(default=False, description="Replace a trace of the same id instead of refusing.")
    queue_size: int = Field(default=1024, ge=1, description="Traces that may wait to be written; then requests wait.")

    @field_validator("keep")
    @classmethod
    def _known(cls, keep: str) -> str:
        from dlm.trace.record import check_keep

        check_keep(keep)
        return keep
