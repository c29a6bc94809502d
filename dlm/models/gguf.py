"""Reads the settings of a GGUF file as the config.json of its family. Reads no weights.

Keys are those of `gguf-py/gguf/constants.py` of llama.cpp, and what its `conversion/` writes for LLaDA and Dream.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlm.data.gguf import Header, read_header
from dlm.data.gguf_tokenizer import ends_of
from dlm.errors import UserError
from dlm.models.config import ModelConfig
from dlm.models.gguf_weights import DIVISORS, Weights, first_part, parts_of
from dlm.models.rope import rope_frequencies

TRANSFORMERS_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
LLADA_KEYS = {
    "d_model": "embedding_length",
    "n_layers": "block_count",
    "n_heads": "attention.head_count",
    "n_kv_heads": "attention.head_count_kv",
    "mlp_hidden_size": "feed_forward_length",
    "max_sequence_length": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


@dataclass(frozen=True)
class Architecture:
    """How files of one `general.architecture` are read: `keys` are config.json's -> the file's, behind the architecture."""

    family: str
    class_name: str
    keys: dict[str, str]
    interleaved: bool = False
    """Rows of the query and key matrices are ordered for a rotation of neighbours instead of halves."""
    causal: bool = True
    shifted: bool = True


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", TRANSFORMERS_KEYS, interleaved=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", TRANSFORMERS_KEYS),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", TRANSFORMERS_KEYS),
    "llada": Architecture("llada", "LLaDAModelLM", LLADA_KEYS, interleaved=True, causal=False, shifted=False),
    "dream": Architecture("Dream", "DreamModel", TRANSFORMERS_KEYS, causal=False),
}
"""`general.architecture` -> how such a file is read."""
REFUSED = (
    *("expert_count", "attention.sliding_window", "attention.max_alibi_bias", "attention.clamp_kqv", "logit_scale"),
    *("attention.scale", "attention.output_scale", "attn_logit_softcapping", "final_logit_softcapping"),
    *("residual_scale", "embedding_scale", "use_parallel_residual", "rope.dimension_sections"),
)
"""Keys, behind the architecture, that change what the network computes in ways not implemented here."""
SCALED = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
"""A stretched rotation: the file's keys -> those of `rope_scaling`."""
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What the published scalings of that kind share; they differ in `factor`."""
STORED = {0: "float32", 1: "float16", 30: "bfloat16"}
"""Packings by number that are plain numbers. The others are unpacked to bfloat16 where memory counts."""


def settings_of(path: Path) -> dict[str, Any]:
    """The file's settings as its family's config.json. UserError, by name, for what is not supported."""
    header = read_header(parts_of(path)[0])
    name = header.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(
            f"{path}: general.architecture = {name!r:.60} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    kind = ARCHITECTURES[name]
    for key in REFUSED:
        if header.values.get(f"{name}.{key}"):
            raise header.wrong(f"{name}.{key}", "missing or 0: what it asks for is not supported")
    for key, own in ((f"{name}.attention.causal", kind.causal), ("diffusion.shift_logits", kind.shifted)):
        if header.get(key, own) != own:
            raise header.wrong(key, f"{str(own).lower()}, as {name} models have it")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{path} has no matrix token_embd.weight, so it holds no language model")
    settings: dict[str, Any] = {"architectures": [kind.class_name], "model_type": kind.family}
    found = {ours: _decimal(header.get(f"{name}.{theirs}")) for ours, theirs in kind.keys.items()}
    settings |= {key: value for key, value in found.items() if value is not None}
    settings |= {"vocab_size": embedding.shape[0], "torch_dtype": _dtype(header), **_biases(header, kind.family)}
    settings |= _heads(header, name, kind) | _ids(header)
    settings |= {} if kind.family == "llada" else {"rope_scaling": _scaling(header, name, settings)}
    return settings


def weights_of(file: Path, device: torch.device) -> Weights:
    """The file's tensors, to be read to `device` one by one; of a later part of a split model too."""
    header = read_header(first_part(file))
    name = header.text("general.architecture")
    heads: dict[str, int] = {}
    if name in ARCHITECTURES and ARCHITECTURES[name].interleaved:
        queries = header.whole(f"{name}.attention.head_count") or 1
        heads = {"attn_q": queries, "attn_k": header.whole(f"{name}.attention.head_count_kv") or queries}
    return Weights(file, device, heads)


