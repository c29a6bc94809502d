"""Bodies of requests: OpenAI's fields, and the sampler's beside them. Checks types and names, not what a model can do."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from dlm.errors import nearest
from dlm.inference.config import SamplerConfig

RENAMED = {"num_samples": "n"}
"""Settings of [sampler] that have another name in a body."""
SHARED = ("temperature", "top_p", "stop", "seed")
"""Settings of [sampler] that are OpenAI's fields too."""
SAMPLER_FIELDS = tuple(name for name in SamplerConfig.model_fields if name not in (*RENAMED, *SHARED))
"""Settings of [sampler] that only we know."""

OFF: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "audio": (),
    "web_search_options": (),
    "verbosity": (),
}
"""OpenAI's fields that nothing here does, and the values that ask for nothing."""

Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(min_length=1)]
Stop = str | Annotated[list[str], Field(max_length=64)]


class Body(BaseModel):
    """What all bodies have in common: names are known, and null is the same as nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if value is not None}
        for name, value in kept.items():
            _require_unicode(value, str(name))
        for name in [name for name in kept if name not in cls.model_fields]:
            if name in RENAMED:
                raise ValueError(f'"{name}" is "{RENAMED[name]}" in a request')
            if name not in OFF:
                raise ValueError(f'unknown field "{str(name)[:60]}"{nearest(str(name), cls.model_fields)}')
            value = kept.pop(name)
            if not any(type(value) is type(off) and value == off for off in _with_floats(OFF[name])):
                raise ValueError(f'"{name}" is not supported: leave it out')
        return kept


def _require_unicode(value: Any, name: str) -> None:
    """Refuse halves of surrogate pairs, which no tokenizer takes; what lies deeper is read by a body of its own."""
    for text in value if isinstance(value, list) else (name, value):
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = ascii(text[error.start])[1:-1]
                raise ValueError(
                    f"{ascii(name)[1:-1]} is no Unicode text: character {error.start} is {half}, half of a surrogate pair"
                ) from None


def _with_floats(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*values, *(float(value) for value in values if type(value) is int))


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool = Field(default=False, description="One more chunk at the end, with usage and no choices.")


class TextPart(Body):
    """A part of a message's content; only text is read."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] = Field(default="", description="The text, or parts that are all text.")

    @model_validator(mode="before")
    @classmethod
    def _as_answered(cls, data: Any) -> Any:
        """An answer of ours may come back as it was: fields that are empty say nothing."""
        if not isinstance(data, dict):
            return data
        for name, value in data.items():
            _require_unicode(value, str(name))
        empty = ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content")
        return {name: value for name, value in data.items() if name not in empty or value}

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def plain(self) -> dict[str, str]:
        """As chat templates read it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


class Common(Body):
    """Fields of both kinds of request."""

    model: str | None = Field(default=None, description="The served model's id; none: that one.")
    max_tokens: int | None = Field(default=None, ge=1, description="Tokens of the answer, at most.")
    temperature: float | None = Field(default=None, ge=0, description="0 takes the most probable token.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Draw from the smallest set of this probability.")
    n: int = Field(default=1, ge=1, le=4096, description="Answers for each prompt.")
    stop: Stop | None = Field(default=None, description="A string, or several, that ends the answer.")
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="Same seed, same text; none: a random one.")
    stream: bool = Field(default=False, description="Send the answer as it is written.")
    stream_options: StreamOptions | None = None
    stream_mode: Literal["text", "denoise"] = Field(
        default="text", description="denoise: chunks tell each step's tokens too, in `dlm`."
    )
    trace: bool | None = Field(default=None, description="Whether its steps are recorded; none: as the server does.")
    user: str | None = Field(default=None, description="Whom you ask for. Not read.")

    @property
    def cap(self) -> int | None:
        """Tokens of the answer, at most, where the request says."""
        return self.max_tokens

    def sampler(self) -> dict[str, Any]:
        """Settings of [sampler] that this body gives. A top_p of 1 asks for nothing."""
        given = {name: getattr(self, name) for name in (*SHARED, *SAMPLER_FIELDS)}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("top_p") == 1:
            del given["top_p"]
        return given | ({"num_samples": self.n} if self.n > 1 else {})


def _settings() -> dict[str, Any]:
    """The sampler's own fields, all optional; their limits are the sampler's to check."""
    found = {}
    for name in SAMPLER_FIELDS:
        info = SamplerConfig.model_fields[name]
        found[name] = (info.annotation | None, Field(default=None, description=info.description))  # type: ignore[operator]
    return found


Sampled: type[Common] = create_model("Sampled", __base__=Common, **_settings())


class CompletionBody(Sampled):  # type: ignore[valid-type, misc]
    """POST /v1/completions."""

    prompt: str | list[str] | Ids | list[Ids] = Field(description="A text or token ids, or a list of either.")
    suffix: str | None = Field(default=None, description="What follows the hole; the answer is what is between.")
    hole: int | None = Field(default=None, ge=1, description="With suffix: tokens of the hole; none: max_tokens.")
    infill: bool = Field(default=False, description="Fill each [MASK:n] of the prompt; the answer is the whole text.")
    echo: bool = Field(default=False, description="Put the prompt before the answer.")
    logprobs: int | None = Field(
        default=None, ge=0, le=20, description="log p of each token, and of so many likeliest."
    )


class ChatBody(Sampled):  # type: ignore[valid-type, misc]
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, description="The conversation.")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="The newer name of max_tokens.")
    logprobs: bool = Field(default=False, description="log p of each token when it was committed.")
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="With logprobs: so many likeliest, too.")

    @property
    def cap(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatBody":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens disagree: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only read with logprobs = true: give that, or leave top_logprobs out")
        return self


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = Field(default=None, description="A text.")
    messages: list[Message] | None = Field(default=None, min_length=1, description="A conversation.")
    add_special_tokens: bool = Field(
        default=True, description="Begin as a prompt does, where the tokenizer has texts begin."
    )
    add_generation_prompt: bool = Field(default=True, description="End a conversation where the answer begins.")
    return_token_strs: bool = Field(default=False, description="Tell each token's text, too.")

    @model_validator(mode="after")
    def _has_one(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize: the text of token ids."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=2**31)]]
