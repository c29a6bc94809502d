"""What a published checkpoint computes, from the papers, in plain numpy loops. Shares nothing with the package."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float64]

QWEN = {"embed": "model.embed_tokens.weight", "layer": "model.layers.{}.", "norm1": "input_layernorm"}
QWEN |= {"norm2": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
QWEN |= {"o": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "gate": "mlp.gate_proj"}
QWEN |= {"up": "mlp.up_proj", "down": "mlp.down_proj", "norm": "model.norm.weight", "head": "lm_head.weight"}
LLADA = {"embed": "model.transformer.wte.weight", "layer": "model.transformer.blocks.{}.", "norm1": "attn_norm"}
LLADA |= {"norm2": "ff_norm", "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "attn_out", "q_norm": "-"}
LLADA |= {"k_norm": "-", "gate": "ff_proj", "up": "up_proj", "down": "ff_out", "norm": "model.transformer.ln_f.weight"}
LLADA |= {"head": "model.transformer.ff_out.weight"}
LLADA2 = QWEN | {
    "embed": "model.word_embeddings.weight",
    "qkv": "attention.query_key_value",
    "o": "attention.dense",
    "q_norm": "attention.query_layernorm",
    "k_norm": "attention.key_layernorm",
}


def logits(folder: Path, ids: list[int]) -> Array:
    """Raw logits (l, v) of a checkpoint folder for one sequence, in float64."""
    hub = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}
    family = hub["model_type"]
    llada = family == "llada" and "d_model" in hub
    names = LLADA if llada else LLADA2 if family == "llada2_moe" else QWEN
    layers = hub["n_layers"] if llada else hub["num_hidden_layers"]
    blocks = {"sdar": "block_size", "llada2_moe": "block_size", "Fast_dLLM_Qwen": "bd_size"}
    block = hub[blocks[family]] if family in blocks else None
    x = np.stack([weights[names["embed"]][i] for i in ids])
    for number in range(layers):
        prefix = names["layer"].format(number)
        layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        x = x + attention(hub, names, layer, rms(x, layer[names["norm1"] + ".weight"], hub), block)
        x = x + feed_forward(hub, names, layer, rms(x, layer[names["norm2"] + ".weight"], hub))
    head = weights.get(names["head"], weights[names["embed"]])
    return rms(x, weights[names["norm"]], hub) @ head.T


def rms(x: Array, weight: Array, hub: dict[str, Any]) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + hub["rms_norm_eps"]) * weight


def linear(layer: dict[str, Array], name: str, x: Array) -> Array:
    return x @ layer[name + ".weight"].T + layer.get(name + ".bias", np.float64(0.0))


def turn(vector: Array, position: int, theta: float, rotary: int) -> Array:
    """RoPE: channel i of the first half and of the second half of the rotated part are one complex number."""
    out = vector.copy()
    for i in range(rotary // 2):
        angle = position / theta ** (2 * i / rotary)
        a, b = vector[i], vector[i + rotary // 2]
        out[i] = a * np.cos(angle) - b * np.sin(angle)
        out[i + rotary // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def attention(
    hub: dict[str, Any], names: dict[str, str], layer: dict[str, Array], x: Array, block: int | None
) -> Array:
    heads = hub.get("num_attention_heads") or hub["n_heads"]
    groups = hub.get("num_key_value_heads") or hub["n_kv_heads"]
    if "qkv" in names:
        width = hub["head_dim"]
        fused = linear(layer, names["qkv"], x)
        q, k, v = np.split(fused, [heads * width, (heads + groups) * width], axis=1)
    else:
        q, k, v = (linear(layer, names[n], x) for n in "qkv")
        width = q.shape[1] // heads
    rotary = int(width * hub.get("partial_rotary_factor", 1.0))
    out = np.zeros((len(x), heads * width))

    def head(values: Array, position: int, number: int, norm: str) -> Array:
        vector = values[position, number * width : (number + 1) * width]
        if norm + ".weight" in layer:
            vector = rms(vector, layer[norm + ".weight"], hub)
        return turn(vector, position, hub["rope_theta"], rotary)

    for h in range(heads):
        g = h // (heads // groups)
        for i in range(len(x)):
            query = head(q, i, h, names["q_norm"])
            seen = [j for j in range(len(x)) if block is None or j // block <= i // block]
            scores = np.array([query @ head(k, j, g, names["k_norm"]) for j in seen]) / np.sqrt(width)
            chances = np.exp(scores - scores.max())
            chances /= chances.sum()
            for chance, j in zip(chances, seen, strict=True):
                out[i, h * width : (h + 1) * width] += chance * v[j, g * width : (g + 1) * width]
    return linear(layer, names["o"], out)


def swiglu(layer: dict[str, Array], prefix: str, names: tuple[str, str, str], x: Array) -> Array:
    gate, up = (linear(layer, prefix + n, x) for n in names[:2])
    return linear(layer, prefix + names[2], gate / (1 + np.exp(-gate)) * up)


def feed_forward(hub: dict[str, Any], names: dict[str, str], layer: dict[str, Array], x: Array) -> Array:
    if "mlp.gate.weight" not in layer:
        return swiglu(layer, "", (names["gate"], names["up"], names["down"]), x)
    own = ("gate_proj", "up_proj", "down_proj")
    return np.stack([token_of_mixture(hub, layer, own, token) for token in x])


def token_of_mixture(hub: dict[str, Any], layer: dict[str, Array], own: tuple[str, str, str], token: Array) -> Array:
    """One token through its experts, chosen by sorting."""
    scores = layer["mlp.gate.weight"] @ token
    count, top = hub["num_experts"], hub["num_experts_per_tok"]
    if hub["model_type"] == "llada2_moe":
        scores = 1 / (1 + np.exp(-scores))
        wish = scores + layer["mlp.gate.expert_bias"]
        size = count // hub["n_group"]
        worth = [sum(sorted(wish[g * size : (g + 1) * size])[-2:]) for g in range(hub["n_group"])]
        open_groups = sorted(range(hub["n_group"]), key=lambda g: -worth[g])[: hub["topk_group"]]
        able = [e for e in range(count) if e // size in open_groups]
        chosen = sorted(able, key=lambda e: -wish[e])[:top]
        total = sum(scores[e] for e in chosen)
        share = {e: hub["routed_scaling_factor"] * scores[e] / total for e in chosen}
    else:
        scores = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        share = {e: scores[e] for e in sorted(range(count), key=lambda e: -scores[e])[:top]}
    out = sum(part * swiglu(layer, f"mlp.experts.{e}.", own, token[None])[0] for e, part in share.items())
    if hub.get("num_shared_experts"):
        out = out + swiglu(layer, "mlp.shared_experts.", own, token[None])[0]
    return np.asarray(out)
