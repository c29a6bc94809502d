"""Small functions with a line missing, filled in with 6, 10 and 14 masks: how many parse.

    python benchmarks/writing.py pico                                     # a table, and benchmarks/results/writing-pico.json
    python benchmarks/writing.py runs/mine --rule random margin --show 3

The first row is what the model's generation_config.json recommends under "dlm" (see dlm/inference/recommended.py), the
second that with every hole filled once, for a model may recommend to fill anew what does not parse. How a model continues
texts is measured by `dlm-eval --config eval/writing --model NAME`.
"""

import argparse
import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import RESULTS, machine, parser, write

from dlm.data.lines import parses
from dlm.evaluation.rate import Rate
from dlm.evaluation.table import markdown

if TYPE_CHECKING:
    from dlm.models.lm import LM

MASKS = (6, 10, 14)
FUNCTIONS = """
def mean(values):
    total = sum(values)
    return total / len(values)

def is_even(number):
    remainder = number % 2
    return remainder == 0

def read_lines(path):
    with open(path) as file:
        return file.read().splitlines()

def count_words(text):
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts

def clamp(value, low, high):
    if value < low:
        return low
    return min(value, high)

def flatten(rows):
    result = []
    for row in rows:
        result.extend(row)
    return result

def first_or_none(items):
    for item in items:
        return item
    return None

def parse_flag(name, default=False):
    value = os.environ.get(name)
    if value is None:
        return default
    return value.lower() in ("1", "true", "yes")

def join_path(base, *parts):
    path = base
    for part in parts:
        path = os.path.join(path, part)
    return path

def chunks(items, size):
    for start in range(0, len(items), size):
        yield items[start:start + size]
"""


def main() -> int:
    words = parser(__doc__)
    add = words.add_argument
    add("model", help="a bundled name or a folder")
    add("--rule", nargs="*", default=["low_confidence", "random"], help="decode rules, at temperature 0")
    add("--show", type=int, default=0, help="print so many functions of each row")
    add("--output", type=Path, default=RESULTS)
    options = words.parse_args()

    import dlm

    lm = dlm.load(options.model, dtype="float32", device="cpu")
    report = {"model": Path(options.model).name, "machine": machine(), "functions": functions(lm, options)}
    write(options.output / f"writing-{report['model']}.json", report)
    return 0


def holes() -> list[tuple[str, str]]:
    """Each function's text before and after its missing line, which is the last but one of its body or the only one."""
    found = []
    for source in FUNCTIONS.strip().split("\n\n"):
        lines = source.split("\n")
        at = max(1, len(lines) - 2)
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        found.append(("\n".join([*lines[:at], indent]), "\n" + "\n".join(lines[at + 1 :]) + "\n"))
        assert ast.parse(source)
    return found


def functions(lm: "LM", options: argparse.Namespace) -> list[dict[str, Any]]:
    """How many of the functions parse when the line is filled in with so many masks."""
    import dlm

    rows = []
    once = {"check": "none"}
    for settings in ({}, once, *({"rule": rule, "temperature": 0.0, **once} for rule in options.rule)):
        row: dict[str, Any] = {"settings": ", ".join(f"{k} = {v}" for k, v in settings.items()) or "as recommended"}
        outcomes = []
        for masks in MASKS:
            found = dlm.infill(lm, [f"{before}[MASK:{masks}]{after}" for before, after in holes()], **settings)
            good = [parses(result.text) for result in found]
            row[f"{masks} masks"] = str(sum(good))
            outcomes += good
            for result in found[: options.show]:
                print(f"---\n{result.text}")
        rows.append(row | {"all": str(Rate.of(outcomes))})
    print(f"{len(holes())} small functions with a line missing: how many parse\n\n{markdown(rows)}\n")
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
