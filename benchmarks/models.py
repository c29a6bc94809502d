"""How good the bundled models are: measure, print tables, write JSON, a plot and the model card.

    python benchmarks/models.py sudoku pico                                  # tables, and benchmarks/results/models-*.json
    python benchmarks/models.py sudoku --run runs/sudoku --card              # the card too, into the model's folder
    python benchmarks/models.py sudoku --model runs/sudoku --run runs/sudoku --card README.md --reuse   # measure nothing again

What is measured is `dlm.infill` and `dlm.diffusion.bound` on held-out data, in fp32 on a CPU.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import RESULTS, parser, write

from dlm.errors import UserError
from dlm.evaluation import bound, infill, lines, sudoku
from dlm.evaluation.about import ABOUT, STDLIB
from dlm.evaluation.card import Run, Table, machine, render_card
from dlm.evaluation.filling import Filling

if TYPE_CHECKING:
    from dlm.models.lm import LM


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    try:
        for name in options.names:
            _one(name, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    add = words.add_argument
    add("names", nargs="*", default=["sudoku", "pico"], help="bundled models, or a name for --model (default: both)")
    add("--model", help="folder or hub id to measure instead of the bundled model of that name")
    add("--run", help="run folder (metrics.jsonl, checkpoints/) the card is written from")
    add("--card", nargs="?", const="", metavar="FILE", help="write the card (default: README.md beside the weights)")
    add("--hardware", help="what the run was trained on (default: this machine)")
    add("--puzzles", type=int, default=1000, help="puzzles for the main rules (1000)")
    add("--sweep", type=int, default=200, help="puzzles for the other rules; 0: none (200)")
    add("--lines", type=int, default=200, help="lines to infill (200)")
    add("--sequences", type=int, default=256, help="held-out sequences of the bound (256)")
    add("--draws", type=int, default=4, help="Monte Carlo draws a sequence (4)")
    add("--length", type=int, default=256, help="tokens a window, and a sequence of the bound (256)")
    add("--infilling", metavar="FILE", help="also lines from a JSONL file in HumanEval's single-line infilling format")
    add("--batch-size", type=int, default=64, help="canvases a forward (64)")
    add("--seed", type=int, default=0, help="of puzzles, lines and random orders (0)")
    add("--dtype", default="float32", help="dtype of the weights (float32)")
    add("--device", default="cpu", help="where to run (cpu)")
    add("--output", type=Path, default=RESULTS, help="folder of the JSON files")
    add("--reuse", action="store_true", help="take the JSON file that is there instead of measuring")
    add("--plot", action="store_true", help="draw solved puzzles against TPF beside the JSON (needs the extra `plot`)")
    options = words.parse_args(argv)
    if len(options.names) > 1 and (options.model or options.run or options.card):
        words.error("--model, --run and --card are for one model: give one name")
    if options.card is not None and options.run is None:
        words.error("--card needs --run, the folder it takes the training's figures from")
    return options


def _one(name: str, options: argparse.Namespace) -> None:
    from dlm.models.finding import find

    file = options.output / f"models-{name}.json"
    folder = find(options.model or name)
    if options.reuse:
        if not file.is_file():
            raise UserError(f"--reuse: there is no {file} yet; run without it once")
        report = json.loads(file.read_text("utf-8"))
    else:
        report = measure(name, str(folder), options)
        write(file, report)
    tables = [Table(**table) for table in report["tables"]]
    print("\n" + "\n\n".join(map(str, tables)))
    if options.plot and report["kind"] == "sudoku":
        plot(report["results"], file.with_suffix(".png"))
    if options.card is not None:
        target = Path(options.card) if options.card else folder / "README.md"
        hardware = options.hardware or machine()
        about = ABOUT[report["kind"]](name)
        run = Run.read(options.run)
        own = json.loads((folder / "generation_config.json").read_text("utf-8")).get("dlm")
        words: dict[str, Any] = {"facts": report["facts"], "hardware": hardware, "recommended": own}
        card = render_card(name, about=about, run=run, tables=tables, **words)
        target.write_text(card, "utf-8")
        print(f"written: {target}")


def measure(name: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    import dlm

    lm = dlm.load(model, dtype=options.dtype, device=options.device)
    lm.name = name
    weights = {id(p): p for p in lm.network.parameters()}.values()
    kind = "sudoku" if sudoku.is_sudoku_model(lm) else KINDS.get(lm.config.attention, "code")
    facts = {"parameters": f"{sum(p.numel() for p in weights):,}", "vocabulary": f"{lm.config.vocab_size:,} tokens"}
    started = time.perf_counter()
    tables, results = MEASURES[kind](lm, options)
    elsewhere = ("names", "model", "run", "card", "hardware", "output", "reuse", "plot")
    return {
        "model": name,
        "kind": kind,
        "facts": facts,
        "machine": machine(),
        "seconds": round(time.perf_counter() - started, 1),
        "options": {key: value for key, value in vars(options).items() if key not in elsewhere},
        "tables": [asdict(table) for table in tables],
        "results": results,
    }


def measure_sudoku(lm: "LM", options: argparse.Namespace) -> tuple[list[Table], list[dict[str, Any]]]:
    """The main rules on all puzzles, the others on the first few of the same."""
    puzzles = sudoku.heldout_puzzles(options.puzzles, seed=options.seed)
    print(f"{lm.name}: {len(puzzles)} held-out puzzles", flush=True)
    tables, results = [], []
    text = (
        "Puzzles of symmetry classes that training never saw, each with one solution, empty cells uniform in 30–55. "
        "Solved means every cell is right. `1/step` commits one cell a forward pass. Columns by empty cells: share solved."
    )
    sets = (
        ("Main rules", text, sudoku.MAIN, len(puzzles)),
        ("Other rules, and more cells a step", "On the first puzzles of the same set.", sudoku.SWEEP, options.sweep),
    )
    for title, words, decodings, count in sets:
        rows = []
        for decoding in decodings if count else ():
            result = sudoku.evaluate_sudoku(
                lm, puzzles.first(count), decoding, batch_size=options.batch_size, seed=options.seed
            )
            rows.append(result.row())
            results.append(result.to_dict())
            line = f"  {result.decoding:36s} TPF {result.tpf:5.2f}  solved {result.solved}  {result.seconds:.0f} s"
            print(line, flush=True)
        if rows:
            tables.append(Table(title=title, text=words, headings=sudoku.HEADINGS, rows=rows))
    return tables, results


def measure_code(lm: "LM", options: argparse.Namespace) -> tuple[list[Table], list[dict[str, Any]]]:
    """The bound, then single lines."""
    found = bound.measure_bound(
        lm, STDLIB, length=options.length, sequences=options.sequences, draws=options.draws, seed=options.seed
    )
    print(f"{lm.name}: bound {found.row()['bits']} bits a byte  {found.seconds:.0f} s", flush=True)
    text = (
        "On the held-out files of the standard library, in sequences scored each from nothing before it; the error is "
        "that of the Monte Carlo draws. End-of-text counts as a token and as no byte."
    )
    tables = [Table(title="Likelihood bound", text=text, headings=bound.HEADINGS, rows=[found.row()])]
    results: list[dict[str, Any]] = [{"bound": found.to_dict()}]
    if lm.config.attention != "bidirectional":
        return tables, results  # it does not see what comes after a hole
    tasks = lines.heldout_lines(STDLIB, options.lines, options.seed)
    sets = [("Single lines of held-out standard-library files", LINES_TEXT, tasks)]
    if options.infilling:
        sets.append(("Single lines of a benchmark", BENCHMARK_TEXT, lines.read_tasks(options.infilling)))
    for title, words, chosen in sets:
        rows = []
        for hole, decoding in LINE_DECODINGS:
            size = {"length": options.length, "batch_size": max(1, options.batch_size // 2), "seed": options.seed}
            result = infill.evaluate_infill(lm, chosen, hole=hole, decoding=decoding, **size)
            rows.append(result.row())
            results.append({"lines": title, **result.to_dict()})
            graded = f"exact {result.exact}  parses {result.parses}"
            print(f"  {hole} {result.decoding:30s} {graded}  {result.seconds:.0f} s", flush=True)
        tables.append(Table(title=title, text=words, headings=infill.HEADINGS, rows=rows))
    return tables, results


LINE_DECODINGS: tuple[tuple[infill.Hole, Filling], ...] = (
    ("oracle", Filling(rule="low_confidence")),
    ("given", Filling(rule="low_confidence")),
    ("oracle", Filling(rule="threshold", options={"threshold": 0.9})),
)
GRADING = (
    "Oracle: the hole has the true line's number of tokens; given: that number rounded up to a multiple of "
    f"{infill.ROUND}. The answer is the hole's text up to its first line break or end-of-text. Exact: the file is the "
    "original again. Parses: the whole file with the answer in place of the line, by `ast.parse`; beside it the same "
    "with nothing there, and with the true line."
)
LINES_TEXT = (
    "Lines of code drawn evenly from all that have 8 to 100 characters and 400 characters of the file on either side; "
    f"the line is to be written from its first visible character on. {GRADING}"
)
BENCHMARK_TEXT = f"The indentation is the model's to write. {GRADING}"


MEASURES: dict[str, Callable[["LM", argparse.Namespace], tuple[list[Table], list[dict[str, Any]]]]] = {
    "sudoku": measure_sudoku,
    **dict.fromkeys(("code", "causal", "block"), measure_code),
}
KINDS = {"causal": "causal", "block_causal": "block"}
"""attention -> what the card says in words."""


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Solved puzzles against tokens a forward pass, a line a rule."""
    from dlm.evaluation.suite.plot import draw

    runs = [
        {"model": "sudoku", "task": "puzzles", "decoding": found["decoding"], "measure": "solved", "metrics": found}
        for found in results
    ]
    draw({"runs": runs}, file)
    print(f"written: {file}")


if __name__ == "__main__":
    raise SystemExit(main())
