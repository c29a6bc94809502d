"""Parking: a request gives its pages up, and what they held waits in the host's memory until there is room again."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dlm.inference.pages import PagePool

if TYPE_CHECKING:
    from dlm.inference.sequence import Sequence


@dataclass(frozen=True)
class Parked:
    """All that a parked request needs to go on as if nothing had been."""

    keys: list[Tensor]
    """What its pages held, (2, layers, pages, page_size, g, e) a branch: keys and values."""
    memory: Any
    """What its strategy handed over."""

    @property
    def pages(self) -> int:
        """How many it needs to come back, in each branch."""
        return self.keys[0].shape[2]


def park(seq: "Sequence", pool: PagePool) -> None:
    """Copy what the request's pages hold, bit for bit, and give them back."""
    memory = seq.strategy.park(seq)
    seq.parked = Parked([pool.read(table) for table in seq.pages.tables], memory)
    seq.pages.release(pool)


def resume(seq: "Sequence", pool: PagePool) -> None:
    """Take as many pages again, and write into them what they held. The pool has room for them."""
    assert seq.parked is not None
    pages = seq.pages
    pages.begin(pool)
    for table, content in zip(pages.tables, seq.parked.keys, strict=True):
        taken = pool.allocate(content.shape[2])
        assert taken is not None
        pool.write(taken, content)
        table += taken
    pages.version += 1
    seq.strategy.resume(seq, seq.parked.memory)
    seq.parked = None
