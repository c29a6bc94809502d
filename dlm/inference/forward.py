"""The network over one layout, as a CUDA graph once the layout has proved to last. Knows no requests."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dlm.inference.attend import paged_attend
from dlm.inference.layout import Layout
from dlm.models.transformer import Transformer

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""A computation -> what runs it again, and the tensor its result is in afterwards."""
AFTER = 2
"""Forwards of a layout before it is recorded. They also compile its kernels, which a recording must not."""


class Forward:
    """Final hidden states of a layout's rows, for any tokens in them.

    A block is denoised in many steps of the same spans, and all that such steps share, tables and positions included,
    is in the layout's own tensors: one recording serves them, of whatever shape, without padding. Launching a layer's
    kernels one by one costs the host more than a GPU needs to run them when few rows are asked.
    """

    def __init__(self, network: Transformer, layout: Layout, capture: Capture | None = None) -> None:
        self.network, self.layout, self.attend, self.capture = network, layout, paged_attend(layout), capture
        self.runs = 0
        self.recorded: tuple[Callable[[], None], Tensor] | None = None
        self.ids: Tensor | None = None

    def __call__(self, ids: np.ndarray) -> Float[Tensor, "n d"]:
        """`ids` are (n,), the layout's rows in order. The result is good until the next call."""
        given = self.layout.upload(ids)
        self.runs += 1
        if self.capture is None or self.runs <= AFTER:
            return self._hidden(given)
        if self.recorded is None:
            self.ids = given.clone()
            self.recorded = self.capture(lambda: self._hidden(self.ids))
        assert self.ids is not None
        replay, hidden = self.recorded
        self.ids.copy_(given)
        replay()
        return hidden

    def _hidden(self, ids: Tensor) -> Tensor:
        return self.network.hidden(ids, self.layout.positions, attend=self.attend)


def cuda_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record what `run` launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph.replay, result
