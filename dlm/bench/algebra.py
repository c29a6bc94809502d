"""Expressions as functions of their variables: parsed by hand, never by `eval`, exact where fractions suffice.

What they compute with is a model's own writing: depth is bounded here, the size of powers in `arithmetic`. Knows no answer and no source.
"""

import cmath
import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction

from dlm.bench.arithmetic import (
    CONSTANTS,
    FUNCTIONS,
    LOGARITHMS,
    OPERATIONS,
    Unclear,
    Value,
    choose,
    close,
    factorial,
    guard,
    power,
    root,
)

Point = dict[str, Fraction]
Node = Callable[[Point], Value]

MAX_LENGTH, MAX_DEPTH = 300, 30
POINTS = 4  # two polynomials that agree at four random points are taken for the same
TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|[A-Za-z]|[-+*/^_!|()\[\]{}])")


def parse(text: str) -> Node:
    """The expression as a function of a point; raises Unclear."""
    if len(text) > MAX_LENGTH:
        raise Unclear(f"{len(text)} characters")
    return _Parser(text).whole()


def equal(left: str, right: str) -> bool:
    """Whether two expressions have the same value wherever they were looked at; False where one is unclear."""
    try:
        pairs = _values(left, right)
    except Unclear:
        return False
    return all(close(a, b) for a, b in pairs)


def proportional(left: str, right: str) -> bool:
    """Whether one expression is a constant multiple of the other: `left` = 0 and `right` = 0 then say the same."""
    try:
        pairs = _values(left, right)
        ratios = [guard(operator.truediv, a, b) for a, b in pairs]
    except Unclear:
        return False
    return not close(ratios[0], Fraction(0)) and all(close(ratio, ratios[0]) for ratio in ratios)


def _values(left: str, right: str) -> list[tuple[Value, Value]]:
    """Both expressions at the same few points."""
    a, b = parse(left), parse(right)
    draw = random.Random(0)
    points = [_Point(draw) for _ in range(POINTS)]
    return [(guard(a, point), guard(b, point)) for point in points]


class _Point(dict[str, Fraction]):
    """Any variable has a value: positive, so that roots are real, and of no simple relation to another's."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.base = draw.randrange(10**6)

    def __missing__(self, name: str) -> Fraction:
        draw = random.Random(f"{self.base} {name}")
        self[name] = Fraction(draw.randrange(101, 997), draw.randrange(101, 997))
        return self[name]


class _Parser:
    """Recursive descent; each method returns the function of what it has read."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        self.depth, self.at = 0, 0
        end = 0
        while text[end:].strip():
            found = TOKEN.match(text, end)
            if found is None:
                raise Unclear(text[end : end + 10])
            self.tokens.append(found[1])
            end = found.end()
        if not self.tokens:
            raise Unclear("nothing")

    def whole(self) -> Node:
        node = self.sum()
        if self.at < len(self.tokens):
            raise Unclear(self.tokens[self.at])
        return node

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, token: str | None = None) -> str:
        taken = self.next
        if not taken or (token is not None and taken != token):
            raise Unclear(f"{taken!r} where {token!r} was due")
        self.at += 1
        return taken

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unclear("nested too deeply")
        node = self.product()
        while self.next in ("+", "-"):
            node = _binary(OPERATIONS[self.take()], node, self.product())
        self.depth -= 1
        return node

    def product(self) -> Node:
        node = self.signed()
        while self.next and self.next not in "+-)]}|":
            if self.next in OPERATIONS:
                node = _binary(OPERATIONS[self.take()], node, self.signed())
            else:  # 5x, 2\sqrt{5}
                node = _binary(OPERATIONS["*"], node, self.power())
        return node

    def signed(self) -> Node:
        """A factor behind any number of signs."""
        flips = 0
        while self.next in ("+", "-"):
            flips += self.take() == "-"
        node = self.power()
        return _unary(operator.neg, node) if flips % 2 else node

    def power(self) -> Node:
        node = self.atom()
        while self.next == "!":
            self.take()
            node = _unary(factorial, node)
        if self.next == "^":
            self.take()
            node = _binary(power, node, self.argument())
        return node

    def argument(self) -> Node:
        """What a command or an exponent applies to: a group, or the one thing that follows."""
        if self.next == "-":
            self.take()
            return _unary(operator.neg, self.argument())
        if len(self.next) > 1 and self.next.isdecimal():  # \frac12 is one half
            digits = self.take()
            self.at -= 1
            self.tokens[self.at : self.at + 1] = list(digits)
        return self.atom()

    def atom(self) -> Node:
        token = self.take()
        if token in CLOSERS:
            node = self.sum()
            self.take(CLOSERS[token])
            return _unary(abs, node) if token == "|" else node
        if token[0].isdigit() or token[0] == ".":
            number = Fraction(token)
            return lambda point: number
        if token == "\\frac":
            return _binary(OPERATIONS["/"], self.argument(), self.argument())
        if token == "\\binom":
            return _binary(choose, self.argument(), self.argument())
        if token == "\\sqrt":
            return self.root()
        if token in FUNCTIONS or token in LOGARITHMS:
            return self.function(token)
        if token in CONSTANTS:
            constant = CONSTANTS[token]
            return lambda point: constant
        if not token[-1].isalpha():
            raise Unclear(token)
        name = token + self.subscript()
        return lambda point: point[name]

    def root(self) -> Node:
        degree: Node = lambda point: Fraction(2)  # noqa: E731
        if self.next == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        return _binary(root, self.argument(), degree)

    def function(self, name: str) -> Node:
        base: Node | None = None
        if name in LOGARITHMS and self.next == "_":
            self.take()
            base = self.argument()
        exponent: Node | None = None
        if self.next == "^":
            self.take()
            exponent = self.argument()
        inside = self.power()
        if name in FUNCTIONS:
            node = _unary(lambda value: FUNCTIONS[name](complex(value)), inside)
        else:
            usual: Node = lambda point: complex(LOGARITHMS[name])  # noqa: E731
            node = _binary(lambda x, b: cmath.log(complex(x)) / cmath.log(complex(b)), inside, base or usual)
        return node if exponent is None else _binary(power, node, exponent)

    def subscript(self) -> str:
        """`_1` or `_{max}` of a variable: part of its name."""
        if self.next != "_":
            return ""
        self.take()
        if self.next != "{":
            return "_" + self.take()
        end = self.tokens.index("}", self.at) if "}" in self.tokens[self.at :] else len(self.tokens)
        name, self.at = "".join(self.tokens[self.at + 1 : end]), end
        self.take("}")
        return "_" + name


CLOSERS = {"(": ")", "[": "]", "{": "}", "|": "|"}


def _unary(apply: Callable[[Value], Value], node: Node) -> Node:
    return lambda point: apply(node(point))


def _binary(apply: Callable[[Value, Value], Value], left: Node, right: Node) -> Node:
    return lambda point: apply(left(point), right(point))
