"""Answers and chunks as OpenAI's clients read them. Knows the two shapes, and nothing of how an answer came to be."""

import time
from collections.abc import Sequence
from typing import Any

from dlm.serving.ask import Ask
from dlm.serving.choice import Choice, Delta
from dlm.serving.echo import Token


class Shape:
    """The JSON of one request's answer, whole or in chunks."""

    def __init__(self, ask: Ask, model: str) -> None:
        self.ask = ask
        self.created = int(time.time())
        kind = "chat.completion" if ask.chat else "text_completion"
        self.common = {"id": ask.id, "object": kind, "created": self.created, "model": model}
        self.chunk_common = {**self.common, "object": f"{kind}.chunk" if ask.chat else kind}
        self._offsets: dict[int, int] = {}

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer at once."""
        found = [self._whole_choice(choice) for choice in choices]
        return {**self.common, "choices": found, "usage": self.usage(choices), "dlm": self.facts(choices)}

    def facts(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """What we tell of all choices beside OpenAI's fields."""
        return _merged([choice.facts() for choice in choices])

    def role(self, number: int) -> dict[str, Any]:
        """A chat's first chunk."""
        return self._chunk(number, {"delta": {"role": "assistant", "content": ""}})

    def chunk(self, number: int, delta: Delta) -> dict[str, Any]:
        """What an event adds."""
        if self.ask.chat:
            content: dict[str, Any] = {"delta": {"content": delta.text}}
        else:
            content = {"text": delta.text}
        return self._chunk(number, content, self._logprobs(number, delta.tokens))

    def finish(self, choice: Choice) -> dict[str, Any]:
        """A choice's last chunk."""
        content: dict[str, Any] = {"delta": {}} if self.ask.chat else {"text": ""}
        chunk = self._chunk(choice.number, content, None, choice.finish_reason)
        return chunk | {"dlm": choice.facts()}

    def step(self, number: int, facts: dict[str, Any]) -> dict[str, Any]:
        """A chunk without text, for what a step did."""
        content: dict[str, Any] = {"delta": {"content": ""}} if self.ask.chat else {"text": ""}
        return self._chunk(number, content) | {"dlm": facts}

    def final(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The chunk that only tells usage."""
        return {**self.chunk_common, "choices": [], "usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Tokens given and written; those after end-of-text do not count."""
        given, written = self.ask.prompt_tokens, sum(len(choice.tokens) for choice in choices)
        cached = sum(choice.cached for choice in choices[:: self.ask.body.n])
        return {
            "prompt_tokens": given,
            "completion_tokens": written,
            "total_tokens": given + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.number, choice.scored)
        common = {"index": choice.number, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if self.ask.chat:
            return {**common, "message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {**common, "text": choice.text}

    def _chunk(
        self, number: int, content: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": number, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self.chunk_common, "choices": [choice]}

    def _logprobs(self, number: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.ask.top is None:
            return None
        if self.ask.chat:
            return {"content": [_chat_token(token) for token in tokens], "refusal": None}
        offset = self._offsets.get(number, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        self._offsets[number] = offset
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens] if self.ask.top else None,
            "text_offset": offsets,
        }


def _by_text(token: Token) -> dict[str, float] | None:
    """The likeliest tokens by their text; of several that look alike (parts of characters) the likeliest."""
    return None if token.likeliest is None else dict(reversed(token.likeliest))


def _chat_token(token: Token) -> dict[str, Any]:
    def one(text: str, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return {**one(token.text, token.logprob), "top_logprobs": [one(*entry) for entry in token.likeliest or ()]}


def _merged(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """The facts of one answer; of several, what all share, and each's own in a list."""
    if len(facts) == 1:
        return facts[0]
    shared = {name: value for name, value in facts[0].items() if all(other.get(name) == value for other in facts)}
    own = [{name: value for name, value in fact.items() if name not in shared} for fact in facts]
    return {**shared, "choices": own}
