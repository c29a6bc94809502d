"""One request's pages: which it holds, how far their keys are final, and what they held when it was parked."""

from dataclasses import dataclass, field

from torch import Tensor

from dlm.inference.pages import PagePool


@dataclass(eq=False)
class PageTable:
    """The pages of a request: one list a branch, of which guidance has two (with the prompt, and without it)."""

    branches: int = 1
    tables: list[list[int]] = field(default_factory=list)
    version: int = 0
    """Counts the changes of `tables`."""
    digests: list[list[bytes]] = field(default_factory=list)
    """Of the first pages of each branch: a digest of the page's tokens and of all before it."""
    parked: list[Tensor] | None = None
    """What the pages held when the request had to give them up, in the host's memory."""
    clean: int = 0
    """Exact cache: positions under this one have their final keys in the pages."""
    refreshed: int | None = None
    """Approximate caches: the step at which all keys were computed last; None when that is due."""
    lingering: list[tuple[int, int]] = field(default_factory=list)
    """Approximate caches: first position of a finished block, and for how many steps it is still recomputed."""

    @property
    def held(self) -> int:
        """Pages now, of all branches."""
        return sum(map(len, self.tables))

    def begin(self) -> None:
        """Hold no page yet, in any branch."""
        self.tables = [[] for _ in range(self.branches)]
        self.digests = [[] for _ in range(self.branches)]

    def missing(self, pages: int) -> int:
        """How many pages all branches lack to have so many each."""
        return sum(max(0, pages - len(table)) for table in self.tables)

    def grow(self, pool: PagePool, pages: int) -> bool:
        """So many pages in each branch; False, and nothing changed, when the pool has not enough."""
        if self.missing(pages) > pool.free:
            return False
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

    def park(self, pool: PagePool) -> None:
        """Copy what the pages hold into the host's memory, and give them back."""
        self.parked = [pool.read(table) for table in self.tables]
        self.release(pool)

    def resume(self, pool: PagePool) -> None:
        """Take pages again, and write into them what they held."""
        assert self.parked is not None
        self.begin()
        for table, content in zip(self.tables, self.parked, strict=True):
            pages = pool.allocate(content.shape[2])
            assert pages is not None
            pool.write(pages, content)
            table += pages
        self.parked = None
        self.version += 1

    def release(self, pool: PagePool) -> None:
        """Give all pages back. Unless it was parked, the request has to begin anew."""
        tables, self.tables, self.digests = self.tables, [], []
        for table in tables:
            pool.release(table)
        if self.parked is None:
            self.clean = 0

    def drop(self) -> None:
        """Hold nothing, where the pool was cleared."""
        self.tables, self.digests, self.parked = [], [], None
        self.clean, self.refreshed = 0, None
