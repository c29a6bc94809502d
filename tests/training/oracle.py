"""The network and every objective's formula, written out in float64 over one sequence at a time. Shares nothing with them."""

from collections.abc import Callable

import torch
from torch import Tensor

from dlm.models import Transformer

Sees = Callable[[int, int], bool]
"""Whether position q sees position k."""


class Oracle:
    """A network without biases and norms of heads, by its weights' names."""

    def __init__(self, network: Transformer) -> None:
        self.config = network.config
        self.w = {name: p.detach().double().requires_grad_() for name, p in network.named_parameters()}

    def logits(self, ids: list[int], sees: Sees) -> Tensor:
        """(l, v); the mask token is never predicted."""
        c, w, l = self.config, self.w, len(ids)
        allowed = torch.tensor([[sees(q, k) for k in range(l)] for q in range(l)])
        angle = torch.arange(l).double()[:, None] / c.rope_theta ** (torch.arange(0, c.head_dim, 2) / c.head_dim)
        x = w["embed.weight"][ids]
        for i in range(c.num_hidden_layers):
            at = f"layers.{i}."
            y = self._norm(x, at + "attn_norm")
            parts = (y @ w[f"{at}attn.{part}_proj.weight"].T for part in "qkv")
            q, k, v = (part.view(l, -1, c.head_dim).transpose(0, 1) for part in parts)
            times = c.num_attention_heads // c.num_key_value_heads
            k, v = k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)
            score = _turn(q, angle) @ _turn(k, angle).transpose(1, 2) / c.head_dim**0.5
            seen = score.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
            x = x + seen.transpose(0, 1).reshape(l, -1) @ w[at + "attn.o_proj.weight"].T
            y = self._norm(x, at + "mlp_norm")
            gate, up = y @ w[at + "mlp.gate_proj.weight"].T, y @ w[at + "mlp.up_proj.weight"].T
            x = x + (gate * gate.sigmoid() * up) @ w[at + "mlp.down_proj.weight"].T
        logits = self._norm(x, "norm") @ w.get("lm_head.weight", w["embed.weight"]).T
        mask = torch.zeros(c.vocab_size, dtype=torch.bool)
        mask[c.mask_token_id] = True
        return logits.masked_fill(mask, -torch.inf)

    def nats(self, shown: list[int], asked: list[int], truth: list[int], sees: Sees, shift: bool) -> list[Tensor]:
        """-log p of truth[i] at each asked i, from the state at i, or at i - 1 where the network is shifted."""
        log_p = self.logits(shown, sees).log_softmax(-1)
        return [-log_p[i - 1 if shift and i else i, truth[i]] for i in asked]

    def gradient(self, loss: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(loss, list(self.w.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(self.w, found, strict=True))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.w[name + ".weight"] * x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()


def _turn(x: Tensor, angle: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


def masked_diffusion(oracle: Oracle, texts: list[list[int]], asked: list[list[int]], p: list[float]) -> Tensor:
    """(1/B) sum_b (1/L) sum_masked CE / p_b: MDLM eq. 10, LLaDA eq. 3."""
    total = torch.zeros((), dtype=torch.float64)
    mask, shift = oracle.config.mask_token_id, oracle.config.shifted_logits
    for text, here, level in zip(texts, asked, p, strict=True):
        shown = [mask if i in here else token for i, token in enumerate(text)]
        for nats in oracle.nats(shown, here, text, lambda q, k: True, shift):
            total = total + nats / level / len(text) / len(texts)
    return total


def block_diffusion(
    oracle: Oracle, texts: list[list[int]], asked: list[list[int]], p: list[list[float]], size: int
) -> Tensor:
    """(1/B) sum_b (1/L) sum_blocks sum_masked CE / p_block: BD3-LM eq. 7, a forward a block behind the clean text."""
    total = torch.zeros((), dtype=torch.float64)
    mask, shift = oracle.config.mask_token_id, oracle.config.shifted_logits
    for text, here, levels in zip(texts, asked, p, strict=True):
        for start in range(0, len(text), size):
            own = [i for i in here if start <= i < start + size]
            shown = text[:start] + [mask if i in own else text[i] for i in range(start, min(start + size, len(text)))]
            for nats in oracle.nats(shown, own, text, lambda q, k: k // size <= q // size, shift):
                total = total + nats / levels[start // size] / len(text) / len(texts)
    return total


def autoregression(oracle: Oracle, texts: list[list[int]], answers: list[range]) -> Tensor:
    """(1/B) sum_b (1/L_answer) sum_answer -log p(x_i | end-of-text, x_<i)."""
    total = torch.zeros((), dtype=torch.float64)
    for text, answer in zip(texts, answers, strict=True):
        shown = [oracle.config.eos_token_id, *text]
        for nats in oracle.nats(shown, [i + 1 for i in answer], shown, lambda q, k: k <= q, True):
            total = total + nats / len(answer) / len(texts)
    return total
