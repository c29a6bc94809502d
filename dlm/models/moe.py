"""Mixture-of-experts feed-forward."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm.models.config import ModelConfig, MoEConfig
from dlm.models.gated import SwiGLU


class Router(nn.Module):
    """Scores in fp32 and the chosen experts of every token (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    bias: Tensor | None

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        # A buffer, as in the published code: balancing moves it, gradients do not.
        self.register_buffer("bias", torch.zeros(moe.num_experts) if moe.expert_bias else None)
        nn.init.normal_(self.weight, std=config.initializer_range)

    def forward(self, x: Float[Tensor, "n d"]) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
        """Expert ids and their weights; the bias and the groups take part in the choice only."""
        moe = self.moe
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if moe.score_function == "sigmoid" else logits.softmax(-1)
        choice = scores if self.bias is None else scores + self.bias.float()
        if moe.topk_group < moe.n_group:
            groups = choice.view(len(x), moe.n_group, moe.num_experts // moe.n_group)
            best = groups.topk(2, dim=-1).values.sum(-1).topk(moe.topk_group, dim=-1).indices
            kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, True)
            choice = groups.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
        experts = choice.topk(moe.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, experts)
        if moe.norm_topk_prob and moe.num_experts_per_tok > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * moe.routed_scaling_factor


class Experts(nn.Module):
    """All experts' SwiGLU weights, stacked; each expert's tokens go through its own matrices in one piece."""

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        e, f, d = moe.num_experts, moe.intermediate_size, config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down = nn.Parameter(torch.empty(e, d, f))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=config.initializer_range)

    def forward(self, x: Float[Tensor, "m d"], experts: Int[Tensor, " m"]) -> Float[Tensor, "m d"]:
        """Each row through the matrices of its expert; `experts` ascend."""
        numbers = torch.arange(len(self.down), device=x.device)
        if x.is_cuda and x.dtype == torch.bfloat16:  # one launch, and the host never waits for the counts
            ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
            gate, up = F.grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
            return F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        pieces = []
        for i, rows in enumerate(x.split(torch.bincount(experts, minlength=len(numbers)).tolist())):
            if len(rows):
                gate, up = F.linear(rows, self.gate_up[i]).chunk(2, dim=-1)
                pieces.append(F.linear(F.silu(gate) * up, self.down[i]))
        return torch.cat(pieces) if pieces else x


class MoE(nn.Module):
    """Routed experts, weighted and summed in fp32, plus the shared ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.router = Router(config, moe)
        self.experts = Experts(config, moe)
        shared = moe.num_shared_experts * moe.intermediate_size
        self.shared = SwiGLU(config.hidden_size, shared) if shared else None
        """The experts that every token passes through: side by side they are one wider SwiGLU."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        flat = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(flat)  # (n, k)
        experts, order = chosen.flatten().sort(stable=True)
        sorted_out = self.experts(flat[order // chosen.shape[1]], experts)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        # (n, k, d): each token's own experts side by side, so that the sum has a fixed order
        out = sorted_out[back].view(*chosen.shape, flat.shape[-1])
        out = (out.float() * weights[..., None]).sum(1).to(x.dtype)
        if self.shared is not None:
            out = out + self.shared(flat)
        return out.view_as(x)
