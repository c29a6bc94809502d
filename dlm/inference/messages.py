"""Conversations among prompts: checked, and made text by the model's chat template. Decodes nothing."""

from collections.abc import Mapping
from typing import Any

from dlm.errors import UserError
from dlm.models.lm import LM

EXAMPLE = '{"role": "user", "content": "…"}'


def is_conversation(prompt: Any) -> bool:
    """Whether this is a list of messages."""
    return isinstance(prompt, (list, tuple)) and any(isinstance(entry, Mapping) for entry in prompt)


def as_texts(lm: LM, prompts: Any) -> Any:
    """The prompts with each conversation rendered by `lm.chat`; everything else as it is."""
    if is_conversation(prompts):
        return [_rendered(lm, prompts, "prompt 0")]
    if not isinstance(prompts, (list, tuple)):
        return prompts
    return [_rendered(lm, p, f"prompt {i}") if is_conversation(p) else p for i, p in enumerate(prompts)]


def _rendered(lm: LM, messages: Any, where: str) -> str:
    for number, message in enumerate(messages):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise UserError(
                f"{where}, message {number} is {str(message)[:60]!r}: a message is {EXAMPLE}, both of them text"
            )
    if lm.tokenizer is None:
        raise UserError(
            f"{where} is a conversation, but model {lm.name!r} has no tokenizer, so no chat template: give token ids"
        )
    try:
        return lm.chat(messages)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
