"""Tiny random checkpoints of every family, written as their authors would: the same numbers in every checkout."""

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from dlm.models import LM, Transformer
from dlm.models.families import config_from_hub

MASK, EOS = 256, 257  # 0 to 255 are bytes
WIDTH, INNER, EXPERT, VOCAB, HEADS, GROUPS, HEAD = 32, 48, 16, 258, 4, 2, 8
TOKENS = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": EOS}
HUB = {  # most families' names of the shape in config.json
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
LLADA = {  # LLaDA's names
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
MODELS: dict[str, dict[str, Any]] = {  # config.json
    "dlm": HUB | {"model_type": "dlm", "qk_norm": True},
    "dlm-moe": HUB | {"model_type": "dlm", "moe": ROUTED},
    "dlm-learned": HUB | {"model_type": "dlm", "position_embedding": "learned", "tie_word_embeddings": True},
    "dlm-block": HUB | {"model_type": "dlm", "attention": "block_causal", "block_length": 4},
    "llada": LLADA | {"model_type": "llada"},
    "llada_moe": HUB | SOFT | {"model_type": "llada_moe", "qk_layernorm": True},
    "Dream": HUB | {"model_type": "Dream"},
    "sdar": HUB | {"model_type": "sdar", "block_size": 4},
    "llada2_moe": HUB | ROUTED_HUB | {"model_type": "llada2_moe", "rotary_dim": 4, "block_size": 4},
    "Fast_dLLM_Qwen": HUB | {"model_type": "Fast_dLLM_Qwen", "bd_size": 4, "tie_word_embeddings": True},
    "qwen2": HUB | {"model_type": "qwen2"},
    "qwen3": HUB | {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": HUB | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
}
BIDIRECTIONAL = ("dlm", "dlm-moe", "dlm-learned", "llada", "llada_moe", "Dream")
BLOCKS = ("dlm-block", "sdar", "llada2_moe", "Fast_dLLM_Qwen")
CAUSAL = ("qwen2", "qwen3", "llama")


def shapes(config: dict[str, Any]) -> dict[str, torch.Size]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        LM(Transformer(config_from_hub(config)), None, "random").save(folder)
        return {name: weight.shape for name, weight in load_file(folder / "model.safetensors").items()}


def tensor(name: str, shape: tuple[int, ...], model: str) -> torch.Tensor:
    """Random weights, the same for the same name. Predictions are confident: often the end of text, never the mask."""
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
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**MODELS[name], "torch_dtype": "float32"}), "utf-8")
    weights = {key: tensor(key, shape, name) for key, shape in shapes(MODELS[name]).items()}
    save_file(weights, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder
