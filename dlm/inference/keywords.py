"""Keyword arguments of a call ⇄ settings objects: read and checked, and listed in the help of functions that take them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel

from dlm import config as toml
from dlm.diffusion.unmask import RULES, Rule
from dlm.errors import UserError, nearest
from dlm.fields import choices, ordered
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.inference.readers import ENGINE_READERS, HOLES, READ_BY, SAMPLER_READERS
from dlm.reading import judged, unread

P = ParamSpec("P")
R = TypeVar("R")


def keywords(*classes: type[BaseModel], without: Sequence[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show a function's `**settings` as what they are: the fields of these classes, in its signature and its help.

    Values beyond those that it takes by position are refused with the names to write.
    """
    shown = {name: info for cls in classes for name, info in ordered(cls) if name not in without}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        places = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
        taken = [place for place in places if place != "self"]
        name = function.__qualname__.removesuffix(".__init__")
        examples = [name for name in ("gen_length", "steps", "cache") if name in shown][:2]

        @wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> R:
            if len(args) > len(places):
                value = f"{args[len(places)]!r:.40}"
                words = " or ".join(f"{example}={value}" for example in examples)
                raise UserError(
                    f"{name}() takes {' and '.join(taken)} by position and everything else by name: write {words}, or "
                    f"whichever of its settings {value} is (help(dlm.{name}) lists them)"
                )
            return function(*args, **named)

        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=info.get_default(), annotation=info.annotation
            )
            for name, info in shown.items()
        ]
        call.__signature__ = inspect.signature(function).replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        lines = "\n".join(f"    {name}: {_described(info)}" for name, info in shown.items())
        call.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nSettings:\n{lines}\n"
        return call

    return decorate


def _described(info: Any) -> str:
    words = choices(info.annotation)
    return info.description + (f" One of: {', '.join(words)}." if len(words) > 1 else "")


def sampler_of(
    where: str, given: Mapping[str, Any], *, holes: bool = False, others: Sequence[str] = ()
) -> SamplerConfig:
    """The sampler's settings of a call. Refuses those that are unknown, and those that nothing in this call reads.

    `others` are names that the call knows beside them, for the hint at the nearest one.
    """
    for name in HOLES if holes else ():
        if given.get(name):
            reason = "a hole ends where its length says, which stands in the prompt, as in [MASK:12]"
            raise UserError(f"{where}: {name} = {given[name]!r:.60} ends a continuation, and {reason}: leave it out")
    settings = dict(given) | ({"gen_length": "auto"} if holes else {})
    for name in given:
        if name not in SamplerConfig.model_fields and name != "remasking":
            raise UserError(f'{where}: unknown key "{name}"{_hint(name, others)}')
    stop = settings.get("stop", "")
    if isinstance(stop, Sequence) and not isinstance(stop, str):
        settings["stop"] = tuple(stop)
    remasking, rule = settings.pop("remasking", None), given.get("rule", "low_confidence")
    if remasking is not None and "rule" in given and rule not in ("low_confidence", remasking):
        raise UserError(f"{where}: rule = {rule!r} and remasking = {remasking!r} disagree: give one of them")
    if remasking is not None:
        rule = settings["rule"] = remasking  # a rule that is not named is left to the model's recommendation
    if isinstance(rule, Rule):
        settings |= _as_settings(where, rule, given)
    checked = toml.check(SamplerConfig, settings, where)
    if isinstance(rule, Rule) and checked.decode_rule != rule:  # one that no name and settings mean
        checked = checked.model_copy(update={"rule": rule})
    if (problem := unread(checked, SAMPLER_READERS, given.keys() & SAMPLER_READERS.keys())) is not None:
        raise UserError(f"{where}: {problem}")
    return checked


def settings_of(
    where: str, given: Mapping[str, Any], *, holes: bool = False, others: Sequence[str] = ()
) -> tuple[SamplerConfig, EngineConfig]:
    """The sampler's and the engine's settings of one call."""
    engine = {name: given[name] for name in given if name in EngineConfig.model_fields}
    sampler = {name: value for name, value in given.items() if name not in engine}
    names = (*EngineConfig.model_fields, *others)
    return sampler_of(where, sampler, holes=holes, others=names), toml.check(EngineConfig, engine, where)


def _as_settings(where: str, rule: Rule, given: Mapping[str, Any]) -> dict[str, Any]:
    """The name and settings that mean this rule; for one that is in no table, those of the default."""
    for name in READ_BY.keys() & given.keys():
        raise UserError(
            f"{where}: {name} = {given[name]!r} stands beside rule = {rule!r}, whose own fields hold: leave {name} out"
        )
    name = next((name for name, known in RULES.items() if known is type(rule)), None)
    fields = {setting: getattr(rule, setting) for setting in rule.settings()}
    return {"rule": "low_confidence"} if name is None else {"rule": name, **fields}


def require_read(config: EngineConfig, cache: str) -> None:
    """Refuse settings of an engine that it does not read; `cache` is what "auto" came to."""
    problem = unread(config.model_copy(update={"cache": cache}), ENGINE_READERS, judged(config, ENGINE_READERS))
    if problem is not None:
        raise UserError(f"engine: {problem}")


def _hint(name: str, others: Sequence[str]) -> str:
    if name in SamplerConfig.ALIASES:
        return f"; here it is {SamplerConfig.ALIASES[name]}"
    if name in EngineConfig.model_fields:
        return f"; it is a setting of the engine: dlm.Engine(lm, {name}=…)"
    known = (*SamplerConfig.model_fields, *others)
    return nearest(name, known) or f"; known: {', '.join(known)}"
