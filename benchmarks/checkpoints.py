"""Tiny random checkpoints of every family, written as their authors would: the same numbers in every checkout."""

import json
import zlib
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

MASK, EOS = 256, 257  # 0 to 255 are bytes
WIDTH, INNER, EXPERT, VOCAB, HEADS, GROUPS, HEAD = 32, 48, 16, 258, 4, 2, 8
TOKENS = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": EOS}
HUB = {  # as most families spell their shape
    **TOKENS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "intermediate_size": INNER,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
LLADA = {  # and as LLaDA does
    **TOKENS,
    "embedding_size": VOCAB,
    "d_model": WIDTH,
    "n_layers": 2,
    "n_heads": HEADS,
    "n_kv_heads": GROUPS,
    "mlp_hidden_size": INNER,
    "max_sequence_length": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "activation_type": "silu",
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 3, "first_k_dense": 1, "n_group": 4, "topk_group": 2}
ROUTED |= {"num_shared_experts": 1, "routed_scaling_factor": 2.5, "expert_bias": True, "intermediate_size": EXPERT}
ROUTED |= {"score_function": "sigmoid", "norm_topk_prob": True}
ROUTED_HUB = {"num_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
ROUTED_HUB |= {"num_shared_experts": 1, "routed_scaling_factor": 2.5, "moe_router_enable_expert_bias": True}
ROUTED_HUB |= {"score_function": "sigmoid", "norm_topk_prob": True, "moe_intermediate_size": EXPERT}
SOFT = {"num_experts": 6, "num_experts_per_tok": 2, "expert_intermediate_size": EXPERT, "moe_layer_freq": [1, 1]}
SOFT |= {"dense_intermediate_size": INNER, "moe_router_score_function": "softmax"}
MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {  # config.json, and what the weights have beside the usual
    "dlm": (HUB | {"model_type": "dlm", "qk_norm": True}, {"qk_norm"}),
    "dlm-moe": (HUB | {"model_type": "dlm", "moe": ROUTED}, {"stacked"}),
    "dlm-learned": (
        HUB | {"model_type": "dlm", "position_embedding": "learned", "tie_word_embeddings": True},
        {"positions", "tied"},
    ),
    "dlm-block": (HUB | {"model_type": "dlm", "attention": "block_causal", "block_length": 4}, set()),
    "llada": (LLADA | {"model_type": "llada"}, {"llada"}),
    "llada_moe": (HUB | SOFT | {"model_type": "llada_moe", "qk_layernorm": True}, {"qk_norm", "experts"}),
    "Dream": (HUB | {"model_type": "Dream"}, {"qkv_bias"}),
    "sdar": (HUB | {"model_type": "sdar", "block_size": 4}, {"qk_norm"}),
    "llada2_moe": (HUB | ROUTED_HUB | {"model_type": "llada2_moe", "rotary_dim": 4, "block_size": 4}, {"llada2"}),
    "Fast_dLLM_Qwen": (
        HUB | {"model_type": "Fast_dLLM_Qwen", "bd_size": 4, "tie_word_embeddings": True},
        {"qkv_bias", "tied"},
    ),
    "qwen2": (HUB | {"model_type": "qwen2"}, {"qkv_bias"}),
    "qwen3": (HUB | {"model_type": "qwen3", "tie_word_embeddings": True}, {"qk_norm", "tied"}),
    "llama": (
        HUB | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"qkv_bias", "o_bias", "mlp_bias"},
    ),
}


def weights(has: set[str]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a checkpoint."""
    llada, llada2 = "llada" in has, "llada2" in has
    body, at = ("model.transformer", "blocks") if llada else ("model", "layers")
    embed = "wte" if llada else "word_embeddings" if llada2 else "embed_tokens"
    found: dict[str, tuple[int, ...]] = {f"{body}.{embed}.weight": (VOCAB, WIDTH)}
    found[f"{body}.{'ln_f' if llada else 'norm'}.weight"] = (WIDTH,)
    if "tied" not in has:
        found["model.transformer.ff_out.weight" if llada else "lm_head.weight"] = (VOCAB, WIDTH)
    if "positions" in has:
        found["model.embed_positions.weight"] = (256, WIDTH)
    attn = "" if llada else "attention." if llada2 else "self_attn."
    out = "attn_out" if llada else "dense" if llada2 else "o_proj"
    q, kv = (HEADS * HEAD, WIDTH), (GROUPS * HEAD, WIDTH)
    inside: dict[str, tuple[int, ...]] = {f"{attn}{out}.weight": (WIDTH, HEADS * HEAD)}
    for norm in ("attn_norm", "ff_norm") if llada else ("input_layernorm", "post_attention_layernorm"):
        inside[f"{norm}.weight"] = (WIDTH,)
    projections = (
        {"query_key_value": (q[0] + 2 * kv[0], WIDTH)} if llada2 else {"q_proj": q, "k_proj": kv, "v_proj": kv}
    )
    for name, shape in projections.items():
        inside[f"{attn}{name}.weight"] = shape
        if "qkv_bias" in has:
            inside[f"{attn}{name}.bias"] = shape[:1]
    if "o_bias" in has:
        inside[f"{attn}{out}.bias"] = (WIDTH,)
    for norm in ("query_layernorm", "key_layernorm") if llada2 else ("q_norm", "k_norm") if "qk_norm" in has else ():
        inside[f"{attn}{norm}.weight"] = (HEAD,)
    for layer in range(2):
        routed = "experts" in has or (layer == 1 and bool(has & {"stacked", "llada2"}))
        for name, shape in (inside | (mixture(has) if routed else dense(has))).items():
            found[f"{body}.{at}.{layer}.{name}"] = shape
    return found


def dense(has: set[str], at: str = "mlp.", inner: int = INNER) -> dict[str, tuple[int, ...]]:
    """The tensors of a plain MLP."""
    gate, up, down = ("ff_proj", "up_proj", "ff_out") if "llada" in has else ("gate_proj", "up_proj", "down_proj")
    at = "" if "llada" in has else at
    found: dict[str, tuple[int, ...]] = {f"{at}{name}.weight": (inner, WIDTH) for name in (gate, up)}
    found[f"{at}{down}.weight"] = (WIDTH, inner)
    return found | ({n.replace("weight", "bias"): s[:1] for n, s in found.items()} if "mlp_bias" in has else {})


def mixture(has: set[str]) -> dict[str, tuple[int, ...]]:
    """The tensors of a mixture of experts."""
    if "stacked" in has:
        found: dict[str, tuple[int, ...]] = {"mlp.experts.gate_up": (8, 2 * EXPERT, WIDTH)}
        found |= {"mlp.experts.down": (8, WIDTH, EXPERT), "mlp.router.weight": (8, WIDTH), "mlp.router.bias": (8,)}
        return found | dense(has, "mlp.shared.", EXPERT)
    count = 8 if "llada2" in has else 6
    found = {"mlp.gate.weight": (count, WIDTH)}
    for expert in range(count):
        found |= dense(has, f"mlp.experts.{expert}.", EXPERT)
    if "llada2" in has:
        found |= {"mlp.gate.expert_bias": (8,)} | dense(has, "mlp.shared_experts.", EXPERT)
    return found


def tensor(name: str, shape: tuple[int, ...], model: str) -> torch.Tensor:
    """Random numbers that the name decides: sure of themselves, fond of the end, never of the mask."""
    found = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{model} {name}".encode())))
    if len(shape) == 1:
        return 0.2 * found if name.endswith("bias") else 1 + 0.2 * found
    if shape != (VOCAB, WIDTH):
        return 0.3 * found
    found[EOS] *= 1.3
    found[MASK] *= 0.01
    return 0.7 * found


def write_tokenizer(folder: Path) -> None:
    """Bytes, the mask and the end, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["[MASK]", "<|endoftext|>"])
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    settings = {"mask_token": "[MASK]", "eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def write_model(name: str, folder: Path) -> Path:
    """A checkpoint as its family's authors would publish it."""
    config, has = MODELS[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}), "utf-8")
    save_file({key: tensor(key, shape, name) for key, shape in weights(has).items()}, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder
