"""What a body asks of the engine: requests with all their settings, and how their answers are to be shown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from secrets import randbits, token_hex
from typing import Any

from dlm import config as toml
from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.inference.decoding import Decoding, continuations, infillings
from dlm.inference.drafting.fitting import require_wanted
from dlm.inference.lengths import at_longest
from dlm.inference.plan import Plan
from dlm.inference.prompts import HOLE, parse_holes
from dlm.inference.readers import FILLS, HOLES, SAMPLER_READERS
from dlm.models.lm import LM
from dlm.reading import unread
from dlm.serving.config import ServeConfig
from dlm.serving.echo import Token, prompt_tokens
from dlm.serving.refusal import Refusal
from dlm.serving.schema import RENAMED, ChatBody, Common, CompletionBody

WHERE = "the request"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A checked request: one decoding a choice, in the order of the choices."""

    id: str
    chat: bool
    body: Common
    decodings: Sequence[Decoding]
    cap: int | None
    """Tokens of an answer, at most; None: as many as its canvas has."""
    seed: int
    echoes: Sequence[str]
    """What stands before each choice's text."""
    scored: Sequence[Sequence[Token]]
    """The tokens of these, for requests that ask for their log-probabilities."""
    kind: str
    """text, infill or suffix."""
    top: int | None
    """How many likeliest tokens are listed beside each; None: no log-probabilities."""
    prompt_tokens: int
    sampler: SamplerConfig
    prompts: Sequence[str] = ()
    """Those with holes whose lengths are still to be chosen; their decodings have the longest."""
    forwards: Sequence[int] = ()
    """What that choice took, a choice."""

    @property
    def confidence(self) -> bool:
        """Whether its answer says how sure the model was."""
        return self.top is not None or self.body.stream_mode == "denoise"


def checked(lm: LM, config: ServeConfig, body: Common) -> Ask:
    """What this body asks for. Tokenises. Raises Refusal for what cannot be done."""
    try:
        return _checked(lm, config, body)
    except UserError as error:
        raise refused(error) from None


def refused(error: UserError) -> Refusal:
    """A mistake in a body as its answer, which names the field where the message does."""
    message = str(error)
    for name, here in RENAMED.items():
        message = re.sub(rf"\b{name}\b", here, message)
    named = re.match(rf'(?:{WHERE}: )?(?:unknown key )?"?([a-z_]+)', message)
    known = {*SamplerConfig.model_fields, *RENAMED.values()}
    return Refusal(400, message, param=named[1] if named is not None and named[1] in known else None)


def _checked(lm: LM, config: ServeConfig, body: Common) -> Ask:
    name, chat = token_hex(12), isinstance(body, ChatBody)
    seed = randbits(53) if body.seed is None else body.seed
    top = (body.top_logprobs or 0) if isinstance(body, ChatBody) and body.logprobs else None
    if isinstance(body, CompletionBody):
        top = body.logprobs
    shared = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{name}", "chat": chat, "body": body, "seed": seed, "top": top}
    if body.trace and not config.trace.enabled:
        raise Refusal(400, "trace: this server keeps no traces: it was started without --trace.enabled", param="trace")
    prompts, echoes, kind = _prompts(lm, config, body)
    if len(prompts) * body.n > config.serve.max_choices:
        raise Refusal(
            400,
            f"{len(prompts)} prompts times n = {body.n} are {len(prompts) * body.n} answers, and this server gives "
            f"{config.serve.max_choices} at most: ask in several requests",
            param="n" if body.n > 1 else "prompt",
        )
    sampler = _sampler(lm, config, body, holes=kind != "text").model_copy(update={"seed": seed})
    make = continuations if kind == "text" else infillings
    longest = at_longest(prompts) if kind == "infill" else prompts
    decodings = _numbered(make(lm, longest, sampler, where=WHERE), shared["id"])
    given = [len(d.request.ids) - sum(map(len, d.request.holes)) for d in decodings[:: body.n]]
    scored: list[list[Token]] = [[] for _ in decodings]
    if top is not None and isinstance(body, CompletionBody) and body.echo and kind == "text":
        scored = [prompt_tokens(lm, d.request.ids, top) for d in decodings[:: body.n] for _ in range(body.n)]
    return Ask(
        **shared,
        decodings=decodings,
        cap=body.cap,
        echoes=[echo for echo in echoes for _ in range(body.n)],
        scored=scored,
        kind=kind,
        prompt_tokens=sum(given),
        sampler=sampler,
        prompts=() if longest is prompts else prompts,
    )


