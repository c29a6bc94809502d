"""From hidden states to decisions: tokens chosen, decode rules applied, second thoughts, for many requests at once."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sized
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.diffusion.choose import Address, BrokenLogits, Signals, choose, guide
from dlm.diffusion.edit import edits, remasks
from dlm.diffusion.rng import Purpose, uniform
from dlm.diffusion.unmask import best, schedule
from dlm.inference.canvas import Decision
from dlm.inference.sequence import Sequence
from dlm.kernels.dispatch import confidence, one_pass
from dlm.kernels.picked import Picked
from dlm.models.transformer import Transformer

Head = Callable[[Tensor], Tensor]
"""Hidden states (n, d) -> logits (n, v)."""


@dataclass(frozen=True)
class Question:
    """What a request asks of a forward."""

    sequence: Sequence
    asked: np.ndarray
    """Which of its columns: (c,)."""
    rows: Sized[np.ndarray]
    """The packed rows that predict these: (asked,) a lane."""


def decide(
    network: Transformer, head: Head, hidden: Float[Tensor, "w d"], wanted: np.ndarray, questions: Iterable[Question]
) -> list[tuple[Sequence, Decision | BrokenLogits]]:
    """What each request does with this forward, which gave the states of the `wanted` rows, (w,) in ascending order.

    Requests with the same rule and settings are decided together.

    A request with NaN or infinite logits gets its BrokenLogits; the others go on. The device is waited for once.
    """
    ordered = list(questions)
    if len(ordered) > 1:
        ordered.sort(key=lambda question: hash(_kind(question.sequence)))
    answers: list[tuple[Sequence, Decision | BrokenLogits]] = []
    for _, alike in groupby(ordered, key=lambda question: _kind(question.sequence)):
        group = list(alike)
        logits = _logits(network, head, hidden, wanted, group)
        seqs, asked = [question.sequence for question in group], [question.asked for question in group]
        answers += _Round(seqs, asked, logits, network.config.mask_token_id).answers()
    return answers


def _kind(seq: Sequence) -> tuple:
    s = seq.decoding.settings
    choice = s.temperature, s.top_k, s.top_p, s.cfg_scale, seq.strategy.judges(seq)
    return seq.decoding.rule, *choice, s.edit_threshold, s.remask_threshold


def _logits(
    network: Transformer, head: Head, hidden: Tensor, wanted: np.ndarray, group: list[Question]
) -> Float[Tensor, "n v"]:
    """Of the asked columns of all requests of a group, guided where they want it."""

    def of_lane(lane: int) -> Tensor:
        parts = [question.rows[lane] for question in group]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if rows is wanted or np.array_equal(rows, wanted):
            return network.suppress(head(hidden))
        places = torch.from_numpy(np.searchsorted(wanted, rows)).to(hidden.device)
        return network.suppress(head(hidden.index_select(0, places)))

    scale = group[0].sequence.decoding.settings.cfg_scale
    return guide(of_lane(0), of_lane(1), scale, network.config.mask_token_id) if scale > 0 else of_lane(0)


class _Round:
    """One group's decisions: grids are (requests, columns), lists are over the n asked columns."""

    def __init__(self, seqs: list[Sequence], asked: list[np.ndarray], logits: Tensor, mask_id: int | None) -> None:
        self.seqs, self.logits, self.mask_id = seqs, logits, mask_id
        self.rule, self.settings = seqs[0].decoding.rule, seqs[0].decoding.settings
        self.judged = seqs[0].strategy.judges(seqs[0])
        self.device = logits.device
        self.shape = len(seqs), max(len(seq.canvas.columns) for seq in seqs)
        self.asked = self._grid(asked)
        self.where = np.flatnonzero(self.asked)
        self.masks = self._grid([seq.canvas.open_masks() for seq in seqs])

    @cached_property
    def owner(self) -> np.ndarray:
        """Of each asked column, whose it is."""
        return self.where // self.shape[1]

    @cached_property
    def column(self) -> np.ndarray:
        """Of each asked column, its place in its row."""
        return self.where % self.shape[1]

    @cached_property
    def flat(self) -> Int[Tensor, " n"]:
        """Places of the asked columns in the grid."""
        return self._upload(self.where)

    def answers(self) -> list[tuple[Sequence, Decision | BrokenLogits]]:
        logits = self._boost(self.logits) if self.rule.remembers else self.logits
        address = self._address() if self.settings.temperature > 0 or self.rule.score == "order" else None
        signals = self._choose(logits, address)
        if self.rule.score == "order":
            assert address is not None
            score = uniform(Purpose.ORDER, **vars(address))
        else:
            score = getattr(signals, self.rule.score)
        commit = self._commit(self._spread(score))
        chosen = signals.token
        if self.judged:
            assert isinstance(signals, Signals) and address is not None
            chosen = self.seqs[0].strategy.judge(self.seqs, signals.probabilities, chosen, address)
        token, broken = self._spread(chosen), self._spread(signals.broken)
        grids = [token, broken, commit]
        if self.seqs[0].revises:
            assert isinstance(signals, Signals)
            token, *second = self._revise(signals, token)
            grids = [token, broken, commit, *second]
        tokens, bad, *flags = self._on_host(grids)
        decisions = [self._decision(i, tokens, flags) for i in range(len(self.seqs))]
        if any(seq.keep for seq in self.seqs):
            assert isinstance(signals, Signals)
            decisions = self._with_facts(signals, logits, decisions)
        return [
            (seq, BrokenLogits(torch.from_numpy(broken[asked])) if broken.any() else decision)
            for seq, decision, broken, asked in zip(self.seqs, decisions, bad, self.asked, strict=True)
        ]

    def _choose(self, logits: Tensor, address: Address | None) -> "Signals | _Read":
        """Tokens and how sure the model is of them: in one fused pass where that gives all that is needed."""
        s, plain = self.settings, not self.judged and not any(seq.revises or seq.keep for seq in self.seqs)
        if plain and s.top_k is None and s.top_p is None and one_pass(logits, s.temperature):
            where = {} if s.temperature == 0 or address is None else vars(address)
            return _Read(confidence(logits, mask_id=self.mask_id, temperature=s.temperature, **where))
        return choose(
            logits,
            mask_id=self.mask_id,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            address=address,
            check=False,
        )

    def _with_facts(self, signals: Signals, logits: Tensor, decisions: list[Decision]) -> list[Decision]:
        """Decisions with what recorders want to know beside them."""
        chosen = np.zeros(self.shape, np.int64)
        for row, decision in zip(chosen, decisions, strict=True):
            row[: len(decision.token)] = decision.token
        p = self._spread(signals.of(self._upload(chosen.reshape(-1)[self.where]))).cpu().numpy()
        most = min(max(seq.topk for seq in self.seqs), logits.shape[-1])
        top = logits.float().topk(most, dim=-1) if most else None
        found = []
        for i, (seq, decision) in enumerate(zip(self.seqs, decisions, strict=True)):
            width, facts = len(seq.canvas.columns), {}
            if "confidence" in seq.keep:
                facts["confidence"] = p[i, :width]
            if seq.topk and top is not None:
                tokens, values = (np.full((width, top.values.shape[1]), empty) for empty in (-1, np.nan))
                mine, columns = self._upload(self.owner == i), self.column[self.owner == i]
                tokens[columns], values[columns] = top.indices[mine].cpu().numpy(), top.values[mine].cpu().numpy()
                facts["topk"] = tokens[:, : seq.topk], values[:, : seq.topk]
            found.append(replace(decision, **facts))
        return found

    def _commit(self, score: Float[Tensor, "b w"]) -> Bool[Tensor, "b w"]:
        masks = self._upload(self.masks)
        commit = self.rule(score, masks, self._quota())
        if not any(len(seq.canvas.open) > 1 for seq in self.seqs):
            return commit
        front = (
            self._upload(self._grid([np.isin(seq.canvas.columns, seq.canvas.open[0].positions) for seq in self.seqs]))
            & masks
        )
        ordered = -score if self.rule.score == "entropy" else score
        return commit | best(ordered, front) & ~(commit & front).any(-1, keepdim=True)

    def _quota(self) -> Int[Tensor, " b"]:
        """The schedule's number for each request, by its first open block."""
        blocks = [(seq.canvas.open[0], seq.step - seq.canvas.open[0].started) for seq in self.seqs]
        shares = [schedule(len(block.positions), block.steps, step) for block, step in blocks]
        return self._upload(np.array(shares, np.int64))

    def _on_host(self, grids: list[Tensor]) -> list[np.ndarray]:
        """In the host's memory: the one synchronisation of a step. The first are tokens, the others flags."""
        if self.device.type == "cpu":
            return [x.numpy() for x in grids]
        token, *flags = torch.stack([x.long() for x in grids]).cpu().numpy()
        return [token, *(x > 0 for x in flags)]

    def _revise(self, signals: Signals, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Second thoughts about what earlier steps committed in the open blocks: tokens, edited ones, masked ones."""
        s = self.settings
        current = self._upload(self._listed([seq.canvas.tokens for seq in self.seqs]))
        committed = self._upload(~self.masks.reshape(-1)[self.where])
        gone, back = torch.zeros_like(committed), torch.zeros_like(committed)
        if s.edit_threshold is not None:
            gone, other = edits(signals, current, committed, s.edit_threshold)
            token = torch.where(self._spread(gone), self._spread(other), token)
        if s.remask_threshold is not None:
            times = self._upload(self._listed([seq.canvas.remasks for seq in self.seqs]))
            back = remasks(signals, current, committed & ~gone, times, s.remask_threshold)
        return token, self._spread(gone), self._spread(back)

    def _boost(self, logits: Tensor) -> Tensor:
        """Let the rule change the logits by what it remembers of each position of its block."""
        places = []
        for i, seq in enumerate(self.seqs):
            position = seq.canvas.columns[self.column[self.owner == i]]
            for block in seq.canvas.open:
                own = position[np.isin(position, block.positions)]
                if len(own):
                    if block.memory is None:
                        block.memory = torch.zeros(len(block.positions), logits.shape[-1], device=self.device)
                    places.append((block, self._upload(np.searchsorted(block.positions, own))))
        memory = torch.cat([block.memory[place] for block, place in places])
        logits, memory = self.rule.boost(logits, memory, self.mask_id)
        for (block, place), part in zip(places, memory.split([len(p) for _, p in places]), strict=True):
            block.memory[place] = part
        return logits

    def _address(self) -> Address:
        facts = np.array([(seq.request.seed, seq.request.sample) for seq in self.seqs], np.int64)
        seed, sample = self._upload(facts[self.owner].T)
        places = self._listed([np.arange(seq.capacity) for seq in self.seqs])
        parts = np.split(places, np.flatnonzero(np.diff(self.owner)) + 1)
        owners = [self.seqs[i] for i in dict.fromkeys(self.owner.tolist())]
        steps = [seq.strategy.luck(seq, part) for seq, part in zip(owners, parts, strict=True)]
        step, position = self._upload(np.concatenate(steps)), self._upload(places)
        return Address(seed=seed, sample=sample, step=step, position=position)

    def _listed(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Of arrays over each canvas, the entries at the asked columns: (n,)."""
        return np.concatenate(
            [
                a[seq.canvas.columns[self.column[self.owner == i]]]
                for i, (seq, a) in enumerate(zip(self.seqs, arrays, strict=True))
            ]
        )

    def _grid(self, parts: list[np.ndarray]) -> np.ndarray:
        if len(parts) == 1:
            return parts[0][None]
        grid = np.zeros(self.shape, bool)
        for row, part in zip(grid, parts, strict=True):
            row[: len(part)] = part
        return grid

    def _spread(self, listed: Tensor) -> Tensor:
        """From the asked columns to the grid, zero elsewhere."""
        if listed.device.type == "cpu":
            values = listed.numpy()
            host = np.zeros(self.shape, values.dtype)
            host.reshape(-1)[self.where] = values
            return torch.from_numpy(host)
        grid = listed.new_zeros(self.shape[0] * self.shape[1])
        return grid.index_copy_(0, self.flat, listed).view(self.shape)

    def _upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)

    def _decision(self, i: int, token: np.ndarray, flags: list[np.ndarray]) -> Decision:
        seq = self.seqs[i]
        width = len(seq.canvas.columns)
        commit, *second = (flag[i, :width] for flag in flags)
        edited, remasked = second or (None, None)
        decision = Decision(token[i, :width], commit, edited, remasked)
        decision = seq.strategy.resolve(seq, decision)
        return decision if seq.script is None else seq.script.decision(seq, decision)


@dataclass(frozen=True)
class _Read:
    """`Signals` from the fused kernel, as far as rules read them."""

    picked: Picked

    @property
    def token(self) -> Int[Tensor, " n"]:
        return self.picked.token

    @property
    def confidence(self) -> Float[Tensor, " n"]:
        return self.picked.p

    @property
    def margin(self) -> Float[Tensor, " n"]:
        return self.picked.first - self.picked.second

    @property
    def entropy(self) -> Float[Tensor, " n"]:
        return self.picked.entropy

    @property
    def broken(self) -> Bool[Tensor, " n"]:
        return ~self.picked.finite
