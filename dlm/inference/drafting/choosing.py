"""From a draft's logits to its guesses: greedy, by the target's own noise, or drawn; by a selector where it has one."""

from collections.abc import Mapping
from collections.abc import Sequence as Sized
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from dlm.diffusion.choose import Address, argmax, choose, distribution
from dlm.diffusion.rng import Purpose, gumbel
from dlm.diffusion.speculate import Drawn, draw
from dlm.inference.drafting.addresses import address_of, addresses
from dlm.inference.drafting.drafter import Guess, Wish
from dlm.models.draft_second import CandidateSelector


@dataclass(frozen=True)
class Kind:
    """Settings by which requests have their drafts chosen together."""

    temperature: float
    top_k: int | None
    top_p: float | None
    verify: str

    @classmethod
    def of(cls, wish: Wish) -> "Kind":
        s = wish.sequence.decoding.settings
        return cls(s.temperature, s.top_k, s.top_p, s.verify) if s.temperature > 0 else cls(0.0, None, None, "match")


class Choosing:
    """The choice for a step's wishes: `arrays` are what the device needs, `guesses` is its part."""

    def __init__(self, wishes: Sized[Wish], selector: CandidateSelector | None = None) -> None:
        self.wishes, self.selector = wishes, selector
        self.groups: dict[Kind, list[int]] = {}  # in an order that processes agree on
        for number, wish in enumerate(wishes):
            self.groups.setdefault(Kind.of(wish), []).append(number)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Of every group under its number: its rows among all, its random numbers' addresses, its selector's walk."""
        found = {}
        ends = np.cumsum([wish.count for wish in self.wishes])
        for number, (kind, members) in enumerate(self.groups.items()):
            mine = [self.wishes[i] for i in members]
            part = {} if kind.temperature == 0 else addresses(mine)
            if len(self.groups) > 1:
                part["rows"] = np.concatenate([np.arange(ends[i] - self.wishes[i].count, ends[i]) for i in members])
            if self.selector is not None:
                part |= _walk(mine)
            found |= {f"choice {number} {name}": values for name, values in part.items()}
        return found

    def guesses(
        self, hidden: Float[Tensor, "n d"], logits: Float[Tensor, "n v"], x: Mapping[str, Tensor]
    ) -> list[Guess]:
        """Tokens of each wish from its rows; `x` has the arrays as tensors."""
        found: dict[int, Guess] = {}
        for number, (kind, members) in enumerate(self.groups.items()):
            start = f"choice {number} "
            mine = {name.removeprefix(start): part for name, part in x.items() if name.startswith(start)}
            rows = mine.get("rows")
            parts = (hidden, logits) if rows is None else (hidden.index_select(0, rows), logits.index_select(0, rows))
            found |= zip(members, self._chosen(kind, [self.wishes[i] for i in members], *parts, mine), strict=True)
        return [found[i] for i in range(len(self.wishes))]

    def _chosen(
        self, kind: Kind, wishes: list[Wish], hidden: Tensor, logits: Tensor, x: Mapping[str, Tensor]
    ) -> list[Guess]:
        address = address_of(x) if kind.temperature > 0 else None
        drawn, warm = None, {"temperature": kind.temperature, "top_k": kind.top_k, "top_p": kind.top_p}
        if self.selector is not None:
            tokens, drawn = self._walked(self.selector, kind, wishes, hidden, logits, address, x)
        elif address is None:
            tokens = argmax(logits)
        elif kind.verify == "match":  # the same noise as the target's: where the two agree, so do their draws
            tokens = choose(logits, mask_id=None, **warm, address=address, check=False).token
        else:
            drawn = Drawn(distribution(logits, **warm))
            tokens = draw(drawn.p, Purpose.DRAFT, address)
        return guesses_of(tokens, drawn, [wish.count for wish in wishes])

    def _walked(
        self,
        selector: CandidateSelector,
        kind: Kind,
        wishes: list[Wish],
        hidden: Tensor,
        logits: Tensor,
        address: Address | None,
        x: Mapping[str, Tensor],
    ) -> tuple[Int[Tensor, " n"], Drawn | None]:
        """DFlash 2: each token among its position's candidates, after the one chosen before it."""
        values, candidates = selector.candidates(logits)
        noise = None
        if address is not None and kind.verify == "match":
            noise = gumbel(**vars(address), vocab_size=logits.shape[-1]).gather(-1, candidates)
        chosen, probabilities = torch.zeros_like(candidates[:, 0]), torch.zeros_like(values)
        before = x["anchor"]
        for place in range(max(wish.count for wish in wishes)):
            rows, who = x[f"rows of {place}"], x[f"wishes of {place}"]
            scores = selector.scores(before[who], hidden[rows], values[rows], candidates[rows])
            if address is None:
                column = scores.argmax(-1)
            elif noise is not None:
                column = (scores / kind.temperature + noise[rows]).argmax(-1)
            else:
                probabilities[rows] = distribution(scores, kind.temperature)
                column = draw(
                    probabilities[rows], Purpose.DRAFT, Address(**{k: v[rows] for k, v in vars(address).items()})
                )
            tokens = candidates[rows].gather(-1, column[:, None])[:, 0]
            chosen[rows] = tokens
            before = before.index_copy(0, who, tokens)
        return chosen, Drawn(probabilities, candidates) if address is not None and kind.verify == "reject" else None


def guesses_of(tokens: Int[Tensor, " n"], drawn: Drawn | None, counts: Sized[int]) -> list[Guess]:
    """One guess for each of `counts`, that many tokens. A GPU keeps the tokens: nobody waits for them."""
    ends = np.cumsum(counts)
    rows = [slice(int(end) - count, int(end)) for count, end in zip(counts, ends, strict=True)]
    known = None if tokens.is_cuda else tokens.cpu().numpy()
    return [
        Guess(
            np.zeros(row.stop - row.start, np.int64) if known is None else known[row],
            None if drawn is None else drawn.rows(row),
            forwards=1,
            there=tokens[row] if known is None else None,
        )
        for row in rows
    ]


def _walk(wishes: list[Wish]) -> dict[str, np.ndarray]:
    """Of each place in a block, which rows and wishes have it; of each wish, its newest token."""
    counts = np.array([wish.count for wish in wishes])
    starts = np.cumsum(counts) - counts
    found = {"anchor": np.array([wish.sequence.canvas.tokens[wish.anchor] for wish in wishes], np.int64)}
    for place in range(counts.max()):
        alive = np.flatnonzero(counts > place)
        found |= {f"wishes of {place}": alive, f"rows of {place}": starts[alive] + place}
    return found
