"""Write a model's card from what `dlm-eval` measured. Measures nothing itself.

dlm-eval --config eval/sudoku-card --output card.json            # eval/pico; eval/bound --model pico-causal
python benchmarks/models.py sudoku card.json                     # the tables that the card would have
python benchmarks/models.py sudoku card.json --run runs/sudoku --card README.md      # the card
python benchmarks/models.py mine card.json more.json --model runs/mine --run runs/mine --card
python benchmarks/models.py pico-draft drafted.json --run runs/pico-draft --card      # a draft: what its target does with it
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cards import ABOUT
from measuring import parser

from dlm.errors import UserError
from dlm.evaluation.card import Run, Table, machine, render_card
from dlm.evaluation.suite.again import config_of
from dlm.evaluation.suite.report import HEADINGS, rows_of

if TYPE_CHECKING:
    from dlm.models.lm import LM

ANSWERED = (
    "The answer is the hole's text up to its first line break or end-of-text. Exact: the file is the original again. Parses: "
    "the whole file with the answer in it, by `ast.parse`; beside it the same with the line left empty. As recommended a hole is filled anew "
    "until what the model sees of the file can be Python; NFE counts every attempt."
)
LINES = (
    "Lines of code drawn evenly from all that have 8 to 100 characters and 400 characters of the file on either side; the "
    f"line is to be written from its first visible character on. {ANSWERED} The hole has "
)
TEXTS = {
    "sudoku": "Puzzles of symmetry classes that training never saw, each with one solution. Solved means every cell is "
    "right. `1/step` commits one cell a forward pass. Checked: filled anew, 16 times at most, until the grid keeps the rules.",
    "bound": "On held-out files of the standard library, in sequences scored each from nothing before it; the error is "
    "that of the draws. End-of-text counts as a token and as no byte.",
    "perplexity": "Continuations by 64 tokens of what stands before held-out lines of code: what the judge, `pico-causal`, makes of them, "
    "their entropy, and the share in which one 4-gram occurs more than three times; beside these the real text's values, "
    "and the judge's of the real text's tokens shuffled.",
    "lines oracle": LINES + "the true line's number of tokens.",
    "lines given": LINES + "that number rounded up to a multiple of 8.",
}
"""A task's label -> what to know when reading its table."""


def main(argv: list[str] | None = None) -> int:
    words = parser(__doc__)
    add = words.add_argument
    add("name", help="a bundled model, or a name for --model")
    add("results", nargs="+", help="JSON files of dlm-eval")
    add("--model", help="folder of the model, if it is not the bundled one of that name")
    add("--run", help="run folder (metrics.jsonl, checkpoints/) the card is written from")
    add("--card", nargs="?", const="", metavar="FILE", help="write the card (default: README.md beside the weights)")
    add("--hardware", help="what the run was trained on (default: this machine)")
    options = words.parse_args(argv)
    if options.card is not None and options.run is None:
        words.error("--card needs --run, the folder it takes the training's figures from")
    try:
        _write(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write(options: argparse.Namespace) -> None:
    import dlm
    from dlm.models.finding import find

    folder = find(options.model or options.name)
    target = target_of(folder)
    lm = dlm.load(target or str(folder), dtype="float32", device="cpu")
    tables = [table for file in options.results for table in tables_of(Path(file), lm)]
    print("\n\n".join(map(str, tables)))
    if options.card is None:
        return
    made = lm.network if target is None else dlm.load_draft(folder, lm)
    weights = {id(p): p for p in made.parameters()}.values()
    facts = {"parameters": f"{sum(p.numel() for p in weights):,}", "vocabulary": f"{lm.config.vocab_size:,} tokens"}
    card = render_card(
        options.name,
        about=ABOUT["draft" if target else kind_of(lm)](options.name),
        run=Run.read(options.run),
        tables=tables,
        facts=facts,
        hardware=options.hardware or machine(),
        recommended=None if target else lm.generation.get("dlm"),
    )
    target = Path(options.card) if options.card else folder / "README.md"
    target.write_text(card, "utf-8")
    print(f"written: {target}")


def tables_of(file: Path, lm: "LM") -> list[Table]:
    """A table for each task that these results have of this model."""
    from dlm.models.fingerprint import weights_digest

    _, values = config_of(file)
    digest = weights_digest(lm.network)
    names = [name for name, facts in values["about"]["models"].items() if facts["weights"] == digest]
    if not names:
        known = ", ".join(values["about"]["models"])
        raise UserError(f"{file} is of {known}, with other weights than {lm.name!r}: run dlm-eval on this model")
    rows = [row for row in rows_of(values) if row["model"] == names[0]]
    tables = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        shown = {key: text for key, text in HEADINGS.items() if any(row.get(key) is not None for row in own)}
        headings = {key: text for key, text in shown.items() if key not in ("model", "task")}
        tables.append(Table(title=task.capitalize(), text=TEXTS.get(task, ""), headings=headings, rows=own))
    return tables


def target_of(folder: Path) -> str | None:
    """The model that this folder's draft is for; None where it holds no draft."""
    from dlm.models.draft_config import is_draft

    hub = json.loads((folder / "config.json").read_text("utf-8"))
    return hub["dlm"]["target"] if is_draft(hub) else None


def kind_of(lm: "LM") -> str:
    """Which words of `cards` fit."""
    from dlm.evaluation.sudoku import is_sudoku_model

    kinds: dict[str, Any] = {"causal": "causal", "block_causal": "block"}
    return "sudoku" if is_sudoku_model(lm) else kinds.get(lm.config.attention, "code")


if __name__ == "__main__":
    raise SystemExit(main())
