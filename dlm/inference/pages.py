"""The page pool: keys and values of every layer in pages that requests own, share and give back. Knows no requests."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from dlm.models.transformer import Transformer


@dataclass(frozen=True)
class PageCount:
    """Where all pages are: used + cached + blank = the pool."""

    used: int
    cached: int
    """Of no request, but their content may serve the next one with the same prompt."""
    blank: int

    @property
    def free(self) -> int:
        return self.cached + self.blank


class PagePool:
    """`num_pages` pages of `page_size` positions; a page holds them for every layer. Keys are stored rotated.

    A page is blank, used by one or more requests, or cached: of no user, but found by the digest of what it holds
    until its room is needed (least recently used first). Runs of neighbouring pages are preferred, so that a CPU can
    read a request's keys as one view. Only what is final is shared, and nobody writes it again: no page is ever
    copied for being shared.
    """

    def __init__(
        self, network: Transformer, num_pages: int, page_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        c = network.config
        shape = c.num_hidden_layers, num_pages, page_size, network.kv_heads, c.head_dim
        self.page_size, self.num_pages = page_size, num_pages
        self.k = torch.empty(shape, device=device, dtype=dtype)
        self.v = torch.empty(shape, device=device, dtype=dtype)
        self.rope: tuple[Tensor, Tensor] | None = None
        """cos and sin of the positions that keys on its pages have had so far."""
        self.epoch = 0
        """Counts how often it was cleared."""
        self.users = np.zeros(num_pages, np.int32)
        self.digests: dict[int, bytes] = {}
        self.pages: dict[bytes, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Pages with a digest and no user, least recently used first."""

    def pages_for(self, positions: int) -> int:
        """How many pages hold so many positions."""
        return -(-positions // self.page_size)

    @property
    def free(self) -> int:
        """Pages that can be had."""
        return self.num_pages - int(np.count_nonzero(self.users))

    def count(self) -> PageCount:
        used = int(np.count_nonzero(self.users))
        return PageCount(used, len(self.idle), self.num_pages - used - len(self.idle))

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """So many pages, each with one user; None, and nothing changed, when there are not enough.

        `after` is the page they continue: its right neighbours are taken if they are blank.
        """
        if count == 0:
            return []
        if count > self.free:
            return None
        taken = None if after is None else self._neighbours(after + 1, count)
        if taken is None:
            unused = self.users == 0
            unused[np.fromiter(self.idle, np.int64, len(self.idle))] = False
            blank = np.flatnonzero(unused)
            while len(blank) < count:
                page, _ = self.idle.popitem(last=False)
                self._forget(page)
                blank = np.insert(blank, np.searchsorted(blank, page), page)
            taken = _run(blank, count, after).tolist()
        self.users[taken] = 1
        return taken

    def share(self, page: int) -> None:
        """One more user."""
        self.users[page] += 1
        self.idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One user less; the last of a sequence go first when room is needed, since fewer prompts begin that way."""
        for page in reversed(pages):
            assert self.users[page] > 0, f"page {page} was released more often than taken"
            self.users[page] -= 1
            if self.users[page] == 0 and page in self.digests:
                self.idle[page] = None

    def register(self, page: int, digest: bytes) -> None:
        """From now on the page is found by what it holds; it must not be written again. The first of equals is kept."""
        if digest not in self.pages and page not in self.digests:
            self.pages[digest], self.digests[page] = page, digest

    def find(self, digest: bytes) -> int | None:
        return self.pages.get(digest)

    def read(self, pages: Sequence[int]) -> Tensor:
        """A copy of these pages in the host's memory, (2, layers, pages, page_size, g, e)."""
        index = torch.tensor(pages, device=self.k.device)
        return torch.stack((self.k[:, index], self.v[:, index])).cpu()

    def write(self, pages: Sequence[int], content: Tensor) -> None:
        """What `read` gave, into other pages."""
        index = torch.tensor(pages, device=self.k.device)
        self.k[:, index], self.v[:, index] = content.to(self.k.device)

    def clear(self) -> None:
        """All pages blank, whoever held them: nobody gives any back."""
        self.epoch += 1
        self.users[:] = 0
        self.digests, self.pages, self.idle = {}, {}, OrderedDict()

    def close(self) -> None:
        """Give the memory back."""
        self.clear()
        self.k = self.v = self.k.new_empty(0)
        self.rope = None

    def _neighbours(self, first: int, count: int) -> list[int] | None:
        """The pages from there on, if all of them are blank."""
        found = list(range(first, min(first + count, self.num_pages)))
        blank = len(found) == count and not any(self.users[page] or page in self.idle for page in found)
        return found if blank else None

    def _forget(self, page: int) -> None:
        del self.pages[self.digests.pop(page)]


def digest(tokens: Iterable[int], before: bytes) -> bytes:
    """Of a page's tokens and, through `before`, of all that stand before them."""
    return blake2b(before + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()


def _run(blank: np.ndarray, count: int, after: int | None) -> np.ndarray:
    """`count` of the sorted blank pages: those right after a page, else the first run of neighbours, else the first."""
    if after is not None:
        at = int(np.searchsorted(blank, after + 1))
        if at + count <= len(blank) and blank[at] == after + 1 and blank[at + count - 1] == after + count:
            return blank[at : at + count]
    if count == 1:
        return blank[:1]
    runs = np.flatnonzero(blank[count - 1 :] - blank[: len(blank) - count + 1] == count - 1)
    start = int(runs[0]) if len(runs) else 0
    return blank[start : start + count]
