"""Whether a request's settings fit the draft that its engine has. Knows no network."""

from collections.abc import Container
from dataclasses import replace
from typing import Any

from dlm.errors import UserError
from dlm.inference.decoding import Decoding
from dlm.inference.drafting.drafter import Drafter

READ_WITH_A_DRAFT = ("draft_length", "verify")
LANES = 8
"""Most states that a diffusion model checks at a time."""


def require_wanted(given: Container[str], drafted: bool, where: str) -> None:
    """Raises UserError for settings of a draft where there is none."""
    for name in READ_WITH_A_DRAFT:
        if name in given and not drafted:
            raise UserError(
                f"{where}: {name} is only read with a draft, and there is none: give draft = …, or leave {name} out"
            )


def fitted(decoding: Decoding, draft: Any, drafter: Drafter | None, cache: str) -> Decoding:
    """The request with `drafted` settled. Raises UserError where it asks for what a draft cannot do."""
    name, s = f"request {decoding.request.request_id!r}", decoding.settings
    if decoding.drafted and draft is None:
        raise UserError(f"{name}: draft = true, and the engine has none: dlm.Engine(lm, draft=…)")
    drafted = (draft is not None and not decoding.request.holes) if decoding.drafted is None else decoding.drafted
    if not drafted:
        return replace(decoding, drafted=False)
    if decoding.request.holes:
        raise UserError(f"{name}: a draft continues a text, and this request fills holes: leave draft out")
    for setting, off in (("cfg_scale", 0), ("edit_threshold", None), ("remask_threshold", None)):
        if getattr(s, setting) != off:
            raise UserError(
                f"{name}: {setting} = {getattr(s, setting)!r} does not go with a draft: leave one of them out"
            )
    if s.strategy != "block":
        raise UserError(
            f"{name}: strategy = {s.strategy!r} does not go with a draft, which is one: leave one of them out"
        )
    most = LANES - 1 if drafter is None else drafter.most
    if isinstance(s.draft_length, int) and s.draft_length > most:
        raise UserError(
            f"{name}: draft_length = {s.draft_length} is more than the {most} tokens that this draft guesses at a time"
            + (
                ""
                if drafter is None or drafter.name != "dflash"
                else f" (block_size = {most + 1}, the anchor included)"
            )
        )
    if s.verify == "reject" and s.draft_length == "auto":
        raise UserError(
            f'{name}: draft_length = "auto" goes by the clock, and under verify = "reject" the text depends on the length: '
            'give a number, or verify = "match"'
        )
    if drafter is None:
        _require_steps(decoding, name, cache)
    return replace(decoding, drafted=True)


def _require_steps(decoding: Decoding, name: str, cache: str) -> None:
    """What a diffusion model's own jumps need."""
    s = decoding.settings
    if decoding.rule.remembers:
        raise UserError(
            f'{name}: rule = {s.rule!r} remembers what it saw, and draft = "self" shows it guesses: use another'
        )
    if cache not in ("none", "exact"):
        raise UserError(
            f'{name}: draft = "self" writes what one token a step would, which cache = {cache!r} only approximates: use '
            '"none" or, where the family has it, "exact"'
        )
    if s.verify == "reject" or s.draft_length == "auto":
        what = 'verify = "reject"' if s.verify == "reject" else 'draft_length = "auto"'
        raise UserError(f'{name}: {what} is not for draft = "self", whose guesses are the model\'s own')
