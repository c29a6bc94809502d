"""`LM`, what `dlm.load` returns: a network with its tokenizer and special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dlm.errors import UserError
from dlm.models.attention import AttentionSpec
from dlm.models.config import ModelConfig
from dlm.models.device import DTYPES, bytes_of, pick_device, pick_dtype, require_room
from dlm.models.quantise import is_quantised
from dlm.models.required import Model, require_lm
from dlm.models.transformer import Transformer

if TYPE_CHECKING:
    from dlm.data.tokenizer import Tokenizer


@dataclass(eq=False)
class LM(Model):
    """What `dlm.load` returns. `tokenizer` is None when the checkpoint has none."""

    network: Transformer
    tokenizer: Tokenizer | None = None
    name: str = "unnamed"
    settings: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's own config.json, so that saving keeps the keys we have no use for."""
    generation: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's own generation_config.json."""

    def __post_init__(self) -> None:
        if not isinstance(self.network, nn.Module):
            require_lm(self.network, "LM()")

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

    def settled(self, settings: Any, where: str) -> Any:
        """A `SamplerConfig` as this model reads it; a UserError for what it does not."""
        if settings.solver is not None:
            raise UserError(
                f"{where}: solver = {settings.solver!r} is only read by latent models, and {self.name!r} is of family "
                f"{self.config.model_type}: leave it out"
            )
        return settings

    def run(self, *_: Any) -> Any:
        """Only for models that no engine runs: decodes by itself."""
        raise NotImplementedError

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

    def to(
        self,
        target: str | torch.device | torch.dtype | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> LM:
        """This model, its weights moved in place to a device ("cuda", "auto", …), a dtype ("bfloat16", …) or both.

        `target` is either of them. An `Engine` made before keeps its pages where they were: make a new one. Raises
        UserError for devices and dtypes that cannot be used, and for a new dtype of quantised weights.
        """
        if isinstance(target, torch.dtype) or (isinstance(target, str) and target.removeprefix("torch.") in DTYPES):
            dtype = dtype or target
        elif target is not None:
            device = target if device is None else device
        where = self.device if device is None else pick_device(device)
        kind = self.dtype if dtype is None else pick_dtype(dtype, {}, where)
        if kind not in DTYPES.values():
            raise UserError(f"dtype={str(kind)!r} is not for weights; use {', '.join(DTYPES)}")
        if kind != self.dtype and is_quantised(self.network):
            raise UserError(
                f"model {self.name!r} is quantised, so its dtype stays: load it again with dtype={str(kind)[6:]!r}, "
                "without quantize"
            )
        if self.network.group is not None and where != self.device:
            raise UserError(f"model {self.name!r} is split over several processes, so its device stays")
        if where != self.device:
            require_room(bytes_of(self.network) * kind.itemsize // self.dtype.itemsize, where, f"model {self.name!r}")
        if where != self.device or kind != self.dtype:
            self.network.move(where, kind)
        return self

    def save(self, folder: str | Path, family: str | None = None, **options: Any) -> None:
        """`dlm.save(self, folder, …)`, without modelling code unless code=True; unmerged adapters are written alone."""
        from dlm.models.saving import save

        save(self, folder, family, **{"code": False, **options})

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.network.parameters())
        size = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
        dtype = str(self.dtype).removeprefix("torch.")
        tokenizer = "no tokenizer" if self.tokenizer is None else f"{self.tokenizer.vocab_size} tokens"
        return f"LM({self.name!r}, {self.config.model_type}, {size} parameters, {dtype} on {self.device}, {tokenizer})"
