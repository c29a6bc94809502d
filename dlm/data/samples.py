"""Packs documents into sequences of one length."""

from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from dlm.data.documents import Document


class Sample(TypedDict):
    """One sequence: ids (length,) int32, its number in the stream and, where the data has them, prompt mask and
    order."""

    input_ids: NDArray[np.int32]
    index: int
    prompt_mask: NotRequired[NDArray[np.bool_]]
    order: NotRequired[NDArray[np.int32]]


def sample_of(cut: Document, index: int) -> Sample:
    """A document of the right length as the sample of that number."""
    sample: Sample = {"input_ids": cut.ids, "index": index}
    if cut.prompt is not None:
        sample["prompt_mask"] = cut.prompt
    if cut.order is not None:
        sample["order"] = cut.order
    return sample


def pad_row(document: Document, length: int, end: int) -> Document:
    """One document as one sequence: truncated, or padded with end-of-text, which counts as answer and has no order."""

    def padded(values: NDArray[Any] | None, blank: int, kind: type) -> NDArray[Any] | None:
        if values is None:
            return None
        row = np.full(length, blank, kind)
        row[: len(values)] = values[:length]
        return row

    ids = padded(document.ids, end, np.int32)
    assert ids is not None
    return Document(ids, padded(document.prompt, 0, np.bool_), padded(document.order, -1, np.int32))


class RowPacker:
    """Each document a sequence; those whose first `length` tokens are all prompt are left out."""

    def __init__(self, length: int, end: int) -> None:
        self.length, self.end = length, end
        self.waiting: Document | None = None

    def push(self, document: Document) -> bool:
        """Take a document; returns whether there is anything to learn in it. Call `pop` before the next one."""
        assert self.waiting is None
        row = pad_row(document, self.length, self.end)
        if len(document.ids) and (row.prompt is None or not row.prompt.all()):
            self.waiting = row
        return self.waiting is not None

    def pop(self) -> Document | None:
        """The next sequence, if there is one."""
        waiting, self.waiting = self.waiting, None
        return waiting

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.waiting = None


class FixedPacker:
    """Documents joined, and cut every `length` tokens; the rest waits for the next document."""

    def __init__(self, length: int, end: int) -> None:
        self.length = length
        self.rest = np.zeros(0, np.int32)

    def push(self, document: Document) -> bool:
        """Append a document; returns whether it has any tokens."""
        assert document.prompt is None, "a cut through a conversation may hold no answer"
        self.rest = np.concatenate([self.rest, document.ids.astype(np.int32)])
        return len(document.ids) > 0

    def pop(self) -> Document | None:
        """The next whole sequence, if there is one."""
        if len(self.rest) < self.length:
            return None
        cut, self.rest = self.rest[: self.length], self.rest[self.length :]
        return Document(cut)

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self.rest.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest = np.array(state["rest"], np.int32)


PACKERS: dict[str, type[RowPacker] | type[FixedPacker]] = {"fixed": FixedPacker, "row": RowPacker}
