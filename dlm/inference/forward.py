"""The network over one layout: on a CPU in one call of C, on a GPU as a CUDA graph once it lasts."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dlm.inference.attend import paged_attend
from dlm.inference.fused import FusedLayers
from dlm.inference.layout import Layout
from dlm.kernels.paths import Path
from dlm.models.attention import Attend
from dlm.models.deterministic import FixedRows
from dlm.models.transformer import Transformer

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""A computation -> what runs it again, and the tensor its result is in afterwards."""
AFTER = 2
"""Forwards of a layout before it is recorded. They also compile its kernels, which a recording must not."""


class Forward:
    """Final hidden states of some of a layout's rows, for any tokens in them.

    A block is denoised in many steps of the same spans, and all that such steps share, tables and positions included,
    is in the layout's own tensors: one recording serves them, of whatever shape, without padding. Launching a layer's
    kernels one by one costs the host more than a GPU needs to run them when rows are few.
    """

    def __init__(
        self,
        network: Transformer,
        layout: Layout,
        path: Path,
        fused: FusedLayers | None = None,
        capture: Capture | None = None,
        deterministic: bool = False,
    ) -> None:
        self.network, self.layout, self.path, self.fused = network, layout, path, fused
        self.capture, self.deterministic = capture, deterministic
        self.runs = 0
        self.recorded: tuple[Callable[[], None], Tensor] | None = None
        self.ids: Tensor | None = None
        self.taps: Tensor | None = None
        """Of the last call, (n, m, d): outputs of its tapped layers, of all rows."""

    def __call__(self, ids: np.ndarray, output_rows: np.ndarray, tapped: tuple[int, ...] = ()) -> Float[Tensor, "w d"]:
        """`ids` are (n,), the layout's rows in order; `output_rows` are (w,), those whose states come back, w > 0.

        `tapped` are layers whose outputs are kept in `taps`. The next call may overwrite the result.
        """
        given, rows = self.layout.upload(ids), self.layout.upload(output_rows)
        if self.fused is not None:
            hidden = self.fused(self.layout, given, rows, tapped)
            self.taps = self.fused.taps
            return hidden
        if tapped:  # a request that is drafted for has other spans in each step: nothing to record
            return self._hidden(given, tapped=tapped)[rows]
        if self.capture is None:
            return self._hidden(given, rows)
        self.runs += 1
        if self.runs <= AFTER:
            return self._hidden(given)[rows]
        if self.recorded is None:
            fixed = self.ids = given.clone()
            self.recorded = self.capture(lambda: self._hidden(fixed))
        assert self.ids is not None
        replay, hidden = self.recorded
        self.ids.copy_(given)
        replay()
        return hidden[rows]

    def head(self, hidden: Float[Tensor, "w d"]) -> Float[Tensor, "w v"]:
        """Logits of the states that the last call gave."""
        if self.fused is not None:
            return self.fused.head(hidden)
        with self._products():
            return self.network.head(hidden)

    @cached_property
    def attend(self) -> Attend:
        return paged_attend(self.layout, self.path)

    def _hidden(self, ids: Tensor, output_rows: Tensor | None = None, tapped: tuple[int, ...] = ()) -> Tensor:
        taps: dict[int, Tensor] = {}
        with self._products():
            hidden = self.network.hidden(
                ids, self.layout.positions, attend=self.attend, output_rows=output_rows, taps=taps if tapped else None
            )
        self.taps = torch.stack([taps[number] for number in tapped], dim=1) if tapped else None
        return hidden

    def _products(self) -> AbstractContextManager[object]:
        return FixedRows() if self.deterministic else nullcontext()


def cuda_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record what `run` launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph.replay, result
