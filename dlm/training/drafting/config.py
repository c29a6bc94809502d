"""[draft]: the draft that objective.masking = "draft" trains. Must import without torch."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from dlm.reading import Reader, Readers
from dlm.training.sections import ObjectiveConfig, Section

if TYPE_CHECKING:
    from dlm.training.config import TrainConfig

DECAYS = {16: 7.0, 10: 5.0, 8: 4.0}
"""block_length -> loss_decay, as published."""
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""What makes it a DFlash 2 draft."""


class DraftConfig(Section):
    """[draft]: a DFlash draft (arXiv 2602.06036) and how it learns."""

    READERS: ClassVar[Readers] = {
        "loss_decay": Reader(
            decides="weighting", where='with weighting = "decay"', reads=lambda d: d.weighting == "decay"
        ),
        "smoothing": Reader(
            decides="weighting", where='with weighting = "dpace"', reads=lambda d: d.weighting == "dpace"
        ),
        "states_dtype": Reader(decides="states", where="with states", reads=lambda d: d.states is not None),
        "tau_length": Reader(
            decides="tau_prompts", where="with tau_prompts above 0", reads=lambda d: d.tau_prompts > 0
        ),
    }

    target: str | None = Field(
        default=None, description="the causal model it drafts for, which stays as it is: bundled name, folder or hub id"
    )
    num_layers: int | None = Field(
        default=None, ge=1, description="layers of a new draft, as wide as the target's; none: 1, or train.init_from's"
    )
    target_layers: tuple[int, ...] = Field(
        default=(), description="target layers whose outputs it reads, from 0; none: num_layers of them, spread evenly"
    )
    block_length: int | None = Field(
        default=None,
        ge=2,
        le=256,
        description="rows of a block: the newest token and the drafted ones; none: 8, or train.init_from's",
    )
    vocabulary: int | None = Field(
        default=None,
        ge=1,
        description="tokens that a new draft can draft: those most frequent in the training answers, so many; none: all. "
        "The others are left to the target; the head costs as much less in training and decoding",
    )
    num_anchors: int = Field(
        default=512, ge=1, description="blocks a sequence, which begin at positions drawn anew each step"
    )
    weighting: Literal["decay", "dpace"] = Field(
        default="decay",
        description="what the k-th drafted token counts; decay: exp(-(k-1) / loss_decay); dpace: how likely the tokens "
        "before it, as the draft has them now, are right",
    )
    loss_decay: float | None = Field(
        default=None, gt=0, description="none: 7, 5, 4 for blocks of 16, 10, 8, and half the block for others"
    )
    smoothing: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="weighting = dpace: how far a drafted token's probability is drawn towards 1",
    )
    states: str | None = Field(
        default=None,
        description="folder of the target's states that `dlm-prepare anchors` wrote; none: the target runs beside",
    )
    states_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="dtype of the states that `dlm-prepare anchors` writes"
    )
    context: bool = Field(
        default=True,
        description="false: a draft that reads nothing of the target but its newest token, to compare with",
    )
    tau_prompts: int = Field(
        default=8, ge=0, description="held-out beginnings that each validation decodes with the draft; 0: none"
    )
    tau_length: int = Field(default=64, ge=2, description="tokens it decodes of each")
    conv_kernel_size: int | None = Field(
        default=None, ge=1, description="DFlash 2: rows that its dynamic convolutions read"
    )
    conv_group_size: int | None = Field(default=None, ge=1, description="DFlash 2: channels that share a kernel")
    selector_rank: int | None = Field(
        default=None, ge=1, description="DFlash 2: width of the codebooks that choose among candidates"
    )
    selector_top_k: int | None = Field(default=None, ge=1, description="DFlash 2: candidates a position")

    @property
    def second(self) -> dict[str, Any]:
        """The sizes of a DFlash 2 draft; empty for a plain one."""
        return {name: value for name in SECOND if (value := getattr(self, name)) is not None}

    def decay(self, block_length: int) -> float:
        """The constant of exp(-(k-1) / it)."""
        return self.loss_decay or DECAYS.get(block_length, block_length / 2)


def draft_problem(config: "TrainConfig") -> str | None:
    """What is wrong with a config that trains a draft, or that says something of a draft and trains none."""
    d, t = config.draft, config.train
    if config.objective.masking != "draft":
        given = [name for name, info in DraftConfig.model_fields.items() if getattr(d, name) != info.default]
        if config.trainable.kind == "draft":
            return 'trainable.kind = "draft" needs objective.masking = "draft", which says the same by itself'
        if given:
            value = getattr(d, given[0])
            return f"draft.{given[0]} = {value!r} is only read with objective.masking = draft, not {config.objective.masking}"
        return None
    if config.trainable.kind not in ("language", "draft"):
        return f"objective.masking = draft trains a draft, not trainable.kind = {config.trainable.kind!r}"
    if d.target is None:
        return "objective.masking = draft needs draft.target: the causal model that the draft is for"
    if 0 < len(d.second) < len(SECOND):
        missing = next(name for name in SECOND if name not in d.second)
        return f"draft.{missing} is not set: a DFlash 2 draft needs all of {', '.join(SECOND)}"
    if len(set(d.target_layers)) < len(d.target_layers) or min(d.target_layers, default=0) < 0:
        return f"draft.target_layers = {list(d.target_layers)}: different numbers of layers, from 0"
    shape = ("num_layers", "target_layers", "block_length", "vocabulary", *SECOND)
    given = [name for name in shape if getattr(d, name) != DraftConfig.model_fields[name].default]
    if t.init_from is not None and given:
        return (
            f"draft.{given[0]} = {getattr(d, given[0])!r} shapes a new draft, and train.init_from = {t.init_from!r} has its own "
            "shape: leave one out"
        )
    if t.init_from is not None and not d.context:
        return f"draft.context = false begins anew, and train.init_from = {t.init_from!r} is a trained draft: leave one out"
    if t.tokenizer is not None:
        return f"train.tokenizer = {t.tokenizer!r}: a draft has its target's tokenizer; leave it out"
    if t.gradient_checkpointing:
        return (
            "train.gradient_checkpointing is not read with objective.masking = draft: lower draft.num_anchors instead"
        )
    if config.eval.draws != type(config.eval).model_fields["draws"].default:
        return f"eval.draws = {config.eval.draws} is not read with objective.masking = draft: leave it out"
    for name, info in ObjectiveConfig.model_fields.items():
        value = getattr(config.objective, name)
        if name not in ("masking", "documents") and value != info.get_default():
            return f"objective.{name} = {value!r} is not read with masking = draft: leave it out"
    return None
