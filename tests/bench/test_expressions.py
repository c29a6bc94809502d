"""The expression grammar against Python's own arithmetic, and sameness on anything at all."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlm.bench.algebra import Unclear, equal, parse
from dlm.bench.expressions import clean, same

PIECES = [
    "\\frac",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "1",
    "23",
    ".5",
    ",",
    "x",
    "y",
    "\\pi",
    "\\sqrt",
    "^",
    "_",
    "+",
    "-",
    "*",
]
PIECES += [
    "/",
    "=",
    "\\text{cm}",
    "\\cup",
    "\\pm",
    "\\\\",
    "&",
    "%",
    "$",
    " ",
    "!",
    "|",
    "\\begin{pmatrix}",
    "\\{",
    "<",
    "∞",
]


@st.composite
def arithmetic(draw, depth=3):
    """The same expression in LaTeX and in Python."""
    if depth == 0 or draw(st.booleans()):
        n = draw(st.integers(0, 20))
        return str(n), f"Fraction({n})"
    (a, pa), (b, pb) = draw(arithmetic(depth=depth - 1)), draw(arithmetic(depth=depth - 1))
    latex, python = draw(
        st.sampled_from(
            [
                ("({a})+({b})", "(({pa})+({pb}))"),
                ("({a})-({b})", "(({pa})-({pb}))"),
                ("({a})({b})", "(({pa})*({pb}))"),
                ("\\frac{{{a}}}{{{b}}}", "(({pa})/({pb}))"),
                ("-({a})", "(-({pa}))"),
                ("({a})^2", "(({pa})**2)"),
            ]
        )
    )
    return latex.format(a=a, b=b), python.format(pa=pa, pb=pb)


@given(arithmetic())
def test_arithmetic_is_exact(pair):
    latex, python = pair
    try:
        want = eval(python, {"Fraction": Fraction})
    except ZeroDivisionError:
        assert not equal(latex, latex)
        return
    assert parse(latex)({}) == want


@given(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
)
def test_anything_can_be_compared(a, b):
    assert same(a, b) == same(b, a) or not a.strip() or not b.strip()
    if a.strip():
        assert same(a, a)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2\\pi", 2 * math.pi),
        ("\\sqrt[3]{27}", 3),
        ("\\sqrt2", math.sqrt(2)),
        ("e^2", math.e**2),
        ("\\sin(\\pi/6)", 0.5),
        ("\\log 1000", 3),
        ("\\ln e", 1),
        ("-2^2", -4),
        ("2^{-1}", 0.5),
        ("2^-1", 0.5),
        ("1/2 \\cdot 4", 2),
        ("i^2", -1),
    ],
)
def test_values(text, value):
    assert complex(parse(text)({})) == pytest.approx(complex(value))


@pytest.mark.parametrize(
    "text", ["", "1+", ")", "(1", "\\frac{1}", "a;b", "1" * 400, "(" * 99 + "1" + ")" * 99, "\\sqrt[3"]
)
def test_what_is_no_expression(text):
    with pytest.raises(Unclear):
        parse(text)


def test_large_powers_cost_nothing():
    assert not equal("9^{9^9}", "8^{9^9}")
    assert equal("x^{100}", "x^{99}x")


def test_clean():
    assert clean("$\\dfrac{1}{2}$ ") == "\\frac{1}{2}"
    assert clean("x = 3.") == "3"
    assert clean("12 \\text{ cm}^2") == clean("12 cm^2") == "12"
