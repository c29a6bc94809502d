import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from dlm.evaluation import algebra
from dlm.evaluation.algebra import same, spelled
from tests.refusals import refused

CALLS = {"+": Fraction.__add__, "-": Fraction.__sub__, "\\cdot ": Fraction.__mul__}


def joined(parts):
    """Two terms, each in LaTeX with its value, and a sign: their sum, difference or product."""
    (left, x), (right, y), sign = parts
    return f"({left}){sign}({right})", CALLS[sign](x, y)


TERMS = st.recursive(
    st.integers(0, 20).map(lambda n: (str(n), Fraction(n))),
    lambda inner: st.tuples(inner, inner, st.sampled_from(list(CALLS))).map(joined),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
@given(TERMS, st.integers(1, 9), st.booleans())
def test_arithmetic_is_exact(term, bottom, right):
    latex, value = term
    value = value / bottom + (not right)
    assert same(f"\\frac{{{latex}}}{{{bottom}}}", f"{value.numerator}/{value.denominator}") is right


def test_in_threads():
    pairs = [(f"\\frac{{{n}}}{{4}}", str(n / 4 + n % 2)) for n in range(12)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda pair: same(*pair), pairs)) == [n % 2 == 0 for n in range(12)]


def test_what_never_ends_is_ended():
    started = time.monotonic()
    assert not same("9^{9^{9^9}}", "28")
    assert time.monotonic() - started < 30
    assert same("0.5", "1/2")  # by a new process


def test_without_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(algebra, "_checker", algebra._Checker())
    refused(r"math-verify: pip install 'dlm\[eval\]'", same, "2x", "3x")
    assert same("\\text{Evelyn}", "evelyn")  # equal as text: nothing to compute


def test_nothing_a_model_writes_is_run(tmp_path):
    file = tmp_path / "made"
    for text in (f"__import__('pathlib').Path('{file}').touch()", f"open('{file}','w')", "exit()", "\x00", "[" * 999):
        assert not same(text, "28")
    assert not file.exists()


def test_spelled():
    assert spelled("x² ≤ −½") == "x^{2} \\le  - 1/2"
    assert spelled("11,111,100") == "11111100"
    assert spelled("(1,200)") == "(1,200)"
