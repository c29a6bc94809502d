"""The network: one plain pre-norm Transformer for every family."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlm.models.attention import Attend, Attention, AttentionSpec, RMSNorm, Rope, dense_attend, fusing, unhooked
from dlm.models.config import ModelConfig
from dlm.models.gated import SwiGLU
from dlm.models.moe import MoE
from dlm.models.rope import rope_frequencies, rope_table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MLP(SwiGLU):
    """A layer's dense feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.mlp_bias)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        sparse = config.moe is not None and layer >= config.moe.first_k_dense
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if sparse else MLP(config)

    def forward(self, x: Float[Tensor, "*b d"], attend: Attend, output_rows: Int[Tensor, " w"] | None = None) -> Tensor:
        x, found = self.terms(x, None, attend, output_rows)
        return x + found

    def terms(
        self, x: Float[Tensor, "*b d"], found: Tensor | None, attend: Attend, output_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Two tensors whose sum is what the layer gives for x + found: the next norm adds them on its way."""
        normed, x = (self.attn_norm(x), x) if found is None else self.attn_norm.of_sum(x, found)
        attended = self.attn(normed, attend, output_rows)
        normed, x = self.mlp_norm.of_sum(x if output_rows is None else x.index_select(0, output_rows), attended)
        return x, self.mlp(normed)


def _table(rows: int, width: int) -> nn.Embedding:
    """An embedding whose weights are still to be filled: nn.Embedding's own draw imports torch._dynamo on meta (2.7 s)."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Transformer(nn.Module):
    """Token ids to logits.

    `forward` gives what the checkpoint's own code would give; `predict` gives, for each position, the
    logits of the token *at* that position (shifted families handled here and nowhere else) with the mask
    token suppressed where the family was trained without it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError(f"a network needs vocab_size >= 1, not {config.vocab_size}")
        self.config = config
        self.attention = AttentionSpec.of(config)
        self.gradient_checkpointing = False
        learned = config.position_embedding == "learned"
        # Computed, not stored: so it is never in a checkpoint, always fp32, and correct after a meta-device load.
        self.rope = None if learned else rope_frequencies(config)
        self.embed = _table(config.vocab_size, config.hidden_size)
        self.positions = _table(config.max_position_embeddings, config.hidden_size) if learned else None
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.kv_heads = config.num_key_value_heads
        """Key and value heads in this process; fewer than the config's under tensor parallelism."""
        self.group: ProcessGroup | None = None
        """The processes that share the layers, under tensor parallelism."""

    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Normal weights; projections back into the residual stream are scaled by 1/sqrt(2 layers) (GPT-2)."""
        std, scaled = self.config.initializer_range, self.config.initializer_range / (2 * len(self.layers)) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                torch.nn.init.zeros_(parameter) if name.endswith("bias") else torch.nn.init.ones_(parameter)
            else:
                back = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down"))
                torch.nn.init.normal_(parameter, std=scaled if back else std, generator=generator)

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Put the weights on `device` in `dtype`, in place; buffers, such as a router's bias, stay fp32."""
        exact = [buffer.data for buffer in self.buffers()]
        for module in self.modules():
            if isinstance(module, Attention | SwiGLU):
                module.packed = None  # their copies are of weights that have moved
        self.to(device=device, dtype=dtype)
        for buffer, values in zip(self.buffers(), exact, strict=True):
            buffer.data = values.to(device)

    def hidden(
        self,
        input_ids: Int[Tensor, "*b l"],
        positions: Int[Tensor, "*b l"] | None = None,
        valid: Bool[Tensor, "b l"] | None = None,
        attention: AttentionSpec | None = None,
        attend: Attend | None = None,
        taps: dict[int, Tensor] | None = None,
        output_rows: Int[Tensor, " w"] | None = None,
    ) -> Float[Tensor, "*b l d"]:
        """Final hidden states, after the last norm. `valid` is False on padding.

        `attend` replaces dense attention, rotary positions included (see `rope_of`); the ids may then be one packed
        row (n,) of any requests, and the states only those of the `output_rows`, (w, d): the last layer is not computed
        further than they need. `taps` is filled with each layer's output, by the layer's number.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        x = self.embedded(input_ids, positions)
        if attend is None:
            attend = dense_attend(attention or self.attention, positions, self.rope_of(positions, x.dtype), valid)
        if taps is None and fusing(x) and all(map(unhooked, self.layers)):
            return self._added_later(x, attend, output_rows)
        for number, layer in enumerate(self.layers):
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, attend, use_reentrant=False)
            else:
                x = layer(x, attend, output_rows if number == len(self.layers) - 1 else None)
            if taps is not None:
                taps[number] = x
        return self.norm(x)

    def _added_later(self, x: Tensor, attend: Attend, output_rows: Tensor | None) -> Tensor:
        """The layers and the last norm; each layer's last sum is the next norm's first."""
        found, last = None, len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x, found = layer.terms(x, found, attend, output_rows if number == last else None)
        return self.norm(x) if found is None else self.norm.of_sum(x, found)[0]

    def embedded(self, input_ids: Int[Tensor, "*b l"], positions: Int[Tensor, "*b l"]) -> Float[Tensor, "*b l d"]:
        """The first layer's input."""
        x = self.embed(input_ids)
        return x if self.positions is None else x + self.positions(positions)

    def rope_of(self, positions: Int[Tensor, "b l"], dtype: torch.dtype) -> Rope | None:
        """cos and sin of these positions; None where positions are learned."""
        if self.rope is None:
            return None
        frequencies, gain = self.rope
        return rope_table(frequencies.to(positions.device), gain, positions, dtype)

    def head(self, hidden: Float[Tensor, "... d"]) -> Float[Tensor, "... v"]:
        """Logits of hidden states."""
        return F.linear(hidden, self.embed.weight) if self.lm_head is None else self.lm_head(hidden)

    def forward(
        self,
        input_ids: Int[Tensor, "b l"],
        positions: Int[Tensor, "b l"] | None = None,
        valid: Bool[Tensor, "b l"] | None = None,
        attention: AttentionSpec | None = None,
    ) -> Float[Tensor, "b l v"]:
        """Raw logits, as the family's own code gives them."""
        return self.head(self.hidden(input_ids, positions, valid, attention))

    def predict(
        self,
        input_ids: Int[Tensor, "b l"],
        rows: Bool[Tensor, "b l"],
        positions: Int[Tensor, "b l"] | None = None,
        valid: Bool[Tensor, "b l"] | None = None,
        attention: AttentionSpec | None = None,
    ) -> Float[Tensor, "n v"]:
        """Logits of the token at each position where `rows` is True, in row-major order; n = rows.sum().

        The vocabulary projection runs on those rows only.
        """
        hidden = self.hidden(input_ids, positions, valid, attention)
        states = (attention or self.attention).states(hidden, self.config.shifted_logits)
        return self.suppress(self.head(states[rows]))

    def suppress(self, logits: Float[Tensor, "n v"], always: bool = False) -> Float[Tensor, "n v"]:
        """The mask token's logit set to minus infinity; unless `always`, not where the family's own code leaves it in.

        In place, unless gradients are recorded.
        """
        mask = self.config.mask_token_id
        if mask is None or (self.config.mask_in_softmax and not always):
            return logits
        if not torch.is_grad_enabled():
            logits[..., mask] = float("-inf")  # no one else holds these logits
            return logits
        return logits.index_fill(-1, torch.tensor([mask], device=logits.device), float("-inf"))

    def matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The matrices of the layers, which Muon may train: no embeddings, head, vectors or adapters."""
        for name, parameter in self.layers.named_parameters():
            if parameter.ndim >= 2 and "router" not in name and "lora" not in name:
                yield f"layers.{name}", parameter
