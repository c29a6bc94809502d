"""What is to be decoded and how: a request with everything that decides its tokens, checked. Decodes nothing itself."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from dlm.diffusion.unmask import Rule
from dlm.errors import UserError, nearest
from dlm.inference.config import SamplerConfig
from dlm.inference.context import fitting
from dlm.inference.messages import as_texts, is_conversation
from dlm.inference.plan import Plan
from dlm.inference.prompts import Prompt, as_prompts, continuation, infilling
from dlm.inference.readers import FILLS
from dlm.inference.recommended import require_check, with_recommended
from dlm.inference.request import Request
from dlm.inference.strategies import CHOSEN, STRATEGIES
from dlm.models.lm import LM
from dlm.models.required import require_lm, require_model


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
    drafted: bool | None = None
    """Whether it is drafted for; None: where the engine has a draft."""


def continuations(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    settings: SamplerConfig,
    *,
    where: str,
    request_ids: Sequence[str] | None = None,
    unique: bool = False,
) -> list[Decoding]:
    """Each prompt, `num_samples` times, to be written on.

    Requests without a given id are numbered, or get random ids where they must be `unique` among all there ever were.
    """
    require_model(lm, where)
    require_check(settings, where)
    settings = lm.settled(with_recommended(lm, settings, "generate"), where)
    if settings.check != "none":
        raise UserError(
            f"{where}: check = {settings.check!r} is of holes that are filled, and this continues a text: leave it out"
        )
    _require_strategy(settings.strategy, where)
    open_ended = settings.gen_length == "auto"
    plan = Plan(config=lm.config, block_length=settings.block_length, steps=settings.steps, open_ended=open_ended)
    length = settings.max_gen_length if settings.gen_length == "auto" else settings.gen_length
    block = plan.length_of_block(None if open_ended else length)
    if not open_ended:
        plan.require_whole_blocks(length, block)
    steps = None if plan.step_by_token else settings.steps
    settings = settings.model_copy(update={"block_length": block, "steps": steps})
    if lm.config.attention != "causal" or settings.cfg_scale > 0:
        lm.require_mask_id()
    texts, ids = _stops(lm, settings, where)
    shared = {
        "plan": plan,
        "rule": settings.decode_rule,
        "settings": settings,
        "stop": stop_ids(lm) | ids,
        "stop_texts": texts,
    }
    return [
        Decoding(request=fitting(lm, continuation(lm, prompt, length, name, **fields), plan, settings, name), **shared)
        for prompt, name, fields in _each(as_prompts(as_texts(lm, prompts)), request_ids, settings, unique)
    ]


def infillings(
    lm: LM,
    prompts: Prompt | Sequence[Prompt],
    settings: SamplerConfig,
    *,
    where: str,
    request_ids: Sequence[str] | None = None,
    unique: bool = False,
) -> list[Decoding]:
    """Each prompt, `num_samples` times, to have its holes filled."""
    require_lm(lm, where)
    given, settings = settings, with_recommended(lm, settings, "infill")
    require_check(settings.model_copy(update={name: getattr(given, name) for name in FILLS if name != "check"}), where)
    _require_strategy(settings.strategy, where)
    if any(map(is_conversation, (prompts, *(prompts if isinstance(prompts, (list, tuple)) else ())))):
        raise UserError(
            f"{where} fills holes in texts, and was given messages: continue a conversation with dlm.generate"
        )
    settings = settings.model_copy(update={"gen_length": "auto", "stop": ()})
    if settings.check != "none" and lm.tokenizer is None:
        raise UserError(
            f"{where}: check = {settings.check!r} reads text, but model {lm.name!r} has no tokenizer: leave it out"
        )
    lm.require_mask_id()
    plan = Plan(config=lm.config, block_length=settings.block_length, steps=settings.steps)
    return [
        Decoding(
            request=fitting(lm, infilling(lm, prompt, name, **fields), plan, settings, name),
            plan=plan,
            rule=settings.decode_rule,
            settings=settings,
        )
        for prompt, name, fields in _each(as_prompts(prompts), request_ids, settings, unique)
    ]


def _require_strategy(name: str, where: str) -> None:
    known = [known for known in STRATEGIES if known not in CHOSEN]
    if name not in known:
        raise UserError(f"{where}: strategy = {name!r}: expected one of {', '.join(known)}{nearest(name, known)}")


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