def with_lengths(lm: LM, ask: Ask, prompts: Sequence[str], forwards: Sequence[int]) -> Ask:
    """The request with these prompts, whose holes have one length each, and the forwards that each took before."""
    decodings = _numbered(infillings(lm, prompts, ask.sampler, where=WHERE), ask.id)
    each = [nfe for nfe in forwards for _ in range(ask.body.n)]
    return replace(ask, decodings=decodings, prompts=(), forwards=each)


def _numbered(decodings: Sequence[Decoding], name: str) -> list[Decoding]:
    """The same under the ids that a request's choices have."""
    return [
        replace(decoding, request=replace(decoding.request, request_id=f"{name}-{number}"))
        for number, decoding in enumerate(decodings)
    ]


def _prompts(lm: LM, config: ServeConfig, body: Common) -> tuple[list[Any], list[str], str]:
    """Prompts as the engine reads them, what is to stand before their answers, and the kind of the answers."""
    if isinstance(body, ChatBody):
        return [plain(_rendered(lm, body))], [""], "text"
    assert isinstance(body, CompletionBody)
    if not body.prompt and isinstance(body.prompt, list):
        raise Refusal(400, "prompt is an empty list: give at least one", param="prompt")
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    prompts: list[Any] = [body.prompt] if single else list(body.prompt)
    if body.suffix is None and body.hole is not None:
        raise Refusal(400, "hole is only read with suffix: give that, or leave hole out", param="hole")
    if body.suffix is not None or body.infill:
        return _holed(config, body, prompts)
    echoes = [_text(lm, prompt) if body.echo else "" for prompt in prompts]
    if body.echo and body.logprobs is not None and lm.config.attention != "causal":
        raise Refusal(
            400,
            f"echo with logprobs asks for log p of the prompt, and {lm.config.model_type} has no such thing: a diffusion "
            "model gives a bound on a text's likelihood; use dlm-eval, or dlm.score",
            param="logprobs",
        )
    return [plain(prompt) if isinstance(prompt, str) else prompt for prompt in prompts], echoes, "text"


def _holed(config: ServeConfig, body: CompletionBody, prompts: list[Any]) -> tuple[list[Any], list[str], str]:
    """Prompts with holes: those of `infill`, or the one before `suffix`."""
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise Refusal(400, "holes are filled in texts: give prompt as text, not as token ids", param="prompt")
    if body.suffix is not None and body.infill:
        raise Refusal(400, "suffix and infill are two ways to mark a hole: give one of them", param="infill")
    if body.echo:
        raise Refusal(400, "echo is only read without holes: leave echo out", param="echo")
    if body.suffix is not None:
        size = _within(config, body.hole or body.cap or _canvas(config.sampler), "hole" if body.hole else "max_tokens")
        texts = [f"{plain(prompt)}[MASK:{size}]{plain(body.suffix)}" for prompt in prompts]
        return texts, [""] * len(prompts), "suffix"
    if body.cap is not None:
        why = "a hole's length stands in the prompt, as in [MASK:12]"
        raise Refusal(400, f"max_tokens ends a continuation, and {why}: leave max_tokens out", param="max_tokens")
    most, ranges = config.serve.max_choices, 0
    for number, prompt in enumerate(prompts):
        pieces = parse_holes(prompt, f"prompt {number}")
        _within(config, sum(piece.most or piece.hole for piece in pieces), "prompt")
        ranges += sum(piece.most > 0 for piece in pieces)
    if ranges > most:
        message = f"prompt has {ranges} holes of unknown length, and this server chooses {most} at most: ask in several requests"
        raise Refusal(400, message, param="prompt")
    return prompts, [""] * len(prompts), "infill"


