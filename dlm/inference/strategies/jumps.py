"""Strategy `jumps`: a diffusion model checks its own guesses of its next states, several in one forward (FreeDave).

Wu & Zhang (arXiv 2510.00294). One prediction fills all masks; committing its surest ones first guesses the states that
the next steps will reach. All of them run side by side in one forward. A guessed state is right where the step before
it, made from the state before, leads to it: so what is written is exactly what step by step would be written.
"""

import copy
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from dlm.diffusion.unmask import schedule
from dlm.inference.canvas import Decision
from dlm.inference.strategies.block import Block

if TYPE_CHECKING:
    from dlm.inference.request import Generation
    from dlm.inference.scheduler import Scheduled
    from dlm.inference.sequence import Sequence

STATES = 3
"""Guessed at a time, unless `draft_length` says otherwise."""


@dataclass(eq=False)
class Memory:
    """What is remembered of a request."""

    states: "list[Sequence]" = field(default_factory=list)
    """Those that this step runs: the request as it is, then the guessed ones."""
    surest: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    """The latest prediction: columns, tokens, and their probabilities."""
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)


class Jumps(Block):
    """Each branch of a request's pages holds the keys of one state."""

    def begin(self, seq: "Sequence") -> bool:
        seq.memory = Memory()
        seq.keep = seq.keep | {"confidence"}
        return super().begin(seq)

    def branches(self, seq: "Sequence") -> int:
        return states_of(seq.decoding.settings.draft_length) + 1

    def forwards(self, seq: "Sequence") -> int:
        return 1

    def shown(self, seq: "Sequence", branch: int) -> np.ndarray:
        states = seq.memory.states
        return states[branch].canvas.tokens if branch < len(states) else seq.canvas.tokens

    def prepare(self, scheduled: "Sized[Scheduled]") -> None:
        for item in scheduled:
            seq = item.sequence
            seq.memory.states = [seq, *_guessed(seq, seq.branches - 1)] if item.span.decides else []

    def views(self, seq: "Sequence") -> "list[Sequence]":
        return seq.memory.states

    def settle(self, seq: "Sequence", decisions: list[Decision]) -> list[Decision]:
        """The steps that were really made: each but the first is from a state that the one before leads to."""
        memory, made = seq.memory, decisions[:1]
        for state, decision in zip(memory.states[1:], decisions[1:], strict=True):
            before = memory.states[len(made) - 1].canvas
            masked = before.masked.copy()
            masked[before.columns[made[-1].commit]] = False
            tokens = before.after(made[-1])
            same = np.array_equal(tokens, state.canvas.tokens[: state.canvas.length])
            if not (same and np.array_equal(masked, state.canvas.masked)):
                break
            made.append(decision)
        last = made[-1]
        assert last.confidence is not None
        memory.surest = seq.canvas.columns, last.token, last.confidence
        memory.accepted.append(sum(int(decision.commit.sum()) for decision in made))
        memory.drafted.append(len(memory.states) - 1)
        memory.states = []
        return made

    def finished(self, seq: "Sequence", result: "Generation") -> "Generation":
        memory = seq.memory
        tau = sum(memory.accepted) / len(memory.accepted) if memory.accepted else 0.0
        facts = {"accepted": memory.accepted, "drafted": memory.drafted, "tau": tau}
        return replace(result, **facts, target_nfe=seq.nfe, draft_nfe=0)


def states_of(draft_length: object) -> int:
    """How many states are guessed at a time."""
    return draft_length if isinstance(draft_length, int) else STATES


def _guessed(seq: "Sequence", most: int) -> "list[Sequence]":
    """States that the next steps may reach: each commits the surest of the latest prediction that are still masks."""
    memory, canvas = seq.memory, seq.canvas
    if memory.surest is None or not np.array_equal(memory.surest[0], canvas.columns):
        return []  # the first step of a block has no prediction before it
    columns, token, sure = memory.surest
    open_masks = canvas.open_masks()
    order = [at for at in np.argsort(-sure, kind="stable") if open_masks[at]]
    block, states, taken = canvas.open[0], [], 0
    for number in range(1, most + 1):
        taken += schedule(len(block.positions), block.steps, seq.step + number - 1 - block.started)
        if taken >= len(order):
            break
        state = copy.copy(seq)
        state.canvas, state.step, state.script = copy.copy(canvas), seq.step + number, None
        at = columns[order[:taken]]
        state.canvas.tokens, state.canvas.masked = canvas.tokens.copy(), canvas.masked.copy()
        state.canvas.tokens[at], state.canvas.masked[at] = token[order[:taken]], False
        states.append(state)
    return states
