"""Requests through a latent model: prompts as clean latents, batches of one shape, tokens by step, results and traces."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dlm.diffusion.choose import Address, choose
from dlm.errors import UserError
from dlm.inference.decoding import Decoding
from dlm.inference.recording import REPLACE, SET, facts_of
from dlm.inference.request import Generation, Outcome, StepEvent
from dlm.inference.texts import result_of
from dlm.latent.sampler import Start, one_step, sample
from dlm.models.deterministic import FixedRows

if TYPE_CHECKING:
    from dlm.latent.lm import LatentLM

STEPS = 32
"""Steps in all, unless given."""


def write(
    lm: "LatentLM", decodings: Sequence[Decoding], batch_size: int, trace: Any = None, on_step: Any = None
) -> list[Generation]:
    """Decode these; results in their order. A request's tokens do not depend on the others."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for number, decoding in enumerate(decodings):
        request = decoding.request
        if lm.network.shape.kind == "perceiver" and request.ids:
            raise UserError(
                f"prompt {number}: model {lm.name!r} is a perceiver, whose latents hold a whole text: it writes from an "
                "empty prompt only"
            )
        groups[len(request.ids), request.gen_length, decoding.settings].append(number)
    recorders = [_recorder(lm, decoding, trace) for decoding in decodings]
    results: dict[int, Generation] = {}
    try:
        for numbers in groups.values():
            for at in range(0, len(numbers), batch_size):
                chosen = numbers[at : at + batch_size]
                rows = Rows(lm, [decodings[n] for n in chosen], [recorders[n] for n in chosen], on_step)
                results.update(zip(chosen, rows.run(), strict=True))
    finally:
        for recorder in recorders:
            if recorder is not None:
                recorder.drop()  # one that has finished was delivered
    return [results[number] for number in range(len(decodings))]


def _recorder(lm: "LatentLM", decoding: Decoding, trace: Any) -> Any:
    if trace is None:
        return None
    request, settings = decoding.request, decoding.settings
    read = settings.model_dump(mode="json", include={"gen_length", "steps", "temperature", "cfg_scale", "solver"})
    return trace.recorder(
        request.request_id,
        list(request.ids),
        mask_id=lm.mask_id,
        length=len(request.ids) + request.gen_length,
        meta={"seed": request.seed, "sample": request.sample},
        context={**facts_of(trace, lm), "kind": "latent", "sampler": read},
    )


