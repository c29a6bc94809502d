"""The reference sampler: no cache, the whole canvas in every forward. Knows nothing of text; the engine must match it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.diffusion.choose import Address, Signals, choose, guide
from dlm.diffusion.edit import edits, remasks
from dlm.diffusion.rng import Purpose, uniform
from dlm.diffusion.unmask import Rule, schedule
from dlm.inference.config import SamplerConfig
from dlm.inference.plan import Block, Plan
from dlm.inference.request import Outcome, Request, StepEvent
from dlm.models.attention import AttentionSpec
from dlm.models.subnormals import subnormals_as_zeros
from dlm.models.transformer import Transformer

OnStep = Callable[[StepEvent], None]


@dataclass(eq=False)
class Row:
    """A request under way."""

    index: int
    request: Request
    blocks: Iterator[Block]
    block: Block = field(init=False)
    started: int = 0
    """Step at which the block began."""
    post_edits: int = 0
    nfe: int = 0


@subnormals_as_zeros()
def sample(
    network: Transformer,
    requests: Sequence[Request],
    plan: Plan,
    rule: Rule,
    settings: SamplerConfig,
    stop: frozenset[int] = frozenset(),
    on_step: OnStep | None = None,
) -> list[Outcome]:
    """Denoise a batch of requests of any lengths; each gets what it would get alone.

    A request ends after its last block or, unless it fills holes, after a block that holds a token of `stop`.
    """
    training = network.training
    network.eval()
    try:
        with torch.inference_mode():
            return Sampler(network, requests, plan, rule, settings, stop, on_step).run()
    finally:
        network.train(training)


class Sampler:
    """One batch from first to last step. Tensors are (requests, canvas); a step works on the rows still live."""

    def __init__(
        self,
        network: Transformer,
        requests: Sequence[Request],
        plan: Plan,
        rule: Rule,
        settings: SamplerConfig,
        stop: frozenset[int],
        on_step: OnStep | None,
    ) -> None:
        self.network, self.plan, self.rule, self.settings = network, plan, rule, settings
        self.stop, self.on_step = stop, on_step
        self.device = network.embed.weight.device
        self.mask_id = network.config.mask_token_id
        self.forwards = 2 if settings.cfg_scale > 0 else 1  # a step
        self.revises = settings.edit_threshold is not None or settings.remask_threshold is not None
        self.attention = None
        if plan.aligned and not requests[0].holes:
            self.attention = AttentionSpec("block_causal", plan.length_of_block(None))
        self.rows = [Row(i, request, plan.blocks(request)) for i, request in enumerate(requests)]
        self.step = 0
        shape = len(requests), max(plan.length(request) for request in requests)
        # Causal families have no mask: what stands at the position being predicted is then of no consequence.
        self.canvas = torch.full(shape, self.mask_id or 0, device=self.device)
        self.given = torch.zeros(shape, dtype=torch.bool, device=self.device)
        self.masked = torch.zeros_like(self.given)  # to be filled, in this block or a later one
        self.active = torch.zeros_like(self.given)  # of this block
        self.when = torch.full(shape, -1, device=self.device)
        self.remasked = torch.zeros(shape, dtype=torch.long, device=self.device)  # times
        self.memory: dict[int, Float[Tensor, "l v"]] = {}  # by row: what the rule remembers of its block
        for row, request in zip(self.rows, requests, strict=True):
            self.canvas[row.index, : len(request.ids)] = torch.tensor(request.ids, dtype=torch.long)
            self.masked[row.index] = True
            self.masked[row.index, : len(request.ids)] = False
            for hole in request.holes:
                self.masked[row.index, hole.start : hole.stop] = True
            self.given[row.index] = ~self.masked[row.index]

    def run(self) -> list[Outcome]:
        live = [row for row in self.rows if self._open(row)]
        while live:
            live = self._advance(live)
        outcomes = []
        for row in self.rows:
            length = row.block.length
            ids, when = self.canvas[row.index, :length].tolist(), self.when[row.index, :length].tolist()
            outcomes.append(Outcome(ids=ids, when=when, nfe=row.nfe))
        return outcomes

    def _open(self, row: Row) -> bool:
        """Begin the row's next block; False when there is none."""
        block = next(row.blocks, None)
        if block is None:
            return False
        row.block, row.started, row.post_edits = block, self.step, 0
        self.active[row.index] = False
        self.active[row.index, torch.tensor(block.positions, device=self.device)] = True
        if self.rule.remembers:
            shape = len(block.positions), self.network.config.vocab_size
            self.memory[row.index] = torch.zeros(shape, device=self.device)
        return True

    def _advance(self, live: list[Row]) -> list[Row]:
        """One forward for the live rows; returns those that go on."""
        index = torch.tensor([row.index for row in live], device=self.device)
        lengths = [row.block.length for row in live]
        longest = max(lengths)
        ids, active = self.canvas[index, :longest], self.active[index, :longest]
        masked = self.masked[index, :longest] & active
        asked = active if self.revises else masked
        signals, score = self._look(live, ids, active, asked, lengths)
        commit = self.rule(score, masked, self._quota(live))
        proposed = ids.masked_scatter(asked, signals.token)
        edited, remasked, proposed = self._revise(signals, index, ids, asked, masked, proposed)
        ids = torch.where(commit | edited, proposed, ids)
        if self.mask_id is not None:
            ids = ids.masked_fill(remasked, self.mask_id)
        self.canvas[index, :longest] = ids
        self.masked[index, :longest] = self.masked[index, :longest] & ~commit | remasked
        self.when[index, :longest] = torch.where(commit, self.step, self.when[index, :longest])
        for row in live:
            row.nfe += self.forwards
        if self.on_step is not None:
            self._tell(self.on_step, live, ids, commit, edited, remasked)
        self.step += 1
        clean = (~(self.masked[index, :longest] & active).any(-1)).tolist()
        had_masks, has_edits = masked.any(-1).tolist(), edited.any(-1).tolist()
        return [row for row, *facts in zip(live, clean, had_masks, has_edits, strict=True) if self._stays(row, *facts)]

    def _look(
        self, live: list[Row], ids: Tensor, active: Tensor, asked: Tensor, lengths: list[int]
    ) -> tuple[Signals, Float[Tensor, "b l"]]:
        """The forward: tokens for the `asked` positions, and what the rule wants to know of them."""
        longest = ids.shape[1]
        valid = None
        if min(lengths) < longest:
            valid = torch.arange(longest, device=self.device) < torch.tensor(lengths, device=self.device)[:, None]
        logits = self._predict(live, ids, asked, valid)
        if self.rule.remembers:
            logits = self._boost(live, active, asked, logits)
        address = None
        if self.settings.temperature > 0 or self.rule.score == "order":
            row, position = asked.nonzero(as_tuple=True)
            owners = [(r.request.seed, r.request.sample) for r in live]
            seed, number = torch.tensor(owners, device=self.device)[row].unbind(-1)
            address = Address(seed=seed, sample=number, step=torch.full_like(row, self.step), position=position)
        s = self.settings
        signals = choose(
            logits, mask_id=self.mask_id, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, address=address
        )
        if self.rule.score == "order":
            assert address is not None
            flat = uniform(Purpose.ORDER, **vars(address))
        else:
            flat = getattr(signals, self.rule.score)
        return signals, flat.new_zeros(asked.shape).masked_scatter(asked, flat)

    def _predict(self, live: list[Row], ids: Tensor, asked: Tensor, valid: Tensor | None) -> Float[Tensor, "n v"]:
        if self.forwards == 1:
            return self.network.predict(ids, asked, valid=valid, attention=self.attention)
        index = torch.tensor([row.index for row in live], device=self.device)
        assert self.mask_id is not None
        blind = ids.masked_fill(self.given[index, : ids.shape[1]], self.mask_id)
        both, valid = torch.cat((ids, blind)), None if valid is None else torch.cat((valid, valid))
        logits = self.network.predict(both, torch.cat((asked, asked)), valid=valid, attention=self.attention)
        seen, unseen = logits.chunk(2)
        return guide(seen, unseen, self.settings.cfg_scale, self.mask_id)

    def _boost(self, live: list[Row], active: Tensor, asked: Tensor, logits: Tensor) -> Float[Tensor, "n v"]:
        """Let the rule change the logits by what it remembers of each position of the block."""
        rank = active.long().cumsum(-1) - 1
        places = [rank[i][asked[i]] for i in range(len(live))]
        memory = torch.cat([self.memory[row.index][place] for row, place in zip(live, places, strict=True)])
        logits, memory = self.rule.boost(logits, memory, self.mask_id)
        for row, place, part in zip(live, places, memory.split([len(place) for place in places]), strict=True):
            self.memory[row.index][place] = part
        return logits

    def _quota(self, live: list[Row]) -> Int[Tensor, " b"]:
        """The schedule's number for each row."""
        blocks = [(row.block, self.step - row.started) for row in live]
        shares = [schedule(len(block.positions), block.steps, step) for block, step in blocks]
        return torch.tensor(shares, device=self.device)

    def _revise(
        self, signals: Signals, index: Tensor, ids: Tensor, asked: Tensor, masked: Tensor, proposed: Tensor
    ) -> tuple[Bool[Tensor, "b l"], Bool[Tensor, "b l"], Int[Tensor, "b l"]]:
        """Second thoughts about what earlier steps committed in this block: edited, remasked, and the tokens proposed."""
        edited = remasked = torch.zeros_like(asked)
        if not self.revises:
            return edited, remasked, proposed
        settings, longest = self.settings, ids.shape[1]
        current, committed = ids[asked], ~masked[asked]
        gone = torch.zeros_like(committed)
        if settings.edit_threshold is not None:
            gone, token = edits(signals, current, committed, settings.edit_threshold)
            edited = edited.masked_scatter(asked, gone)
            proposed = torch.where(edited, proposed.masked_scatter(asked, token), proposed)
        if settings.remask_threshold is not None:
            times = self.remasked[index, :longest]
            back = remasks(signals, current, committed & ~gone, times[asked], settings.remask_threshold)
            remasked = remasked.masked_scatter(asked, back)
            self.remasked[index, :longest] = times + remasked
        return edited, remasked, proposed

    def _stays(self, row: Row, clean: bool, had_masks: bool, has_edits: bool) -> bool:
        """Whether the row goes on; opens its next block when this one is done."""
        if not clean:
            return True
        if self.settings.edit_threshold is not None:
            row.post_edits += not had_masks
            if (had_masks or has_edits) and row.post_edits < self.settings.max_post_edit_steps:
                return True
        written = self.canvas[row.index, torch.tensor(row.block.positions, device=self.device)].tolist()
        if not row.request.holes and not self.stop.isdisjoint(written):
            return False
        return self._open(row)

    def _tell(
        self, on_step: OnStep, live: list[Row], ids: Tensor, commit: Tensor, edited: Tensor, remasked: Tensor
    ) -> None:
        with torch.inference_mode(False):  # what leaves this room are ordinary tensors
            canvas, *changes = (x.clone().cpu() for x in (ids, commit, edited, remasked))
        event = StepEvent(
            step=self.step,
            nfe=live[0].nfe,
            request_ids=tuple(row.request.request_id for row in live),
            prompt_lengths=tuple(row.request.prompt_length for row in live),
            lengths=tuple(row.block.length for row in live),
            canvas=canvas,
            committed=changes[0],
            edited=changes[1],
            remasked=changes[2],
        )
        on_step(event)
