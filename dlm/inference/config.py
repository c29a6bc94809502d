"""What `dlm-infer` is asked: which model, how to decode, which jobs, how to show them. Knows neither torch nor files."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from dlm.trace.config import TraceConfig

Rule = Literal[
    "low_confidence",
    "random",
    "margin",
    "entropy",
    "threshold",
    "factor",
    "entropy_bound",
    "entropy_threshold",
    "hierarchical",
    "credit",
]

MOST = 2**20
"""Tokens, or steps, of one request; refused before any memory is asked for."""


class ModelSection(BaseModel):
    """[model]: what to load, and where to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        default="pico", min_length=1, description="A bundled model (pico, sudoku), a folder, or a hub id."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the weights; auto keeps the checkpoint's on a GPU and is float32 on a CPU."
    )
    device: str = Field(default="auto", min_length=1, description="auto, cpu, cuda, cuda:N or mps.")
    adapter: str | None = Field(
        default=None,
        description="Folder of a LoRA adapter to merge into it; beside the weights where they are quantised.",
    )
    quantize: Literal["nf4", "int8"] | None = Field(
        default=None, description="Pack the layers' matrices in 4 or 8 bits (needs bitsandbytes)."
    )
    tensor_parallel: int = Field(
        default=1, ge=1, description="Processes of one node that share the layers; start them with torchrun."
    )


