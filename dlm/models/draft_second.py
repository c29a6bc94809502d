"""What DFlash 2 adds to a draft: dynamic convolutions around a layer's parts, and a selector among candidates."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from dlm.models.attention import Attend
from dlm.models.draft_config import DraftConfig
from dlm.models.transformer import Layer


class DynamicConvolution(nn.Module):
    """Two grouped causal convolutions whose kernels are a fixed one plus one computed from the row: one before a layer's
    attention or feed-forward, one after. Row i of a block reads its rows i, i - 1, …; none before the block."""

    def __init__(self, width: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.kernel_size, self.group_size = kernel_size, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, width))
        self.kernel_projection = nn.Linear(width, 2 * kernel_size * width // group_size, bias=False)

    def kernels(self, x: Float[Tensor, "*b q d"]) -> tuple[Tensor, Tensor]:
        """The kernels before and after, (*b, q, kernel_size, d) each, from the normed input."""
        shape = *x.shape[:-1], 2, self.kernel_size, x.shape[-1] // self.group_size
        own = self.kernel_projection(x).view(shape).repeat_interleave(self.group_size, dim=-1)
        both = own + self.base_kernel.to(x.dtype)
        return both[..., 0, :, :], both[..., 1, :, :]

    @staticmethod
    def mix(
        x: Float[Tensor, "*b q d"], kernel: Float[Tensor, "*b q k d"], place: Int[Tensor, " q"]
    ) -> Float[Tensor, "*b q d"]:
        """Row i as the sum over j of kernel[i, j] · x[i - j], within its block, in which it has that `place`."""
        total = kernel[..., 0, :] * x
        for offset in range(1, min(kernel.shape[-2], x.shape[-2])):
            earlier = F.pad(x[..., :-offset, :], (0, 0, offset, 0)) * (place >= offset)[:, None]
            total = total + kernel[..., offset, :] * earlier
        return total


class DraftLayer(Layer):
    """A DFlash 2 layer: convolutions around attention and feed-forward."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__(config.network, layer)
        assert config.conv_kernel_size is not None and config.conv_group_size is not None
        shape = config.network.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv, self.mlp_conv = DynamicConvolution(*shape), DynamicConvolution(*shape)

    def convolved(
        self, x: Float[Tensor, "*b q d"], attend: Attend, place: Int[Tensor, " q"]
    ) -> Float[Tensor, "*b q d"]:
        """`forward` of rows of blocks, in which they have these places."""
        normed = self.attn_norm(x)
        before, after = self.attention_conv.kernels(normed)
        x = x + self.attention_conv.mix(self.attn(self.attention_conv.mix(normed, before, place), attend), after, place)
        normed = self.mlp_norm(x)
        before, after = self.mlp_conv.kernels(normed)
        return x + self.mlp_conv.mix(self.mlp(self.mlp_conv.mix(normed, before, place)), after, place)


class CandidateSelector(nn.Module):
    """Scores a position's likeliest tokens by the token chosen before them: logit(c) + ⟨A[previous] ⊙ W h, B[c]⟩."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        assert config.selector_rank is not None and config.selector_top_k is not None
        shape = config.network.vocab_size, config.selector_rank
        self.top_k = min(config.selector_top_k, config.network.vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape))
        self.successor_codebook = nn.Parameter(torch.zeros(shape))
        self.hidden_projection = nn.Linear(config.network.hidden_size, config.selector_rank, bias=False)

    def candidates(self, logits: Float[Tensor, "... v"]) -> tuple[Float[Tensor, "... k"], Int[Tensor, "... k"]]:
        """Logits and ids of each position's likeliest tokens, likeliest first; equal logits by the lower id."""
        values, tokens = logits.sort(dim=-1, descending=True, stable=True)
        return values[..., : self.top_k], tokens[..., : self.top_k]

    def scores(
        self,
        previous: Int[Tensor, "..."],
        hidden: Float[Tensor, "... d"],
        values: Float[Tensor, "... k"],
        tokens: Int[Tensor, "... k"],
    ) -> Float[Tensor, "... k"]:
        """Of one position's candidates, after the token `previous`."""
        key = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        return values + torch.einsum("...r,...kr->...k", key, self.successor_codebook[tokens])