def generation_of(path: Path) -> dict[str, Any]:
    """The file's special tokens as a generation_config.json."""
    header = read_header(path)
    ends = ends_of(header)
    stops = {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}
    return {key: token for key, token in _ids(header).items() if key != "mask_token_id"} | stops


def _decimal(value: Any) -> Any:
    """A 32-bit float as the shortest equal decimal: 1e-05, not 9.999999747378752e-06."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    short = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((x for x in short if struct.pack("<f", x) == struct.pack("<f", value)), value)


def _dtype(header: Header) -> str:
    """The dtype of its largest tensor."""
    largest = max(header.tensors.values(), key=lambda tensor: math.prod(tensor.shape))
    return STORED.get(largest.kind, "bfloat16")


def _biases(header: Header, family: str) -> dict[str, Any]:
    """Settings that follow from which tensors there are: biases, and whether the output head is the embedding."""
    tied, has = "output.weight" not in header.tensors, lambda part: f"blk.0.{part}.bias" in header.tensors
    if family == "llada":
        return {"weight_tying": tied, "include_qkv_bias": has("attn_q")}
    biases = {"attention_bias": has("attn_q"), "mlp_bias": has("ffn_gate")} if family in ("llama", "qwen3") else {}
    return {"tie_word_embeddings": tied, **biases}


def _heads(header: Header, name: str, kind: Architecture) -> dict[str, Any]:
    """Their width, and the part of it that is rotated."""
    width, heads = (header.whole(f"{name}.{key}") for key in ("embedding_length", "attention.head_count"))
    if not width or not heads:
        raise UserError(f"{header.file}: {name}.embedding_length and {name}.attention.head_count should be above 0")
    usual = width // heads
    each = header.whole(f"{name}.attention.key_length", usual)
    value = header.whole(f"{name}.attention.value_length", each)
    rotated = header.whole(f"{name}.rope.dimension_count", each)
    if value != each:
        raise header.wrong(f"{name}.attention.value_length", f"{each}, as wide as the keys")
    if kind.family == "llada" and (each != usual or rotated != each):
        raise UserError(
            f"{header.file}: heads of {each} with {rotated} rotated; LLaDA's are {usual} wide and rotate all"
        )
    wide = {} if kind.family == "llada" else {"head_dim": each}
    return wide | ({} if rotated == each else {"rotary_dim": rotated})


def _ids(header: Header) -> dict[str, Any]:
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding", "mask_token_id": "mask"}
    found = {ours: header.whole(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in named.items()}
    return {key: token for key, token in found.items() if token is not None}


def _scaling(header: Header, name: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling`: from keys, or from the divisors of the frequencies."""
    kind, linear = header.text(f"{name}.rope.scaling.type", "none"), header.get(f"{name}.rope.scale_linear")
    if kind == "none" and linear:  # an older spelling
        return {"rope_type": "linear", "factor": _decimal(linear)}
    if kind == "none":
        return _divisors(header, settings)
    if kind not in ("linear", "yarn"):
        raise header.wrong(f"{name}.rope.scaling.type", "none, linear or yarn")
    found = {ours: _decimal(header.get(f"{name}.{theirs}")) for theirs, ours in SCALED.items()}
    return {"rope_type": kind, **{key: value for key, value in found.items() if value is not None}}


def _divisors(header: Header, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Llama 3's scaling whose divisors these are; None where nothing is divided."""
    if DIVISORS not in header.tensors:
        return None
    found = Weights(header.file, torch.device("cpu")).get_tensor(DIVISORS).flatten()
    factor = _decimal(float(found.max()))
    if factor == 1.0:
        return None
    scaling = {**LLAMA3, "factor": factor}
    theta, width = settings.get("rope_theta", 10_000.0), settings.get("rotary_dim", settings["head_dim"])
    plain = ModelConfig.model_construct(rope_theta=theta, head_dim=width, rope_scaling=None, rotary_dim=None)
    frequencies, _ = rope_frequencies(plain)
    stretched, _ = rope_frequencies(plain.model_copy(update={"rope_scaling": scaling}))
    if found.shape != frequencies.shape or not torch.allclose(frequencies / found, stretched, rtol=1e-4, atol=0):
        raise UserError(
            f"{header.file}: {DIVISORS} holds divisors that are not those of Llama 3's scaling: not supported"
        )
    return scaling