class Rows:
    """Requests of one shape and one set of settings, decoded together."""

    def __init__(self, lm: "LatentLM", decodings: Sequence[Decoding], recorders: Sequence[Any], on_step: Any) -> None:
        self.lm, self.network, self.decodings, self.recorders, self.on_step = (
            lm,
            lm.network,
            decodings,
            recorders,
            on_step,
        )
        request, device = decodings[0].request, lm.device
        self.settings = decodings[0].settings
        self.given = len(request.ids)
        self.length = self.given + request.gen_length
        chunk = self.network.shape.kind == "chunk"
        self.canvas_length = self.length if chunk else self.network.length
        if self.length > self.canvas_length:
            raise UserError(
                f"gen_length = {request.gen_length}: model {lm.name!r} writes {self.canvas_length} tokens at most"
            )
        self.latents = self.network.shape.latents_of(self.canvas_length)
        ids = torch.tensor([decoding.request.ids for decoding in decodings], dtype=torch.long, device=device)
        self.canvas = torch.full((len(decodings), self.length), lm.mask_id or 0, device=device)
        self.canvas[:, : self.given] = ids
        self.when = torch.full_like(self.canvas, -1)
        self.seed = torch.tensor([decoding.request.seed for decoding in decodings], device=device)
        self.sample = torch.tensor([decoding.request.sample for decoding in decodings], device=device)
        self.nfe = [0] * len(decodings)
        self.live = torch.ones(len(decodings), dtype=torch.bool, device=device)
        self.step = 0

    def run(self) -> list[Generation]:
        """Their results, in order."""
        # A product has the rows of one request: no bit of it depends on how many there are.
        with FixedRows(max(self.latents, 2)), torch.no_grad():
            start = self._start()
            if self.settings.solver == "adapter":
                self._watch(one_step(self.network, start), range(self.latents), 1, True)
            else:
                size = self.network.shape.block_length or self.latents
                open_blocks = -(-self.latents // size) - int(start.clean[0].sum()) // size
                steps = max(1, (self.settings.steps or STEPS) // open_blocks)
                how = {"solver": self.settings.solver or "euler", "scale": self.settings.cfg_scale}
                sample(self.network, start, steps=steps, **how, watch=self._watch)
        results = []
        for row, decoding in enumerate(self.decodings):
            ids, when = self.canvas[row].tolist(), self.when[row].tolist()
            result = result_of(self.lm, decoding, Outcome(ids=ids, when=when, nfe=max(1, self.nfe[row])))
            if (recorder := self.recorders[row]) is not None:
                recorder.finish(nfe=result.nfe, finish_reason=result.finish_reason)
            results.append(result)
        return results

    def _start(self) -> Start:
        """The prompt's whole chunks as clean latents; its other tokens are clamped as tokens."""
        b, size = len(self.decodings), self.network.shape.tokens_per_latent
        z = torch.zeros(b, self.latents, self.network.shape.channels, device=self.lm.device)
        clean = torch.zeros(b, self.latents, dtype=torch.bool, device=self.lm.device)
        if known := self.given // size:
            z[:, :known] = self.network.encode(self.canvas[:, : known * size])
            clean[:, :known] = True
        return Start(z=z, clean=clean, seed=self.seed, sample=self.sample)

    def _watch(self, z: Tensor, latents: range, forwards: int, final: bool) -> bool:
        """Decode what latents point to, note what changed, and say whether every row has written its end."""
        first, last = 0, self.length
        if self.network.shape.kind == "chunk":
            size = self.network.shape.tokens_per_latent
            first, last = max(self.given, latents.start * size), min(self.length, latents.stop * size)
        tokens = self._tokens(z, first, last)
        before = self.canvas[:, first:last]
        fresh = (self.when[:, first:last] < 0) & self.live[:, None]
        changed = (tokens != before) & ~fresh & self.live[:, None]
        self.canvas[:, first:last] = torch.where(fresh | changed, tokens, before)
        self.when[:, first:last] = torch.where(fresh | changed, self.step, self.when[:, first:last])
        self._tell(first, last, fresh, changed, forwards)
        for row in self.live.nonzero().flatten().tolist():
            self.nfe[row] = forwards
        self.step += 1
        if final and last < self.length:
            stop = torch.tensor(sorted(self.decodings[0].stop), device=self.canvas.device)
            self.live &= ~torch.isin(self.canvas[:, self.given : last], stop).any(-1)
        return not bool(self.live.any())

    def _tokens(self, z: Tensor, first: int, last: int) -> Int[Tensor, "b m"]:
        """Tokens first..last as the latents so far spell them, drawn by `temperature`."""
        s = self.settings
        logits = self.network.decode(z, last if self.network.shape.kind == "chunk" else self.canvas_length)[
            :, first:last
        ]
        b, m, _ = logits.shape
        address = None
        if s.temperature > 0:
            position = torch.arange(first, last, device=logits.device).expand(b, m).flatten()
            seed, number = (x[:, None].expand(b, m).flatten() for x in (self.seed, self.sample))
            address = Address(seed=seed, sample=number, step=torch.zeros_like(position), position=position)
        more = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "address": address}
        return choose(logits.flatten(0, 1), mask_id=self.lm.mask_id, **more).token.view(b, m)

    def _tell(self, first: int, last: int, fresh: Bool[Tensor, "b m"], changed: Bool[Tensor, "b m"], nfe: int) -> None:
        """Recorders and whoever watches the steps."""
        for row, recorder in enumerate(self.recorders):
            if recorder is None or not self.live[row]:
                continue
            where = (fresh | changed)[row].nonzero().flatten()
            kinds = torch.where(changed[row, where], REPLACE, SET).cpu().numpy()
            tokens, canvas = self.canvas[row, first:last][where].cpu().numpy(), self.canvas[row].cpu().numpy()
            recorder.commit(
                self.step, (where + first).cpu().numpy(), tokens, kinds, length=self.length, canvas=canvas.copy()
            )
        if self.on_step is not None:
            committed, edited = (torch.zeros_like(self.canvas, dtype=torch.bool) for _ in range(2))
            committed[:, first:last], edited[:, first:last] = fresh, changed
            self.on_step(
                StepEvent(
                    step=self.step,
                    nfe=nfe,
                    request_ids=tuple(d.request.request_id for d in self.decodings),
                    prompt_lengths=(self.given,) * len(self.decodings),
                    lengths=(self.length,) * len(self.decodings),
                    canvas=self.canvas.cpu(),
                    committed=committed.cpu(),
                    edited=edited.cpu(),
                    remasked=torch.zeros_like(committed).cpu(),
                )
            )
