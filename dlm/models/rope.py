"""Rotary frequencies, with the scalings that published checkpoints use."""

import math
import reprlib
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm.errors import UserError
from dlm.models.config import ModelConfig

NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
MOST = 1e12


def rope_frequencies(config: ModelConfig) -> tuple[Float[Tensor, " r"], float]:
    """Inverse frequencies in fp32 (r = rotary_dim / 2) and the factor on cos and sin (1 unless yarn).

    Raises UserError for scalings that are not known, lack a number, or give no finite frequencies.
    """
    dim = config.rotary_dim or config.head_dim
    freq = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    _check(scaling, kind)
    gain = 1.0
    try:
        if kind == "linear":
            freq = freq / scaling["factor"]
        elif kind == "llama3":
            freq = _llama3(freq, scaling)
        elif kind == "yarn":
            freq, gain = _yarn(freq, dim, config, scaling)
    except (ArithmeticError, ValueError) as error:  # logarithms of 0, thetas of 1
        raise UserError(f"rope_theta={config.rope_theta} with rope_scaling={reprlib.repr(scaling)}: {error}") from error
    if not torch.isfinite(freq).all() or not math.isfinite(gain):
        raise UserError(
            f"rope_theta={config.rope_theta} with rope_scaling={reprlib.repr(scaling)} gives frequencies that are not finite"
        )
    return freq, gain


def _check(scaling: dict[str, Any], kind: Any) -> None:
    """A known kind, with the numbers that it needs."""
    if kind not in ("default", *NEEDED):
        raise UserError(f"rope_scaling type {reprlib.repr(kind)} is not supported; known: default, {', '.join(NEEDED)}")
    if kind == "default":
        return
    for key in NEEDED[kind]:
        if scaling.get(key) is None:
            raise UserError(f"rope_scaling={reprlib.repr(scaling)} of type {kind!r} lacks {key!r}")
    for key in NUMBERS:
        value = scaling.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < MOST):
            raise UserError(f"rope_scaling: {key} = {reprlib.repr(value)} should be a number above 0, below {MOST:g}")


def _llama3(freq: Tensor, scaling: dict) -> Tensor:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear blend between."""
    old, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = old * freq / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * freq / factor + blend * freq


def _yarn(freq: Tensor, dim: int, config: ModelConfig, scaling: dict) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, eq. 17-23), with the truncation transformers uses."""
    factor = scaling["factor"]
    old = scaling.get("original_max_position_embeddings") or config.max_position_embeddings

    def channel(turns: float) -> float:
        return dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = channel(scaling.get("beta_fast", 32)), channel(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=freq.device) - low) / max(high - low, 1e-3)).clamp(0, 1)

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    gain = scaling.get("attention_factor")
    if gain is None:
        some, all_ = scaling.get("mscale"), scaling.get("mscale_all_dim")
        gain = growth(some) / growth(all_) if some and all_ else growth(1.0)
    return freq / factor * ramp + freq * (1 - ramp), gain


def rope_table(
    freq: Float[Tensor, " r"], gain: float, positions: Int[Tensor, "b l"], dtype: torch.dtype
) -> tuple[Float[Tensor, "b l 1 e"], Float[Tensor, "b l 1 e"]]:
    """cos and sin of each position, computed in fp32, then cast to `dtype`."""
    angle = positions[:, :, None, None].float() * freq
    angle = torch.cat((angle, angle), dim=-1)
    return (angle.cos() * gain).to(dtype), (angle.sin() * gain).to(dtype)
