"""How much work a training step is, and how fast this machine could do it. Knows nothing of any run."""

import time

import torch

from dlm.models.config import ModelConfig


def flops_a_token(
    config: ModelConfig, parameters: int, length: int, forwarded: float = 1.0, asked: float = 0.5
) -> float:
    """Training FLOPs a token of input: 6 a weight, attention's 12 * length * width a layer, the head where asked only.

    Counted as in Kaplan et al. and nanoGPT, except that the network runs on `forwarded` positions for each token, and the
    vocabulary projection on `asked` ones (`Masking.work`). A mixture of experts counts the experts a token meets.
    """
    head = config.vocab_size * config.hidden_size
    body = parameters - head * (1 if config.tie_word_embeddings else 2)
    if config.position_embedding == "learned":
        body -= config.max_position_embeddings * config.hidden_size
    if config.moe is not None:
        m = config.moe
        idle = m.num_experts - m.num_experts_per_tok
        body -= 3 * config.hidden_size * m.intermediate_size * idle * (config.num_hidden_layers - m.first_k_dense)
    attention = 12 * length * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return forwarded * (6 * body + attention) + 6 * head * asked


def gemm_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that this machine reaches in a large matrix product, measured now: what MFU is a share of."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)
