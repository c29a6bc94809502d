"""From what a caller gives as `draft` to a drafter for an engine; says what does not fit before anything runs."""

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm.errors import UserError, nearest
from dlm.inference.drafting.dflash import DFlash
from dlm.inference.drafting.diffusion import Diffusion
from dlm.inference.drafting.drafter import Drafter, Plain
from dlm.inference.drafting.lookup import LookupFirst
from dlm.inference.drafting.ngram import NGram
from dlm.models.draft import Draft
from dlm.models.draft_files import load_draft, require_fit
from dlm.models.finding import find
from dlm.models.lm import LM
from dlm.models.settings import read_json

if TYPE_CHECKING:
    from dlm.inference.compute import Compute
    from dlm.inference.pages import PagePool

DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NGram}
"""Those that need no weights, by the name that `draft` takes."""
FIRST = "ngram+"
"""Before another draft's name: prompt lookup where the text repeats itself, that draft elsewhere."""
SELF = "self"
"""Names no drafter: a diffusion model checks its own guesses."""


@dataclass(frozen=True)
class Looked:
    """A draft for where prompt lookup finds nothing."""

    rest: Draft | LM

    @property
    def name(self) -> str:
        """As the user gave it."""
        return f"{FIRST}{self.rest.name}"


def named(draft: Any, lm: LM, where: str) -> Any:
    """What `draft` means for this model: a `Draft`, a model, both of which may stand in a `Looked`, or a drafter's name;
    raises UserError where it does not fit."""
    if isinstance(draft, Plain | Looked):
        return draft
    if isinstance(draft, str) and draft.startswith(FIRST):
        rest = named(draft.removeprefix(FIRST), lm, where)
        if not isinstance(rest, Draft | LM):
            raise UserError(f"{where}: draft = {draft!r}: what follows {FIRST!r} is a draft's folder, or a model's")
        return Looked(rest)
    if draft is None or isinstance(draft, LM):
        return draft if draft is None else _require_twin(draft, lm, where)
    if isinstance(draft, Draft):
        require_fit(draft.config, draft.name, lm)
        if draft.target is not lm:
            raise UserError(
                f"{where}: draft {draft.name!r} was loaded for another copy of a model ({draft.target.name!r}) than {lm.name!r}: "
                f"it computes with that one's embedding and head; dlm.load_draft({draft.name!r}, target) loads it for this one"
            )
        return draft
    if not isinstance(draft, str | Path):
        raise UserError(
            f"{where}: draft = {reprlib.repr(draft)}: give a draft (dlm.load_draft), its folder, a model of the same "
            f'tokenizer, {", ".join(map(repr, DRAFTERS))}, or "self" for a diffusion model'
        )
    if draft == SELF:
        if lm.config.attention == "causal":
            raise UserError(
                f'{where}: draft = "self" checks the guesses of a diffusion model, and {lm.name!r} ({lm.config.model_type}) is '
                'causal: use draft="ngram", or a draft'
            )
        return SELF
    if draft in DRAFTERS:
        _require_causal(lm, repr(draft), where)
        return draft
    try:
        folder = find(draft)
    except UserError as error:
        known = (*DRAFTERS, SELF)
        raise UserError(f"{where}: draft: {error}; by name: {', '.join(known)}{nearest(str(draft), known)}") from error
    hub = read_json(folder / "config.json")
    from dlm.models.draft_config import is_draft

    if hub and not is_draft(hub):
        from dlm.models.loading import load

        return named(load(draft, device=lm.device, dtype=lm.dtype), lm, where)
    return load_draft(draft, lm)


def drafter_of(draft: Any, lm: LM, pool: "PagePool", compute: "Compute") -> Drafter:
    """A drafter for an engine with this model and this pool; `draft` is what `named` gave."""
    if isinstance(draft, Plain):
        return draft
    if isinstance(draft, Looked):
        return LookupFirst(drafter_of(draft.rest, lm, pool, compute))
    if isinstance(draft, Draft):
        return DFlash(draft, pool, compute)
    if isinstance(draft, LM):
        return Diffusion(draft)
    return DRAFTERS[draft]()


def drafted_page_bytes(draft: Any, page_size: int) -> int:
    """Bytes that a draft keeps for each page of its target."""
    draft = draft.rest if isinstance(draft, Looked) else draft
    if not isinstance(draft, Draft):
        return 0
    c = draft.config.network
    return 2 * c.num_hidden_layers * page_size * c.num_key_value_heads * c.head_dim * draft.target.dtype.itemsize


def _require_causal(lm: LM, what: str, where: str) -> None:
    if lm.config.attention != "causal":
        raise UserError(
            f"{where}: draft {what} guesses what a causal model writes next, and {lm.name!r} ({lm.config.model_type}) is "
            f'{lm.config.attention}: use draft="self"'
        )


def _require_twin(draft: LM, lm: LM, where: str) -> LM:
    """Raises UserError where a model cannot draft for another one."""
    what = f"draft {draft.name!r}"
    _require_causal(lm, repr(draft.name), where)
    if draft is lm or draft.config.attention == "causal":
        raise UserError(
            f"{where}: {what} ({draft.config.model_type}) is causal: a model that drafts for {lm.name!r} is a diffusion model; "
            'for its own text use draft="ngram"'
        )
    draft.require_mask_id()
    theirs, ours = draft.tokenizer, lm.tokenizer
    if theirs is not None and ours is not None and theirs.fingerprint != ours.fingerprint:
        tokens = _vocabulary(theirs), _vocabulary(ours)
        if tokens[0] != tokens[1]:
            raise UserError(
                f"{where}: {what} has another tokenizer than model {lm.name!r}, so its token ids mean other text: a draft needs "
                "the same one"
            )
    elif draft.config.vocab_size != lm.config.vocab_size and (theirs is None or ours is None):
        raise UserError(
            f"{where}: {what} has {draft.config.vocab_size:,} tokens and model {lm.name!r} {lm.config.vocab_size:,}: a draft "
            "needs the same tokenizer"
        )
    return draft


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Tokens and their ids, without the special ones: a diffusion model has a mask more."""
    special = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
    return {text: i for text, i in tokenizer.backend.get_vocab(True).items() if text not in special}
