"""[model], [draft], [sampler] and [engine]: which model decodes, how masks become tokens, and how much runs at a time.

Rules bring their own settings (`dlm.diffusion.unmask.RULES`). Nothing here needs torch.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from dlm.diffusion.unmask import RULES, Rule
from dlm.inference.checks import CHECKS
from dlm.inference.readers import ALIASES, ENGINE_READERS, READ_BY


def _rule_setting(name: str) -> tuple[Any, Any]:
    """A rule's setting as a field of [sampler]: its type and limits, its default, and which rules read it."""
    rules = READ_BY[name]
    rule = RULES[rules[0]]
    kind = rule.settings()[name]
    words = f"Rule{'s' * (len(rules) > 1)} {', '.join(rules)}: {kind.__metadata__[0].description}."
    return kind, Field(default=getattr(rule, name), description=words)


if TYPE_CHECKING:  # type checkers cannot see what is made of a table
    RuleName = CheckName = str
    RuleSettings = BaseModel
else:
    RuleName = Literal[tuple(RULES)]
    CheckName = Literal[("none", *CHECKS)]
    RuleSettings = create_model("RuleSettings", **{name: _rule_setting(name) for name in READ_BY})

Cache = Literal["auto", "none", "prefix", "dual", "exact"]

MOST = 2**20
"""Tokens, or steps, of one request; refused before any memory is asked for."""


class ModelSection(BaseModel, frozen=True, extra="forbid"):
    """[model]: what to load, and where to."""

    name: str = Field(
        default="pico",
        min_length=1,
        description="A bundled model (pico, pico-block, pico-causal, sudoku), a folder, a GGUF file, or a hub id.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the weights; auto keeps the checkpoint's on a GPU and is float32 on a CPU."
    )
    device: str = Field(default="auto", min_length=1, description="auto, cpu, cuda, cuda:N or mps.")
    adapter: str | None = Field(
        default=None,
        description="Folder of a LoRA adapter to merge into it; beside the weights where they are quantised.",
    )
    quantize: Literal["nf4", "int8", "q8", "torchao-fp8", "torchao-int8", "torchao-int4"] | None = Field(
        default=None,
        description="Pack the matrices in 4 or 8 bits: nf4 and int8 by bitsandbytes, torchao-… by torchao, q8 for a CPU.",
    )
    tensor_parallel: int = Field(
        default=1, ge=1, description="Processes of one node that share the layers; start them with torchrun."
    )


class DraftSection(BaseModel):
    """[draft]: what guesses tokens that the model then checks, several in one forward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(
        default=None,
        min_length=1,
        description='A DFlash draft\'s folder or hub id, "ngram" (what followed the same tokens before), a diffusion model of '
        'the same tokenizer, either of these after "ngram+" for both, or, for a diffusion model, "self". The text stays that '
        "of no draft.",
    )


class SamplerConfig(RuleSettings):
    """[sampler]: how masks become tokens. The names are those of `dlm.generate`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    ALIASES: ClassVar[dict[str, str]] = ALIASES

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
    rule: RuleName = Field(default="low_confidence", description="Which masked positions a step commits.")
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
        default="block", description="block: one block after the other; multi_block: a few consecutive ones at a time."
    )
    max_active_blocks: int = Field(
        default=4, ge=1, le=MOST, description="Strategy multi_block: blocks denoised at a time."
    )
    block_add: float = Field(
        default=0.1, ge=0, le=1, description="Strategy multi_block: filled share of the last block that adds one more."
    )
    draft_length: int | Literal["auto"] | None = Field(
        default=None,
        description='With a draft: tokens it guesses at a time; "auto" goes by what pays (verify = "match"). '
        "none: as many as the draft was made for.",
    )
    verify: Literal["match", "reject"] = Field(
        default="match",
        description="With a draft: match writes token for token what the model would without it; reject only keeps the "
        "distribution, drawing drafts from the draft's own.",
    )
    solver: Literal["euler", "heun", "sde", "adapter"] | None = Field(
        default=None,
        description="Latent models: how the flow is solved; heun is two forwards a step, sde adds noise on the way, adapter "
        "is one step from noise that was chosen for the prompt. none: euler.",
    )
    check: CheckName = Field(
        default="none",
        description="Holes: what the filled text must pass, else they are filled anew. python: it parses, or where it is a "
        "fragment the largest part around the holes that can; python_line: and each hole is one line at most. sudoku: the "
        "grid keeps the rules.",
    )
    attempts: int = Field(
        default=8,
        ge=1,
        le=2**16,
        description="With a check: how often the holes are filled at most; the last time stays.",
    )
    retry_temperature: float = Field(
        default=0.7, gt=0, description="With a check: the temperature from the second time on, if it is not higher."
    )
    stop: str | tuple[str, ...] = Field(
        default=(),
        description="A string, or a list of strings, that ends a continuation; the text is cut before it. Holes ignore it.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Same seed, same text, whatever else is in the batch.")
    num_samples: int = Field(default=1, ge=1, le=2**16, description="Samples for each prompt.")

    @property
    def decode_rule(self) -> Rule:
        """The rule with its settings. A call may have given it as an object, whose own fields then hold."""
        if isinstance(self.rule, Rule):
            return self.rule
        known = RULES[self.rule]
        return known(**{name: getattr(self, name) for name in known.settings()})

    @field_validator("stop", mode="after")
    @classmethod
    def _several(cls, stop: str | tuple[str, ...]) -> tuple[str, ...]:
        several = (stop,) if isinstance(stop, str) else stop
        if "" in several:
            raise ValueError('an empty string stands everywhere: name what ends a text, or leave "stop" out')
        return several

    @model_validator(mode="after")
    def _fits_together(self) -> "SamplerConfig":
        if isinstance(self.draft_length, int) and self.draft_length < 1:
            raise ValueError(
                f"draft_length = {self.draft_length}: it counts drafted tokens, so at least 1; without any, leave draft out"
            )
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


class EngineConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """[engine]: what is kept between forwards, and how much runs at a time. Of these only `cache` can change tokens."""

    cache: Cache = Field(
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
    kernels: Literal["auto", "triton", "c", "torch", "c-widened", "c-dots", "c-tiles", "c-int16"] = Field(
        default="auto",
        description="What computes: Triton on a GPU, C for float32 and bfloat16 on a CPU, torch anywhere; auto takes the first "
        "that can. c-int16: bfloat16 as whole numbers of 16 bits, faster on CPUs with avx512_vnni.",
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
        default=True,
        description="Record steps of a size once and replay them: saves the host's launches, where Triton computes on CUDA.",
    )

    def with_cache(self, cache: str) -> "EngineConfig":
        """The same with another cache, and without what that one does not read."""
        other = self.model_copy(update={"cache": cache})
        fields = type(self).model_fields
        gone = {name: fields[name].default for name, reader in ENGINE_READERS.items() if not reader.reads(other)}
        return other.model_copy(update=gone)

    @model_validator(mode="after")
    def _one_size(self) -> "EngineConfig":
        given = "memory_fraction" in self.model_fields_set and self.num_pages is not None
        if given and self.memory_fraction != type(self).model_fields["memory_fraction"].default:
            raise ValueError(
                f"memory_fraction = {self.memory_fraction} is only read without num_pages, and num_pages = {self.num_pages}: "
                "give one of them"
            )
        return self
