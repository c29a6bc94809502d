"""A model that always says the same: what the commands show can then be tested without torch. Decodes nothing."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from dlm.errors import UserError

PUZZLE = "530070000600195000098000060800060003400803001700020006060000280000419005000080079"
ANSWER = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
MASK = 0


@dataclass
class Event:
    step: int
    nfe: int
    canvas: np.ndarray
    committed: np.ndarray
    request_ids: tuple[str, ...] = ("0",)
    refused: None = None
    drafted: None = None

    @property
    def edited(self) -> np.ndarray:
        return np.zeros_like(self.committed)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.canvas.shape[1],) * len(self.canvas)


@dataclass
class FakeGeneration:
    text: str
    tokens: list[int]
    nfe: int
    tpf: float
    finish_reason: str = "length"
    request_id: str = "0"
    holes: list[str] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(eq=False)
class FakeLM:
    """A token is a character; 0 is the mask, as are `.` and `0` in a Sudoku."""

    name: str = "fake"
    tokenizer: Any = field(default_factory=object)
    config: Any = field(default_factory=lambda: SimpleNamespace(attention="bidirectional"))

    def encode(self, text: str) -> list[int]:
        bare = "".join(text.split()).replace(".", "0")
        if len(bare) == 81 and bare.isdecimal():
            return [ord(character) if character != "0" else MASK for character in bare]
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(chr(i) if i != MASK else "·" for i in ids)

    @property
    def mask_id(self) -> int:
        return MASK

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def load(name: str, **options: Any) -> FakeLM:
    if name == "missing":
        raise UserError("no model called missing")
    return FakeLM(name)


def continue_all(lm, prompts, sampler, engine, trace, request_ids, on_step=None, draft=None) -> list[FakeGeneration]:
    answer = [ord(character) for character in "answer"]
    results = [_fill(lm.encode(prompt) + [MASK] * 6, answer, on_step, whole=False) for prompt in prompts]
    return _named(results, request_ids)


def fill_all(lm, prompts, sampler, engine, trace, request_ids, on_step=None) -> list[FakeGeneration]:
    results = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids: list[int] = []
            for part in re.split(r"(\[MASK:\d+\])", prompt):
                ids += [MASK] * int(part[6:-1]) if part.startswith("[MASK:") else lm.encode(part)
            results.append(_fill(ids, [ord("x")] * ids.count(MASK), on_step, whole=True))
        else:
            answer = [ord(a) for a, token in zip(ANSWER, prompt, strict=True) if token == MASK]
            results.append(_fill(list(prompt), answer, on_step, whole=True))
    return _named(results, request_ids)


def _named(results: list[FakeGeneration], request_ids: Sequence[str]) -> list[FakeGeneration]:
    return [replace(result, request_id=name) for result, name in zip(results, request_ids, strict=True)]


def _fill(ids: list[int], answer: list[int], on_step: Callable | None, whole: bool) -> FakeGeneration:
    """Three passes over the holes, every third position at a time."""
    canvas = np.array([ids])
    holes = np.flatnonzero(canvas[0] == MASK)
    for step in range(3):
        committed = np.zeros(canvas.shape, bool)
        committed[0, holes[step::3]] = True
        canvas[0, holes[step::3]] = answer[step::3]
        if on_step is not None:
            on_step(Event(step, step + 1, canvas.copy(), committed))
    text = "".join(map(chr, canvas[0] if whole else answer))
    return FakeGeneration(text, answer, 3, len(answer) / 3, holes=["".join(map(chr, answer))] if whole else None)
