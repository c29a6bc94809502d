"""Documents into sequences of one length, with nothing lost between them. Knows no files and no tokenizer."""

from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from dlm.data.documents import Document

Cut = tuple[NDArray[np.int32], NDArray[np.bool_] | None]


class Sample(TypedDict):
    """One sequence: ids (length,) int32, prompt mask (length,) where there is one, and its number in the stream."""

    input_ids: NDArray[np.int32]
    index: int
    prompt_mask: NotRequired[NDArray[np.bool_]]


def pad_row(document: Document, length: int, end: int) -> Cut:
    """One document as one sequence: truncated, or padded with end-of-text, which counts as answer."""
    ids = np.full(length, end, np.int32)
    n = min(length, len(document.ids))
    ids[:n] = document.ids[:n]
    if document.prompt is None:
        return ids, None
    prompt = np.zeros(length, np.bool_)
    prompt[:n] = document.prompt[:n]
    return ids, prompt


class RowPacker:
    """Each document a sequence; those whose first `length` tokens are all prompt are left out."""

    def __init__(self, length: int, end: int) -> None:
        self.length, self.end = length, end
        self.waiting: Cut | None = None

    def push(self, document: Document) -> bool:
        """Take a document, and say whether there is anything to learn in it; `pop` before the next one."""
        assert self.waiting is None
        ids, prompt = pad_row(document, self.length, self.end)
        if len(document.ids) and (prompt is None or not prompt.all()):
            self.waiting = (ids, prompt)
        return self.waiting is not None

    def pop(self) -> Cut | None:
        """The next sequence, if there is one."""
        waiting, self.waiting = self.waiting, None
        return waiting

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = None


class FixedPacker:
    """Documents end to end, cut every `length` tokens; what is left over waits for the next document."""

    def __init__(self, length: int, end: int) -> None:
        self.length = length
        self.rest = np.zeros(0, np.int32)

    def push(self, document: Document) -> bool:
        """Lay a document behind what is left, and say whether it added anything."""
        assert document.prompt is None, "a cut through a conversation may hold no answer"
        self.rest = np.concatenate([self.rest, document.ids.astype(np.int32)])
        return len(document.ids) > 0

    def pop(self) -> Cut | None:
        """The next whole sequence, if there is one."""
        if len(self.rest) < self.length:
            return None
        cut, self.rest = self.rest[: self.length], self.rest[self.length :]
        return cut, None

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self.rest.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest = np.array(state["rest"], np.int32)


PACKERS: dict[str, type[RowPacker] | type[FixedPacker]] = {"fixed": FixedPacker, "row": RowPacker}
