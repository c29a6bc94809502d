"""Arithmetic on exact fractions, and on complex numbers where they do not suffice. Knows no expression.

The numbers are a model's own writing, so what would take long or fill the memory is refused.
"""

import cmath
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Value = Fraction | complex

MAX_BITS = 20_000
CONSTANTS: dict[str, Value] = {"\\pi": complex(math.pi), "\\infty": complex(math.inf), "e": complex(math.e), "i": 1j}
FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "\\sin": cmath.sin,
    "\\cos": cmath.cos,
    "\\tan": cmath.tan,
    "\\cot": lambda x: 1 / cmath.tan(x),
    "\\sec": lambda x: 1 / cmath.cos(x),
    "\\csc": lambda x: 1 / cmath.sin(x),
    "\\arcsin": cmath.asin,
    "\\arccos": cmath.acos,
    "\\arctan": cmath.atan,
    "\\exp": cmath.exp,
}
LOGARITHMS = {"\\log": 10.0, "\\ln": math.e, "\\lg": 10.0}
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "\\div": operator.truediv,
    "\\cdot": operator.mul,
    "\\times": operator.mul,
}


class Unclear(ValueError):
    """Not an expression of this grammar, or one too large to compute."""


def power(base: Value, exponent: Value) -> Value:
    """Exact for whole exponents, unless that would be enormous."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent.numerator) <= MAX_BITS:
            return base**exponent.numerator
    return complex(base) ** complex(exponent)


def root(value: Value, degree: Value) -> Value:
    """The real one where there is one; exact for squares."""
    if degree == 2 and isinstance(value, Fraction) and value >= 0:
        above, below = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if (above * above, below * below) == (value.numerator, value.denominator):
            return Fraction(above, below)
    if degree == 3 and isinstance(value, Fraction) and value < 0:  # the real one
        return -((-complex(value)) ** (1 / 3))
    return complex(value) ** (1 / complex(degree))


def factorial(value: Value) -> Value:
    """Of a whole number up to 500."""
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 500:
        raise Unclear(f"factorial of {value}")
    return Fraction(math.factorial(value.numerator))


def choose(n: Value, k: Value) -> Value:
    """k of n."""
    if not (isinstance(n, Fraction) and isinstance(k, Fraction) and n.denominator == k.denominator == 1):
        raise Unclear(f"{n} over {k}")
    if not 0 <= k <= n <= 500:
        raise Unclear(f"{n} over {k}")
    return Fraction(math.comb(n.numerator, k.numerator))


def guard(apply: Callable[..., Value], *arguments: object) -> Value:
    """The value of a call, or Unclear where it has none that is finite."""
    try:
        value = apply(*arguments)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise Unclear(str(error)) from None
    if isinstance(value, Fraction):
        return value
    value = complex(value)
    if not cmath.isfinite(value):
        raise Unclear("not finite")
    return value


def close(a: Value, b: Value) -> bool:
    """Equal, exactly so between fractions."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    try:
        return cmath.isclose(complex(a), complex(b), rel_tol=1e-9, abs_tol=1e-12)
    except OverflowError:
        return False
