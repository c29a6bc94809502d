"""What a model writes, under several settings: continuations of held-out files, and small functions with a line missing.

    python benchmarks/writing.py pico --judge pico-causal                   # tables, and benchmarks/results/writing-*.json
    python benchmarks/writing.py pico --only functions                      # parse rate at 6, 10 and 14 masks
    python benchmarks/writing.py runs/mine --judge runs/causal --temperature 0.8 1.0 --rule random --block 4 8

The best settings belong into the model's generation_config.json under "dlm" (see dlm/inference/recommended.py), which
`dlm.generate` and `dlm.infill` then take as defaults; the first row of each table is what that file says now.
"""

import argparse
import ast
import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm.evaluation.about import STDLIB
from dlm.evaluation.card import machine
from dlm.evaluation.continuations import HEADINGS, evaluate_continuations, heldout_prompts, references
from dlm.evaluation.lines import parses
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a bundled name or a folder")
    add("--judge", default="pico-causal", help="the causal model whose perplexity is taken (pico-causal)")
    add("--only", choices=("continuations", "functions"), help="one of the two (default: both)")
    add("--prompts", type=int, default=100, help="held-out prompts (100)")
    add("--tokens", type=int, default=64, help="tokens of a continuation (64)")
    add("--temperature", type=float, nargs="*", default=[0.0, 0.7, 0.85, 1.0])
    add("--rule", nargs="*", default=["low_confidence", "random"], help="decode rules; a causal model has none")
    add("--block", type=int, nargs="*", default=[], help="block lengths, of bidirectional models")
    add("--top-p", type=float, nargs="*", default=[], help="also draws from the smallest set with this probability")
    add("--seed", type=int, default=0)
    add("--show", type=int, default=0, help="print so many continuations of each row")
    add("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()

    import dlm

    lm = dlm.load(options.model, dtype="float32", device="cpu")
    lm.name = Path(options.model).name
    report: dict[str, Any] = {"model": lm.name, "machine": machine(), "prompts": options.prompts, "seed": options.seed}
    if options.only != "functions":
        report["continuations"] = continuations(lm, options)
    if options.only != "continuations" and lm.config.attention == "bidirectional":
        report["functions"] = functions(lm, options)
    file = options.output / f"writing-{lm.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(f"written: {file}")
    return 0


def settings_of(lm: "LM", options: argparse.Namespace) -> list[dict[str, Any]]:
    """The recommended settings, then every combination of the options given."""
    rules = [None] if lm.config.attention == "causal" else options.rule
    blocks = options.block if lm.config.attention == "bidirectional" and options.block else [None]
    found: list[dict[str, Any]] = [{}]
    for temperature, top_p, rule, block in product(options.temperature, [None, *options.top_p], rules, blocks):
        if temperature or top_p is None:
            every = {"temperature": temperature, "top_p": top_p, "rule": rule, "block_length": block}
            found.append({key: value for key, value in every.items() if value is not None})
    return found


def continuations(lm: "LM", options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for the real text, one for its tokens shuffled, and one for each way of decoding."""
    import dlm

    judge = dlm.load(options.judge, dtype="float32", device="cpu")
    places = heldout_prompts(STDLIB, lm, options.prompts, options.seed, tokens=options.tokens)
    results = references(lm, judge, places, options.seed)
    for settings in settings_of(lm, options):
        result, found = evaluate_continuations(lm, judge, places, tokens=options.tokens, seed=options.seed, **settings)
        results.append(result)
        print(f"  {result.settings:60s} loops {result.loops}  perplexity {result.perplexity:.1f}", flush=True)
        for place, text in list(zip(places, found, strict=True))[: options.show]:
            print(f"--- {place.name}\n{place.prompt[-160:]}⟦{text.text}⟧")
    print(f"\n{len(places)} held-out prompts, {options.tokens} tokens each, judged by {options.judge}\n")
    print(markdown([result.row() for result in results], HEADINGS) + "\n")
    return [result.to_dict() for result in results]


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
    for settings in ({}, *({"rule": rule, "temperature": 0.0} for rule in options.rule)):
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
