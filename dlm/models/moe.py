"""Mixture-of-experts feed-forward."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm.kernels import dispatch, reference
from dlm.kernels.routing import Routing
from dlm.models.attention import fusing
from dlm.models.config import ModelConfig, MoEConfig
from dlm.models.gated import SwiGLU

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Router(nn.Module):
    """Scores in fp32 and the chosen experts of every token (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    bias: Tensor | None

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.routing = Routing(
            chosen=moe.num_experts_per_tok,
            sigmoid=moe.score_function == "sigmoid",
            normalised=moe.norm_topk_prob and moe.num_experts_per_tok > 1,
            factor=moe.routed_scaling_factor,
            groups=moe.n_group if moe.topk_group < moe.n_group else 1,
            kept_groups=moe.topk_group if moe.topk_group < moe.n_group else 1,
        )
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        # A buffer, as in the published code: balancing moves it, gradients do not.
        self.register_buffer("bias", torch.zeros(moe.num_experts) if moe.expert_bias else None)
        nn.init.normal_(self.weight, std=config.initializer_range)

    def forward(self, x: Float[Tensor, "n d"]) -> tuple[Int[Tensor, "n k"], Float[Tensor, "n k"]]:
        """Expert ids and their weights; the bias and the groups take part in the choice only."""
        run = dispatch.route if fusing(x) and x.dtype == self.weight.dtype else reference.route
        return run(x, self.weight, self.bias, self.routing)


class Experts(nn.Module):
    """All experts' SwiGLU weights, stacked: those of this process, where several share them."""

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        e, f, d = moe.num_experts, moe.intermediate_size, config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down = nn.Parameter(torch.empty(e, d, f))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=config.initializer_range)


class MoE(nn.Module):
    """Routed experts, weighted and summed in fp32, plus the shared ones. Gradients take torch's own operations."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.router = Router(config, moe)
        self.experts = Experts(config, moe)
        shared = moe.num_shared_experts * moe.intermediate_size
        self.shared = SwiGLU(config.hidden_size, shared) if shared else None
        """The experts that every token passes through: side by side they are one wider SwiGLU."""
        self.first = 0
        """Number of this process's first expert."""
        self.group: ProcessGroup | None = None
        """The processes that share the experts."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        flat = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(flat)
        shared = None if self.shared is None else self.shared(flat)
        run = dispatch.mixture if fusing(x) and x.dtype == self.experts.down.dtype else reference.mixture
        own = flat, chosen, weights, self.experts.gate_up, self.experts.down
        if self.group is None:
            return run(*own, shared).view_as(x)
        found = run(*own, None, self.first, torch.float32)
        if shared is not None:
            found = found + shared
        torch.distributed.all_reduce(found, group=self.group)
        return found.to(x.dtype).view_as(x)
