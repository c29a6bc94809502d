"""`Family`: how a family of checkpoints names its settings and its weights, and how it decodes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlm.models.config import AttentionKind, ModelConfig
from dlm.models.hub_tensors import Names
from dlm.models.settings import Settings


@dataclass(frozen=True)
class Family:
    """One checkpoint family. `names` are the spellings of its weights: the first is written, the others are read too."""

    architecture: str
    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    names: tuple[Names, ...]
    attention: AttentionKind = "bidirectional"
    shifted_logits: bool = False
    mask_in_softmax: bool = False
    mask_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    aliases: tuple[str, ...] = ()
