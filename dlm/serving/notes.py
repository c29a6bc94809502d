"""What each step of a request changed, while it runs: the engine's recorder, for streams and log-probabilities and for the store."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlm.inference.recording import Listener, Recorder
from dlm.inference.sequence import Sequence


@dataclass(frozen=True, kw_only=True)
class Note:
    """What one step of one request changed."""

    step: int
    nfe: int
    """Forward passes before this step."""
    positions: list[int]
    """From 0, the prompt's first token."""
    tokens: list[int]
    kinds: list[int]
    """SET, MASK or REPLACE."""
    confidence: list[float] | None
    likeliest: tuple[np.ndarray, np.ndarray] | None
    """Token ids and logits, (n, k) each."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a request gets beside its text."""

    keep: frozenset[str] = frozenset()
    """"confidence", "topk"; nothing: no notes."""
    topk: int = 0
    recorded: bool = True
    """Whether the store, if there is one, records it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its trace says beside what all do."""


class Notes:
    """An engine's listener: its own recorder beside the store's, for requests that are wished for by their id."""

    def __init__(self, store: Listener | None, tell: Callable[[str, Note], None]) -> None:
        self.store, self.tell = store, tell
        self.wishes: dict[str, Wish] = {}

    def begin(self, seq: Sequence, meta: Mapping[str, Any]) -> Recorder | None:
        """The recorder of a request: the store's, ours, both in one, or none."""
        wish = self.wishes.get(seq.request_id, Wish())
        stored = self.store.begin(seq, {**meta, **wish.facts}) if self.store is not None and wish.recorded else None
        return Watch(self, seq, wish, stored) if wish.keep else stored


class Watch:
    """Tells each step, and hands it on to the store's recorder."""

    def __init__(self, notes: Notes, seq: Sequence, wish: Wish, stored: Recorder | None) -> None:
        self.notes, self.seq, self.wish, self.stored = notes, seq, wish, stored
        self.keep: Collection[str] = wish.keep | frozenset(() if stored is None else stored.keep)
        kept = stored.topk if stored is not None and "topk" in stored.keep else 0
        self.topk = max(wish.topk, kept)
        self._kept = kept

    def commit(
        self,
        step: int,
        positions: np.ndarray,
        tokens: np.ndarray,
        kinds: Any,
        confidence: Any = None,
        topk: Any = None,
        length: int | None = None,
        canvas: Any = None,
    ) -> None:
        """One step: a note of it, and the store's own record."""
        if self.stored is not None:
            own = None if topk is None or not self._kept else tuple(part[:, : self._kept] for part in topk)
            self.stored.commit(step, positions, tokens, kinds, confidence, own, length, canvas)
        note = Note(
            step=step,
            nfe=self.seq.nfe,
            positions=positions.tolist(),
            tokens=tokens.tolist(),
            kinds=np.broadcast_to(kinds, len(positions)).tolist(),
            confidence=None if confidence is None else confidence.tolist(),
            likeliest=topk if self.wish.topk else None,
        )
        self.notes.tell(self.seq.request_id, note)

    def finish(self, **meta: Any) -> None:
        """The store's recorder delivers."""
        if self.stored is not None:
            self.stored.finish(**meta)

    def drop(self) -> None:
        """The store's recorder gives up."""
        if self.stored is not None:
            self.stored.drop()
