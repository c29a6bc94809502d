"""Holes of unknown length: what `[MASK:4-16]` chooses on held-out lines, and what the fills are worth.

    python benchmarks/lengths.py                       # pico, 60 lines of the standard library
    python benchmarks/lengths.py --least 1 --most 32

Each line is filled at the chosen length, at its true one, at the middle of the range and at random ones. "Alike" is
difflib's ratio of the fill and the true line: the model is far too small to write many lines exactly.
"""

import random
from difflib import SequenceMatcher
from statistics import mean

from measuring import parser

import dlm
from dlm.data.config import DataConfig
from dlm.data.lines import LineTask, heldout_lines, parses
from dlm.evaluation.table import markdown

CONTEXT = 400
"""Characters shown on either side."""


def main() -> None:
    words = parser(__doc__)
    words.add_argument("--model", default="pico")
    words.add_argument("--lines", type=int, default=60)
    words.add_argument("--least", type=int, default=4)
    words.add_argument("--most", type=int, default=16)
    words.add_argument("--seed", type=int, default=0)
    options = words.parse_args()
    lm, span = dlm.load(options.model), (options.least, options.most)
    tasks = heldout_lines(DataConfig(source="stdlib"), 10 * options.lines, seed=options.seed)
    true = [len(lm.require_tokenizer().encode(task.line, special=False)) for task in tasks]
    kept = [(task, size) for task, size in zip(tasks, true, strict=True) if span[0] <= size <= span[1]][: options.lines]
    tasks, true = [task for task, _ in kept], [size for _, size in kept]
    draw = random.Random(options.seed)
    holes = {
        f"chosen from {span[0]}-{span[1]}": [f"[MASK:{span[0]}-{span[1]}]"] * len(tasks),
        "true length": [f"[MASK:{size}]" for size in true],
        "middle": [f"[MASK:{sum(span) // 2}]"] * len(tasks),
        "random length": [f"[MASK:{draw.randint(*span)}]" for _ in tasks],
    }
    results = {name: dlm.infill(lm, list(map(prompt, tasks, found))) for name, found in holes.items()}
    oracle = [alike(task, result) for task, result in zip(tasks, results["true length"], strict=True)]
    rows = []
    for name, filled in results.items():
        near = [alike(task, result) for task, result in zip(tasks, filled, strict=True)]
        row = {"hole": name, "tokens": f"{mean(len(r.tokens) for r in filled):.1f}"}
        row["true length"] = f"{mean(len(r.tokens) == size for r, size in zip(filled, true, strict=True)):.0%}"
        row["alike"] = f"{mean(near):.3f}"
        row["at least as alike as at the true length"] = (
            f"{mean(a >= b for a, b in zip(near, oracle, strict=True)):.0%}"
        )
        whole = [parses(task.filled(hole(r))) for task, r in zip(tasks, filled, strict=True)]
        rows.append(row | {"file parses": f"{mean(whole):.0%}", "NFE": f"{mean(r.nfe for r in filled):.1f}"})
    print(markdown(rows))


def prompt(task: LineTask, hole: str) -> str:
    before, after = task.prefix[-CONTEXT:], task.suffix[:CONTEXT]
    return hole.join(text.replace("[MASK", "\\[MASK") for text in (before, after))


def alike(task: LineTask, result: dlm.Generation) -> float:
    return SequenceMatcher(None, hole(result), task.line).ratio()


def hole(result: dlm.Generation) -> str:
    assert result.holes is not None
    return result.holes[0]


if __name__ == "__main__":
    main()
