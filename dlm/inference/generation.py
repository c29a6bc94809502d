"""`dlm.generate` and `dlm.infill`: settings checked, prompts made requests, results made text. Samples nothing itself."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypedDict, Unpack

from dlm import config as toml
from dlm.diffusion.unmask import Rule, make_rule
from dlm.errors import UserError
from dlm.inference.config import SamplerConfig
from dlm.inference.plan import Plan
from dlm.inference.prompts import Prompt, as_prompts, continuation, infilling
from dlm.inference.reference import OnStep, sample
from dlm.inference.request import Generation, Outcome, Request
from dlm.models.lm import LM


class Options(TypedDict, total=False):
    """What `generate` and `infill` take beside their own arguments; meanings and defaults are `SamplerConfig`'s."""

    max_gen_length: int
    top_k: int | None
    top_p: float | None
    factor: float
    tau_low: float
    gamma: float
    remask_threshold: float | None
    edit_threshold: float | None
    max_post_edit_steps: int
    num_samples: int
    remasking: Literal["low_confidence", "random"]
    """LLaDA's name for `rule`."""


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
    request_ids: Sequence[str] | None = None,
    batch_size: int = 64,
    on_step: OnStep | None = None,
    **options: Unpack[Options],
) -> list[Generation]:
    """Continue each prompt by `gen_length` tokens, or until end-of-text; results are in the order of the prompts.

    `block_length` is 32 (all of a shorter generation; the family's own for block-causal ones) and `steps` 128 in all,
    rounded down to whole steps a block, unless given. With gen_length="auto" blocks are added until end-of-text or
    `max_gen_length`, and `steps` counts those of one block. Causal families go token by token, whatever these say.
    `num_samples` results a prompt stand next to each other. Results do not depend on `batch_size`, the number of
    requests that are sampled together. Raises UserError for what cannot be done.
    """
    given = {
        "gen_length": gen_length,
        "temperature": temperature,
        "cfg_scale": cfg_scale,
        "rule": rule,
        "threshold": threshold,
        "seed": seed,
        **options,
    }
    plan = Plan(config=lm.config, block_length=block_length, steps=steps, open_ended=gen_length == "auto")
    block = plan.length_of_block(gen_length if isinstance(gen_length, int) else None)
    numbers = {"block_length": block} | ({} if steps is None or plan.step_by_token else {"steps": steps})
    chosen, settings = _settings("generate", given, numbers)
    length = settings.max_gen_length if settings.gen_length == "auto" else settings.gen_length
    _check_model(lm, settings)
    requests = [
        continuation(lm, prompt, length, where, **fields)
        for prompt, where, fields in _each(as_prompts(prompts), request_ids, settings)
    ]
    stop = stop_ids(lm)
    return [
        _continued(lm, request, outcome, stop)
        for request, outcome in _run(lm, requests, plan, chosen, settings, stop, batch_size, on_step)
    ]


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
    request_ids: Sequence[str] | None = None,
    batch_size: int = 64,
    on_step: OnStep | None = None,
    **options: Unpack[Options],
) -> list[Generation]:
    """Fill the holes of each prompt: `[MASK:12]` in a text, runs of mask ids in a list of tokens.

    All holes are filled together in up to `steps` (128) steps, or `block_length` positions at a time from the left,
    which shares the steps out. Text on both sides is seen as far as the family's attention reaches. End-of-text in a hole ends nothing: it is a token like others, and `.text` and
    `.holes` do not show it. Otherwise as `generate`.
    """
    given = {
        "temperature": temperature,
        "cfg_scale": cfg_scale,
        "rule": rule,
        "threshold": threshold,
        "seed": seed,
        **options,
    }
    if "gen_length" in given:
        raise UserError('infill(): unknown key "gen_length": a hole\'s length stands in the prompt, as in [MASK:12]')
    numbers = {"gen_length": "auto"}
    numbers |= {k: v for k, v in (("block_length", block_length), ("steps", steps)) if v is not None}
    chosen, settings = _settings("infill", given, numbers)
    lm.require_mask_id()
    requests = [
        infilling(lm, prompt, where, **fields)
        for prompt, where, fields in _each(as_prompts(prompts), request_ids, settings)
    ]
    plan = Plan(config=lm.config, block_length=block_length, steps=steps)
    return [
        _filled(lm, request, outcome)
        for request, outcome in _run(lm, requests, plan, chosen, settings, frozenset(), batch_size, on_step)
    ]


