"""How many tokens to draft: as many as pay, by what steps cost here and by how often drafts are kept."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Sized
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlm.inference.scheduler import Scheduled

MEMORY = 0.98
"""Weight of what was before, at each new observation."""
PROBE = 16
"""Where drafting does not pay, one token is drafted once in so many times: it may pay later."""


class Length:
    """For `draft_length = "auto"`: the length that promises most tokens a second, 0 where drafting does not pay.

    A step's seconds are fitted as a line over its rows, the draft's forward apart; the chance that a draft is kept, given
    that all before it were, is counted by position. Whatever it says, the text stays the same.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most, self.clock = most, clock
        self.tried, self.kept = [1.0] * most, [0.7] * most
        self.rows = self.others = 0
        self.drafting = 1
        """Requests that had drafts in the last step that had any; `others` are the rows of the rest."""
        self.mark = 0.0
        self.open = False
        """Whether the target's answers are still to be timed, in a step that reads no prompts."""
        self.idle = 0
        self.target, self.draft = Line(), Line()

    def start(self, scheduled: "Sized[Scheduled]") -> None:
        """A step begins."""
        self.rows = sum(len(item.span.positions) for item in scheduled)
        self.open = all(item.span.decides for item in scheduled)
        self.mark = self.clock()

    def drafted(self, requests: int, tokens: int) -> None:
        """Of so many requests so many tokens were drafted."""
        now = self.clock()
        if self.open:
            self.draft.add(self.rows, now - self.mark)
            self.drafting, self.others = requests, self.rows - requests - tokens
        self.mark = now

    def verified(self) -> None:
        """The target's answers are there."""
        if self.open:
            self.target.add(self.rows, self.clock() - self.mark)
        self.open = False

    def learn(self, drafted: int, count: int) -> None:
        """Of so many drafted tokens so many were added, the target's own included."""
        for place in range(min(drafted, count, self.most)):
            self.tried[place] = MEMORY * self.tried[place] + 1
            self.kept[place] = MEMORY * self.kept[place] + (place < count - 1)

    def best(self) -> int:
        """The length to draft now. What was not tried is thought likely, and of what does not pay one token now and then."""
        best, found, tokens, chance = 0, 0.0, 1.0, 1.0
        for length in range(self.most + 1):
            if length:
                chance *= self.kept[length - 1] / self.tried[length - 1]
                tokens += chance
            rows = self.others + self.drafting * (length + 1)
            seconds = self.target.at(rows) + (self.draft.at(rows) if length else 0.0)
            speed = (self.others + self.drafting * tokens) / max(seconds, 1e-9)
            if speed > found:
                best, found = length, speed
        self.idle = 0 if best else (self.idle + 1) % PROBE
        return best or int(self.idle == PROBE - 1)


class Line:
    """Seconds as a line over rows, the latest counting most."""

    def __init__(self) -> None:
        self.n = self.x = self.y = self.xx = self.xy = 0.0

    def add(self, x: float, y: float) -> None:
        """One more observation."""
        self.n, self.x, self.y, self.xx, self.xy = (
            MEMORY * old + new
            for old, new in zip((self.n, self.x, self.y, self.xx, self.xy), (1, x, y, x * x, x * y), strict=True)
        )

    def at(self, x: float) -> float:
        """What is expected there; never less than nothing, and never falling with x."""
        if not self.n:
            return 0.0
        spread = self.n * self.xx - self.x * self.x
        slope = max(0.0, (self.n * self.xy - self.x * self.y) / spread) if spread > 1e-9 * self.xx * self.n else 0.0
        return max(0.0, (self.y - slope * self.x) / self.n) + slope * x
