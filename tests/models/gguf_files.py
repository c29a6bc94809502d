"""Tiny GGUF files, written by the `gguf` package as llama.cpp's converter writes them: its keys, its names of tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm.models import LM

from . import tiny

gguf: Any = pytest.importorskip("gguf", reason="needs the extra `gguf`")

SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "rope_theta": 5e4, "rms_norm_eps": 1e-5}
"""Over the shape of `tiny`: what packings in blocks of 32 can hold."""
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"qkv_bias": False, "o_bias": False, "mlp_bias": False}),
    "llama with biases": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama with wide heads": ("llama", "llama", {"head_dim": 32}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}),
    "llada": ("llada", "llada-gqa", {"tie_word_embeddings": False, "qkv_bias": False}),
    "llada with biases": ("llada", "llada-gqa", {}),
    "dream": ("dream", "Dream", {"rope_theta": 1e6}),
}
"""Name -> `general.architecture`, the case of `tiny`, what differs from it."""


def network(name: str, **more: Any) -> LM:
    """The network of a case, before it becomes a file."""
    _, case, fields = CASES[name]
    return tiny.model(case, **{**SHAPE, **fields, **more})


def write(
    lm: LM,
    architecture: str,
    folder: Path,
    packing: str = "F32",
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    tokens: bool = True,
) -> Path:
    """`folder`/model.gguf, and `folder`/twin: a folder of safetensors with the weights that the packing leaves.

    `keys` are added or replaced in the header; None takes one away. Vectors stay F32, as llama.cpp keeps them.
    """
    lm.save(folder / "twin")
    stored, config = load_file(folder / "twin" / "model.safetensors"), lm.config
    named = gguf.get_tensor_name_map(
        next(kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture), config.num_hidden_layers
    )
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    stated = {
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": config.rope_theta,
        f"{architecture}.rope.dimension_count": config.head_dim,
    }
    if config.head_dim != config.hidden_size // config.num_attention_heads:
        stated |= {f"{architecture}.attention.{part}_length": config.head_dim for part in ("key", "value")}
    if architecture in ("llada", "dream"):
        stated |= {f"{architecture}.attention.causal": False, "tokenizer.ggml.mask_token_id": config.mask_token_id}
    if architecture == "llada":
        stated["diffusion.shift_logits"] = False
    if tokens:
        stated |= vocabulary(config.vocab_size)
    for key, value in {**stated, **(keys or {})}.items():
        if value is not None:
            add(writer, key, value)
    twin: dict[str, torch.Tensor] = {}
    for hub, tensor in stored.items():
        theirs = named.get_name(hub, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, hub
        turned = architecture in ("llama", "llada")
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        rows = heads.get(theirs.split(".")[-2]) if turned else None
        values = tensor.float().numpy()
        if rows is not None:  # `permute` of llama.cpp's conversion/llama.py
            values = (
                values.reshape(rows, 2, len(values) // rows // 2, *values.shape[1:])
                .swapaxes(1, 2)
                .reshape(values.shape)
            )
        kind = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else packing]
        packed = gguf.quantize(values, kind)
        writer.add_tensor(theirs, packed, raw_dtype=kind)
        back = gguf.dequantize(packed, kind).reshape(values.shape)
        if rows is not None:
            back = back.reshape(rows, len(back) // rows // 2, 2, *back.shape[1:]).swapaxes(1, 2).reshape(back.shape)
        twin[hub] = torch.from_numpy(np.ascontiguousarray(back))
    for key, values in (extra or {}).items():
        writer.add_tensor(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(twin, folder / "twin" / "model.safetensors", metadata={"format": "pt"})
    return folder / "model.gguf"


def vocabulary(size: int) -> dict[str, Any]:
    """A byte-level vocabulary of letters: token i is one character, some are special."""
    tokens = [chr(ord("!") + i) for i in range(size)]
    types = [1] * size
    for index, text in ((1, "<|endoftext|>"), (2, "<|pad|>"), (3, "<|im_end|>"), (40, "<|hole|>")):
        tokens[index], types[index] = text, 3
    tokens[41], types[41] = "<tool>", 4
    tokens[42], types[42] = "[PAD42]", 5
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}>",
    }


def add(writer: Any, key: str, value: Any) -> None:
    """A value by the type that llama.cpp gives such values."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value or key.endswith("merges"):
        writer.add_array(key, value) if value else None


def settings(folder: Path) -> dict[str, Any]:
    """config.json of a folder."""
    return json.loads((folder / "config.json").read_text("utf-8"))