class SamplerConfig(BaseModel):
    """[sampler]: how masks become tokens. The names are those of `dlm.generate`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gen_length: int | Literal["auto"] = Field(
        default=128, description='Tokens to generate; "auto" adds blocks until end-of-text or max_gen_length.'
    )
    max_gen_length: int = Field(
        default=1024,
        ge=1,
        le=MOST,
        description='Upper limit when gen_length = "auto"; the model\'s context is another.',
    )
    allow_long: bool = Field(
        default=False,
        description="Let prompt and generation be longer than the context the model was made for (same as --allow-long).",
    )
    block_length: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="Tokens denoised together, block after block; none: the family's own, or 32; all holes at once.",
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="Denoising steps in all; each block gets its equal share. none: 128, or a block's when open-ended.",
    )
    temperature: float = Field(default=0.0, ge=0, description="0 takes the most probable token; higher is more random.")
    top_k: int | None = Field(default=None, ge=1, description="Draw from the k most probable tokens only.")
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Draw from the smallest set of tokens with this probability."
    )
    cfg_scale: float = Field(
        default=0.0, ge=0, description="Classifier-free guidance; 0 is off, more costs a second forward."
    )
    rule: Rule = Field(default="low_confidence", description="Which masked positions a step commits.")
    threshold: float = Field(
        default=0.9, ge=0, le=1, description="Rules threshold, hierarchical, credit: commit at this confidence."
    )
    factor: float = Field(
        default=1.0, gt=0, description="Rule factor: f; the n-th most confident needs 1 - f / (n + 1)."
    )
    tau_low: float = Field(
        default=0.5, ge=0, le=1, description="Rule hierarchical: confidence the best of each run needs."
    )
    gamma: float = Field(default=0.1, ge=0, description="Rule entropy_bound: entropy (nats) a step may commit.")
    entropy_threshold: float = Field(
        default=0.5, ge=0, description="Rule entropy_threshold: commit up to this entropy (nats)."
    )
    remask_threshold: float | None = Field(
        default=None, ge=0, le=1, description="Mask a committed token again when its confidence falls under this."
    )
    edit_threshold: float | None = Field(
        default=None, ge=0, le=1, description="Replace a committed token when another's probability exceeds this."
    )
    max_post_edit_steps: int = Field(
        default=16, ge=0, le=MOST, description="Extra passes a block may spend on editing."
    )
    strategy: str = Field(
        default="block", description="One block after the other, or a few consecutive ones at a time."
    )
    max_active_blocks: int = Field(
        default=4, ge=1, le=MOST, description="Strategy multi_block: blocks denoised at a time."
    )
    block_add: float = Field(
        default=0.1, ge=0, le=1, description="Strategy multi_block: filled share of the last block that adds one more."
    )
    stop: str | tuple[str, ...] = Field(
        default=(),
        description="A string, or a list of strings, that ends a continuation; the text is cut before it. Holes ignore it.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Same seed, same text, whatever else is in the batch.")
    num_samples: int = Field(default=1, ge=1, le=2**16, description="Samples for each prompt.")

    @field_validator("stop", mode="after")
    @classmethod
    def _several(cls, stop: str | tuple[str, ...]) -> tuple[str, ...]:
        several = (stop,) if isinstance(stop, str) else stop
        if "" in several:
            raise ValueError('an empty string stands everywhere: name what ends a text, or leave "stop" out')
        return several

    @model_validator(mode="after")
    def _fits_together(self) -> "SamplerConfig":
        if self.gen_length == "auto":
            return self
        if self.gen_length < 1:
            raise ValueError(f'gen_length = {self.gen_length} must be at least 1, or "auto"')
        if self.gen_length > MOST:
            raise ValueError(
                f"gen_length = {self.gen_length}: one request may have {MOST} tokens at most; make it smaller"
            )
        if self.block_length is not None and self.gen_length % self.block_length:
            raise ValueError(
                f"gen_length = {self.gen_length} is not a multiple of block_length = {self.block_length}: "
                f"make it {-(-self.gen_length // self.block_length) * self.block_length}, or change block_length"
            )
        return self


class EngineConfig(BaseModel):
    """[engine]: what is kept between forwards, and how much runs at a time. Of these only `cache` can change tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cache: Literal["auto", "none", "prefix", "dual", "exact"] = Field(
        default="auto",
        description="Keys and values kept: auto is exact where the family allows it, else none; prefix and dual "
        "(Fast-dLLM) are approximations for bidirectional families.",
    )
    refresh_interval: int | None = Field(
        default=None,
        ge=1,
        description="Caches prefix and dual: recompute all keys every so many steps; none: at each block's first step.",
    )
    cache_delay: int = Field(
        default=1,
        ge=0,
        description="Caches prefix and dual with refresh_interval: steps a finished block is still recomputed.",
    )
    page_size: int = Field(default=32, ge=1, le=MOST, description="Positions in a page of the cache.")
    num_pages: int | None = Field(
        default=None, ge=1, le=2**31, description="Pages in the cache; none: from memory_fraction."
    )
    memory_fraction: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Share of the free memory that pages may take, on a GPU; a quarter of it elsewhere.",
    )
    max_num_tokens: int = Field(default=8192, ge=1, le=2**31, description="Positions in one forward, at most.")
    max_num_requests: int = Field(default=256, ge=1, le=MOST, description="Requests under way at a time, at most.")
    kernels: Literal["auto", "triton", "c", "torch"] = Field(
        default="auto",
        description="What computes: Triton on a GPU, C for float32 on a CPU, torch anywhere; auto takes the first that can.",
    )
    max_waiting: int | None = Field(
        default=None, ge=0, description="Requests that may wait for their turn; more are refused. none: any number."
    )
    deterministic: bool = Field(
        default=False,
        description="Logits do not depend on the batch, bit for bit: by matrix products in pieces of one size, which is "
        "slower. On a CPU, plain networks in fp32 are always so, at no price.",
    )
    cuda_graphs: bool = Field(
        default=False, description="Record a block's step once and replay it; saves the host's launches, on CUDA only."
    )


class JobConfig(BaseModel):
    """[[job]]: one thing to decode. It inherits [model] and [sampler], and overrides what it names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str = Field(default="", description="Heading of what is shown.")
    request_id: str = Field(default="", description="Returned with the result; the job's number from 0 when empty.")
    prompt: str | None = Field(
        default=None, description="Text to continue, or to fill where it says [MASK:12] (twelve tokens) or [MASK:4-16]."
    )
    sudoku: str | None = Field(
        default=None, description="81 cells row by row; 0 or . is empty; spaces and lines are ignored."
    )
    model: ModelSection = Field(default=ModelSection(), description="This job's model; [model] when absent.")
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
        """Where it was written, for messages: a file's line, an option."""
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

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelSection = Field(default=ModelSection(), description="The model of every job that names no other.")
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
        shared = {name: data[name] for name in ("model", "sampler") if isinstance(data.get(name), dict)}
        jobs = (_under(shared, job) if isinstance(job, dict) else job for job in data["job"])
        return {**data, "job": tuple(jobs)}


def _under(shared: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    merged = dict(job)
    for name, section in shared.items():
        own = job.get(name, {})
        merged[name] = {**section, **own} if isinstance(own, dict) else own
    return merged
