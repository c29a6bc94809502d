"""`dlm.generate` and `dlm.infill`: every prompt through one engine, results in order. Knows nothing of how they are decoded."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

from dlm import config as toml
from dlm.diffusion.unmask import Rule
from dlm.errors import UserError
from dlm.inference.config import MOST, EngineConfig
from dlm.inference.decoding import Decoding, Options, continuations, infillings
from dlm.inference.engine import Cache, Engine, OnStep
from dlm.inference.lengths import at_longest, settle
from dlm.inference.prompts import Prompt, as_prompts
from dlm.inference.recording import Store
from dlm.inference.request import Generation
from dlm.models.lm import LM


def generate(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    gen_length: int | Literal["auto"] = 128,
    block_length: int | None = None,
    steps: int | None = None,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    rule: str | Rule = "low_confidence",
    threshold: float = 0.9,
    seed: int = 0,
    *,
    stop: str | Sequence[str] = (),
    cache: Cache = "auto",
    trace: Store | None = None,
    request_ids: Sequence[str] | None = None,
    batch_size: int = 64,
    on_step: OnStep | None = None,
    **options: Unpack[Options],
) -> list[Generation]:
    """Continue each prompt by `gen_length` tokens, or until end-of-text; results are in the order of the prompts.

    A prompt is a text, a list of token ids, or a conversation: a list of messages {"role": …, "content": …}, which goes
    through the model's chat template (`lm.chat`). `prompts` is one prompt or a list of them, of any kinds.

    `block_length` is 32 (all of a shorter generation; the family's own for block-causal ones) and `steps` 128 in all,
    rounded down to whole steps a block, unless given. With gen_length="auto" blocks are added until end-of-text or
    `max_gen_length`, and `steps` counts those of one block. Causal families go token by token, whatever these say.

    `stop` is a string or several: a result ends as soon as one of them stands in its settled text, and its `.text` is
    cut before it. `.tokens` goes on to the token that completed it, as it goes on to end-of-text, so a cut may lie
    within a token. The name of a special token may be a stop string too.

    `num_samples` results a prompt stand next to each other. `cache` is the engine's: "auto" changes no token, "prefix"
    and "dual" approximate; `trace` (a `dlm.TraceStore`) records every step under the request's id, which is a random one
    unless given. A prompt that together with its generation is longer than the model's context is refused, unless
    allow_long=True. Ctrl-C is raised as `dlm.inference.Interrupted`, which holds what was decoded. `options` may name its
    other settings too (`EngineConfig`). Results do not depend on `batch_size`, the number of requests under way at a
    time. Raises UserError for what cannot be done.
    """
    given, engine = _given(locals(), options)
    given |= {"gen_length": gen_length, "stop": stop}
    decodings = continuations(lm, prompts, given, where="generate()", request_ids=request_ids, unique=trace is not None)
    return _run(lm, decodings, engine, batch_size, trace, on_step)


def infill(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    block_length: int | None = None,
    steps: int | None = None,
    temperature: float = 0.0,
    cfg_scale: float = 0.0,
    rule: str | Rule = "low_confidence",
    threshold: float = 0.9,
    seed: int = 0,
    *,
    cache: Cache = "auto",
    trace: Store | None = None,
    request_ids: Sequence[str] | None = None,
    batch_size: int = 64,
    on_step: OnStep | None = None,
    **options: Unpack[Options],
) -> list[Generation]:
    """Fill the holes of each prompt: `[MASK:12]` in a text, runs of mask ids in a list of tokens.

    `[MASK:4-16]` is a hole of four to sixteen tokens. Its length is chosen first, by how sure the model is of the empty
    hole's tokens over how sure it is where the text ends with the hole (CAL, arXiv 2602.00476, with its bias measured on
    the prompt instead of fitted to the model): two forwards a length, at most 32 at a time for a wide range, which
    is searched from coarse to fine. Several such holes are settled from left to right. Only the chosen length is
    decoded, shown and recorded, as if it had been given; `.nfe` counts the forwards of the choice too, in each sample.
    A small model cannot tell lengths well, and likes short ones: give it a narrow range.

    All holes are filled together in up to `steps` (128) steps, or `block_length` positions at a time from the left,
    which shares the steps out. Text on both sides is seen as far as the family's attention reaches. End-of-text in a
    hole ends nothing: it is a token like others, and `.text` and `.holes` do not show it. Otherwise as `generate`.
    """
    given, engine = _given(locals(), options)
    names = {"where": "infill()", "request_ids": request_ids, "unique": trace is not None}
    longest = at_longest(prompts)
    decodings = infillings(lm, longest, given, **names)  # says what is wrong with the prompts before anything runs
    if longest is prompts:
        return _run(lm, decodings, engine, batch_size, trace, on_step)
    settled, forwards = settle(lm, as_prompts(prompts), lambda probes: engine_for(lm, probes, engine, batch_size))
    results = _run(lm, infillings(lm, settled, given, **names), engine, batch_size, trace, on_step)
    for number, result in enumerate(results):
        nfe = result.nfe + forwards[number * len(settled) // len(results)]
        results[number] = replace(result, nfe=nfe, tpf=len(result.tokens) / nfe)
    return results


SETTINGS = ("block_length", "steps", "temperature", "cfg_scale", "rule", "threshold", "seed")


def _given(arguments: dict[str, Any], options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was given for the sampler, and what for the engine."""
    given = {name: arguments[name] for name in SETTINGS} | dict(options)
    engine = {name: given.pop(name) for name in EngineConfig.model_fields.keys() & given.keys()}
    return given, {**engine, "cache": arguments["cache"]}


def _run(
    lm: LM,
    decodings: list[Decoding],
    engine: dict[str, Any],
    batch_size: int,
    trace: Store | None,
    on_step: OnStep | None,
) -> list[Generation]:
    """All of them through an engine of their own."""
    if not isinstance(batch_size, int) or not 1 <= batch_size <= MOST:
        raise UserError(f"batch_size = {batch_size!r:.60} must be a number from 1 to {MOST}")
    toml.check(EngineConfig, engine, "generate()" if not decodings or decodings[0].request.gen_length else "infill()")
    return engine_for(lm, decodings, engine, batch_size, trace, on_step).run(decodings) if decodings else []


def engine_for(
    lm: LM,
    decodings: Sequence[Decoding],
    engine: dict[str, Any],
    batch_size: int,
    trace: Store | None = None,
    on_step: OnStep | None = None,
) -> Engine:
    """An engine just large enough to have `batch_size` of these under way, where nothing else was asked for."""
    page = engine.get("page_size", EngineConfig.model_fields["page_size"].default)
    sizes = sorted((_size(decoding, page) for decoding in decodings), reverse=True)[:batch_size]
    room = {
        "num_pages": sum(pages for pages, _ in sizes),
        "max_num_tokens": max(8192, *(positions for _, positions in sizes)),
        "max_num_requests": batch_size,
    }
    return Engine(lm, **{**room, **engine}, trace=trace, on_step=on_step)


def _size(decoding: Decoding, page_size: int) -> tuple[int, int]:
    """Pages and positions that a request may come to need."""
    length, lanes = max(1, decoding.plan.length(decoding.request)), 2 if decoding.settings.cfg_scale > 0 else 1
    return -(-length // page_size) * lanes, length * lanes
