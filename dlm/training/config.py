"""Everything `dlm-train` reads, and the sections of the run itself. Must import without torch."""

from typing import Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from dlm.data.config import DataConfig
from dlm.models.config import ModelConfig
from dlm.reading import Reader
from dlm.training.drafting.config import DraftConfig, draft_problem
from dlm.training.observing import CheckpointConfig, EvalConfig, LogConfig, ProfileConfig, WatchConfig
from dlm.training.sections import (
    AdapterConfig,
    AlignConfig,
    ObjectiveConfig,
    ReplayConfig,
    Section,
    TrainableConfig,
)

TEXT_TOKENIZER = "pico"
"""The default tokenizer of a new model of text files. It is byte-level, so it can write any text."""


class GroupConfig(Section):
    """One group of parameters."""

    algorithm: Literal["adamw", "muon"] = Field(
        default="adamw", description="optimiser of this group; muon is for hidden matrices"
    )
    lr_scale: float = Field(
        default=1.0, ge=0, description="this group's learning rate is train.lr times this; 0 freezes it"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")


class OptimConfig(Section):
    """Per-group optimiser settings; train.lr is the common factor."""

    READERS = dict.fromkeys(
        ("momentum", "ns_steps"),
        Reader(
            decides="hidden.algorithm",
            where='with hidden.algorithm = "muon"',
            reads=lambda o: o.hidden.algorithm == "muon",
        ),
    )

    freeze: tuple[str, ...] = Field(
        default=(), description="modules that are not trained, as lm_head, embed, mlp, layers.0, layers.*.attn"
    )
    hidden: GroupConfig = Field(default=GroupConfig(weight_decay=0.01), description="matrices inside the layers")
    embed: GroupConfig = Field(default=GroupConfig(), description="token and position embeddings (and a tied head)")
    head: GroupConfig = Field(default=GroupConfig(), description="untied output head")
    scalar: GroupConfig = Field(
        default=GroupConfig(), description="norm weights, biases, routers, stacked experts, adapters"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW first moment")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW second moment")
    eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="Muon momentum (Nesterov)")
    ns_steps: int = Field(default=5, ge=1, le=20, description="Muon Newton-Schulz iterations")

    @model_validator(mode="after")
    def _muon_on_matrices(self) -> Self:
        for name in ("embed", "head", "scalar"):
            if getattr(self, name).algorithm == "muon":
                raise ValueError(f"optim.{name}.algorithm = 'muon': Muon is for hidden matrices; use 'adamw' here")
        return self


class TrainSection(Section):
    """The run itself."""

    out: str = Field(default="runs/train", description="run folder: the final model, metrics.jsonl and checkpoints/")
    init_from: str | None = Field(
        default=None,
        description="start from these weights: bundled name, folder, GGUF file or hub id; none: from scratch",
    )
    tokenizer: str | None = Field(
        default=None,
        description="bundled name (pico), folder or hub id; none: init_from's, the data's own (sudoku), or pico's for text files",
    )
    steps: int = Field(default=1000, ge=1, description="optimiser steps")
    batch_size: int = Field(default=8, ge=1, description="sequences a step, over all processes and accumulation")
    micro_batch_size: int | None = Field(
        default=None, ge=1, description="sequences a forward in each process; none: no accumulation"
    )
    length: int = Field(default=256, ge=1, description="tokens a sequence")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="learning rate after the warm-up; wsd: constant, then linear over the last decay_steps",
    )
    decay_steps: int = Field(
        default=0, ge=0, description="schedule = wsd: length of the final decay; such a run can be extended"
    )
    warmup_steps: int = Field(
        default_factory=lambda given: 50 if given["steps"] >= 50 else given["steps"] // 10,
        ge=0,
        description="linear warm-up from 0; unless given: 50, or a tenth of the steps where these are fewer than 50",
    )
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1, description="final learning rate over the peak")
    clip: float = Field(default=1.0, ge=0, description="maximum gradient norm; 0: no clipping")
    ema: float = Field(
        default=0.0, ge=0, lt=1, description="decay of the averaged weights that are validated and saved; 0: none"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="bf16: autocast; fp16: on a CPU with avx512_fp16, factors of products in half precision, scaled "
        "(weights and all else stay fp32)",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="recompute each layer in the backward pass to save memory"
    )
    compile: bool = Field(default=False, description="torch.compile the layers")
    seed: int = Field(default=0, ge=0, lt=2**32, description="weights, masks and data order")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        default="auto", description="where to train; auto: the best there is"
    )
    threads: int | None = Field(default=None, ge=1, description="CPU threads; none: torch's choice")
    save_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="dtype of the final model"
    )
    resume: bool = Field(default=True, description="go on from the newest checkpoint in `out`, if there is one")


