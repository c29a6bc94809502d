"""`dlm.generate` and `dlm.infill`: every prompt through one engine, results in order. Knows nothing of how they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

from dlm.errors import UserError
from dlm.inference.config import MOST, EngineConfig, SamplerConfig
from dlm.inference.decoding import Decoding, continuations, infillings
from dlm.inference.drafting.fitting import READ_WITH_A_DRAFT, require_wanted
from dlm.inference.drafting.making import SELF, named
from dlm.inference.engine import Engine, OnStep
from dlm.inference.keyword_types import GenerateKeywords, InfillKeywords
from dlm.inference.keywords import keywords, settings_of
from dlm.inference.lengths import at_longest, settle
from dlm.inference.prompts import Prompt, as_prompts
from dlm.inference.readers import ENGINE_ALONE, FILLS, HOLES
from dlm.inference.recording import Store
from dlm.inference.request import Generation
from dlm.inference.strategies.jumps import states_of
from dlm.models.lm import LM

DRAFTED = {name: SamplerConfig.model_fields[name].default for name in READ_WITH_A_DRAFT}
"""Settings that only a draft reads, and what they are where nobody gave them."""
OWN = ("draft", "trace", "request_ids", "batch_size", "on_step")


@keywords(SamplerConfig, EngineConfig, without=(*FILLS, *ENGINE_ALONE))
def generate(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    *,
    draft: Any = None,
    trace: Store | None = None,
    request_ids: Sequence[str] | None = None,
    batch_size: int = 64,
    on_step: OnStep | None = None,
    **settings: Unpack[GenerateKeywords],
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
    allow_long=True. Ctrl-C is raised as `dlm.inference.Interrupted`, which holds what was decoded. Results do not depend on
    `batch_size`, the number of requests under way at a time. `remasking` is LLaDA's name for `rule`, which may also be an
    object of `dlm.diffusion.unmask`. Raises UserError for what cannot be done, and for a setting that nothing reads here.

    `draft` speeds a causal model up: a DFlash draft (`dlm.load_draft`, or its folder or hub id), "ngram" (what followed the
    same tokens earlier in the text), a diffusion model of the same tokenizer, or "ngram+FOLDER" (that draft or model where
    the text repeats nothing) guesses tokens, and one forward of the model checks them all. The text is token for token
    that of no draft, at any temperature, unless verify="reject". For a diffusion model, draft="self" writes the text of one
    token a step in fewer, wider forwards. Results then tell `.accepted`, `.tau`, `.target_nfe` and `.draft_nfe`.
    """
    sampler, engine = settings_of("generate()", settings, others=OWN)
    require_wanted(settings, draft is not None, "generate()")
    return continue_all(lm, prompts, sampler, engine, trace, request_ids, batch_size, on_step, draft)


