"""Strategy `speculative`: a drafter guesses the next tokens, and a causal target checks all of them in one forward.

Leviathan et al. (arXiv 2211.17192). The drafts stand in the canvas under masks, so the exact cache's own span checks them,
and taking a refused one back is nothing but writing over it: final are the keys of the tokens that were kept.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dlm.diffusion.choose import Address
from dlm.diffusion.speculate import Drawn, judge
from dlm.inference.canvas import Decision
from dlm.inference.drafting.drafter import Drafter, Wish
from dlm.inference.drafting.length import Length
from dlm.inference.plan import Block as Positions
from dlm.inference.strategies.block import Block

if TYPE_CHECKING:
    from dlm.inference.forward import Forward
    from dlm.inference.pages import PagePool
    from dlm.inference.request import Generation
    from dlm.inference.scheduler import Scheduled
    from dlm.inference.sequence import Sequence
    from dlm.models.lm import LM

NONE = np.zeros(0, np.int64)


@dataclass(eq=False)
class Memory:
    """What is remembered of a request."""

    asked: int = 0
    """Tokens that the next step is to check."""
    rows: int = 0
    drafts: np.ndarray = field(default_factory=NONE.copy)
    """Those that stand in the canvas now, from the first open position on."""
    there: Tensor | None = None
    """The drafts, where the host does not know them yet."""
    drawn: Drawn | None = None
    accepted: list[int] = field(default_factory=list)
    """Tokens that each verification added."""
    drafted: list[int] = field(default_factory=list)
    """Tokens that each verification checked."""
    forwards: int = 0
    """Of the draft."""


class Speculative(Block):
    """One step checks a request's drafts and adds those it agrees with, and one token of its own.

    `verify = "match"`: the target's choice at each position is what it would be without drafts, and a draft is kept where
    it is the same. "reject": drafts are drawn from q, and kept with probability min(1, p/q).
    """

    def __init__(self, lm: "LM", pool: "PagePool", drafter: Drafter | None = None) -> None:
        super().__init__(lm, pool)
        assert drafter is not None, "requests come here where the engine has a draft"
        self.drafter, self.length = drafter, Length(drafter.most)
        self.taps, self.marks = drafter.taps, drafter.marks

    def begin(self, seq: "Sequence") -> bool:
        seq.memory = Memory()
        return self._open_next(seq)

    def most_open(self, seq: "Sequence") -> int:
        return self._limit(seq) + 1

    def luck(self, seq: "Sequence", positions: np.ndarray) -> np.ndarray:
        return positions - seq.canvas.start  # the step that would decide them, were there no drafts

    def reach(self, seq: "Sequence") -> int:
        return seq.canvas.first - 1 + seq.memory.rows if self.marks and seq.memory.asked else 0

    def prepare(self, scheduled: "Sized[Scheduled]") -> None:
        asking = [item.sequence for item in scheduled if item.span.decides and item.sequence.memory.asked]
        self.length.start(scheduled)
        if not asking:
            return
        wishes = [Wish(seq, seq.canvas.first - 1, seq.memory.asked, seq.memory.rows) for seq in asking]
        for seq, guess in zip(asking, self.drafter.propose(wishes), strict=True):
            memory, first = seq.memory, seq.canvas.first
            memory.drafts, memory.drawn, memory.there = guess.tokens, guess.drawn, guess.there
            memory.forwards += guess.forwards
            seq.canvas.tokens[first : first + len(guess.tokens)] = guess.tokens
        self.length.drafted(len(asking), sum(len(seq.memory.drafts) for seq in asking))

    def late(self, seq: "Sequence") -> Tensor | None:
        return seq.memory.there

    def learn(self, seq: "Sequence", tokens: np.ndarray) -> None:
        first = seq.canvas.first
        seq.memory.drafts, seq.memory.there = tokens, None
        seq.canvas.tokens[first : first + len(tokens)] = tokens

    def observe(self, scheduled: "Sized[Scheduled]", forward: "Forward") -> None:
        self.drafter.absorb(scheduled, forward)

    def judges(self, seq: "Sequence") -> bool:
        return seq.decoding.settings.verify == "reject" and seq.decoding.settings.temperature > 0

    def judging(self, seqs: "Sized[Sequence]") -> dict[str, np.ndarray]:
        rows, start = [], 0
        for seq in seqs:
            rows.append(start + np.arange(len(seq.memory.drafts)))
            start += len(seq.canvas.columns)
        return {"drafted": np.concatenate(rows), "drafts": np.concatenate([seq.memory.drafts for seq in seqs])}

    def judge(
        self, seqs: "Sized[Sequence]", p: Tensor, token: Tensor, address: Address, x: Mapping[str, Tensor]
    ) -> Tensor:
        known = x["drafts"].split([len(seq.memory.drafts) for seq in seqs])
        pairs = [(seq.memory, tokens) for seq, tokens in zip(seqs, known, strict=True) if len(tokens)]
        if not pairs:
            return token
        tokens = [part if memory.there is None else memory.there for memory, part in pairs]
        q = torch.cat([_dense(memory.drawn, part, p) for (memory, _), part in zip(pairs, tokens, strict=True)])
        index = x["drafted"]
        mine = Address(**{name: part[index] for name, part in vars(address).items()})
        return token.index_copy(0, index, judge(p[index], Drawn(q), torch.cat(tokens), mine))

    def resolve(self, seq: "Sequence", proposed: Decision) -> Decision:
        self.length.verified()
        drafts, token = seq.memory.drafts, proposed.token
        wrong = np.flatnonzero(token[: len(drafts)] != drafts)
        count = int(wrong[0]) + 1 if len(wrong) else len(drafts) + 1
        ends = np.flatnonzero(np.isin(token[:count], list(seq.decoding.stop)))
        commit = np.arange(len(token)) < (int(ends[0]) + 1 if len(ends) else count)
        drafted = np.full(len(token), -1, np.int64)
        drafted[: len(drafts)] = drafts
        return proposed._replace(commit=commit, drafted=drafted)

    def advance(self, seq: "Sequence", decision: Decision) -> bool:
        memory, canvas, block = seq.memory, seq.canvas, seq.canvas.open[0]
        count = int(decision.commit.sum())
        if canvas.first > canvas.start:  # the first token follows the prompt: nothing was drafted for it
            memory.accepted.append(count)
            memory.drafted.append(len(memory.drafts))
            self.length.learn(memory.drafted[-1], count)
        memory.drafts, memory.drawn, memory.there = NONE, None, None
        left = block.positions[canvas.masked[block.positions]]
        canvas.tokens[left] = canvas.mask_id
        seq.close(block)
        newest = int(block.positions[0]) + count - 1
        return int(canvas.tokens[newest]) not in seq.decoding.stop and self._open_next(seq)

    def finished(self, seq: "Sequence", result: "Generation") -> "Generation":
        memory, accepted, left = seq.memory, [], len(result.tokens) - 1
        for count in memory.accepted:  # a stop string may end the text before the last ones
            if left > 0:
                accepted.append(min(count, left))
            left -= count
        return replace(
            result,
            accepted=accepted,
            drafted=memory.drafted[: len(accepted)],
            tau=sum(accepted) / len(accepted) if accepted else 0.0,
            target_nfe=seq.nfe,
            draft_nfe=memory.forwards,
        )

    def park(self, seq: "Sequence") -> Any:
        return self.drafter.park(seq)

    def resume(self, seq: "Sequence", parked: Any) -> None:
        self.drafter.resume(seq, parked)

    def forget(self, seq: "Sequence") -> None:
        self.drafter.forget(seq)

    def _limit(self, seq: "Sequence") -> int:
        wanted = seq.decoding.settings.draft_length
        return self.drafter.most if wanted in (None, "auto") else min(int(wanted), self.drafter.most)

    def _open_next(self, seq: "Sequence") -> bool:
        """Open the position after the newest token and those to be drafted; False where the text is full."""
        canvas, memory = seq.canvas, seq.memory
        first = canvas.start + int((~canvas.masked[canvas.start :]).sum())
        left = canvas.end - first
        if left <= 0:
            return False
        memory.asked = memory.rows = 0
        if first > canvas.start and left > 1:
            most = self._limit(seq)
            if seq.decoding.settings.draft_length == "auto":
                most = min(most, self.length.best())
            count = min(most, left - 1)
            memory.asked = self.drafter.ready(seq, first - 1, count) if count else 0
            if memory.asked:
                memory.rows = memory.asked + 1 if memory.asked < count else min(most, left) + 1
        after = first + memory.asked + 1
        seq.open(Positions(range(first, after), after, 1))
        return True


def _dense(drawn: Drawn | None, drafts: Tensor, like: Tensor) -> Tensor:
    """q of a request's drafts over the whole vocabulary, of which `like` has a column a token."""
    if drawn is not None:
        return drawn.dense(like.shape[-1]).to(like.dtype)
    return like.new_zeros(len(drafts), like.shape[-1]).scatter_(-1, drafts[:, None], 1)