class TrainConfig(Section):
    """Everything `dlm-train` reads."""

    train: TrainSection = Field(default=TrainSection(), description="the run itself")
    model: ModelConfig = Field(default=ModelConfig(), description="the network's shape, when training from scratch")
    data: DataConfig = Field(default=DataConfig(), description="what to train on")
    trainable: TrainableConfig = Field(default=TrainableConfig(), description="what kind of model is trained")
    objective: ObjectiveConfig = Field(default=ObjectiveConfig(), description="what is minimised")
    draft: DraftConfig = Field(default=DraftConfig(), description="the draft that is trained for a target")
    replay: ReplayConfig = Field(default=ReplayConfig(), description="past batches among the new ones")
    align: AlignConfig = Field(default=AlignConfig(), description="alignment to a causal teacher")
    adapter: AdapterConfig = Field(default=AdapterConfig(), description="LoRA and QLoRA")
    optim: OptimConfig = Field(default=OptimConfig(), description="optimiser groups")
    eval: EvalConfig = Field(default=EvalConfig(), description="validation and samples")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="checkpoints")
    log: LogConfig = Field(default=LogConfig(), description="logging")
    watch: WatchConfig = Field(default=WatchConfig(), description="pictures, gradient norms and samples")
    profile: ProfileConfig = Field(default=ProfileConfig(), description="profiling")

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer's name; None where the model or the data bring their own, or none is named."""
        t = self.train
        new_text = t.init_from is None and self.draft.target is None and self.data.source == "text"
        return TEXT_TOKENIZER if t.tokenizer is None and new_text else t.tokenizer

    @property
    def extendable(self) -> bool:
        """Whether a run may be given more steps: nothing in it depends on their number."""
        follows = (self.align.weight > 0 and self.align.decay != "constant") or self.objective.masking == "trajectory"
        return self.train.schedule in ("constant", "wsd") and not follows

    @model_validator(mode="after")
    def _possible(self, info: ValidationInfo) -> Self:
        t = self.train
        if (problem := draft_problem(self)) is not None:
            raise ValueError(problem)
        if self.objective.masking == "trajectory" and self.data.source != "traces":
            raise ValueError(
                f'objective.masking = trajectory needs data.source = "traces", not "{self.data.source}": '
                "dlm-infer --trace and dlm-prepare trajectories record them"
            )
        if self.objective.masking == "block" and t.length % (self.objective.block_length or 1):
            raise ValueError(
                f"train.length = {t.length} is not a multiple of objective.block_length = {self.objective.block_length}: "
                "the last block of every sequence would be cut"
            )
        if t.compile and t.precision == "fp16":
            raise ValueError(
                'train.precision = "fp16" and train.compile = true: torch.compile cannot see into the kernels that multiply '
                "halves; leave one of them out"
            )
        if t.warmup_steps > t.steps:
            raise ValueError(
                f"train.warmup_steps = {t.warmup_steps} exceeds train.steps = {t.steps}: lower it, or leave it out"
            )
        if (t.schedule == "wsd") != (t.decay_steps > 0):
            raise ValueError(
                f"train.schedule = {t.schedule!r} and train.decay_steps = {t.decay_steps}: wsd, and only wsd, decays so"
            )
        if t.micro_batch_size and t.batch_size % t.micro_batch_size:
            raise ValueError(
                f"train.batch_size = {t.batch_size} is not a multiple of train.micro_batch_size = {t.micro_batch_size}"
            )
        if self.align.weight and self.objective.masking == "causal":
            raise ValueError(
                f"align.weight = {self.align.weight}: masking = 'causal' masks nothing that could be aligned"
            )
        if self.align.weight and self.objective.documents == "apart":
            raise ValueError(
                'objective.documents = "apart": the teacher of [align] reads its rows joined; leave one out'
            )
        if self.align.weight and not (self.align.teacher or self.align.anchors or t.init_from):
            raise ValueError(f"align.weight = {self.align.weight}: no teacher; set align.teacher or train.init_from")
        if self.adapter.kind != "none" and t.init_from is None:
            raise ValueError(f"adapter.kind = {self.adapter.kind!r} needs the model it adapts: set train.init_from")
        for name in self.model.model_fields_set if t.init_from is not None else ():
            inherited = info.context is not None and info.context.inherited(("model", name), ("train", "init_from"))
            if (value := getattr(self.model, name)) != ModelConfig.model_fields[name].default and not inherited:
                raise ValueError(
                    f"model.{name} = {value!r} shapes a new network, and train.init_from = {t.init_from!r} has its own "
                    "shape: leave [model] out, or train.init_from"
                )
        language = self.trainable.kind == "language" and self.objective.masking != "draft"
        if language and t.init_from is None and t.length > self.model.max_position_embeddings:
            raise ValueError(
                f"train.length = {t.length} exceeds model.max_position_embeddings = {self.model.max_position_embeddings}"
            )
        return self
