"""Mathematical answers: one spelling of each, and whether two mean the same. Knows no text around them and no source.

Same value is same answer: 1/2 is 0.5, and 2(x+1) is 2x+2. Units, currency, degrees and LaTeX's looks do not count; sign,
brackets and the order in a tuple do.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from dlm.bench.algebra import equal, proportional

Same = Callable[[str, str], bool]

SYMBOLS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": "*",
        "·": "*",
        "÷": "/",
        "⁄": "/",
        "π": "\\pi ",
        "∞": "\\infty ",
        "∪": "\\cup ",
        "√": "\\sqrt ",
        "≤": "<=",
        "≥": ">=",
        "°": "",
        "€": "",
        "£": "",
    }
)
HIGH = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
UNITS = "cm|mm|km|ft|in|yd|mi|kg|mg|lb|oz|hr|hrs|min|sec|mph|cents|dollars|degrees|radians|units|sq"
Replacement = str | Callable[[re.Match[str]], str]

REWRITES: tuple[tuple[str, Replacement], ...] = (
    (r"\\\$|\$|(?<!\\)\\[()\[\]]", ""),
    (r"\\%", "%"),
    (r"\{,\}", ","),
    (r",\s*\\!\s*", ","),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|quad|qquad)(?![A-Za-z])|(?<!\\)\\[!,;: ]|~", " "),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", ""),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\leq?(?![A-Za-z])", "<="),
    (r"\\geq?(?![A-Za-z])", ">="),
    (r"\\neq?(?![A-Za-z])", "!="),
    (r"\\(?:cdot|times)(?![A-Za-z])|\*\*", lambda found: "^" if found[0] == "**" else "*"),
    (r"\\approx(?![A-Za-z])", "="),
    (r"\+?\\infty|(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", lambda _: r"\infty "),
    # A unit in \text behind a value says nothing of the value.
    (
        r"(?<=[^\s,;=(])\s*\\(?:text|textrm|mathrm|mbox|rm)\s*\{(?!\s*(?:and|or)\s*\})[^{}]*\}(?:\^\{?\d\}?)?(?=[\s.]*$)",
        "",
    ),
    (r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname|boldsymbol)\s*\{([^{}]*)\}", r" \1 "),
    (r"\s(?:and|or)\s", " , "),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"(?<![\w.^_}/])(\d+)\s+(\d+)\s*/\s*(\d+)", r"(\1+\2/\3)"),
    (r"(?<![\w.^_}/])(\d+)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}", r"(\1+\2/\3)"),
    (r"(?<![\w.,(\[])(?<!\\\{)(\d{1,3}(?:,\d{3})+)(?![\d,])", lambda found: found[0].replace(",", "")),
)
NAMED = re.compile(r"^\s*(?:[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?|\\[a-z]+)\s*(?:=|\\in(?![A-Za-z]))(?!.*[=<>])")
TAIL = re.compile(rf"(?:(?<=[\d)}}])\s*(?:{UNITS})|(?<=[\d)}}%])\s+[A-Za-z]{{3,}})(?:\s*\^?\{{?[23]\}}?)?\s*\.?$")
MATRIX = re.compile(r"\\begin\{([pbvBV]|small|)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
COLUMNS = {"b": "p", "small": "p", "": "p"}  # kinds that are written in other brackets only
OPEN, CLOSE = "([{", ")]}"


def clean(text: str) -> str:
    """One of the many spellings of an answer."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: "^{" + found[0].translate(HIGH) + "}", text)
    text = re.sub("[¼½¾⅓⅔⅕⅛]", lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    text = unicodedata.normalize("NFKC", text).translate(SYMBOLS).strip()
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    text = NAMED.sub("", text.strip()).strip().rstrip(".,;").strip()
    while (shorter := TAIL.sub("", text)) != text and shorter:
        text = shorter.strip()
    return text


def same(answer: str, gold: str) -> bool:
    """Whether two answers mean the same."""
    return bool(answer.strip()) and _same(clean(answer), clean(gold))


def _same(a: str, b: str) -> bool:
    if _squeezed(a) == _squeezed(b):
        return True
    if not a or not b:
        return False
    if a.endswith("%") or b.endswith("%"):
        return _same_percent(a, b)
    return any(compare(a, b) for compare in COMPARISONS)


def _squeezed(text: str) -> str:
    """Without blanks; words in lower case, for a variable's case may matter and a name's does not."""
    text = re.sub(r"\s+", "", text)
    bare = text.strip("()") if len(text.strip("()")) == 1 and text.strip("()").isalpha() else text
    return bare.casefold() if bare.isalpha() else bare


def _same_percent(a: str, b: str) -> bool:
    """20 % is 20 % and, beside an answer without the sign, 20 or 0.2."""
    bare = a.rstrip("% "), b.rstrip("% ")
    if a.endswith("%") == b.endswith("%"):
        return _same(*bare)
    return _same(*bare) or equal(
        f"({a[:-1]})/100" if a.endswith("%") else a, f"({b[:-1]})/100" if b.endswith("%") else b
    )


def _matrices(a: str, b: str) -> bool:
    first, second = MATRIX.fullmatch(a), MATRIX.fullmatch(b)
    if first is None or second is None:
        return False
    kinds = {COLUMNS.get(found[1], found[1]) for found in (first, second)}
    rows = [[row.split("&") for row in re.split(r"\\\\", found[2]) if row.strip()] for found in (first, second)]
    shapes = [[len(row) for row in matrix] for matrix in rows]
    cells = [[clean(cell) for row in matrix for cell in row] for matrix in rows]
    return len(kinds) == 1 and shapes[0] == shapes[1] and _pairwise(cells[0], cells[1])


def _unions(a: str, b: str) -> bool:
    return _unordered(*(re.split(r"\\cup(?![A-Za-z])", text) for text in (a, b)))


def _lists(a: str, b: str) -> bool:
    """`1, -2` and `\\{-2, 1\\}`: a set of solutions in any order; ± stands for both."""
    return _unordered(*(_entries(text) for text in (a, b)))


def _entries(text: str) -> list[str]:
    text = re.sub(r"^\\\{(.*)\\\}$", r"\1", text.strip())
    signed = [
        re.sub(r"\\pm(?![A-Za-z])|±", sign, part)
        for part in _split(text)
        for sign in (("+", "-") if re.search(r"\\pm(?![A-Za-z])|±", part) else ("",))
    ]
    return [NAMED.sub("", part.strip()).strip() for part in signed]


def _tuples(a: str, b: str) -> bool:
    """Points and intervals: brackets and order count."""
    if a[0] not in "([" or a[0] != b[0] or a[-1] != b[-1] or a[-1] not in ")]":
        return False
    first, second = _split(a[1:-1]), _split(b[1:-1])
    return len(first) > 1 and _pairwise(first, second)


def _equations(a: str, b: str) -> bool:
    """`5x + 4 = 0` and `-5x = 4`."""
    sides = [re.fullmatch(r"([^=<>]+)=([^=<>]+)", text) for text in (a, b)]
    if not all(sides):
        return False
    left, right = (f"({side[1]})-({side[2]})" for side in sides if side)
    return proportional(left, right)


def _bases(a: str, b: str) -> bool:
    """A base one of the two leaves out: 2516_8 and 2516."""
    bare = [re.fullmatch(r"(\d+)\s*_\s*\{?\d+\}?", text) for text in (a, b)]
    if (bare[0] is None) == (bare[1] is None):
        return False
    return a == bare[1][1] if bare[1] else bool(bare[0]) and bare[0][1] == b


COMPARISONS: tuple[Same, ...] = (_matrices, _unions, _lists, _tuples, _equations, _bases, equal)


def _split(text: str) -> list[str]:
    """The parts between commas and semicolons that no bracket encloses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in OPEN) - (character in CLOSE)
        if character in ",;" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _pairwise(first: Sequence[str], second: Sequence[str]) -> bool:
    return len(first) == len(second) and all(_same(x, y) for x, y in zip(first, second, strict=True))


def _unordered(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether the parts pair off; "same" is close to an equivalence, so taking the first that fits will do."""
    if len(first) != len(second) or len(first) < 2 or len(first) > 20:
        return False
    left = Counter(range(len(second)))
    for x in first:
        match = next((j for j in left if _same(x.strip(), second[j].strip())), None)
        if match is None:
            return False
        del left[match]
    return True
