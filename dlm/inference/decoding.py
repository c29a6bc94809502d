"""What is to be decoded and how: a request with everything that decides its tokens, checked. Decodes nothing itself."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Literal, TypedDict

from dlm import config as toml
from dlm.diffusion.unmask import Rule, make_rule
from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.inference.context import fitting
from dlm.inference.messages import as_texts, is_conversation
from dlm.inference.plan import Plan
from dlm.inference.prompts import Prompt, as_prompts, continuation, infilling
from dlm.inference.request import Request
from dlm.models.lm import LM
from dlm.models.required import require_lm


class Options(TypedDict, total=False):
    """What `generate` and `infill` take beside their own arguments: fields of `SamplerConfig` and of `EngineConfig`."""

    max_gen_length: int
    top_k: int | None
    top_p: float | None
    factor: float
    tau_low: float
    gamma: float
    entropy_threshold: float
    remask_threshold: float | None
    edit_threshold: float | None
    max_post_edit_steps: int
    num_samples: int
    strategy: Literal["block", "multi_block"]
    max_active_blocks: int
    block_add: float
    refresh_interval: int | None
    cache_delay: int
    page_size: int
    num_pages: int | None
    memory_fraction: float
    max_num_tokens: int
    max_num_requests: int
    kernels: Literal["auto", "triton", "c", "torch"]
    deterministic: bool
    cuda_graphs: bool
    allow_long: bool
    remasking: Literal["low_confidence", "random"]
    """LLaDA's name for `rule`."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """One request, how it is cut into blocks, which rule and settings fill them, and the tokens that end it."""

    request: Request
    plan: Plan
    rule: Rule
    settings: SamplerConfig
    stop: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    """What ends it as text, and is not part of its result."""


def continuations(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    given: dict[str, Any],
    *,
    where: str,
    request_ids: Sequence[str] | None = None,
    unique: bool = False,
) -> list[Decoding]:
    """Each prompt, `num_samples` times, to be written on; `given` are the sampler's settings by name.

    Requests without a given id are numbered, or get random ids where they must be `unique` among all there ever were.
    """
    require_lm(lm, where)
    gen_length, steps = given.get("gen_length", 128), given.get("steps")
    plan = Plan(config=lm.config, block_length=given.get("block_length"), steps=steps, open_ended=gen_length == "auto")
    block = plan.length_of_block(gen_length if isinstance(gen_length, int) else None)
    numbers = {"block_length": block} | {"steps": None if plan.step_by_token else steps}
    rule, settings = _settings(where, {**given, **numbers})
    length = settings.max_gen_length if settings.gen_length == "auto" else settings.gen_length
    if lm.config.attention != "causal" or settings.cfg_scale > 0:
        lm.require_mask_id()
    texts, ids = _stops(lm, settings, where)
    shared = {"plan": plan, "rule": rule, "settings": settings, "stop": stop_ids(lm) | ids, "stop_texts": texts}
    return [
        Decoding(request=fitting(lm, continuation(lm, prompt, length, name, **fields), plan, settings, name), **shared)
        for prompt, name, fields in _each(as_prompts(as_texts(lm, prompts)), request_ids, settings, unique)
    ]


def infillings(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    given: dict[str, Any],
    *,
    where: str,
    request_ids: Sequence[str] | None = None,
    unique: bool = False,
) -> list[Decoding]:
    """Each prompt, `num_samples` times, to have its holes filled."""
    require_lm(lm, where)
    if "gen_length" in given:
        raise UserError(f'{where}: unknown key "gen_length": a hole\'s length stands in the prompt, as in [MASK:12]')
    if given.get("stop"):
        raise UserError(f"{where}: stop = {given['stop']!r} ends a continuation, and a hole ends where its length says")
    if any(map(is_conversation, (prompts, *(prompts if isinstance(prompts, (list, tuple)) else ())))):
        raise UserError(
            f"{where} fills holes in texts, and was given messages: continue a conversation with dlm.generate"
        )
    rule, settings = _settings(where, {**given, "gen_length": "auto"})
    lm.require_mask_id()
    plan = Plan(config=lm.config, block_length=settings.block_length, steps=settings.steps)
    return [
        Decoding(
            request=fitting(lm, infilling(lm, prompt, name, **fields), plan, settings, name),
            plan=plan,
            rule=rule,
            settings=settings,
        )
        for prompt, name, fields in _each(as_prompts(prompts), request_ids, settings, unique)
    ]


def stop_ids(lm: LM) -> frozenset[int]:
    """The tokens that end a text: the config's end-of-text and what generation_config.json lists beside it."""
    listed = lm.generation.get("eos_token_id")
    listed = listed if isinstance(listed, list) else [listed]
    return frozenset(token for token in (lm.eos_id, *listed) if isinstance(token, int))


def _stops(lm: LM, settings: SamplerConfig, where: str) -> tuple[tuple[str, ...], frozenset[int]]:
    """What ends a text: strings, and those that are a special token's name as its id, for text never shows them."""
    if settings.stop and lm.tokenizer is None:
        raise UserError(
            f"{where}: stop = {list(settings.stop)} is text, but model {lm.name!r} has no tokenizer: leave it out"
        )
    named = {text: lm.require_tokenizer().special_id(text) for text in settings.stop}
    texts = tuple(text for text, token in named.items() if token is None)
    return texts, frozenset(token for token in named.values() if token is not None)


def _settings(where: str, given: dict[str, Any]) -> tuple[Rule, SamplerConfig]:
    """The rule and the checked settings of a call."""
    given = {"rule": "low_confidence", **given}
    if not isinstance(given.get("stop", ""), str) and isinstance(given["stop"], Sequence):
        given["stop"] = tuple(given["stop"])
    remasking = given.pop("remasking", None)
    if remasking is not None:
        if given["rule"] not in ("low_confidence", remasking):
            raise UserError(
                f"{where}: rule = {given['rule']!r} and remasking = {remasking!r} disagree: give one of them"
            )
        given["rule"] = remasking
    rule = given["rule"]
    if isinstance(rule, Rule):
        del given["rule"]
        return rule, toml.check(SamplerConfig, given, where)
    settings = toml.check(SamplerConfig, given, where)
    return make_rule(settings.rule, settings.model_dump()), settings


def _each(
    prompts: list[str | list[int]], request_ids: Sequence[str] | None, settings: SamplerConfig, unique: bool
) -> Iterator[tuple[str | list[int], str, dict[str, Any]]]:
    """Each sample of each prompt: the prompt, its name in messages, and the fields its request gets."""
    if request_ids is not None:
        names = list(request_ids) if isinstance(request_ids, Iterable) and not isinstance(request_ids, str) else None
        if names is None or not all(isinstance(name, (str, int)) for name in names):
            raise UserError(f"request_ids = {request_ids!r:.60}: give a list of texts, one for each prompt")
    else:
        names = [token_hex(4) if unique else str(i) for i in range(len(prompts))]
    if len(names) != len(prompts):
        raise UserError(f"{len(names)} request_ids for {len(prompts)} prompts: give one each")
    for i, prompt in enumerate(prompts):
        for number in range(settings.num_samples):
            name = names[i] if settings.num_samples == 1 else f"{names[i]}/{number}"
            yield prompt, f"prompt {i}", {"request_id": name, "seed": settings.seed, "sample": number}
