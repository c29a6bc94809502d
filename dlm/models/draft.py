"""The DFlash draft: a few layers that read a target's hidden states and fill a block of masks in one forward.

DFlash (arXiv 2602.06036): f = hidden_norm(fc[h of the tapped layers]) is turned into keys and values by every layer, and
stands before the block as its context. DFlash 2 adds dynamic convolutions to the layers and a selector among candidates.
Embedding and head are the target's: they are no parameters of the draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm.models.attention import Attend, RMSNorm, rotate
from dlm.models.config import ModelConfig
from dlm.models.draft_config import DraftConfig, default_layer_ids
from dlm.models.rope import rope_frequencies, rope_table
from dlm.models.transformer import Layer, Transformer

if TYPE_CHECKING:
    from pathlib import Path

    from dlm.models.lm import LM


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
        previous: Int[Tensor, ...],
        hidden: Float[Tensor, "... d"],
        values: Float[Tensor, "... k"],
        tokens: Int[Tensor, "... k"],
    ) -> Float[Tensor, "... k"]:
        """Of one position's candidates, after the token `previous`."""
        key = self.predecessor_codebook[previous] * self.hidden_projection(hidden)
        return values + torch.einsum("...r,...kr->...k", key, self.successor_codebook[tokens])


class Draft(nn.Module):
    """A draft for one target. Its parameters have z-lab's names, but for the layers, which are named as ours are.

    A block's row 0 is the anchor, the newest token, whose own target state does not exist yet; rows 1 … B - 1 are the
    mask, and row i predicts the token i places after the anchor.
    """

    def __init__(self, config: DraftConfig, target: LM, name: str = "draft") -> None:
        super().__init__()
        self.config, self.target, self.name = config, target, name
        d = config.network.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = RMSNorm(d, config.network.rms_norm_eps)
        numbers = range(config.network.num_hidden_layers)
        layers = [DraftLayer(config, i) if config.selects else Layer(config.network, i) for i in numbers]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(d, config.network.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config) if config.selects else None
        self.rope = rope_frequencies(config.network)

    @classmethod
    def fresh(
        cls,
        target: LM,
        *,
        num_layers: int = 1,
        block_size: int = 8,
        target_layer_ids: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        generator: torch.Generator | None = None,
        name: str = "draft",
        **more: Any,
    ) -> Draft:
        """An untrained draft with heads and widths as the target's, on its device in its dtype.

        `target_layer_ids` are the target's layers it reads, from 0; by default `num_layers` of them, as z-lab spreads
        them. The mask is the target's own or, where it has none, end-of-text: an anchor never is that. `more` are other
        fields of `DraftConfig`, `intermediate_size`, and for DFlash 2 its four sizes.
        """
        shape = target.config
        layers = tuple(target_layer_ids or default_layer_ids(shape.num_hidden_layers, num_layers))
        tokenizer = target.tokenizer
        masks = (mask_token_id, target.mask_id, None if tokenizer is None else tokenizer.mask_token_id, target.eos_id)
        network = ModelConfig(
            model_type="qwen3",
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            intermediate_size=more.pop("intermediate_size", shape.intermediate_size),
            rope_theta=shape.rope_theta,
            rope_scaling=shape.rope_scaling,
            max_position_embeddings=shape.max_position_embeddings,
            rms_norm_eps=shape.rms_norm_eps,
            qk_norm=True,
            initializer_range=shape.initializer_range,
        )
        fields = {
            "network": network,
            "num_target_layers": shape.num_hidden_layers,
            "target_layer_ids": layers,
            "block_size": block_size,
            "mask_token_id": next((mask for mask in masks if mask is not None), shape.vocab_size - 1),
            "windows": (None,) * num_layers,
            "causal": (False,) * num_layers,
            **more,
        }
        draft = cls(DraftConfig.model_validate(fields), target, name)
        draft.initialise(generator)
        return draft.to(device=target.device, dtype=target.dtype)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Normal weights; those back into the residual stream are scaled by 1/sqrt(2 layers). Convolutions pass their
        input on, and the selector's scores are the logits, until training changes them."""
        std = self.config.network.initializer_range
        scaled = std / (2 * len(self.layers)) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith("base_kernel"):
                parameter.zero_()[:, 0] = 1
            elif name.endswith(("kernel_projection.weight", "successor_codebook")):
                parameter.zero_()
            elif name.endswith("predecessor_codebook"):
                nn.init.normal_(parameter, generator=generator)
            elif parameter.ndim < 2:
                nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.ones_(parameter)
            else:
                back = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=scaled if back else std, generator=generator)

    def body(self) -> Transformer:
        """The layers between the target's embedding and head, as the network that an engine runs. Shares all weights."""
        network, target = self.config.network, self.target.network
        with torch.device("meta"):
            body = Transformer(network.model_copy(update={"num_hidden_layers": 1, "tie_word_embeddings": True}))
        body.config = network
        body.layers, body.norm, body.embed, body.lm_head = self.layers, self.norm, target.embed, target.lm_head
        return body.eval()

    def features(self, taps: Mapping[int, Float[Tensor, "*b d"]]) -> Float[Tensor, "*b md"]:
        """The target's states side by side, from its layers' outputs by their numbers (`Transformer.hidden`'s `taps`)."""
        return torch.cat([taps[layer] for layer in self.config.target_layer_ids], dim=-1)

    def context(self, features: Float[Tensor, "*b md"]) -> Float[Tensor, "*b d"]:
        """f: what all layers read of the target."""
        return self.hidden_norm(self.fc(features))

    def keys_values(self, context: Float[Tensor, "*b d"]) -> list[tuple[Tensor, Tensor]]:
        """Of each layer, its keys, not yet rotated, and values of the context: (*b, g, e) each."""
        found = []
        for layer in self.layers:
            attn: Any = layer.attn
            keys, values = (part(context).unflatten(-1, (-1, attn.head_dim)) for part in (attn.k_proj, attn.v_proj))
            found.append((attn.k_norm(keys), values))
        return found

    def embedded(self, input_ids: Int[Tensor, "*b q"]) -> Float[Tensor, "*b q d"]:
        """What goes into the first layer. No gradient goes into the target."""
        return F.embedding(input_ids, self.target.network.embed.weight.detach()) * self.config.input_embedding_scale

    def forward(
        self,
        input_ids: Int[Tensor, "b q"],
        positions: Int[Tensor, "b q"],
        features: Float[Tensor, "b c md"],
        context_positions: Int[Tensor, "b c"],
        allowed: Bool[Tensor, "b q k"] | Any | None = None,
        block: int | None = None,
    ) -> Float[Tensor, "b q d"]:
        """Final states of rows of blocks, after the last norm; `logits` makes them scores of tokens.

        Rows see keys of the c context positions, then keys of the q rows themselves: `allowed` says which, (b, q, c + q),
        True where seen (or a BlockMask of FlexAttention); None: all. What a sliding layer does not see is taken from
        it. Several blocks may lie in one row of the batch, `block` rows each (only convolutions read that); by default the
        q rows are one block. Positions are absolute: row i of a block stands at the anchor's position + i.
        """
        x = self.embedded(input_ids)
        cos, sin = rope_table(self.rope[0].to(x.device), self.rope[1], positions, x.dtype)
        context = self.keys_values(self.context(features))
        turn = rope_table(self.rope[0].to(x.device), self.rope[1], context_positions, x.dtype)
        everywhere = torch.cat((context_positions, positions), dim=1)

        def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = context[number]
            keys = torch.cat((rotate(keys, *turn), rotate(k, cos, sin)), dim=1).transpose(1, 2)
            values, queries = torch.cat((values, v), dim=1).transpose(1, 2), rotate(q, cos, sin).transpose(1, 2)
            mask = allowed
            if (seen := self.sight(number, positions, everywhere)) is not None:
                mask = seen if mask is None else mask & seen
            if mask is not None and not isinstance(mask, Tensor):
                from dlm.models.streams import flex_attend

                return flex_attend(queries, keys, values, mask).transpose(1, 2)
            mask = None if mask is None else mask[:, None]
            grouped = q.shape[2] != k.shape[2]
            return F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=grouped).transpose(1, 2)

        rows = torch.arange(x.shape[1], device=x.device)
        return self.run(x, attend, rows % (block or x.shape[1]))

    def run(self, x: Float[Tensor, "*b q d"], attend: Attend, place: Int[Tensor, " q"]) -> Float[Tensor, "*b q d"]:
        """All layers and the last norm, under any attention; rows have these places in their blocks."""
        for layer in self.layers:
            x = layer.convolved(x, attend, place) if isinstance(layer, DraftLayer) else layer(x, attend)
        return self.norm(x)

    def sight(
        self, layer: int, queries: Int[Tensor, "*b q"], keys: Int[Tensor, "*b k"]
    ) -> Bool[Tensor, "*b q k"] | None:
        """Which key positions a layer's rows see beside any other rule; None: all. z-lab's own reading."""
        window, causal = self.config.windows[layer], self.config.causal[layer]
        if window is None and not causal:
            return None
        ahead = keys.unsqueeze(-2) - queries.unsqueeze(-1)
        seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        return seen if window is None else seen & (ahead.abs() < window)

    def logits(self, hidden: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """Scores of tokens by the target's head."""
        return self.scaled(self.target.network.head(hidden))

    def scaled(self, logits: Float[Tensor, "... v"]) -> Float[Tensor, "... v"]:
        """The head's logits as the draft means them."""
        cap = self.config.final_logit_softcapping
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def save(self, folder: str | Path, *, dtype: str | None = None, overwrite: bool = False) -> None:
        """Write a folder in z-lab's format; see `dlm.models.draft_saving.save_draft`."""
        from dlm.models.draft_saving import save_draft

        save_draft(self, folder, dtype=dtype, overwrite=overwrite)

    def __repr__(self) -> str:
        count, config = sum(p.numel() for p in self.parameters()), self.config
        kind = "DFlash 2" if config.selects else "DFlash"
        return (
            f"Draft({self.name!r}, {kind}, {count / 1e6:.2f}M parameters, {len(self.layers)} layers, block {config.block_size}, "
            f"reads layers {', '.join(map(str, config.target_layer_ids))} of {self.target.name!r})"
        )
