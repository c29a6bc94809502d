"""Samplers made of dice: they keep every canvas they had, and tell a recorder only what changed."""

from dataclasses import dataclass, field

import numpy as np

from dlm.trace.events import ACCEPT, MASK, REJECT, REPLACE, SET
from dlm.trace.record import Recorder
from dlm.trace.trace import Trace

MASK_ID = 3


@dataclass
class Run:
    """What a sampler did: the canvas before the first and after each step, and what a recorder made of it."""

    canvases: list[np.ndarray]
    recorder: Recorder
    trace: Trace = field(init=False)

    def __post_init__(self) -> None:
        self.trace = self.recorder.trace()

    def padded(self) -> np.ndarray:
        """All canvases as one array, what is not there yet as masks."""
        length = len(self.canvases[-1])
        return np.stack([np.pad(c, (0, length - len(c)), constant_values=MASK_ID) for c in self.canvases])


def run(
    rng: np.random.Generator, length: int, steps: int, *, vocab=32_000, prompt=0, holes=False, grows=False,
    edits=0.0, remasks=0.0, drafts=0.0, keep: tuple[str, ...] = (), name="r", meta: dict | None = None,
) -> Run:  # fmt: skip
    """A denoising of `length` positions in `steps` steps; rates are chances a position has at each step."""
    canvas = np.full(length, MASK_ID, np.int32)
    canvas[:prompt] = rng.integers(4, vocab, prompt)
    if holes:
        here = rng.random(length) < 0.4
        canvas[here] = rng.integers(4, vocab, int(here.sum()))
    size = max(prompt, length // 3) if grows else length
    canvas[size:] = MASK_ID  # what comes later comes masked
    canvases = [canvas[:size].copy()]
    recorder = Recorder(name, canvases[0].copy(), mask_id=MASK_ID, keep=keep, meta=meta)
    for step in range(steps):
        if grows and rng.random() < 0.5:
            size = min(length, size + max(1, length // 5))
        seen = canvas[:size]
        kind = np.full(size, -1)
        masked = seen == MASK_ID
        quota = -(-int(masked.sum()) // max(1, steps - step)) if rng.random() < 0.95 else 0
        chosen = rng.permutation(np.flatnonzero(masked))[:quota]
        kind[chosen] = np.where(rng.random(len(chosen)) < drafts, ACCEPT, SET)
        kind[~masked & (rng.random(size) < edits)] = REPLACE
        kind[~masked & (rng.random(size) < remasks)] = MASK
        kind[masked & (kind < 0) & (rng.random(size) < drafts / 4)] = REJECT
        positions = np.flatnonzero(kind >= 0)
        token = rng.integers(4, vocab, len(positions)).astype(np.int32)
        moves = kind[positions] != REJECT
        canvas[positions[moves]] = np.where(kind[positions] == MASK, MASK_ID, token)[moves]
        beside, n = {}, len(positions)
        if "confidence" in keep:
            beside["confidence"] = rng.random(n)
        if "topk" in keep:
            beside["topk"] = rng.integers(0, vocab, (n, 3)), rng.normal(size=(n, 3))
        recorder.commit(step, positions, token, kind[positions], length=size, canvas=canvas[:size], **beside)
        canvases.append(canvas[:size].copy())
    return Run(canvases, recorder)


def anything(rng: np.random.Generator, longest: int, most_steps: int, name: str = "r") -> Run:
    """A run of random size, strategy and granularity."""
    length, steps = (int(np.exp(rng.uniform(0, np.log(most)))) for most in (longest, most_steps))
    rates = {rate: float(rng.choice([0, 0.02, 0.2])) for rate in ("edits", "remasks", "drafts")}
    if length * steps > 2**18:
        rates = {rate: value / 100 for rate, value in rates.items()}
    kept = ("confidence", "topk", "digests")
    return run(
        rng,
        length,
        steps,
        vocab=int(rng.choice([10, 300, 32_000, 126_464])),
        prompt=int(rng.integers(0, length + 1)) if rng.random() < 0.7 else 0,
        holes=bool(rng.random() < 0.3),
        grows=bool(rng.random() < 0.3),
        keep=tuple(name for name in kept if rng.random() < 0.4),
        name=name,
        meta={"seed": int(rng.integers(1000))} if rng.random() < 0.8 else None,
        **rates,
    )
