"""A language model as users hold it: network, tokenizer and special tokens. Knows nothing of sampling or training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.errors import UserError
from dlm.models.attention import AttentionSpec
from dlm.models.config import ModelConfig
from dlm.models.transformer import Transformer

if TYPE_CHECKING:
    from dlm.data.tokenizer import Tokenizer


@dataclass(eq=False)
class LM:
    """What `dlm.load` returns. `tokenizer` is None when the checkpoint has none."""

    network: Transformer
    tokenizer: Tokenizer | None = None
    name: str = "unnamed"
    settings: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's own config.json, so that saving keeps the keys we have no use for."""
    generation: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's own generation_config.json."""

    @property
    def config(self) -> ModelConfig:
        """The network's shape, family and special tokens."""
        return self.network.config

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.network.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.network.embed.weight.dtype

    @property
    def mask_id(self) -> int | None:
        """The id of [MASK], if the checkpoint has one."""
        return self.config.mask_token_id

    @property
    def eos_id(self) -> int | None:
        """The id of end-of-text, if the checkpoint has one."""
        return self.config.eos_token_id

    @property
    def pad_id(self) -> int | None:
        """The id of padding; end-of-text where the checkpoint names none."""
        return self.eos_id if self.config.pad_token_id is None else self.config.pad_token_id

    def require_mask_id(self) -> int:
        """The id of [MASK], or an error that says what to do."""
        if self.mask_id is None:
            raise UserError(
                f"model {self.name!r} ({self.config.model_type}) has no mask token, so it cannot be sampled by diffusion; "
                'add "mask_token_id" to its config.json, or load a diffusion checkpoint'
            )
        return self.mask_id

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, or an error that says what to do."""
        if self.tokenizer is None:
            raise UserError(
                f"model {self.name!r} has no tokenizer; put a tokenizer.json into its folder, or give prompts as token ids"
            )
        return self.tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self.require_tokenizer().encode(text)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids."""
        return self.require_tokenizer().decode(list(ids), skip_special)

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Messages through the checkpoint's chat template, ready for the assistant's turn."""
        return self.require_tokenizer().apply_chat_template(list(messages), add_generation_prompt=True)

    def predict(
        self,
        input_ids: Int[Tensor, "b l"],
        rows: Bool[Tensor, "b l"],
        positions: Int[Tensor, "b l"] | None = None,
        valid: Bool[Tensor, "b l"] | None = None,
        attention: AttentionSpec | None = None,
    ) -> Float[Tensor, "n v"]:
        """Logits of the token at each position in `rows`; see `Transformer.predict`."""
        return self.network.predict(input_ids, rows, positions, valid, attention)

    def save(self, folder: str | Path, family: str | None = None, **options: Any) -> None:
        """`dlm.save(self, folder, …)`, without modelling code unless code=True; unmerged adapters are written alone."""
        from dlm.models import export

        export.save(self, folder, family, **{"code": False, **options})

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.network.parameters())
        size = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
        dtype = str(self.dtype).removeprefix("torch.")
        tokenizer = "no tokenizer" if self.tokenizer is None else f"{self.tokenizer.vocab_size} tokens"
        return f"LM({self.name!r}, {self.config.model_type}, {size} parameters, {dtype} on {self.device}, {tokenizer})"
