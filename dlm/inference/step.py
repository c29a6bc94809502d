"""One step: the packed forward of all scheduled requests, and what each decides by it. Changes no request."""

from collections.abc import Iterator
from collections.abc import Sequence as Sized
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from dlm.diffusion.choose import BrokenLogits
from dlm.inference.canvas import Decision
from dlm.inference.canvases import Canvases, Commits
from dlm.inference.compute import Compute
from dlm.inference.config import EngineConfig
from dlm.inference.crowd import CrowdRound, Crowds
from dlm.inference.decide import Question, Round, rounds
from dlm.inference.forward import Forward
from dlm.inference.layout import Layout, lengthen_rope
from dlm.inference.pages import PagePool
from dlm.inference.scheduler import Scheduled
from dlm.inference.sequence import Sequence
from dlm.inference.strategies import Strategy
from dlm.models.lm import LM

Result = tuple[Sequence, list[Decision] | BrokenLogits]
"""A request and its next steps, mostly one, or what is wrong with its logits."""
Late = tuple[Sequence, Tensor, np.ndarray]
"""A request, tokens of it that only the device knows, and the packed rows that show them."""


class Stepper:
    """Runs a network over scheduled requests; keeps what can serve the next step."""

    def __init__(self, lm: LM, pool: PagePool, config: EngineConfig) -> None:
        self.network, self.pool, self.compute = lm.network, pool, Compute(lm, config)
        self.canvases = Canvases()
        self.crowds, self.apart = Crowds(self.canvases), False
        if lm.device.type == "cuda":  # now, since making it keeps the host waiting
            lengthen_rope(lm.network, pool, lm.config.context_length)
        self.nfe = self.rows = 0
        self._last: tuple[tuple, Forward, np.ndarray] | None = None

    def run(self, scheduled: list[Scheduled]) -> tuple[list[Result], list[Commits]]:
        """What each request that is asked something decides, one step after the other, or that its logits are broken.

        Plain requests come all together, in `Commits`, unless all are wanted `apart`.
        """
        strategies = list(_by_strategy(scheduled))
        training = self.network.training
        if training:
            self.network.eval()
        try:
            with self.compute.running():
                for strategy, mine in strategies:
                    strategy.prepare(mine)
                return self._forward(scheduled, strategies)
        finally:
            if training:
                self.network.train()

    def forget(self) -> None:
        """Keep nothing of the step before."""
        self._last = None
        self.crowds.forget()

    def reload(self) -> None:
        """The weights have changed."""
        self._last = None
        self.compute.reload()

    def _forward(
        self, scheduled: list[Scheduled], strategies: list[tuple[Strategy, list[Scheduled]]]
    ) -> tuple[list[Result], list[Commits]]:
        forward, ids = self._lay_out(scheduled)
        together, asked = self._asked(scheduled, forward.layout)
        questions = (question for item, rows in asked for question in _questions(item, rows))
        groups, output_rows = rounds(questions, together)
        tapped = next((strategy.taps for strategy, _ in strategies if strategy.taps), ())
        self.nfe += 1
        self.rows += len(ids)
        hidden, x, late = None, None, _late(asked)
        if (graphs := self.compute.graphs) is not None:
            known = [(tokens, rows) for _, tokens, rows in late]
            hidden, forward.taps = graphs.run(forward.layout, ids, output_rows, groups, tapped, known), graphs.taps
        if hidden is None:  # one copy up, and kernel after kernel
            more = {"late": np.concatenate([rows for *_, rows in late])} if late else {}
            x = self.compute.transfers.up(forward.arrays(ids, output_rows) | _arrays(groups) | more)
            if late:
                x["ids"].index_copy_(0, x["late"], torch.cat([tokens for _, tokens, _ in late]))
            hidden = forward(x, tapped)
        for strategy, mine in strategies:
            strategy.observe(mine, forward)
        if isinstance(hidden, Tensor):
            found = self._decided(forward, hidden, groups, x, late)
        else:
            found = [hidden()]
            tokens = found[0].pop() if late else ids
            for seq, _, rows in late:
                seq.strategy.learn(seq, tokens[rows])
        answers, commits = _answers(groups, found)
        answered = [item.sequence for item in scheduled if item.sequence in answers]
        return [(seq, _settled(seq, answers)) for seq in answered], commits

    def _asked(
        self, scheduled: list[Scheduled], layout: Layout
    ) -> tuple[list[CrowdRound], list[tuple[Scheduled, list[int]]]]:
        """Rounds of those that are asked together, and those that are asked one by one, with their first rows."""
        asked = [(item, rows) for item, rows in zip(scheduled, layout.starts, strict=True) if item.span.decides]
        if self.apart:
            return [], asked
        crowds, numbers = self.crowds.of([item.sequence for item, _ in asked])
        starts = np.array([rows[0] for _, rows in asked])
        return [CrowdRound(crowd, layout, starts) for crowd in crowds], [asked[number] for number in numbers]

    def _decided(
        self, forward: Forward, hidden: Tensor, groups: list[Round], x: dict[str, Tensor] | None, late: list[Late]
    ) -> list[list[np.ndarray]]:
        """What the device computes of all rounds, read back together. `x` are their arrays, where they are up already."""
        if not groups:
            return []
        if x is None:
            x = self.compute.transfers.up(_arrays(groups))
        parts = [
            group.compute(self.network, forward.head, hidden, {name: x[f"{number} {name}"] for name in group.arrays})
            for number, group in enumerate(groups)
        ]
        whole = iter(self.compute.transfers.down([y for part in [[t for _, t, _ in late], *parts] for y in part]))
        for seq, _, _ in late:
            seq.strategy.learn(seq, next(whole))
        return [list(islice(whole, len(part))) for part in parts]

    def _lay_out(self, scheduled: list[Scheduled]) -> tuple[Forward, np.ndarray]:
        """The step's forward, that of the step before where nothing moved, and the tokens of its rows."""
        seqs = [item.sequence for item in scheduled]
        pages = [seq.pages.version for seq in seqs]
        key = self.canvases.version, [seq.number for seq in seqs], pages, [item.span for item in scheduled]
        if self._last is None or self._last[0] != key:
            layout = Layout(scheduled, self.pool, self.network)
            self._last = key, self.compute.forward(layout), self._places(seqs, layout)
        _, forward, places = self._last
        ids = self.canvases.tokens.take(places, mode="clip")
        starts = zip(scheduled, forward.layout.starts, strict=True)
        for item, rows in [(item, rows) for item, rows in starts if not item.sequence.plain]:
            for branch, row in enumerate(rows):
                shown = _shown(item, branch)
                ids[row : row + len(shown)] = shown
        return forward, ids

    def _places(self, seqs: list[Sequence], layout: Layout) -> np.ndarray:
        """Where the tokens of all rows stand in `canvases`; anything for requests that are not there."""
        places = [self.canvases.places.get(seq, 0) for seq in seqs]
        return layout.host_positions + self.canvases.offsets[places][layout.whose[layout.owner]]


