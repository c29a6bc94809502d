"""From what requests ask of a forward to what each of them does: grouped by their settings, host arrays in and out."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Sized
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlm.diffusion.choose import Address, BrokenLogits, Signals
from dlm.diffusion.unmask import schedule
from dlm.inference.canvas import Decision, OpenBlock
from dlm.inference.recipe import Head, Recipe, spread
from dlm.inference.sequence import Sequence
from dlm.models.transformer import Transformer


class Question(NamedTuple):
    """What a request asks of a forward."""

    sequence: Sequence
    asked: np.ndarray
    """Which of its columns: (c,)."""
    positions: Sized[int]
    """Those that the forward runs of it, in ascending order."""
    starts: Sized[int]
    """The packed row of the first of them, in each branch that predicts the columns."""


def rounds(questions: Iterable[Question], others: "Sized[Round]" = ()) -> "tuple[list[Round], np.ndarray]":
    """One round for all requests with the same rule and settings, in the order in which they were asked first.

    They follow `others`, rounds that were made by other means. And the packed rows whose states they need, (w,).
    """
    groups: dict[tuple, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.sequence.kind, []).append(question)
    found = [*others, *[Round(group) for group in groups.values()]]
    if len(found) == 1 and len(found[0].rows) == 1 and len(found[0].at):
        found[0].states = [None]  # nobody else reads any
        return found, found[0].rows[0]
    wanted = _union([rows for each in found for rows in each.rows])
    for each in found:
        each.states = [_places(rows, wanted) for rows in each.rows]
    return found, wanted


class Round:
    """One group's decisions: grids are (requests, columns), lists are over the n asked columns.

    `arrays` are what the device needs, `compute` is its part, and `decisions` are made of what it gave.
    """

    def __init__(self, group: list[Question]) -> None:
        self.seqs = [question.sequence for question in group]
        keep = [seq for seq in self.seqs if seq.keep]
        several = any(len(seq.canvas.open) > 1 for seq in self.seqs)
        topk = max((seq.topk for seq in keep), default=0)
        self.recipe, self.judged = recipe_of(self.seqs[0].kind, several, bool(keep), topk)
        self.shape = len(group), max(len(seq.canvas.columns) for seq in self.seqs)
        self.parts = [question.asked for question in group]
        self.asked = self._grid(self.parts)
        self.at = np.flatnonzero(self.asked)
        self.masks = self._grid([seq.canvas.open_masks() for seq in self.seqs])
        self.positions = self._grid([seq.canvas.columns for seq in self.seqs]).reshape(-1)[self.at]
        """Of the asked columns."""
        self.rows = self._rows(group)
        """The packed rows that predict these, (n,) a branch."""
        self.states: list[np.ndarray | None] = []
        """Where these stand among the rows whose states are needed; None: they are just those."""
        self.signals: Signals | None = None

    @property
    def repeatable(self) -> bool:
        """Whether `compute` is a function of its tensors alone, and asked once."""
        forced = self.recipe.confident and any(seq.script is not None for seq in self.seqs)
        return not (self.judged or self.recipe.rule.remembers or forced)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """What `Recipe` reads."""
        found = {"at": self.at, "masks": self.masks, "quota": self._quota()}
        for branch, states in enumerate(self.states):
            if states is not None:
                found[f"rows{branch}"] = states
        if self.recipe.several:
            front = [np.isin(seq.canvas.columns, seq.canvas.open[0].positions) for seq in self.seqs]
            found["front"] = self._grid(front)
        if self.recipe.draws:
            found |= self._address()
        if self.recipe.revises:
            found["current"] = self._listed([seq.canvas.tokens for seq in self.seqs])
            found["committed"] = ~self.masks.reshape(-1)[self.at]
            found["times"] = self._listed([seq.canvas.remasks for seq in self.seqs])
        if self.recipe.rule.remembers:
            found["places"] = np.concatenate([place for _, place in self._blocks()])
        return found | self.seqs[0].strategy.judging(self.seqs) if self.judged else found

    def compute(self, network: Transformer, head: Head, hidden: Tensor, x: Mapping[str, Tensor]) -> list[Tensor]:
        """The device's part: `arrays` as tensors in, what `decisions` reads out."""
        logits = self.recipe.logits(network, head, hidden, x)
        mask_id = network.config.mask_token_id
        if self.recipe.rule.remembers:
            logits = self._boost(logits, x, mask_id)
        found, self.signals = self.recipe.decide(logits, x, mask_id, partial(self._judge, x) if self.judged else None)
        return found

    def decisions(self, found: list[np.ndarray]) -> list[tuple[Sequence, Decision | BrokenLogits]]:
        """What each request does, by what `compute` gave; a BrokenLogits where its logits are NaN or infinite."""
        b, w = self.shape
        grids = 3 + 2 * self.recipe.revises + self.recipe.confident
        token, bad, commit, *rest = [*(grid[:b, :w] for grid in found[:grids]), *found[grids:]]
        second = [rest.pop(0), rest.pop(0)] if self.recipe.revises else []
        decisions = []
        for i, seq in enumerate(self.seqs):
            width = len(seq.canvas.columns)
            edited, remasked = (flag[i, :width] for flag in second) if second else (None, None)
            decision = Decision(token[i, :width], commit[i, :width], edited, remasked)
            decision = seq.strategy.resolve(seq, decision)
            decisions.append(decision if seq.script is None else seq.script.decision(seq, decision))
        if self.recipe.confident:
            decisions = self._with_facts(decisions, token, rest)
        if not bad.any():
            return list(zip(self.seqs, decisions, strict=True))
        return [
            (seq, BrokenLogits(torch.from_numpy(broken[asked])) if broken.any() else decision)
            for seq, decision, broken, asked in zip(self.seqs, decisions, bad, self.asked, strict=True)
        ]

    def _with_facts(self, decisions: list[Decision], token: np.ndarray, rest: list[np.ndarray]) -> list[Decision]:
        """Decisions with what recorders want to know beside them."""
        p, *top = rest
        chosen = token.copy()
        for row, decision in zip(chosen, decisions, strict=True):
            row[: len(decision.token)] = decision.token
        if not np.array_equal(chosen[self.asked], token[self.asked]):
            assert self.signals is not None  # a script put others there: asked once more
            listed = torch.from_numpy(chosen.reshape(-1)[self.at]).to(self.signals.token.device)
            p = spread(self.signals.of(listed), self._places(listed.device)).cpu().numpy()
        found = []
        for i, (seq, decision) in enumerate(zip(self.seqs, decisions, strict=True)):
            width, facts = len(seq.canvas.columns), {}
            if "confidence" in seq.keep:
                facts["confidence"] = p[i, :width]
            if seq.topk:
                tokens, values = (np.full((width, top[0].shape[1]), empty) for empty in (-1, np.nan))
                mine = np.flatnonzero(self.owner == i)
                tokens[self.column[mine]], values[self.column[mine]] = top[0][mine], top[1][mine]
                facts["topk"] = tokens[:, : seq.topk], values[:, : seq.topk]
            found.append(decision._replace(**facts))
        return found

    @cached_property
    def owner(self) -> np.ndarray:
        """Of each asked column, whose it is."""
        return self.at // self.shape[1]

    @cached_property
    def column(self) -> np.ndarray:
        """Of each asked column, its place in its row."""
        return self.at % self.shape[1]

    def _places(self, device: torch.device) -> dict[str, Tensor]:
        return {name: torch.from_numpy(self.arrays[name]).to(device) for name in ("at", "masks")}

    def _quota(self) -> np.ndarray:
        """The schedule's number for each request, by its first open block."""
        blocks = [(seq.canvas.open[0], seq.step) for seq in self.seqs]
        shares = [schedule(len(block.positions), block.steps, step - block.started) for block, step in blocks]
        return np.array(shares, np.int64)

    def _address(self) -> dict[str, np.ndarray]:
        requests = [seq.request for seq in self.seqs]
        each = zip(
            self.seqs, np.split(self.positions, np.searchsorted(self.owner, range(1, len(requests)))), strict=True
        )
        return {
            "seed": np.array([request.seed for request in requests], np.int64)[self.owner],
            "sample": np.array([request.sample for request in requests], np.int64)[self.owner],
            "step": np.concatenate([seq.strategy.luck(seq, positions) for seq, positions in each]),
            "position": self.positions,
        }

    def _listed(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Of arrays over each canvas, the entries at the asked columns: (n,)."""
        return np.concatenate(
            [array[seq.canvas.columns[part]] for seq, array, part in zip(self.seqs, arrays, self.parts, strict=True)]
        )

    def _rows(self, group: list[Question]) -> list[np.ndarray]:
        at, shift = self.positions, self.seqs[0].shift
        if shift:
            at = np.maximum(at - shift, 0)
        firsts = np.array([question.positions[0] for question in group])
        place = at - firsts[self.owner]
        for i, question in enumerate(group):
            if not isinstance(question.positions, range):
                mine = self.owner == i
                place[mine] = np.searchsorted(question.positions, at[mine])
        starts = np.array([question.starts for question in group])
        return [place + branch[self.owner] for branch in starts.T]

    def _grid(self, parts: list[np.ndarray]) -> np.ndarray:
        if len(parts) == 1:
            return parts[0][None]
        if all(len(part) == self.shape[1] for part in parts):
            return np.concatenate(parts).reshape(self.shape)
        grid = np.zeros(self.shape, parts[0].dtype)
        for row, part in zip(grid, parts, strict=True):
            row[: len(part)] = part
        return grid

    def _judge(self, x: Mapping[str, Tensor], p: Tensor, token: Tensor, address: Address) -> Tensor:
        return self.seqs[0].strategy.judge(self.seqs, p, token, address, x)

    def _blocks(self) -> Iterator[tuple[OpenBlock, np.ndarray]]:
        """Open blocks that are asked about, and at which of their positions."""
        for i, seq in enumerate(self.seqs):
            position = seq.canvas.columns[self.parts[i]]
            for block in seq.canvas.open:
                own = position[np.isin(position, block.positions)]
                if len(own):
                    yield block, np.searchsorted(block.positions, own)

    def _boost(self, logits: Tensor, x: Mapping[str, Tensor], mask_id: int | None) -> Tensor:
        """Let the rule change the logits by what it remembers of each position of its block."""
        asked, known = list(self._blocks()), []
        counts = [len(place) for _, place in asked]
        for block, _ in asked:
            if block.memory is None:
                block.memory = logits.new_zeros(len(block.positions), logits.shape[-1], dtype=torch.float32)
            known.append(block.memory)
        places = x["places"].split(counts)
        memory = torch.cat([of_block[place] for of_block, place in zip(known, places, strict=True)])
        logits, memory = self.recipe.rule.boost(logits, memory, mask_id)
        for of_block, place, part in zip(known, places, memory.split(counts), strict=True):
            of_block[place] = part
        return logits


@lru_cache
def recipe_of(kind: tuple, several: bool, confident: bool, topk: int) -> tuple[Recipe, bool]:
    """What requests of a kind (`Sequence.kind`) decide by, and whether their strategy judges."""
    rule, temperature, top_k, top_p, cfg_scale, judged, edit_threshold, remask_threshold = kind
    facts = {"several": several, "confident": confident, "topk": topk}
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "cfg_scale": cfg_scale}
    return Recipe(rule=rule, **drawn, edit_threshold=edit_threshold, remask_threshold=remask_threshold, **facts), judged


def _places(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
    """Where these rows stand among those wanted; None where they are just those."""
    return None if rows is wanted or np.array_equal(rows, wanted) else np.searchsorted(wanted, rows)


def _union(rows: list[np.ndarray]) -> np.ndarray:
    """All rows once, ascending. Never empty: a forward needs at least one row."""
    together = rows[0] if len(rows) == 1 else np.concatenate(rows) if rows else np.zeros(0, np.int64)
    if not (together[1:] > together[:-1]).all():
        together = np.unique(together)
    return together if len(together) else np.zeros(1, np.int64)
