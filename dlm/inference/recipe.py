"""What requests of the same settings decide by, on the device: from hidden states to tokens and flags. Knows no request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dlm.diffusion.choose import Address, Signals, choose, guide
from dlm.diffusion.edit import edits, remasks
from dlm.diffusion.rng import Purpose, uniform
from dlm.diffusion.unmask import Rule, best
from dlm.kernels.dispatch import confidence, one_pass
from dlm.kernels.picked import Picked
from dlm.models.transformer import Transformer

Head = Callable[[Tensor], Tensor]
"""Hidden states (n, d) -> logits (n, v)."""
Judge = Callable[[Tensor, Tensor, Address], Tensor]


@dataclass(frozen=True)
class Recipe:
    """A group's settings, as far as its decisions depend on them.

    Its arrays, by name: `at` (n,), each asked column's place in the grid of (requests, columns); `masks` (b, w) and
    `quota` (b,); with `several` blocks open `front` (b, w), the columns of each first one; above temperature 0, or with
    rule `random`, `seed`, `sample`, `step` and `position`, (n,) each; where tokens may be revised `current`, `committed`
    and `times`, (n,) each; `rows0` and `rows1`, (n,), where the states of a branch are not just those that were asked for.
    """

    rule: Rule
    temperature: float
    top_k: int | None
    top_p: float | None
    cfg_scale: float
    edit_threshold: float | None
    remask_threshold: float | None
    several: bool = False
    confident: bool = False
    """Whether p of each token is asked for."""
    topk: int = 0
    """How many of the likeliest tokens are."""

    @property
    def revises(self) -> bool:
        return self.edit_threshold is not None or self.remask_threshold is not None

    @property
    def draws(self) -> bool:
        """Whether it needs random numbers."""
        return self.temperature > 0 or self.rule.score == "order"

    def logits(self, network: Transformer, head: Head, hidden: Tensor, x: Mapping[str, Tensor]) -> Float[Tensor, "n v"]:
        """Of the asked columns, guided where they want it."""

        def of_branch(branch: int) -> Tensor:
            rows = x.get(f"rows{branch}")
            return network.suppress(head(hidden if rows is None else hidden.index_select(0, rows)))

        mask_id = network.config.mask_token_id
        return guide(of_branch(0), of_branch(1), self.cfg_scale, mask_id) if self.cfg_scale > 0 else of_branch(0)

    def decide(
        self,
        logits: Float[Tensor, "n v"],
        x: Mapping[str, Tensor],
        mask_id: int | None,
        judge: Judge | None = None,
    ) -> "tuple[list[Tensor], Signals | None]":
        """Grids (b, w): tokens, broken logits, commits; then, where asked for, edits and returns to the mask, p of each
        token, and lists (n, k) of the likeliest tokens and their logits. Beside them what the tokens were chosen from.

        `judge` changes the tokens by what was drafted.
        """
        address = Address(**{name: x[name] for name in ("seed", "sample", "step", "position")}) if self.draws else None
        signals = self._choose(logits, address, mask_id, plain=judge is None)
        if self.rule.score == "order":
            assert address is not None
            score = uniform(Purpose.ORDER, **vars(address))
        else:
            score = getattr(signals, self.rule.score)
        commit = self._commit(spread(score, x), x)
        chosen = signals.token
        if judge is not None:
            assert isinstance(signals, Signals) and address is not None
            chosen = judge(signals.probabilities, chosen, address)
        second: list[Tensor] = []
        if self.revises:
            assert isinstance(signals, Signals)
            chosen, *flags = self._revise(signals, chosen, x)
            second = [spread(flag, x) for flag in flags]
        found = [spread(chosen, x), spread(signals.broken, x), commit, *second]
        if self.confident:
            assert isinstance(signals, Signals)
            found.append(spread(signals.of(chosen), x))
        if self.topk:
            top = logits.float().topk(min(self.topk, logits.shape[-1]), dim=-1)
            found += [top.indices, top.values]
        return found, signals if isinstance(signals, Signals) else None

    def _choose(self, logits: Tensor, address: Address | None, mask_id: int | None, plain: bool) -> "Signals | _Read":
        """Tokens and how sure the model is of them: in one fused pass where that gives all that is needed."""
        plain = plain and not (self.revises or self.confident or self.topk)
        if plain and self.top_k is None and self.top_p is None and one_pass(logits, self.temperature):
            where = {} if self.temperature == 0 or address is None else vars(address)
            return _Read(confidence(logits, mask_id=mask_id, temperature=self.temperature, **where))
        return choose(
            logits,
            mask_id=mask_id,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            address=address,
            check=False,
        )

    def _commit(self, score: Float[Tensor, "b w"], x: Mapping[str, Tensor]) -> Bool[Tensor, "b w"]:
        masks = x["masks"]
        commit = self.rule(score, masks, x["quota"])
        if not self.several:
            return commit
        front = x["front"] & masks
        ordered = -score if self.rule.score == "entropy" else score
        return commit | best(ordered, front) & ~(commit & front).any(-1, keepdim=True)

    def _revise(self, signals: Signals, token: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Second thoughts about what earlier steps committed in the open blocks: tokens, edited ones, masked ones."""
        current, committed = x["current"], x["committed"]
        gone, back = torch.zeros_like(committed), torch.zeros_like(committed)
        if self.edit_threshold is not None:
            gone, other = edits(signals, current, committed, self.edit_threshold)
            token = torch.where(gone, other, token)
        if self.remask_threshold is not None:
            back = remasks(signals, current, committed & ~gone, x["times"], self.remask_threshold)
        return token, gone, back


def spread(listed: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    """From the asked columns to the grid, zero elsewhere. A place past the grid's end is dropped."""
    shape, at = x["masks"].shape, x["at"]
    if listed.device.type == "cpu":  # numpy's calls take a third of torch's time
        values = listed.numpy()
        host = np.zeros(shape[0] * shape[1] + 1, values.dtype)
        host[at.numpy()] = values
        return torch.from_numpy(host[:-1].reshape(shape))
    grid = listed.new_zeros(shape[0] * shape[1] + 1)
    return grid.index_copy_(0, at, listed)[:-1].view(shape)


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
