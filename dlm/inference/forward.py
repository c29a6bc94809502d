"""The network over one layout: on a CPU in one call of C, elsewhere module by module over the pages."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dlm.inference.attend import PagedAttend, viewed_attend
from dlm.inference.fused import FusedLayers
from dlm.inference.layout import Layout, rope_rows
from dlm.inference.pages import PagePool
from dlm.kernels.paths import Path
from dlm.kernels.spans import Spans
from dlm.models.attention import Attend
from dlm.models.deterministic import FixedRows
from dlm.models.transformer import Transformer


class Forward:
    """Final hidden states of some of a layout's rows, for any tokens in them."""

    def __init__(
        self,
        network: Transformer,
        layout: Layout,
        path: Path,
        fused: FusedLayers | None = None,
        deterministic: bool = False,
    ) -> None:
        self.network, self.layout, self.path, self.fused = network, layout, path, fused
        self.deterministic = deterministic
        self.travels = path.paged and layout.device.type == "cuda"
        """Whether the layout goes up with each step's tokens; elsewhere it keeps tensors of its own."""
        self.taps: Tensor | None = None
        """Of the last step, (n, m, d): outputs of its tapped layers, of all rows."""

    def arrays(self, ids: np.ndarray, output_rows: np.ndarray) -> dict[str, np.ndarray]:
        """What `__call__` reads: `ids` are (n,), the layout's rows in order; `output_rows` are (w,), those whose states
        come back, in ascending order, w > 0."""
        given = {"ids": ids, "rows": output_rows}
        return given | self.layout.arrays if self.travels else given

    def __call__(self, x: Mapping[str, Tensor], tapped: tuple[int, ...] = ()) -> Float[Tensor, "w d"]:
        """`tapped` are layers whose outputs are kept in `taps`. The next call may overwrite the result."""
        if self.fused is not None:
            hidden = self.fused(self.layout, x["ids"], x["rows"], tapped)
            self.taps = self.fused.taps
            return hidden
        if self.travels:
            attend, positions = attend_of(self.network, self.layout.pool, x, self.layout.most, self.layout.furthest)
        else:
            attend, positions = self.attend, self.layout.positions
        with products(self.deterministic):
            hidden, self.taps = states_and_taps(self.network, x, positions, attend, tapped)
        return hidden

    def head(self, hidden: Float[Tensor, "w d"]) -> Float[Tensor, "w v"]:
        """Logits of the states that the last call gave."""
        if self.fused is not None:
            return self.fused.head(hidden)
        with products(self.deterministic):
            return self.network.head(hidden)

    @cached_property
    def attend(self) -> Attend:
        layout = self.layout
        if not self.path.paged:
            return viewed_attend(layout)
        return PagedAttend(layout.pool, layout.rope, layout.slots, layout.spans)


def states_and_taps(
    network: Transformer, x: Mapping[str, Tensor], positions: Tensor, attend: Attend, tapped: tuple[int, ...]
) -> tuple[Float[Tensor, "w d"], Float[Tensor, "n m d"] | None]:
    """Final states of the rows that `x` names and, of all rows, the outputs of the tapped layers."""
    if not tapped:
        return network.hidden(x["ids"], positions, attend=attend, output_rows=x["rows"]), None
    taps: dict[int, Tensor] = {}
    hidden = network.hidden(x["ids"], positions, attend=attend, taps=taps)
    return hidden.index_select(0, x["rows"]), torch.stack([taps[number] for number in tapped], dim=1)


def attend_of(
    network: Transformer, pool: PagePool, x: Mapping[str, Tensor], most: tuple[int, int], furthest: int
) -> tuple[Attend, Tensor]:
    """Attention by a layout's `arrays` on the device, and its positions. `most` and `furthest` are upper bounds."""
    spans = Spans(
        **{name: x[name] for name in ("starts", "positions", "visible", "tables", "block_lengths")},
        max_queries=most[0],
        max_visible=most[1],
    )
    rope = rope_rows(network, pool, x["positions"], furthest)
    return PagedAttend(pool, rope, x["slots"], spans), x["positions"]


def products(deterministic: bool) -> AbstractContextManager[object]:
    """Matrix products that do not depend on the batch, where that is asked for."""
    return FixedRows() if deterministic else nullcontext()
