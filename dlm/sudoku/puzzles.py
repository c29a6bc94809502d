"""Puzzles with exactly one solution: random grids, digging, splits that share no puzzle, a pool kept on disk."""

import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from dlm.atomic import cache_folder, replacing
from dlm.errors import UserError
from dlm.sudoku.solver import Grid, State, follows_rules, givens_of, search

SPLITS = {"train": 0, "heldout": 1}
MAX_EMPTY = 60  # most grids can be dug to 55-58 holes; 60 already takes hundreds of tries
POOL_VERSION = 2  # raise it whenever the same seed would give another pool


def random_grid(rng: np.random.Generator) -> Grid:
    """A full valid grid. Three boxes on the diagonal cannot disagree, so they are drawn; the rest is searched."""
    start = np.zeros((9, 9), np.int8)
    for k in (0, 3, 6):
        start[k : k + 3, k : k + 3] = rng.permutation(9).reshape(3, 3) + 1
    return next(search(State().choose(givens_of(start.reshape(81))), rng))


def symmetry_invariant(grid: Grid) -> int:
    """32 bits that no Sudoku symmetry changes, so grids that differ here are essentially different.

    The digits of two rows are permutations of each other; the cycle type of that permutation survives relabelling
    and any order of the columns. Rows are described by the types against their own band and the others, sorted
    within bands, then bands, then the two readings by rows and by columns.
    """
    readings = []
    for lines in (grid.reshape(9, 9).astype(np.int64) - 1, grid.reshape(9, 9).T.astype(np.int64) - 1):
        step = np.argsort(lines, axis=1)[:, lines]  # (line i, line j, position) -> position in i of j's digit
        second = np.take_along_axis(step, step, 2)
        third = np.take_along_axis(step, second, 2)
        fourth = np.take_along_axis(second, second, 2)
        fixed = [(power == np.arange(9)).sum(2) for power in (second, third, fourth)]
        types = (fixed[0] + 10 * fixed[1] + 100 * fixed[2]).reshape(9, 3, 3)
        rows = [(sorted(types[i, i // 3]), sorted(np.delete(types[i], i // 3, 0).ravel())) for i in range(9)]
        readings.append(sorted(sorted(rows[b : b + 3]) for b in (0, 3, 6)))
    flat = np.array([kind for r in sorted(readings) for band in r for row in band for part in row for kind in part])
    return zlib.crc32(flat.astype("<i4").tobytes())


def split_of(grid: Grid) -> str:
    """The split a full grid belongs to. It depends on the symmetry class only, so splits share no class, whatever the seeds."""
    return "heldout" if symmetry_invariant(grid) % 4 == 0 else "train"


def _dig(rng: np.random.Generator, grid: Grid, empty: int | None) -> Grid:
    """`grid` with holes made in random order, each kept only if no other completion appears; at most `empty`."""
    given, puzzle, holes = dict(zip(range(81), givens_of(grid), strict=True)), grid.copy(), 0
    for cell in rng.permutation(81).tolist():
        if holes == empty:
            break
        option = given.pop(cell)
        state = State().choose(given.values())
        # A second completion must have another digit here: every other hole was unique before this one.
        if next(search(state._replace(options=state.options & ~(1 << option))), None) is not None:
            given[cell] = option
            continue
        puzzle[cell] = 0
        holes += 1
    return puzzle


def make_puzzle(rng: np.random.Generator, empty: int | None = None, split: str | None = None) -> tuple[Grid, Grid]:
    """(puzzle, solution) with exactly one solution; `empty` cells, or as many as this digging order allows if None."""
    if empty is not None and not 0 <= empty <= MAX_EMPTY:
        raise UserError(f"{empty=} cells: a puzzle can be asked for with 0 to {MAX_EMPTY} empty cells")
    while True:
        grid = random_grid(rng)
        if split is not None and split_of(grid) != split:
            continue
        puzzle = _dig(rng, grid, empty)
        if empty is None or np.count_nonzero(puzzle == 0) == empty:
            return puzzle, grid


def addressed(seed: int, purpose: int, split: str, index: int) -> np.random.Generator:
    """Random numbers with an address: the counter's top word is the index, so streams never overlap."""
    key = np.array([seed % 2**64, 2 * purpose + SPLITS[split]], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index], np.uint64)))


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise UserError(f"unknown sudoku split {split!r}; known: {', '.join(SPLITS)}")


def generate_puzzles(
    n: int, empty: int | tuple[int, int] = (30, 55), seed: int = 0, split: str = "heldout"
) -> tuple[Grid, Grid]:
    """(puzzles, solutions), each (n, 81); puzzle i depends on (seed, split, i) only, its holes are uniform in `empty`."""
    _check_split(split)
    low, high = (empty, empty) if isinstance(empty, int) else empty
    if not 0 <= low <= high <= MAX_EMPTY:
        raise UserError(f"{empty=}: give a range within 0 to {MAX_EMPTY} empty cells, smaller first")
    pairs = np.empty((n, 2, 81), np.int8)
    for i in range(n):
        rng = addressed(seed, 1, split, i)
        pairs[i] = make_puzzle(rng, int(rng.integers(low, high + 1)), split)
    return pairs[:, 0], pairs[:, 1]


def _read_pool(path: Path) -> Grid:
    """Base puzzles (n, 2, 81) from `path`, none if the file is missing or not what this code would have written."""
    try:
        pool = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return np.empty((0, 2, 81), np.int8)
    sound = isinstance(pool, np.ndarray) and pool.dtype == np.int8 and pool.ndim == 3 and pool.shape[1:] == (2, 81)
    sound = sound and follows_rules(pool[:, 1]).all() and ((pool[:, 0] == pool[:, 1]) | (pool[:, 0] == 0)).all()
    return pool if sound else np.empty((0, 2, 81), np.int8)


def base_puzzles(size: int = 2000, split: str = "train", seed: int = 0, folder: Path | None = None) -> Grid:
    """(size, 2, 81): minimal puzzles and their solutions. A smaller pool is a prefix of a larger one; kept on disk."""
    _check_split(split)
    path = (folder or cache_folder()) / f"sudoku-v{POOL_VERSION}-{split}-{seed}.npy"
    pool = _read_pool(path)
    if len(pool) >= size:
        return pool[:size]
    fresh = np.empty((size - len(pool), 2, 81), np.int8)
    for i in range(len(fresh)):
        fresh[i] = make_puzzle(addressed(seed, 0, split, len(pool) + i), None, split)
    pool = np.concatenate([pool, fresh])
    with suppress(OSError):  # a cache that cannot be written costs only time
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, pool)
    return pool
