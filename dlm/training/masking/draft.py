"""Blocks that a draft is asked to fill: each begins at an anchor, a token that stands, and goes on in masks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm.diffusion.rng import Purpose, uniform
from dlm.training.batch import Batch
from dlm.training.masking.view import documents

if TYPE_CHECKING:
    from dlm.models.draft import Draft


@dataclass(frozen=True)
class Blocks:
    """The n blocks of each row of a batch, B rows each: row j·B + i of `input_ids` is row i of block j."""

    input_ids: Int[Tensor, "b q"]
    positions: Int[Tensor, "b q"]
    context_positions: Int[Tensor, "b l"]
    anchors: Int[Tensor, "b n"]
    """Where the anchors stand in their rows."""
    begin: Int[Tensor, "b n"]
    """Where their documents begin there."""
    targets: Int[Tensor, "b n k"]
    """The tokens behind each anchor; k = B - 1."""
    rows: Int[Tensor, "b n"]
    """How many rows each block has: B, or fewer where a text has no room for more. Nobody sees the others."""
    asked: Bool[Tensor, "b n k"]
    """Which of them are drafted: those up to the end of the answer, of the document, of the text, and up to a token that
    the draft cannot draft."""

    @property
    def size(self) -> int:
        """B."""
        return self.targets.shape[2] + 1

    def sight(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Whether row q of the blocks sees key k of [the text's states | the blocks], as FlexAttention asks it.

        A block sees the states of its own document before its anchor, and itself. The anchor's own state is not there
        when a draft is decoded: the target has not read it yet.
        """
        length, size, anchors, begin, rows = (
            self.context_positions.shape[1],
            self.size,
            self.anchors,
            self.begin,
            self.rows,
        )

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            block = q // size
            before = (k < anchors[batch, block]) & (k >= begin[batch, block])
            own = ((k - length) // size == block) & ((k - length) % size < rows[batch, block])
            return (k < length) & before | (k >= length) & own

        return sees

    def allowed(self) -> Bool[Tensor, "b q k"]:
        """The same as a table."""
        device, (b, q) = self.input_ids.device, self.input_ids.shape
        rows = torch.arange(b, device=device)[:, None, None]
        keys = torch.arange(self.context_positions.shape[1] + q, device=device)
        return self.sight()(rows, rows, torch.arange(q, device=device)[:, None], keys)

    def block_mask(self) -> Any:
        """The same for FlexAttention, which leaves out what is not seen."""
        from torch.nn.attention.flex_attention import create_block_mask

        b, q = self.input_ids.shape
        return create_block_mask(self.sight(), b, None, q, self.context_positions.shape[1] + q, self.input_ids.device)


class DraftMasking:
    """Anchors are drawn among the positions a of an answer whose next token belongs to it too, and that end no text.

    With `apart`, documents that share a row are told apart by the end-of-text that closes each, as in `documents`.
    """

    def __init__(self, draft: "Draft", num_anchors: int, apart: bool, seed: int) -> None:
        self.size, self.mask_id, self.eos_id = draft.config.block_size, draft.config.mask_token_id, draft.target.eos_id
        self.num_anchors, self.apart, self.seed, self.drafts = num_anchors, apart, seed, draft.drafts

    def fit(self, batch: Batch) -> Bool[Tensor, "b l"]:
        """Where an anchor may be."""
        pairs = batch.answer[:, :-1] & batch.answer[:, 1:] & ~self._ends(batch.input_ids)[:, :-1]
        return torch.cat((pairs, torch.zeros_like(batch.answer[:, :1])), dim=1)

    def draw(self, batch: Batch) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
        """Anchors of each row in their order, and which of them are any: a row may have fewer that are fit."""
        fit, at = self.fit(batch), torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        number = uniform(Purpose.ANCHOR, seed=self.seed, sample=batch.index[:, None], step=batch.step, position=at)
        order = number.to(fit.device).masked_fill(~fit, 2.0).argsort(-1)
        anchors = order[:, : max(1, min(self.num_anchors, fit.shape[1] - 1))].sort(-1).values
        return anchors, fit.gather(-1, anchors)

    def blocks(self, batch: Batch, anchors: Int[Tensor, "b n"] | None = None, room: int | None = None) -> Blocks:
        """The blocks at these anchors, all of them fit; drawn ones unless given. `room`: positions a decoded text has."""
        used = None
        if anchors is None:
            anchors, used = self.draw(batch)
        ids, (b, l), n = batch.input_ids, batch.input_ids.shape, anchors.shape[1]
        at, rows = torch.arange(l, device=ids.device).expand_as(ids), torch.arange(self.size, device=ids.device)
        position = at if self.eos_id is None or not self.apart else documents(ids, self.eos_id, opens=False)
        place = (anchors[..., None] + rows[1:]).flatten(1)  # of the tokens behind each anchor, in the row
        inside = place.clamp(max=l - 1)
        targets = ids.gather(-1, inside).view(b, n, -1)
        going = (batch.answer.gather(-1, inside) & (place < l)).view(b, n, -1)
        going[..., 1:] &= ~self._ends(targets)[..., :-1]  # nothing is decoded behind an end-of-text
        going &= self.drafts(targets)  # the target writes such a token itself, and drafting begins anew behind it
        if used is not None:
            going = going & used[..., None]
        canvas = torch.full((b, n, self.size), self.mask_id, dtype=ids.dtype, device=ids.device)
        canvas[..., 0] = ids.gather(-1, anchors)
        first = position.gather(-1, anchors)
        return Blocks(
            input_ids=canvas.flatten(1),
            positions=(first[..., None] + rows).flatten(1),
            context_positions=position,
            anchors=anchors,
            begin=anchors - first,
            targets=targets,
            rows=torch.full_like(anchors, self.size) if room is None else (room - anchors).clamp(max=self.size),
            asked=going.long().cumprod(-1).bool(),
        )

    def _ends(self, ids: Int[Tensor, "*b l"]) -> Bool[Tensor, "*b l"]:
        return torch.zeros_like(ids, dtype=torch.bool) if self.eos_id is None else ids == self.eos_id
