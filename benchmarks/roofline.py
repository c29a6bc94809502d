"""Networks of published shapes, and a block step of one beside the least that its bytes and FLOPs need."""

import statistics
from typing import Any

import torch
from kernels import copy_bandwidth, gemm_speed
from measuring import timed

import dlm
from dlm.models import LM, ModelConfig, Transformer
from dlm.models.packing import pack

LLADA: dict[str, Any] = {"model_type": "llada", "mask_in_softmax": True, "max_position_embeddings": 4096}
LLADA |= {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
SDAR: dict[str, Any] = {"model_type": "sdar", "attention": "block_causal", "qk_norm": True, "rope_theta": 1e6}
EXPERTS: dict[str, Any] = {"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512, "first_k_dense": 1}
EXPERTS |= {"num_shared_experts": 1, "n_group": 8, "topk_group": 4, "score_function": "sigmoid", "expert_bias": True}
SHAPES: dict[str, dict[str, Any]] = {  # width, layers, heads, key heads, feed-forward, vocabulary; and what else differs
    "tiny": {"sizes": (256, 4, 4, 4, 704, 1024), **LLADA},
    "llada-8b": {"sizes": (4096, 32, 32, 32, 12288, 126464), **LLADA},
    "dream-7b": {
        "sizes": (3584, 28, 28, 4, 18944, 152064),
        "model_type": "Dream", "shifted_logits": True, "qkv_bias": True, "rope_theta": 1e6, "max_position_embeddings": 4096,
    },
    "sdar-4b": {"sizes": (2560, 36, 32, 8, 9728, 151936), "head_dim": 128, "block_length": 4, **SDAR},
    "llada2-mini": {
        "sizes": (2048, 20, 16, 4, 5120, 157184),
        **SDAR, "model_type": "llada2_moe", "block_length": 32, "rotary_dim": 64, "moe": EXPERTS,
    },
}  # fmt: skip


def make(shape: str, vocab: int | None = None, device: str = "cpu") -> LM:
    """Random weights of a shape; without an end-of-text, so that everyone writes all of it. bf16 on a GPU, else fp32."""
    fields = dict(SHAPES[shape])
    width, layers, heads, groups, hidden, vocabulary = fields.pop("sizes")
    fields |= {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": hidden}
    fields |= {"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": vocab or vocabulary}
    config = ModelConfig(**{"head_dim": width // heads, "mask_token_id": (vocab or vocabulary) - 1, **fields})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device != "cpu" else torch.float32)
    try:
        with torch.device(device):
            network = Transformer(config)
    finally:
        torch.set_default_dtype(before)
    network.initialise(torch.Generator(device).manual_seed(0))
    assert network.lm_head is not None
    with torch.no_grad():
        network.lm_head.weight[config.mask_token_id] *= 0.01  # the mask is no favourite, as in a trained model
    pack(network)
    return LM(network.eval(), None, "random")


def prompt(lm: LM, length: int, seed: int = 1) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, lm.config.vocab_size - 2, (length,), generator=draw).tolist()


def block_steps(
    lm: LM, *, batch: int, context: int, block: int, graphs: bool, device: str, clock: str
) -> dict[str, Any]:
    """Steps of `batch` requests in the middle of a block, against their bytes and FLOPs: each weight that a row needs
    read once, each cached key and value once."""
    exact = lm.config.attention == "block_causal"
    block = lm.config.block_length or block
    size = 32
    pages = batch * -(-(context + block) // size)
    engine = dlm.Engine(
        lm,
        cache="exact" if exact else "dual",
        cuda_graphs=graphs,
        num_pages=pages,
        max_num_requests=batch,
        max_num_tokens=max(8192, context + block),
        page_size=size,
    )
    for number in range(batch):
        text = prompt(lm, context - block, number)
        engine.add_request(text, gen_length=2 * block, block_length=block, steps=2 * block)
    taken, rows, tokens = [], engine.stats().rows, 0
    while engine.has_work:
        seconds = timed(engine.step, device)[0][clock]
        now = engine.stats()
        step = now.rows - rows
        if now.running == batch and step <= 2 * batch * block:  # neither a prompt nor a refresh among them
            taken.append((seconds, step))
        rows, tokens = now.rows, now.tokens
    engine.close()
    taken = taken[len(taken) // 4 :]  # graphs are recorded in the first
    if not taken:
        return {"batch": batch, "graphs": graphs, "tokens": tokens}
    best, rows = min(taken)
    bytes_, flops = work(lm, batch, context, rows)
    bandwidth, speed = _speeds(lm)
    needed = max(bytes_ / bandwidth, flops / speed)
    return {
        "batch": batch,
        "graphs": graphs,
        "rows": rows,
        "ms_a_block_step": 1e3 * best,
        "median_ms": 1e3 * statistics.median(seconds for seconds, _ in taken),
        "tokens_a_second": batch / best,
        "bytes": bytes_,
        "flops": flops,
        "ms_its_bytes_need": 1e3 * bytes_ / bandwidth,
        "ms_its_flops_need": 1e3 * flops / speed,
        "times_the_roofline": best / needed,
    }


def work(lm: LM, batch: int, context: int, rows: int) -> tuple[int, int]:
    """The least bytes that a step must read, and its FLOPs."""
    c, size = lm.config, lm.dtype.itemsize
    weights = flops = 0
    for name, weight in lm.network.named_parameters():
        if name.startswith("embed"):
            continue
        read = used = weight.numel()
        if c.moe is not None and ".experts." in name:
            share = c.moe.num_experts_per_tok / c.moe.num_experts
            read, used = round(read * (1 - (1 - share) ** rows)), round(used * share)  # experts that some row chose
        weights, flops = weights + read, flops + 2 * used * rows
    cached = 2 * c.num_hidden_layers * batch * context * c.num_key_value_heads * c.head_dim
    flops += 4 * c.num_hidden_layers * rows * context * c.num_attention_heads * c.head_dim
    return size * (weights + cached), flops


_KNOWN: dict[str, tuple[float, float]] = {}


def _speeds(lm: LM) -> tuple[float, float]:
    """Bytes a second of a copy and FLOP/s of a large product, measured once."""
    key = f"{lm.device} {lm.dtype}"
    if key not in _KNOWN:
        _KNOWN[key] = copy_bandwidth(lm.device, 0.5), gemm_speed(lm.device, lm.dtype, 0.5)
    return _KNOWN[key]
