"""One request's pages: which it holds, and how far their keys are final."""

from dataclasses import dataclass, field

import numpy as np

from dlm.inference.pages import PagePool


@dataclass(eq=False)
class PageTable:
    """The pages of a request: one list a branch, of which guidance has two (with the prompt, and without it)."""

    branches: int = 1
    tables: list[list[int]] = field(default_factory=list)
    epoch: int = 0
    """That of the pool when its pages were taken: a pool that was cleared since then wants none back."""
    version: int = 0
    """Counts the changes of `tables`."""
    digests: list[list[bytes]] = field(default_factory=list)
    """Of the first pages of each branch: a digest of the page's tokens and of all before it."""
    clean: int = 0
    """Exact cache: positions under this one have their final keys in the pages."""
    booked: int = -1
    """Exact cache: the `clean` up to which full pages were offered to others; -1 where they are to be offered anew."""
    reused: int = 0
    """Exact cache: positions whose pages another request had filled, when this one began."""
    refreshed: int | None = None
    """Approximate caches: the step at which all keys were computed last; None when that is due."""
    _arrays: tuple[int, list[np.ndarray]] | None = None
    """`tables` as arrays, and the `version` that they are of."""
    lingering: list[tuple[int, int]] = field(default_factory=list)
    """Approximate caches: first position of a finished block, and for how many steps it is still recomputed."""

    @property
    def held(self) -> int:
        """Pages now, of all branches."""
        return sum(map(len, self.tables))

    def begin(self, pool: PagePool) -> None:
        """An empty list of pages for each branch."""
        self.epoch, self._arrays, self.booked = pool.epoch, None, -1
        self.tables = [[] for _ in range(self.branches)]
        self.digests = [[] for _ in range(self.branches)]

    def arrays(self) -> list[np.ndarray]:
        """The tables as arrays."""
        if self._arrays is None or self._arrays[0] != self.version:
            self._arrays = self.version, [np.array(table, np.int64) for table in self.tables]
        return self._arrays[1]

    def missing(self, pages: int) -> int:
        """How many pages all branches lack to have so many each."""
        missing = 0
        for table in self.tables:
            if len(table) < pages:
                missing += pages - len(table)
        return missing

    def grow(self, pool: PagePool, pages: int) -> bool:
        """So many pages in each branch; False, and nothing changed, when the pool has not enough."""
        missing = self.missing(pages)
        if missing == 0 or missing > pool.free:
            return missing == 0
        for table in self.tables:
            new = pool.allocate(max(0, pages - len(table)), table[-1] if table else None)
            assert new is not None
            table += new
            self.version += bool(new)
        return True

    def share(self, pool: PagePool, page: int, digest: bytes, branch: int) -> None:
        """Use a page that another request has filled with the same tokens."""
        pool.share(page)
        self.tables[branch].append(page)
        self.digests[branch].append(digest)

    def cut(self, pool: PagePool, pages: int) -> None:
        """Give back what each branch holds beyond so many pages."""
        for table, digests in zip(self.tables, self.digests, strict=True):
            pool.release(table[pages:])
            del table[pages:], digests[pages:]

    def release(self, pool: PagePool) -> None:
        """Give all pages back."""
        tables, self.tables, self.digests = self.tables, [], []
        for table in tables if self.epoch == pool.epoch else []:
            pool.release(table)

    def drop(self) -> None:
        """Hold nothing, where the pool was cleared."""
        self.tables, self.digests, self.clean, self.refreshed = [], [], 0, None
