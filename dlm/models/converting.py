"""Converts an autoregressive network to a diffusion model: changes its attention, and adds a mask token."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dlm.errors import UserError
from dlm.models.attention import AttentionSpec
from dlm.models.config import MOST_BLOCK, AttentionKind
from dlm.models.required import require_lm

if TYPE_CHECKING:
    from dlm.models.lm import LM


def convert(lm: "LM", attention: AttentionKind = "bidirectional", block_length: int | None = None) -> "LM":
    """The same model with another attention, changed in place; one that is not causal gets a mask token.

    `dlm.models.convert(dlm.load("Qwen/Qwen3-0.6B"))` is what training with `train.init_from` starts from: the same
    weights, and still the token at i predicted by the logits at i-1, which `config.shifted_logits` records. The mask is
    the tokenizer's own or, where there is none, "[MASK]" behind its last token: in a spare row of the embedding, or in a
    new one. Saved as family `dlm`; `lm.save(folder, family="qwen3")` writes the causal family's layout again.
    """
    require_lm(lm, "convert()")
    if attention == "block_causal" and not 1 <= (block_length or 0) <= MOST_BLOCK:
        raise UserError(
            f"convert: block_causal attention needs block_length >= 1, not {block_length} (and at most {MOST_BLOCK})"
        )
    changes = {"attention": attention, "block_length": block_length}
    if attention == "causal":  # a causal state has seen its own token, so it predicts the next one
        changes["shifted_logits"] = True
    elif lm.mask_id is None:
        _add_mask(lm)
    _configure(lm, **changes)
    return lm


def _add_mask(lm: "LM") -> None:
    """Name a mask token; a row of its own that was never trained becomes the mean of the tokens' rows."""
    network, rows, known = lm.network, lm.config.vocab_size, lm.tokenizer
    if known is not None:
        lm.tokenizer = known.with_mask()
    mask = rows if lm.tokenizer is None else lm.tokenizer.mask_token_id
    assert mask is not None
    if mask > rows:
        raise UserError(f"model {lm.name!r} has {rows} rows in its embedding, but its tokenizer has {mask} tokens")
    if mask == rows or lm.tokenizer is not known:
        network.embed.weight = _with_mean(network.embed.weight, mask)
        network.embed.num_embeddings = len(network.embed.weight)
        if network.lm_head is not None:
            network.lm_head.weight = _with_mean(network.lm_head.weight, mask)
            network.lm_head.out_features = len(network.lm_head.weight)
    _configure(lm, mask_token_id=mask, vocab_size=len(network.embed.weight))


@torch.no_grad()
def _with_mean(weight: Tensor, row: int) -> nn.Parameter:
    """The table with the mean of the rows before `row` as that row, which may be one more than it had."""
    mean = weight[:row].mean(0, keepdim=True, dtype=torch.float32).to(weight.dtype)
    return nn.Parameter(torch.cat((weight[:row], mean, weight[row + 1 :])))


def _configure(lm: "LM", **changes: object) -> None:
    config = lm.config.model_copy(update=changes)
    lm.network.config, lm.network.attention = config, AttentionSpec.of(config)
