"""Tiny random networks of every family, with all weights far from their defaults."""

import torch

from dlm.models import FAMILIES, LM, ModelConfig, Transformer

SHAPE = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "max_position_embeddings": 64}
SHAPE |= {"mask_token_id": 40, "eos_token_id": 1, "pad_token_id": 2, "initializer_range": 0.3}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 12, "num_shared_experts": 1, "first_k_dense": 1}
MOE |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "expert_bias": True}
SOFT_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 12, "score_function": "softmax"}
SOFT_MOE |= {"norm_topk_prob": False}
TIED = {"qkv_bias": True, "tie_word_embeddings": True}
BLOCKS = {"qk_norm": True, "head_dim": 8, "block_length": 4}
CASES: dict[str, dict] = {
    "dlm": {"model_type": "dlm", "qk_norm": True},
    "dlm-moe": {"model_type": "dlm", "moe": MOE, "o_bias": True},
    "dlm-learned": {"model_type": "dlm", "position_embedding": "learned", "tie_word_embeddings": True},
    "llada": {"model_type": "llada", "num_key_value_heads": 4, "rope_theta": 5e5},
    "llada-gqa": {"model_type": "llada", "qkv_bias": True, "tie_word_embeddings": True},
    "llada_moe": {"model_type": "llada_moe", "qk_norm": True, "moe": SOFT_MOE},
    "Dream": {"model_type": "Dream", "qkv_bias": True, "rope_theta": 1e6},
    "sdar": {"model_type": "sdar", **BLOCKS},
    "llada2_moe": {"model_type": "llada2_moe", **BLOCKS, "rotary_dim": 4, "moe": MOE},
    "Fast_dLLM_Qwen": {"model_type": "Fast_dLLM_Qwen", **TIED, "block_length": 4},
    "qwen2": {"model_type": "qwen2", "qkv_bias": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "head_dim": 8, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "qkv_bias": True, "o_bias": True, "mlp_bias": True},
}


def config(case: str, **more: object) -> ModelConfig:
    fields = CASES[case]
    family = FAMILIES[fields["model_type"]]
    kinds = {"attention": family.attention, "shifted_logits": family.shifted_logits}
    return ModelConfig.model_validate(SHAPE | kinds | {"mask_in_softmax": family.mask_in_softmax} | fields | more)


def model(case: str, **more: object) -> LM:
    network = Transformer(config(case, **more))
    generator = torch.Generator().manual_seed(0)
    network.initialise(generator)
    for tensor in network.state_dict().values():
        if tensor.ndim == 1:
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    return LM(network.eval(), name=case)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Products of the same numbers, which torch rounds by the CPU and by their operands' addresses."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def tokens(length: int = 11, rows: int = 2) -> torch.Tensor:
    ids = torch.randint(3, 39, (rows, length), generator=torch.Generator().manual_seed(1))
    ids[:, 2::3] = SHAPE["mask_token_id"]
    return ids
