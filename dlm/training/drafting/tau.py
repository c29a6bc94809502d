"""tau, tokens a verification: measured in the decoding loop, and what the training forward makes of the same text."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from dlm.inference.generation import generate
from dlm.models.draft import Draft
from dlm.training.batch import Batch
from dlm.training.drafting.config import DraftConfig
from dlm.training.drafting.objective import block_states
from dlm.training.drafting.states import TargetStates
from dlm.training.masking.draft import DraftMasking
from dlm.training.validate import HeldOut


@dataclass(frozen=True)
class Tau:
    """tau three ways; each is the mean over all verifications.

    loop: decoding greedily with the draft. Known to differ from what training promises where a draft is fed otherwise than
    it was trained. forward: what the training forward accepts of the very texts that the loop wrote, from the same
    beginnings: no different, unless training and decoding disagree. held_out: the same of the held-out answers themselves,
    which the target might not have written so.
    """

    loop: float | None
    forward: float | None
    held_out: float
    first: float
    """Share of held-out anchors whose next token is drafted right."""
    texts: int

    def row(self) -> dict[str, float]:
        """For metrics.jsonl."""
        found = {"tau_held_out": self.held_out, "accuracy_first": self.first}
        if self.loop is not None and self.forward is not None:
            found |= {"tau": self.loop, "tau_training": self.forward, "tau_gap": self.loop - self.forward}
        return found

    def __str__(self) -> str:
        rest = f"{self.held_out:.3f} on held-out text, whose next token it drafts right {self.first:.1%} of the time"
        if self.loop is None or self.forward is None:
            return f"tau {rest}"
        return (
            f"tau {self.loop:.3f} decoding {self.texts} held-out beginnings; {self.forward:.3f} by the training forward over "
            f"the same texts (gap {self.loop - self.forward:+.3f}); {rest}"
        )


class TauMeter:
    """Measures a draft on the beginnings of held-out sequences."""

    def __init__(self, config: DraftConfig, masking: DraftMasking, states: TargetStates) -> None:
        self.config, self.masking, self.states = config, masking, states

    @torch.no_grad()
    def measure(self, draft: Draft, held_out: HeldOut) -> Tau:
        """`draft` may hold averaged weights."""
        device = draft.fc.weight.device
        rows = [(ids, answer) for batch in held_out.batches for ids, answer in zip(*batch, strict=True)]
        accepted, right, anchors = [], 0, 0
        for ids, answer in rows:
            matched, fit = self.matched(draft, ids.to(device), answer.to(device))
            right, anchors = right + int((matched[fit] > 0).sum()), anchors + int(fit.sum())
            accepted += walked(matched.tolist(), fit.tolist())
        prompts = self.prompts(rows) if self.config.tau_prompts else []
        loop, forward = self._decoded(draft, prompts) if prompts else ([], [])
        return Tau(
            _mean(loop) if loop else None,
            _mean(forward) if loop else None,
            _mean(accepted) if accepted else 0.0,
            right / max(1, anchors),
            len(prompts),
        )

    def prompts(self, rows: Sequence[tuple[Tensor, Tensor]]) -> list[list[int]]:
        """What stands before the answer, or the first half where all is one; of several documents the last one's part."""
        found = []
        for ids, answer in rows:
            cut = int(answer.long().argmax()) or len(ids) // 2
            begin = cut
            while begin and not (self.masking.apart and int(ids[begin - 1]) == self.masking.eos_id):
                begin -= 1
            if begin < cut:
                found.append(ids[begin:cut].tolist())
            if len(found) == self.config.tau_prompts:
                break
        return found

    def _decoded(self, draft: Draft, prompts: list[list[int]]) -> tuple[list[int], list[int]]:
        """What each verification of the loop added, and what the training forward says it should have."""
        target, device = draft.target, draft.fc.weight.device
        room = target.config.max_position_embeddings - max(map(len, prompts))
        if room < 2:
            return [], []
        length = min(self.config.tau_length, room)
        results = generate(target, prompts, draft=draft, gen_length=length, temperature=0.0, batch_size=16)
        loop, forward, joined = [], [], copy(self.masking)
        joined.apart = False  # what is decoded is one document
        for prompt, result in zip(prompts, results, strict=True):
            ids = torch.tensor(prompt + result.tokens, device=device)
            answer = torch.arange(len(ids), device=device) >= len(prompt)
            loop += result.accepted or []
            if len(result.tokens) > 1:
                room = len(prompt) + length
                forward += walked(*(x.tolist() for x in self.matched(draft, ids, answer, joined, room)))
        return loop, forward

    def matched(
        self,
        draft: Draft,
        ids: Int[Tensor, " l"],
        answer: Tensor,
        masking: DraftMasking | None = None,
        room: int | None = None,
    ) -> tuple[Int[Tensor, " l"], Tensor]:
        """Of each position, were it an anchor, how many of its first drafted tokens are the text's; and where one may be."""
        masking = masking or self.masking
        one = Batch(ids[None], answer[None], torch.zeros(1, dtype=torch.long, device=ids.device), 0, 1)
        fit = masking.fit(one)[0]
        counts = torch.zeros_like(ids)
        features = None
        for anchors in fit.nonzero()[:, 0].split(self.masking.num_anchors):
            blocks = masking.blocks(one, anchors[None], room)
            if features is None:
                features = self.states.live(one.input_ids, blocks.context_positions)
            hidden = block_states(draft, blocks, features)[0]
            tokens = drafted(draft, hidden, ids[anchors])
            counts[anchors] = ((tokens == blocks.targets[0]) & blocks.asked[0]).long().cumprod(-1).sum(-1)
        return counts, fit


def drafted(draft: Draft, hidden: Tensor, anchors: Int[Tensor, " n"]) -> Int[Tensor, "n k"]:
    """The tokens that a draft guesses greedily from its blocks' states (n, k, d)."""
    logits = draft.logits(hidden)
    selector = draft.candidate_selector
    if selector is None:
        return logits.argmax(-1)
    values, candidates = selector.candidates(logits)
    before, found = anchors, []
    for place in range(hidden.shape[1]):
        scores = selector.scores(before, hidden[:, place], values[:, place], candidates[:, place])
        before = candidates[:, place].gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
        found.append(before)
    return torch.stack(found, dim=-1)


def walked(matched: Sequence[int], fit: Sequence[bool]) -> list[int]:
    """What verifications would add, one after the other over a text: what is drafted right, and the target's own token.

    An anchor that is fit has a token behind it. Each verification begins where the last one ended; the text's end clips it.
    """
    added, at, size = [], 0, len(fit)
    while at < size:
        if not fit[at]:
            at += 1
            continue
        end = at + 1
        while end < size and fit[end]:
            end += 1
        added.append(min(matched[at] + 1, end - at))  # `end` is the last token that can be drafted
        at += added[-1]
    return added


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)
