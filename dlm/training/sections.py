"""The sections of a training TOML that say what is learned. Must import without torch."""

from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from dlm.errors import nearest
from dlm.reading import Reader, Readers, judged, unread
from dlm.training.masking import MASKINGS


class Section(BaseModel):
    """A section of a training TOML. A setting in `READERS` that the others leave unread is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    READERS: ClassVar[Readers] = {}

    @model_validator(mode="after")
    def _all_read(self, info: ValidationInfo) -> Self:
        name = type(self).__name__.removesuffix("Config").lower()  # as it stands in `TrainConfig`
        if (problem := unread(self, self.READERS, judged(self, self.READERS, info, name))) is not None:
            raise ValueError(problem)
        return self


class TrainableConfig(Section):
    """[trainable]: what kind of model is trained, a line of `dlm.training.trainable.TRAINABLES`."""

    kind: str = Field(default="language", description="language: a network that predicts tokens")
    own: dict[str, Any] = Field(default={}, description="settings of a kind that brings its own, which it checks")


class ObjectiveConfig(Section):
    """[objective]: how text is corrupted and what its tokens count. The masking also decides who sees whom:
    `block` trains a block-causal network and `causal` a causal one; the others keep what the model is, except that a
    causal one becomes bidirectional, and a block-causal one where `attention` says so."""

    READERS = {
        "entropy_temperature": Reader(
            decides="entropy_weight", where="with an entropy_weight above 0", reads=lambda o: o.entropy_weight > 0
        )
    }

    masking: str = Field(
        default="random",
        description="random: LLaDA and MDLM; complementary: the same and the complement of its mask; "
        "spans: random, with runs of neighbouring tokens in some sequences, for models that fill holes; "
        "block: block diffusion (BD3-LM); "
        "causal: plain autoregressive training; trajectory: what a decoder's block still lacked (data.source = traces); "
        "draft: blocks that a DFlash draft fills for draft.target.",
    )
    block_length: int | None = Field(default=None, ge=1, description="masking = block, trajectory: tokens a block")
    max_block_length: int | None = Field(
        default=None, ge=1, description="masking = trajectory: blocks grow to this over the run; none: they stay"
    )
    min_mask_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="masking = trajectory: least share of the block that is masked, at the run's start; "
        "it grows to max_mask_ratio",
    )
    max_mask_ratio: float = Field(
        default=0.8, gt=0, le=1, description="masking = trajectory: largest share of the block that is masked"
    )
    complementary: bool = Field(
        default=False, description="masking = trajectory: a second pass asks for the block's other tokens"
    )
    span_share: float = Field(
        default=0.5, ge=0, le=1, description="masking = spans: share of the sequences in which whole runs are masked"
    )
    span_length: float = Field(
        default=16.0, ge=1, description="masking = spans: tokens of a run on average, in sequences with the longest"
    )
    span_level: float = Field(
        default=0.5, gt=0, le=1, description="masking = spans: highest share of these sequences that is masked"
    )
    span_edges: float = Field(
        default=0.0,
        ge=0,
        description="masking = spans: a token d places from what is shown counts d^-span_edges; 0: all count alike",
    )
    entropy_weight: float = Field(
        default=0.0,
        ge=0,
        description="of the entropy of tokens already predicted right, which makes the model surer of them; d3LLM has 2",
    )
    entropy_temperature: float = Field(default=0.5, gt=0, description="temperature of that entropy")
    weighting: Literal["bound", "uniform"] = Field(
        default="bound", description="1/p, which makes the loss the likelihood bound; or uniform"
    )
    antithetic: bool = Field(
        default=True, description="spread the noise levels of a batch evenly (lower variance, same expectation)"
    )
    t_min: float = Field(
        default=1e-3,
        gt=0,
        le=1,
        description="lowest noise level, as a share of tokens masked; with t_max < 1 or t_min > 0.001 the loss is no bound",
    )
    t_max: float = Field(
        default=1.0, gt=0, le=1, description="highest noise level; BD3-LM narrows both for small blocks"
    )
    exact_count: bool = Field(default=False, description="mask an exact number of tokens instead of independently")
    documents: Literal["joined", "apart"] = Field(
        default="joined",
        description="apart: those packed into one row do not see each other, and each begins at position 0; "
        "validation reads its rows joined",
    )
    attention: Literal["bidirectional"] | None = Field(
        default=None,
        description="bidirectional: a block-causal train.init_from becomes so, too; none: it keeps its attention",
    )
    truncate_probability: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="share of steps whose sequences are cut to a random length (LLaDA); pre-training only, not block",
    )
    own: dict[str, Any] = Field(default={}, description="settings of a masking that brings its own, which it checks")

    @field_validator("masking")
    @classmethod
    def _known(cls, masking: str) -> str:
        if masking not in MASKINGS:
            raise ValueError(f"must be one of {', '.join(MASKINGS)}{nearest(masking, MASKINGS)}")
        return masking

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in dict.fromkeys(("own", *(name for entry in MASKINGS.values() for name in entry.reads))):
            maskings = [masking for masking, entry in MASKINGS.items() if name in entry.reads]
            if getattr(self, name) != type(self).model_fields[name].default and self.masking not in maskings:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} is only read with masking = {' or '.join(maskings)}, "
                    f"not {self.masking}"
                )
        if self.masking == "block" and self.block_length is None:
            raise ValueError("masking = block needs block_length (BD3-LM: 4, 8 or 16)")
        if self.t_min > self.t_max:
            raise ValueError(f"t_min = {self.t_min} exceeds t_max = {self.t_max}")
        if self.masking == "trajectory":
            if self.block_length is None:
                raise ValueError("masking = trajectory needs block_length (d3LLM: 16, with max_block_length = 32)")
            if (self.max_block_length or self.block_length) < self.block_length:
                raise ValueError(
                    f"max_block_length = {self.max_block_length} is less than block_length = {self.block_length}"
                )
            if self.min_mask_ratio > self.max_mask_ratio:
                raise ValueError(
                    f"min_mask_ratio = {self.min_mask_ratio} exceeds max_mask_ratio = {self.max_mask_ratio}"
                )
        return self


class ReplayConfig(Section):
    """[replay]: rows of past batches among the new ones, against forgetting."""

    READERS = dict.fromkeys(
        ("size", "start"), Reader(decides="fraction", where="with a fraction above 0", reads=lambda r: r.fraction > 0)
    )

    fraction: float = Field(
        default=0.0, ge=0, lt=1, description="share of each batch that was in an earlier one; 0: off"
    )
    size: int = Field(default=4096, ge=1, description="rows kept: a uniform sample of all new ones so far")
    start: int = Field(default=0, ge=0, description="steps before rows come again; they are kept from the first on")


class AlignConfig(Section):
    """[align]: states of masked tokens drawn towards those that a frozen causal teacher has of the clean text
    (arXiv 2605.06885): weight * (1 - mean cosine) is added to the loss."""

    READERS = {
        **dict.fromkeys(
            ("decay", "num_sample_layers", "sub_sample_ratio"),
            Reader(decides="weight", where="with a weight above 0", reads=lambda a: a.weight > 0),
        ),
        "final_weight": Reader(
            decides="decay", where='with decay = "linear" or "cosine"', reads=lambda a: a.decay != "constant"
        ),
    }

    weight: float = Field(default=0.0, ge=0, description="what the term counts at the beginning of the run; 0: off")
    decay: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="how the weight goes to final_weight over the run; constant: it does not"
    )
    final_weight: float = Field(default=0.0, ge=0, description="decay = linear, cosine: the weight at the end")
    layers: Literal["all"] | tuple[int, ...] = Field(
        default="all", description="layers whose outputs are aligned, counted from 0, teacher's and student's alike"
    )
    num_sample_layers: int | None = Field(
        default=None, ge=1, description="so many of the layers, drawn anew each step; none: all of them"
    )
    sub_sample_ratio: float = Field(
        default=1.0, gt=0, le=1, description="share of a sequence's masked tokens, drawn anew each step"
    )
    teacher: str | None = Field(
        default=None, description="causal model: bundled name, folder or hub id; none: train.init_from as it is there"
    )
    anchors: str | None = Field(
        default=None, description="folder of states that `dlm-prepare anchors` wrote; none: the teacher runs beside"
    )
    anchors_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="dtype of the states that `dlm-prepare anchors` writes"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.layers != "all" and (not self.layers or min(self.layers) < 0):
            raise ValueError(f'align.layers = {list(self.layers)}: "all", or numbers of layers from 0 on')
        if self.layers != "all" and len(set(self.layers)) < len(self.layers):
            raise ValueError(f"align.layers = {list(self.layers)}: a layer is named twice")
        if self.layers != "all" and (self.num_sample_layers or 1) > len(self.layers):
            raise ValueError(
                f"align.num_sample_layers = {self.num_sample_layers}, but align.layers names {len(self.layers)}"
            )
        return self


class AdapterConfig(Section):
    """[adapter]: train small matrices beside the model's own instead of the model (LoRA, arXiv 2106.09685)."""

    READERS = {
        **dict.fromkeys(
            ("r", "alpha", "dropout", "targets", "merge"),
            Reader(decides="kind", where='with kind = "lora" or "qlora"', reads=lambda a: a.kind != "none"),
        ),
        "double_quant": Reader(decides="kind", where='with kind = "qlora"', reads=lambda a: a.kind == "qlora"),
    }

    kind: Literal["none", "lora", "qlora"] = Field(
        default="none", description="qlora: the model's own matrices in 4 bits (NF4; needs bitsandbytes)"
    )
    r: int = Field(default=16, ge=1, description="rank")
    alpha: float = Field(default=32.0, gt=0, description="what is added counts alpha / r")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout before the adapter")
    targets: tuple[str, ...] = Field(
        default=(), description="linear layers by name, e.g. q_proj, v_proj; none: all of attention and feed-forward"
    )
    double_quant: bool = Field(default=True, description="kind = qlora: quantise the scales too")
    merge: bool = Field(default=False, description="also write the model with the adapter in it, into <out>/merged")
