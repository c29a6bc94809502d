"""An engine that answers without a network, on a clock of its own: a step takes a second and makes one block a request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlm.errors import UserError
from dlm.inference.request import Generation


class Clock:
    """Time that passes only when it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "asleep while a request is due"
        self.now += seconds


@dataclass(frozen=True)
class Event:
    request_id: str
    text: str = ""
    tokens: tuple[int, ...] = ()
    result: Generation | None = None
    error: str | None = None


@dataclass
class Stats:
    nfe: int


@dataclass
class FakeEngine:
    """Takes `room` requests a step. A prompt that begins with 99 is refused, one with 98 fails halfway."""

    clock: Clock
    room: int = 64
    says: str = "\\boxed{6}"
    waiting: list[tuple[str, Sequence[int], dict[str, Any], list[int]]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0

    def add_request(self, prompt: Sequence[int], *, request_id: str, **settings: Any) -> str:
        if prompt[0] == 99:
            raise UserError("it can never fit")
        self.settings.append(settings)
        self.waiting.append((request_id, prompt, settings, []))
        return request_id

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def stats(self) -> Stats:
        return Stats(self.steps)

    def step(self) -> list[Event]:
        self.clock.now += 1.0
        self.steps += 1
        events = []
        for entry in self.waiting[: self.room]:
            name, prompt, settings, done = entry
            block = settings["block_length"]
            done += range(len(done), len(done) + block)
            fresh = tuple(done[-block:])
            if prompt[0] == 98:
                events.append(Event(name, error="poisoned"))
                self.waiting.remove(entry)
            elif len(done) < settings["gen_length"]:
                events.append(Event(name, "…", fresh))
            else:
                facts = {"nfe": len(done) // block, "tpf": block, "finish_reason": "length", "request_id": name}
                result = Generation(text=self.says, tokens=list(done), **facts)
                events.append(Event(name, "…", fresh, result))
                self.waiting.remove(entry)
        return events
