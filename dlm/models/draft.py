"""The DFlash draft: a few layers that read a target's hidden states and fill a block of masks in one forward.

DFlash (arXiv 2602.06036): f = hidden_norm(fc[h of the tapped layers]) is turned into keys and values by every layer, and
stands before the block as its context. DFlash 2 adds dynamic convolutions to the layers and a selector among candidates.
Embedding and head are the target's: they are no parameters of the draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm.models.attention import Attend, RMSNorm, rotate
from dlm.models.draft_config import DraftConfig, new_config
from dlm.models.draft_second import CandidateSelector, DraftLayer
from dlm.models.rope import rope_frequencies, rope_table
from dlm.models.transformer import Layer, Transformer

if TYPE_CHECKING:
    from pathlib import Path

    from dlm.models.lm import LM


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
        self.tokens: Tensor | None
        """The tokens it can draft, ascending; None: all."""
        count = config.draft_vocab_size
        self.register_buffer("tokens", None if count is None else torch.arange(count), persistent=False)
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
        tokens: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        name: str = "draft",
        **more: Any,
    ) -> Draft:
        """An untrained draft with heads and widths as the target's, on its device in its dtype.

        `target_layer_ids` are the target's layers it reads, from 0; by default `num_layers` of them, as z-lab spreads
        them. The mask is the target's own or, where it has none, end-of-text: an anchor never is that. `tokens` are those
        that it can draft: of a large vocabulary a few thousand make up nearly all text, and the head costs as much less.
        `more` are other fields of `DraftConfig`, `intermediate_size`, and for DFlash 2 its four sizes.
        """
        tokenizer = target.tokenizer
        masks = (mask_token_id, target.mask_id, None if tokenizer is None else tokenizer.mask_token_id, target.eos_id)
        config = new_config(
            target.config,
            num_layers=num_layers,
            block_size=block_size,
            target_layer_ids=target_layer_ids,
            mask_token_id=next((mask for mask in masks if mask is not None), target.config.vocab_size - 1),
            draft_vocab_size=None if tokens is None else len(set(tokens)),
            **more,
        )
        draft = cls(config, target, name)
        if tokens is not None:
            draft.tokens = torch.tensor(sorted(set(tokens)))
        draft.initialise(generator)
        return draft.to(device=target.device, dtype=target.dtype)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Normal weights; those back into the residual stream are scaled by 1/sqrt(2 layers). Convolutions pass their
        input on, the selector's scores are the logits, and the context says little, until training changes them."""
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
                quiet = name == "hidden_norm.weight"  # an untrained `fc` would drown what the block itself says
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 0.1 if quiet else 1.0)
            else:
                back = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=scaled if back else std, generator=generator)

    def body(self) -> Transformer:
        """The layers between the target's embedding and head, as the network that an engine runs. Shares all weights, but
        for the rows of a head that scores some tokens only: these are copied."""
        network, target = self.config.network, self.target.network
        with torch.device("meta"):
            body = Transformer(network.model_copy(update={"num_hidden_layers": 1, "tie_word_embeddings": True}))
        body.config = network
        body.layers, body.norm, body.embed, body.lm_head = self.layers, self.norm, target.embed, target.lm_head
        if self.tokens is not None:
            head = self.head_weight()
            body.lm_head = nn.Linear(*reversed(head.shape), bias=False, device="meta")
            body.lm_head.weight = nn.Parameter(head, requires_grad=False)
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
        """Scores of all tokens by the target's head."""
        if self.tokens is None:
            return self.scaled(self.target.network.head(hidden))
        return self.scaled(F.linear(hidden, self.head_weight()))

    def head_weight(self) -> Float[Tensor, "k d"]:
        """The rows of the target's head for the tokens it can draft."""
        network = self.target.network
        head = network.embed.weight if network.lm_head is None else network.lm_head.weight
        return head.detach() if self.tokens is None else head.detach().index_select(0, self.tokens)

    def drafts(self, tokens: Int[Tensor, "*b"]) -> Bool[Tensor, "*b"]:
        """Which of these it can draft."""
        if self.tokens is None:
            return torch.ones_like(tokens, dtype=torch.bool)
        return self.tokens[self.place(tokens)] == tokens

    def place(self, tokens: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Their rows in `head_weight`; any row for those it cannot draft."""
        if self.tokens is None:
            return tokens
        return torch.searchsorted(self.tokens, tokens.contiguous()).clamp(max=len(self.tokens) - 1)

    def scaled(self, logits: Float[Tensor, "... k"]) -> Float[Tensor, "... v"]:
        """`capped`, those of tokens it cannot draft at -inf."""
        logits = self.capped(logits)
        if self.tokens is None:
            return logits
        size = *logits.shape[:-1], self.config.network.vocab_size
        return logits.new_full(size, float("-inf")).index_copy_(-1, self.tokens, logits)

    @property
    def raw_logits(self) -> bool:
        """Whether `capped` changes nothing."""
        return self.config.final_logit_softcapping is None and self.config.output_multiplier == 1

    def capped(self, logits: Float[Tensor, "... k"]) -> Float[Tensor, "... k"]:
        """The head's logits as the draft means them."""
        cap = self.config.final_logit_softcapping
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def __deepcopy__(self, memo: dict[int, Any]) -> Draft:
        """A copy for the same target, which is not copied."""
        memo[id(self.target)] = self.target
        memo[id(self)] = copied = Draft.__new__(Draft)
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

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