def _arrays(groups: list[Round]) -> dict[str, np.ndarray]:
    """Those of all rounds, under a round's number and their names."""
    return {f"{number} {name}": x for number, group in enumerate(groups) for name, x in group.arrays.items()}


def _late(asked: list[tuple[Scheduled, list[int]]]) -> list[Late]:
    """What is to be shown of tokens that only the device knows."""
    found = []
    for item, starts in asked:
        seq, positions = item.sequence, item.span.positions
        if (tokens := seq.strategy.late(seq)) is not None:
            first = starts[0] + int(np.searchsorted(positions, seq.canvas.first))
            found.append((seq, tokens, np.arange(first, first + len(tokens))))
    return found


def _shown(item: Scheduled, branch: int) -> np.ndarray:
    """The tokens of a span."""
    tokens, positions = item.sequence.tokens(branch), item.span.positions
    if isinstance(positions, range) and positions.step == 1:
        return tokens[positions.start : positions.stop]
    return tokens[np.asarray(positions)]


def _by_strategy(scheduled: list[Scheduled]) -> Iterator[tuple[Strategy, list[Scheduled]]]:
    strategies = dict.fromkeys([item.sequence.strategy for item in scheduled])
    for strategy in strategies:
        own = len(strategies) > 1
        yield strategy, [item for item in scheduled if item.sequence.strategy is strategy] if own else scheduled


def _questions(item: Scheduled, starts: Sized[int]) -> Iterator[Question]:
    """Of each state of a request: which columns are to be decided, and by which rows."""
    seq = item.sequence
    guided = seq.decoding.settings.cfg_scale > 0
    for number, view in enumerate(seq.strategy.views(seq)):
        own = starts if guided else starts[number : number + 1]
        yield Question(view, seq.strategy.asks(view), item.span.positions, own)


def _answers(
    groups: list[Round], found: list[list[np.ndarray]]
) -> tuple[dict[Sequence, Decision | BrokenLogits], list[Commits]]:
    """What rounds decide: of each request, or of a whole crowd where nobody's logits are broken."""
    commits, answers = [], {}
    for group, arrays in zip(groups, found, strict=True):
        made = group.commits(arrays) if isinstance(group, CrowdRound) else None
        if made is not None:
            commits.append(made)
        else:
            answers |= dict(group.decisions(arrays))
    return answers, commits


def _settled(seq: Sequence, answers: dict[Sequence, Decision | BrokenLogits]) -> list[Decision] | BrokenLogits:
    """What becomes of the answers to a request's questions."""
    found = []
    for view in seq.strategy.views(seq):
        if isinstance(answer := answers[view], BrokenLogits):
            return answer
        found.append(answer)
    return seq.strategy.settle(seq, found)
