"""Finds all solutions of a Sudoku as exact covers, and checks answers.

A grid is np.int8 (81,), row by row, 0 for an empty cell.

One of 729 options is "digit d in cell c"; the options still open are one Python integer, bit 81 (d - 1) + c. A
constraint ("cell c has a digit", "row r has a d", ...) is nine of these bits, and the 81 constraints of a family
differ only by a shift, so a few wide integer operations test a family at once.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Grid = NDArray[np.int8]


class _Family(NamedTuple):
    """81 constraints: bit a of `anchors` stands for the nine options a + i near + j far, i and j in 0..2."""

    anchors: int
    near: int
    far: int

    def shifts(self) -> list[int]:
        return [i * self.near + j * self.far for j in range(3) for i in range(3)]

    def pattern(self) -> int:
        return sum(1 << s for s in self.shifts())

    def count(self, options: int) -> tuple[int, int]:
        """The anchors with at least one of `options`, and with at least two; other bits are noise."""
        near, far = self.near, self.far
        a, b = options >> near, options >> 2 * near
        once, twice = options | a | b, options & a | (options | a) & b
        a, b = once >> far, once >> 2 * far
        return once | a | b, twice | twice >> far | twice >> 2 * far | once & a | (once | a) & b


def _bits(positions: Iterable[int]) -> int:
    return sum(1 << p for p in positions)


_NINE = range(9)
_FAMILIES = (
    _Family(_bits(range(81)), 81, 243),  # a digit in cell c
    _Family(_bits(81 * d + 9 * r for d in _NINE for r in _NINE), 1, 3),  # d in row r
    _Family(_bits(81 * d + c for d in _NINE for c in _NINE), 9, 27),  # d in column c
    _Family(_bits(81 * d + 27 * (b // 3) + 3 * (b % 3) for d in _NINE for b in _NINE), 1, 9),  # d in box b
)
_PATTERNS = [family.pattern() for family in _FAMILIES]
_EVERY = (1 << 729) - 1


def _met(option: int) -> tuple[int, ...]:
    """The constraint of each family that `option` meets, as its anchor bit."""
    before = [(f.anchors, [option - s for s in f.shifts() if option >= s]) for f in _FAMILIES]
    return tuple(_bits(place for place in places if anchors >> place & 1) for anchors, places in before)


def _clear(option: int) -> int:
    """The options that stay open once `option` is chosen: all that share no constraint with it, and not itself."""
    shared = 0
    for anchor, pattern in zip(_met(option), _PATTERNS, strict=True):
        shared |= anchor * pattern
    return _EVERY & ~shared


# All that choosing option k does to a state: ands on the unmet constraints and the open options, an or on the chosen.
_CLEAR = [_clear(k) for k in range(729)]
_EFFECT = [(*(_EVERY & ~anchor for anchor in _met(k)), _CLEAR[k], 1 << k) for k in range(729)]


class State(NamedTuple):
    """A partial cover: options open, options chosen, and by family the constraints still to meet."""

    options: int = _EVERY
    chosen: int = 0
    unmet: tuple[int, ...] = tuple(family.anchors for family in _FAMILIES)

    def choose(self, choices: Iterable[int]) -> "State":
        options, chosen, (cells, rows, columns, boxes) = self
        for k in choices:
            cell, row, column, box, clear, bit = _EFFECT[k]
            cells &= cell
            rows &= row
            columns &= column
            boxes &= box
            options &= clear
            chosen |= bit
        return State(options, chosen, (cells, rows, columns, boxes))


def _propagate(state: State) -> State | None:
    """Naked and hidden singles until nothing moves; None when a constraint has no option left."""
    quiet = 0
    while quiet < 4:
        for family, pattern, i in zip(_FAMILIES, _PATTERNS, range(4), strict=True):
            options, unmet = state.options, state.unmet[i]
            once, twice = family.count(options)
            if unmet & ~once:
                return None
            quiet += 1
            single, picked = unmet & ~twice, []
            while single:
                place = single.bit_length() - 1
                single ^= 1 << place
                picked.append((options & pattern << place).bit_length() - 1)
            if picked:
                state, quiet = state.choose(picked), 0
    return state


def _branches(state: State) -> list[int]:
    """The options of a tightest constraint still to meet: any with two, otherwise the cell with the fewest."""
    for family, pattern, unmet in zip(_FAMILIES, _PATTERNS, state.unmet, strict=True):
        once = twice = more = 0
        for s in family.shifts():
            here = state.options >> s & unmet
            more |= twice & here
            twice |= once & here
            once |= here
        if pair := twice & ~more:
            both = state.options & pattern << pair.bit_length() - 1
            return [both.bit_length() - 1, (both & -both).bit_length() - 1]
    cells = [[c + s for s in range(0, 729, 81) if state.options >> c + s & 1] for c in range(81)]
    return min((cell for cell in cells if cell), key=len)


def search(state: State, rng: np.random.Generator | None = None) -> Iterator[Grid]:
    """Every completion, depth first, the branches in random order if `rng` is given."""
    stack = [state]
    while stack:
        settled = _propagate(stack.pop())
        if settled is None:
            continue
        if not settled.unmet[0]:
            if settled.chosen.bit_count() > 81:  # singles picked together may exclude each other
                continue
            bits = np.frombuffer(settled.chosen.to_bytes(92, "little"), np.uint8)
            yield (np.unpackbits(bits, bitorder="little")[:729].reshape(9, 81).argmax(0) + 1).astype(np.int8)
            continue
        branches = _branches(settled)
        if rng is not None:
            branches = rng.permutation(branches).tolist()
        stack += [settled.choose([k]) for k in branches]


def givens_of(puzzle: Grid) -> list[int]:
    """The options that the givens of `puzzle` choose."""
    cells = np.flatnonzero(puzzle)
    return (81 * (puzzle[cells].astype(int) - 1) + cells).tolist()


def find_clash(puzzle: Grid) -> tuple[int, int] | None:
    """The first two givens that exclude each other, as cells."""
    givens = givens_of(puzzle)
    for i, option in enumerate(givens):
        for other in givens[:i]:
            if not _CLEAR[other] >> option & 1:
                return other % 81, option % 81
    return None


def solutions(puzzle: Grid, limit: int = 2) -> list[Grid]:
    """Up to `limit` completions of `puzzle`; two are enough to tell that it is not unique."""
    if find_clash(puzzle):  # the search would have to try everything to see it
        return []
    return list(islice(search(State().choose(givens_of(puzzle))), limit))


def follows_rules(grids: NDArray[Any]) -> NDArray[np.bool_]:
    """For full grids (n, 81): whether each row, column and box holds 1 to 9."""
    square = np.asarray(grids).reshape(-1, 9, 9)
    boxes = square.reshape(-1, 3, 3, 3, 3).swapaxes(2, 3).reshape(-1, 9, 9)
    lines = np.concatenate([square, square.swapaxes(1, 2), boxes], axis=1)
    return (np.sort(lines, axis=2) == np.arange(1, 10)).all(axis=(1, 2))


def check_solution(puzzle: Grid, answer: NDArray[Any]) -> bool:
    """Whether `answer` is a full valid grid that keeps every given of `puzzle`."""
    grid = np.asarray(answer)
    return grid.shape == (81,) and bool(follows_rules(grid)[0] and (grid == puzzle)[puzzle > 0].all())
