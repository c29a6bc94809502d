"""The keywords of `dlm.generate` and its like, for type checkers. Do not edit it.

Made from the settings by `python -m tests.inference.test_keyword_types > dlm/inference/keyword_types.py`.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

from dlm.diffusion.unmask import Rule


class DecodeKeywords(TypedDict, total=False):
    """How masks become tokens."""

    threshold: float
    factor: float
    gamma: float
    entropy_threshold: float
    tau_low: float
    allow_long: bool
    block_length: int | None
    steps: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    cfg_scale: float
    rule: str | Rule
    remask_threshold: float | None
    edit_threshold: float | None
    max_post_edit_steps: int
    strategy: str
    max_active_blocks: int
    block_add: float
    solver: Literal["euler", "heun", "sde", "adapter"] | None
    seed: int
    num_samples: int
    remasking: str


class FillKeywords(DecodeKeywords, total=False):
    """How holes are filled."""

    check: Literal["none", "python", "python_line", "sudoku"]
    attempts: int
    retry_temperature: float


class ContinueKeywords(DecodeKeywords, total=False):
    """How a text is continued."""

    gen_length: int | Literal["auto"]
    max_gen_length: int
    draft_length: int | Literal["auto"] | None
    verify: Literal["match", "reject"]
    stop: str | Sequence[str]


class SamplerKeywords(FillKeywords, ContinueKeywords, total=False):
    """Of one request, whatever it asks for."""


class KnownEngineKeywords(TypedDict, total=False):
    """What runs at a time, where all requests are known."""

    cache: Literal["auto", "none", "prefix", "dual", "exact"]
    refresh_interval: int | None
    cache_delay: int
    page_size: int
    num_pages: int | None
    max_num_tokens: int
    max_num_requests: int
    kernels: Literal["auto", "triton", "c", "torch", "c-widened", "c-dots", "c-tiles", "c-int16"]
    deterministic: bool
    cuda_graphs: bool


class EngineKeywords(KnownEngineKeywords, total=False):
    """Of `dlm.Engine`."""

    memory_fraction: float
    max_waiting: int | None


class GenerateKeywords(ContinueKeywords, KnownEngineKeywords, total=False):
    """Of `dlm.generate`."""


class InfillKeywords(FillKeywords, KnownEngineKeywords, total=False):
    """Of `dlm.infill`."""
