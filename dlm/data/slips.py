"""Slips put into training text, so that a model learns to go on after its own: real text never shows it any."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlm.data.loader import SampleStream
from dlm.data.samples import Sample

EVERY = 32
"""Tokens of text for each slip, on average."""
LONGEST, COPIES = 12, 6
"""Tokens that a loop repeats, and how often, at most."""


class Slips(SampleStream):
    """A stream whose samples are broken, `share` of them, by slips: tokens out of place, and loops.

    What is put in stands as prompt: no loss is taken on it, but on the real text after it. A model that was only shown
    real text takes its own unlikely token for the begin of a table of equal entries, repeats it, and goes on for ever:
    the better it is at copying what its context holds, the more so. In the spirit of DITTO (arXiv 2206.02369), whose
    loss on repeated sentences asks for less probability with each.

    Tokens out of place are drawn from `ids`, or from elsewhere in the sample. What is drawn depends on the seed and the
    sample's number alone.
    """

    def __init__(self, stream: SampleStream, share: float, ids: NDArray[Any], seed: int) -> None:
        self.stream, self.share, self.ids, self.seed = stream, share, ids, seed

    def __next__(self) -> Sample:
        sample = next(self.stream)
        draw = np.random.Generator(np.random.Philox(key=[self.seed, sample["index"]]))
        return sample if draw.random() >= self.share else slipped(sample, self.ids, draw)

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)


def slipped(sample: Sample, others: NDArray[Any], draw: np.random.Generator) -> Sample:
    """The sample with a slip in every EVERY tokens or so, as long as before: what no longer fits is lost at its end."""
    ids, length = sample["input_ids"], len(sample["input_ids"])
    prompt = sample.get("prompt_mask", np.zeros(length, np.bool_))
    parts: list[Any] = []
    marks: list[Any] = []
    at = 0
    while at < length:
        stop = at + 1 + int(draw.integers(0, 2 * EVERY))
        if draw.random() < 1 / 2:
            size, copies = round(LONGEST ** draw.random()), int(draw.integers(1, COPIES + 1))
            slip = np.tile(ids[max(0, stop - size) : stop], copies)
        else:
            slip = draw.choice(others if draw.random() < 1 / 2 else ids, 1)
        parts += [ids[at:stop], slip]
        marks += [prompt[at:stop], np.ones(len(slip), np.bool_)]
        at = stop
    return {
        "input_ids": np.concatenate(parts)[:length].astype(np.int32),
        "index": sample["index"],
        "prompt_mask": np.concatenate(marks)[:length],
    }
