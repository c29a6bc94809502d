"""What a latent model is made of, and how its four stages are trained: [trainable.own]. Must import without torch."""

from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dlm.models.config import ModelConfig
from dlm.reading import Reader, Readers, judged, unread

STAGES = ("autoencoder", "flow", "joint", "adapter")
FLOWING = ("flow", "joint", "adapter")
FAMILY = "dlm_latent"


class Part(BaseModel):
    """A table of settings; one that the others leave unread is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    READERS: ClassVar[Readers] = {}

    @model_validator(mode="after")
    def _all_read(self) -> Self:
        if (problem := unread(self, self.READERS, judged(self, self.READERS))) is not None:
            raise ValueError(problem)
        return self


class Headed(Part):
    """A table whose width is shared among attention heads."""

    TABLE: ClassVar[str]

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"{self.TABLE}.hidden_size = {self.hidden_size} must be an even multiple of num_attention_heads = "
                f"{self.num_attention_heads}"
            )
        return self

    @property
    def heads(self) -> dict[str, Any]:
        """As fields of a `ModelConfig`."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.hidden_size // self.num_attention_heads,
            "qk_norm": True,
        }


class AutoencoderConfig(Headed):
    """[trainable.own.autoencoder]"""

    TABLE = "autoencoder"

    hidden_size: int = Field(default=128, ge=8, le=2**14, description="width of encoder and decoder")
    intermediate_size: int = Field(default=256, ge=8, le=2**16, description="hidden width of their SwiGLU")
    num_hidden_layers: int = Field(
        default=2, ge=1, le=256, description="feed-forward layers each; of a perceiver, layers"
    )
    num_attention_heads: int = Field(default=4, ge=1, le=256, description="kind = perceiver: heads")

    def network(self, vocab_size: int) -> ModelConfig:
        """The shape of its feed-forward and attention."""
        return ModelConfig(vocab_size=vocab_size, **self.heads)


class DenoiserConfig(Headed):
    """[trainable.own.denoiser]"""

    TABLE = "denoiser"

    hidden_size: int = Field(default=192, ge=8, le=2**14, description="width")
    num_hidden_layers: int = Field(default=4, ge=1, le=256, description="layers")
    num_attention_heads: int = Field(default=4, ge=1, le=256, description="heads")
    intermediate_size: int = Field(default=512, ge=8, le=2**16, description="hidden width of the SwiGLU feed-forward")
    position_embedding: Literal["rope", "learned"] = Field(
        default="rope", description="rotary positions, or a learned vector for each latent"
    )