def plain(text: str) -> str:
    """A text whose [MASK:n] are these characters, and no holes."""
    return HOLE.sub(lambda found: f"\\{found.group()}", text)


def _rendered(lm: LM, body: ChatBody) -> str:
    messages = [message.plain for message in body.messages]
    if lm.tokenizer is None:
        raise Refusal(
            400, f"model {lm.name!r} has no tokenizer, so no chat template: use /v1/completions with token ids"
        )
    return lm.chat(messages)


def _text(lm: LM, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    vocabulary = lm.config.vocab_size
    if any(not 0 <= token < vocabulary for token in prompt):
        raise Refusal(400, f"prompt has token ids outside the vocabulary of {vocabulary} tokens", param="prompt")
    return "" if lm.tokenizer is None else lm.decode(prompt)


def _sampler(lm: LM, config: ServeConfig, body: Common, holes: bool) -> SamplerConfig:
    """The server's settings under those of the body, which must all be read."""
    own = body.sampler()
    suffix = isinstance(body, CompletionBody) and body.suffix is not None
    for name in HOLES if holes else ():
        if own.get(name) and not (suffix and name == "stop"):
            reason = "a hole ends where its length says, which stands in the prompt, as in [MASK:12]"
            raise UserError(f"{WHERE}: {name} = {own[name]!r:.60} ends a continuation, and {reason}: leave it out")
    unchecked = not holes or own.get("check") == "none"
    names = config.sampler.model_fields_set - set(FILLS if unchecked else ())
    base = {name: getattr(config.sampler, name) for name in names}
    if isinstance(own.get("stop"), list):
        own["stop"] = tuple(own["stop"])
    merged = {**base, **own}
    merged |= {"gen_length": "auto", "stop": ()} if holes else {}
    lengths = {} if holes else _lengths(lm, config, body, merged, own)
    settings = toml.check(SamplerConfig, {**merged, **lengths}, WHERE)
    require_wanted(own, config.draft.model is not None, WHERE)
    judged = [name for name in own if name in SAMPLER_READERS and not (holes and name in HOLES)]
    if (problem := unread(settings, SAMPLER_READERS, judged)) is not None:
        raise UserError(f"{WHERE}: {problem}")
    return settings


def _lengths(lm: LM, config: ServeConfig, body: Common, merged: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The canvas for `max_tokens`: whole blocks with at least so many tokens, which are cut back after."""
    cap, length = body.cap, merged.get("gen_length", SamplerConfig.model_fields["gen_length"].default)
    within, found = partial(_within, config), {}
    if length == "auto":
        longest = cap if cap is not None and "max_gen_length" not in own else merged.get("max_gen_length")
        longest = min(1024, config.serve.max_tokens) if longest is None else longest
        return {"max_gen_length": within(longest, "max_gen_length" if "max_gen_length" in own else "max_tokens")}
    if cap is None or "gen_length" in own:
        return {"gen_length": within(length, "gen_length")} if isinstance(length, int) else {}
    within(cap, "max_tokens")
    block = merged.get("block_length")
    size = Plan(config=lm.config, block_length=block if isinstance(block, int) and block > 0 else None).length_of_block(
        cap
    )
    found["gen_length"] = -(-cap // size) * size
    steps, blocks = merged.get("steps"), found["gen_length"] // size
    if isinstance(steps, int) and "steps" not in own:  # the server's own: as many as fit these blocks
        found["steps"] = max(1, steps // blocks) * blocks
    return found


def _canvas(sampler: SamplerConfig) -> int:
    return sampler.gen_length if isinstance(sampler.gen_length, int) else 128


def _within(config: ServeConfig, tokens: int, param: str) -> int:
    """The number, where this server gives so many."""
    if tokens > config.serve.max_tokens:
        most = config.serve.max_tokens
        raise Refusal(
            400, f"{param}: {tokens} tokens, and this server gives {most} at most: ask for fewer", param=param
        )
    return tokens
