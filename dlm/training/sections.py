"""The sections of a training TOML that say what is learned. Knows no tensors: this module must import without torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ObjectiveConfig(Section):
    """[objective]: how text is corrupted and what its tokens count. The masking also decides who sees whom:
    `block` trains a block-causal network and `causal` a causal one; the others keep what the model is, except that a
    causal one becomes bidirectional."""

    masking: Literal["random", "complementary", "causal"] = Field(
        default="random",
        description="random: LLaDA and MDLM; complementary: the same and the complement of its mask; "
        "causal: plain autoregressive training.",
    )
    block_length: int | None = Field(default=None, ge=1, description="masking = block, trajectory: tokens a block")
    weighting: Literal["bound", "uniform"] = Field(
        default="bound", description="1/p, which makes the loss the likelihood bound; or uniform"
    )
    antithetic: bool = Field(
        default=True, description="spread the noise levels of a batch evenly (lower variance, same expectation)"
    )
    exact_count: bool = Field(default=False, description="mask an exact number of tokens instead of independently")
    truncate_probability: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="share of steps whose sequences are cut to a random length (LLaDA); pre-training only",
    )