def stop_ids(lm: LM) -> frozenset[int]:
    """The tokens that end a text: the config's end-of-text and what generation_config.json lists beside it."""
    listed = lm.generation.get("eos_token_id")
    listed = listed if isinstance(listed, list) else [listed]
    return frozenset(token for token in (lm.eos_id, *listed) if isinstance(token, int))


def _settings(name: str, given: dict[str, Any], numbers: dict[str, Any]) -> tuple[Rule, SamplerConfig]:
    """The rule and the checked settings of a call."""
    given = {**given, **numbers}
    remasking = given.pop("remasking", None)
    if remasking is not None:
        if given["rule"] not in ("low_confidence", remasking):
            raise UserError(
                f"{name}(): rule = {given['rule']!r} and remasking = {remasking!r} disagree: give one of them"
            )
        given["rule"] = remasking
    rule = given["rule"]
    if isinstance(rule, Rule):
        del given["rule"]
        return rule, toml.check(SamplerConfig, given, f"{name}()")
    settings = toml.check(SamplerConfig, given, f"{name}()")
    return make_rule(settings.rule, settings.model_dump()), settings


def _check_model(lm: LM, settings: SamplerConfig) -> None:
    if lm.config.attention != "causal" or settings.cfg_scale > 0:
        lm.require_mask_id()


def _each(
    prompts: list[str | list[int]], request_ids: Sequence[str] | None, settings: SamplerConfig
) -> Iterator[tuple[str | list[int], str, dict[str, Any]]]:
    """Each sample of each prompt: the prompt, its name in messages, and the fields its request gets."""
    names = [str(i) for i in range(len(prompts))] if request_ids is None else list(request_ids)
    if len(names) != len(prompts):
        raise UserError(f"{len(names)} request_ids for {len(prompts)} prompts: give one each")
    for i, prompt in enumerate(prompts):
        for number in range(settings.num_samples):
            name = names[i] if settings.num_samples == 1 else f"{names[i]}/{number}"
            yield prompt, f"prompt {i}", {"request_id": name, "seed": settings.seed, "sample": number}


def _run(
    lm: LM,
    requests: list[Request],
    plan: Plan,
    rule: Rule,
    settings: SamplerConfig,
    stop: frozenset[int],
    batch_size: int,
    on_step: OnStep | None,
) -> Iterator[tuple[Request, Outcome]]:
    if batch_size < 1:
        raise UserError(f"batch_size = {batch_size} must be at least 1")
    for first in range(0, len(requests), batch_size):
        batch = requests[first : first + batch_size]
        yield from zip(batch, sample(lm.network, batch, plan, rule, settings, stop, on_step), strict=True)


def _continued(lm: LM, request: Request, outcome: Outcome, stop: frozenset[int]) -> Generation:
    start, end = len(request.ids), len(request.ids) + request.gen_length
    tokens = list(outcome.ids[start:end])
    ended = next((i for i, token in enumerate(tokens) if token in stop), None)
    if ended is not None:
        tokens = tokens[: ended + 1]
    return Generation(
        text="" if lm.tokenizer is None else lm.decode(tokens),
        tokens=tokens,
        nfe=outcome.nfe,
        tpf=len(tokens) / outcome.nfe,
        finish_reason="length" if ended is None else "stop",
        request_id=request.request_id,
        sample=request.sample,
        steps=list(outcome.when[start : start + len(tokens)]),
    )


def _filled(lm: LM, request: Request, outcome: Outcome) -> Generation:
    positions = [position for hole in request.holes for position in hole]
    holes = [_decode_hole(lm, outcome.ids, hole) for hole in request.holes]
    if request.pieces is None:
        text = "" if lm.tokenizer is None else lm.decode(outcome.ids)
    else:
        text = "".join(piece + hole for piece, hole in zip(request.pieces, [*holes, ""], strict=True))
    return Generation(
        text=text,
        tokens=[outcome.ids[position] for position in positions],
        nfe=outcome.nfe,
        tpf=len(positions) / outcome.nfe,
        finish_reason="length",
        request_id=request.request_id,
        sample=request.sample,
        holes=holes,
        steps=[outcome.when[position] for position in positions],
    )


def _decode_hole(lm: LM, ids: Sequence[int], hole: range) -> str:
    """A hole's text as it reads after what stands before it: some tokenizers drop a text's first space."""
    if lm.tokenizer is None:
        return ""
    before, after = lm.decode(ids[: hole.start]), lm.decode(ids[: hole.stop])
    return after.removeprefix(before) if after.startswith(before) else lm.decode(ids[hole.start : hole.stop])
