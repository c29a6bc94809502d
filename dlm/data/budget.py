"""Limits for one rendering of a template: how many steps it may take, and how many characters it may make.

Work is counted before it is done, and the same on every machine: there is no time limit.
"""

import math
import re
from collections.abc import ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

STEPS, MADE = 100_000, 16_000_000
"""Allowed for every template; a conversation of n characters adds 8 n steps and 64 n characters."""
WIDTH, BITS = 1_000, 4_096
"""The widest padding in characters, and the longest integer in bits."""
NODE = 16
"""Characters that an entry of a list counts as."""
WIDE = ("batch", "center", "indent", "round", "slice", "tojson", "truncate")
"""Filters that take a width, a length or a precision."""
PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")


class Budget:
    """The work that a template with the variables `given` may still do. Methods raise SecurityError beyond that."""

    def __init__(self, given: Any) -> None:
        self.weights: dict[int, tuple[Any, int]] = {}
        self.heaviest: float = math.inf
        size = self.weigh(given)
        self.steps, self.made, self.heaviest = STEPS + 8 * size, MADE + 64 * size, MADE + 2 * size

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise SecurityError(f"it takes more than {STEPS:,} steps")

    def make(self, size: int, times: int = 1) -> None:
        """Count `size` characters, made `times` times."""
        self.made -= max(0, size) * max(0, times)
        if self.made < 0:
            raise SecurityError(f"it makes more than {MADE:,} characters")

    def read(self, value: Any) -> Any:
        """Count the steps of comparing or searching a value, and return it."""
        self.step(1 + self.weigh(value) // 256)
        return value

    def show(self, value: Any) -> Any:
        """Count a value that becomes text, and return it."""
        self.step()
        self.make(self.weigh(value))
        return value

    def add(self, value: Any) -> Any:
        """Count a new value, and return it. A list counts by its length: its entries were counted before."""
        if isinstance(value, Namespace):
            return value
        weight = self.weigh(value)
        self.make(len(value) if isinstance(value, list | tuple | Mapping) else weight)
        return value

    def weigh(self, value: Any) -> int:
        """Characters of a value with everything inside it; an entry that a list holds twice counts twice."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Namespace):
            raise SecurityError("a namespace is no text")
        if not isinstance(value, list | tuple | Mapping | KeysView | ValuesView | ItemsView):
            return value.bit_length() // 3 if isinstance(value, int) else NODE
        if id(value) not in self.weights:
            inside = (part for pair in value.items() for part in pair) if isinstance(value, Mapping) else value
            weight = NODE * (1 + len(value))
            for part in inside:
                weight += self.weigh(part)
            self._check(weight)
            self.weights[id(value)] = value, weight  # keeps the value alive, so that no other object gets its id
        return self.weights[id(value)][1]

    def _check(self, weight: float) -> None:
        if weight > self.heaviest:
            raise SecurityError(f"it makes a list of more than {MADE:,} characters")

    def operator(self, kind: str, left: Any, right: Any) -> None:
        """Count the operation `left kind right`."""
        self.step(1 + (self.weigh(left) + self.weigh(right)) // 256)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if kind == "**" else left.bit_length() + right.bit_length()
            if kind != "%" and bits > BITS:
                raise SecurityError(f"{kind} makes a number of more than {BITS:,} bits")
        elif kind == "%" and isinstance(left, str):
            self._format(left, [right])
        elif kind == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, Sequence) and isinstance(times, int):
                    self.make(len(value), times)
                    self._check(self.weigh(value) * times)

    def method(self, text: str, name: str, given: Sequence[Any]) -> None:
        """Count a call of a string's method."""
        self.read(text)
        if name in PADDING:
            self._narrow(given)
            self.make(WIDTH, text.count("\t") + 1)
        elif name == "replace":
            self._replace(text, given)
        elif name == "join":
            self._join(given, text)
        elif name in ("format", "format_map"):
            self._format(text, given)
        elif name in ("translate", "maketrans"):
            raise SecurityError(f"templates have no str.{name}")

    def filter(self, name: str, value: Any, given: Sequence[Any]) -> None:
        """Count the application of a filter."""
        for part in (value, *given):
            self.step(1 + self.weigh(part) // NODE)
        if name in WIDE:
            self._narrow(given)
        if name == "indent":  # a string, or a number of spaces, goes into every line
            widest = max(len(part) if isinstance(part, str) else int(part) for part in (4, *given))
            self.make(widest, 1 + str(value).count("\n"))
        elif name == "replace":
            self._replace(str(value), given)
        elif name == "join":
            self._join([value], str(given[0]) if given else "")
        elif name == "format":
            self._format(str(value), given)

    def _replace(self, text: str, given: Sequence[Any]) -> None:
        old, new = [str(part) for part in (*given, "", "")][:2]
        self.make(len(new), text.count(old))

    def _join(self, given: Sequence[Any], between: str) -> None:
        parts = given[0] if given else ()
        count = len(parts) if hasattr(parts, "__len__") else STEPS if len(between) > WIDTH else 1
        self.make(len(between), count)

    def _format(self, pattern: str, values: Iterable[Any]) -> None:
        """Count a format as if every placeholder took all values at the largest width."""
        if re.search(r"\d{4}|\*|\{[^{}]*\{", pattern):
            raise SecurityError(f"a format has a width of {WIDTH:,} or more, or one that is computed")
        each = sum(map(self.weigh, values)) + (WIDTH if re.search(r"\d", pattern) else 0)
        self.make(len(pattern) + each, 1 + pattern.count("%") + pattern.count("{"))

    def _narrow(self, given: Iterable[Any]) -> None:
        for value in given:
            if isinstance(value, int) and abs(value) > WIDTH:
                raise SecurityError(f"a width of more than {WIDTH:,}")