class Shape(Part):
    """What a saved latent model says of itself."""

    READERS = {
        "tokens_per_latent": Reader(decides="kind", where='with kind = "chunk"', reads=lambda s: s.kind == "chunk"),
        "latents": Reader(decides="kind", where='with kind = "perceiver"', reads=lambda s: s.kind == "perceiver"),
    }

    kind: Literal["chunk", "perceiver"] = Field(
        default="chunk", description="chunk: every few tokens become one latent; perceiver: a whole text a fixed number"
    )
    tokens_per_latent: int = Field(default=4, ge=1, le=256, description="kind = chunk: tokens a latent")
    latents: int = Field(default=16, ge=1, le=4096, description="kind = perceiver: latents a text")
    channels: int = Field(default=32, ge=1, le=4096, description="numbers a latent")
    variational: bool = Field(
        default=False,
        description="the encoder gives a normal distribution (VAE); else each latent's norm is sqrt(channels)",
    )
    path: Literal["linear", "vp"] = Field(
        default="linear", description="from data to noise: straight, or of constant variance with a cosine schedule"
    )
    self_conditioning: bool = Field(default=True, description="the denoiser is shown its own last guess")
    block_length: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="latents denoised together, block after block (Cola); none: all at once",
    )
    t_min: float | None = Field(
        default=None,
        gt=0,
        lt=0.5,
        description="noise at which the likelihood bound asks the decoder; none: at which training text costs least, found "
        "when the model is written",
    )
    autoencoder: AutoencoderConfig = Field(default=AutoencoderConfig(), description="encoder and decoder")
    denoiser: DenoiserConfig = Field(default=DenoiserConfig(), description="the flow's network")
    stage: Literal["autoencoder", "flow", "joint", "adapter"] = Field(
        default="autoencoder", description="what is trained, or was last"
    )

    @model_validator(mode="after")
    def _blocks_of_chunks(self) -> Self:
        if self.block_length is not None and self.kind == "perceiver":
            raise ValueError(
                f'block_length = {self.block_length} is only read with kind = "chunk": a perceiver\'s latents have no order'
            )
        return self

    def latents_of(self, length: int) -> int:
        """Latents of a text of so many tokens."""
        return self.latents if self.kind == "perceiver" else -(-length // self.tokens_per_latent)


def _in(*stages: str, more: str = "", reads: Any = None) -> Reader:
    words = " or ".join(f'"{stage}"' for stage in stages)
    return Reader(
        decides="stage",
        where=f"with stage = {words}{more}",
        reads=lambda c: c.stage in stages and (reads is None or reads(c)),
    )


class LatentConfig(Shape):
    """[trainable.own] of trainable.kind = "latent". The shape is the checkpoint's where train.init_from names one."""

    READERS = {
        **Shape.READERS,
        **dict.fromkeys(("noise", "token_dropout", "latent_dropout"), _in("autoencoder", "joint")),
        "free_bits": Reader(decides="kl_weight", where="with a kl_weight above 0", reads=lambda c: c.kl_weight > 0),
        **dict.fromkeys(("times", "prompt_probability", "prompt_drop"), _in(*FLOWING)),
        **dict.fromkeys(
            ("times_mean", "times_std"),
            Reader(decides="times", where='with times = "logit_normal"', reads=lambda c: c.times == "logit_normal"),
        ),
        **dict.fromkeys(("encoder_gradient", "anchor_weight"), _in("joint")),
        "align_weight": Reader(decides="align", where="with align", reads=lambda c: c.align is not None),
        "align_layer": Reader(decides="align", where="with align", reads=lambda c: c.align is not None),
        **dict.fromkeys(("alpha", "tau", "sigma", "beta"), _in("adapter")),
    }

    noise: float = Field(default=0.5, ge=0, description="the decoder sees latents under noise of 0 to so many std")
    token_dropout: float = Field(default=0.1, ge=0, lt=1, description="tokens that the encoder sees as [MASK]")
    latent_dropout: float = Field(default=0.1, ge=0, lt=1, description="share of a latent's numbers set to 0")
    kl_weight: float = Field(default=0.0, ge=0, description="of the KL to a standard normal; needs variational = true")
    free_bits: float = Field(default=0.5, ge=0, description="nats a channel below which the KL is not lowered")
    times: Literal["uniform", "logit_normal", "adaptive"] = Field(
        default="uniform", description="how noise levels are drawn; adaptive: more where the loss rises with them"
    )
    times_mean: float = Field(default=0.0, description="times = logit_normal: mean of logit t; above 0 is more noise")
    times_std: float = Field(default=1.0, gt=0, description="times = logit_normal: standard deviation of logit t")
    prompt_probability: float = Field(
        default=0.25, ge=0, le=1, description="rows whose first latents, a random number, stay clean"
    )
    prompt_drop: float = Field(
        default=0.1, ge=0, le=1, description="of these, the share whose prompt is hidden: for guidance"
    )
    encoder_gradient: float = Field(default=0.0, ge=0, description="what the flow's gradient counts in the encoder")
    anchor_weight: float = Field(default=0.0, ge=0, description="of the KL to the encoder as the stage began (Cola)")
    align: str | None = Field(
        default=None,
        description="frozen model whose states the decoder's are drawn towards: bundled name, folder, hub id",
    )
    align_weight: float = Field(default=1.0, gt=0, description="of 1 - cosine")
    align_layer: int = Field(default=-1, description="which of its layers; -1 is the last")
    alpha: float = Field(default=0.5, ge=0, le=1, description="rows whose noise is the adapter's; else standard normal")
    tau: float = Field(default=0.7, gt=0, description="std of the answer's error: its cost counts 1 / (2 tau^2)")
    sigma: float = Field(default=0.7, gt=0, description="std of the prompt's error")
    beta: float = Field(
        default=1e-2, ge=0, description="of the summed KL between the adapter's noise and standard normal"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kl_weight > 0 and not self.variational:
            raise ValueError(f"kl_weight = {self.kl_weight} needs variational = true: without it nothing is drawn")
        if self.align is not None and self.stage not in ("autoencoder", "joint"):
            raise ValueError(
                f'align = "{self.align}" trains the autoencoder, which stage = "{self.stage}" keeps as it is'
            )
        return self

    @property
    def shape(self) -> Shape:
        """What is saved with the model."""
        return Shape.model_construct(**{name: getattr(self, name) for name in Shape.model_fields})