@keywords(SamplerConfig, EngineConfig, without=(*HOLES, *DRAFTED, *ENGINE_ALONE))
def infill(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    *,
    trace: Store | None = None,
    request_ids: Sequence[str] | None = None,
    batch_size: int = 64,
    on_step: OnStep | None = None,
    **settings: Unpack[InfillKeywords],
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

    `check="python"` fills the holes of a text that does not parse again, `attempts` (8) times in all, each with other random
    numbers and `retry_temperature`; `.attempts` and `.passed` tell how it went, and `.nfe` counts them all. A trace holds
    every attempt. Checks are in dlm/inference/checks.py: a function and a line each.
    """
    sampler, engine = settings_of("infill()", settings, holes=True, others=OWN)
    for name in DRAFTED:
        if name in settings:
            raise UserError(f"infill(): {name} is of a draft, which continues a text and fills no holes: leave it out")
    return fill_all(lm, prompts, sampler, engine, trace, request_ids, batch_size, on_step)


def continue_all(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    sampler: SamplerConfig,
    engine: EngineConfig,
    trace: Store | None = None,
    request_ids: Sequence[str] | None = None,
    batch_size: int = 64,
    on_step: OnStep | None = None,
    draft: Any = None,
    prepare: Callable[[Engine], None] | None = None,
) -> list[Generation]:
    """`generate` with its settings as objects. `prepare` is called with the engine before it takes the prompts."""
    _check_size(batch_size)
    names = {"where": "generate()", "request_ids": request_ids, "unique": trace is not None}
    require_wanted(
        {name for name in DRAFTED if getattr(sampler, name) != DRAFTED[name]}, draft is not None, "generate()"
    )
    decodings = continuations(lm, prompts, sampler, **names)
    draft = draft if lm.refuses else named(draft, lm, "generate()")
    if not decodings:
        return []
    return run(lm, decodings, engine, batch_size, trace, on_step, draft, prepare)


def fill_all(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    sampler: SamplerConfig,
    engine: EngineConfig,
    trace: Store | None = None,
    request_ids: Sequence[str] | None = None,
    batch_size: int = 64,
    on_step: OnStep | None = None,
) -> list[Generation]:
    """`infill` with its settings as objects."""
    _check_size(batch_size)
    names = {"where": "infill()", "request_ids": request_ids, "unique": trace is not None}
    longest = at_longest(prompts)
    decodings = infillings(lm, longest, sampler, **names)  # says what is wrong with the prompts before anything runs
    if not decodings:
        return []
    if longest is prompts:
        return engine_for(lm, decodings, engine, batch_size, trace, on_step).run(decodings)
    settled, forwards = settle(lm, as_prompts(prompts), lambda probes: engine_for(lm, probes, engine, batch_size))
    decodings = infillings(lm, settled, sampler, **names)
    results = engine_for(lm, decodings, engine, batch_size, trace, on_step).run(decodings)
    for number, result in enumerate(results):
        nfe = result.nfe + forwards[number * len(settled) // len(results)]
        results[number] = replace(result, nfe=nfe, tpf=len(result.tokens) / nfe)
    return results


def run(
    lm: LM,
    decodings: Sequence[Decoding],
    config: EngineConfig,
    batch_size: int,
    trace: Store | None = None,
    on_step: OnStep | None = None,
    draft: Any = None,
    prepare: Callable[[Engine], None] | None = None,
) -> list[Generation]:
    """Decode these in an engine made for them; a model that no engine runs decodes them itself."""
    if lm.refuses:
        return lm.run(decodings, config, batch_size, trace, on_step, draft)
    engine = engine_for(lm, decodings, config, batch_size, trace, on_step, draft)
    if prepare is not None:
        prepare(engine)
    return engine.run(decodings)


def _check_size(batch_size: int) -> None:
    if not isinstance(batch_size, int) or not 1 <= batch_size <= MOST:
        raise UserError(f"batch_size = {batch_size!r:.60} must be a number from 1 to {MOST}")


def engine_for(
    lm: LM,
    decodings: Sequence[Decoding],
    config: EngineConfig,
    batch_size: int,
    trace: Store | None = None,
    on_step: OnStep | None = None,
    draft: Any = None,
) -> Engine:
    """An engine just large enough to have `batch_size` of these under way, where nothing else was asked for."""
    for name in ENGINE_ALONE:
        if (value := getattr(config, name)) != EngineConfig.model_fields[name].default:
            raise UserError(
                f"{name} = {value} is only read by a dlm.Engine that requests come to: here all are known, and it is made "
                f"for them; leave {name} out"
            )
    sizes = sorted((_size(decoding, config.page_size, draft) for decoding in decodings), reverse=True)[:batch_size]
    room = {
        "num_pages": sum(pages for pages, _ in sizes),
        "max_num_tokens": max(8192, *(positions for _, positions in sizes)),
        "max_num_requests": batch_size,
    }
    room = {name: size for name, size in room.items() if name not in config.model_fields_set}
    return Engine.of(lm, config.model_copy(update=room), trace=trace, on_step=on_step, draft=draft)


def _size(decoding: Decoding, page_size: int, draft: Any = None) -> tuple[int, int]:
    """Pages and positions that a request may come to need."""
    length, lanes = max(1, decoding.plan.length(decoding.request)), 2 if decoding.settings.cfg_scale > 0 else 1
    if draft == SELF:
        lanes = states_of(decoding.settings.draft_length) + 1
    return -(-length // page_size) * lanes, length * lanes
