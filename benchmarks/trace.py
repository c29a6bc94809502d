"""What traces cost: bytes, microseconds, writes a second, time to start, and time of the engine that records them.

python benchmarks/trace.py      # prints the tables, and writes benchmarks/results/trace.json
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from traces.samples import LENGTH, STEPS

from dlm.bench.finding import Table
from dlm.bench.report import in_markdown
from dlm.errors import UserError

RESULTS = Path(__file__).parent / "results"
Say = Callable[[str], None]

BYTES = {"what": "bytes a trace", "record": "record", "file": "file"}
TIMES = {"what": "one call", "microseconds": "µs", "counts": "× sum(range(100))"}
STARTS = {"what": "command", "seconds": "seconds", "cpu_seconds": "CPU, seconds"}
WRITES = {"durability": "durability", "processes": "processes", "traces_a_second": "traces/s"}
OVERHEAD = {
    "what": "recording",
    "off": "off, µs",
    "more": "more, µs",
    "percent": "more, %",
    "interval": "95 % of it, %",
    "pairs": "pairs",
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    RESULTS.mkdir(exist_ok=True)
    try:
        values, tables = measure(options, lambda line: print(line, file=sys.stderr, flush=True))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n\n".join(map(in_markdown, tables)))
    report = {"trace": values, **_where(options)}
    options.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 0


def measure(options: argparse.Namespace, say: Say) -> tuple[dict[str, Any], list[Table]]:
    """Sizes, times, start-up and writes of traces; then an engine with and without recording."""
    from traces import overhead, records
    from traces.samples import samples

    say(f"{options.traces} traces of {LENGTH} tokens in {STEPS} steps")
    traces, lessons = samples(options.traces, options.tokenizer)
    shape = f"{LENGTH} tokens, {STEPS} steps"
    tables = []

    def table(title: str, headings: dict[str, str], rows: list, text: str = "") -> list:
        say(title)
        tables.append(Table(title=title, headings=headings, rows=rows, text=text))
        return rows

    values: dict[str, Any] = {"traces": len(traces), "length": LENGTH, "steps": STEPS}
    values["bytes"] = table(
        "Traces: size", BYTES, records.sizes(traces, lessons), f"{len(traces)} traces of {shape}; file: all included."
    )
    values["microseconds"] = table(
        "Traces: time", TIMES, records.times(traces, lessons, options.seconds), f"The fastest of many calls; {shape}."
    )
    values["start"] = table("Traces: start", STARTS, records.start(), "The least of ten runs, for each column.")
    values["writes"] = table("Traces: writes", WRITES, records.writes(traces[: options.writes]))
    if options.requests:
        import dlm

        rows = overhead.measure(dlm.load(options.model), options.requests, options.gen_length, say)
        values["overhead"] = table("Traces: recording", OVERHEAD, rows, overhead.TEXT)
    return values, tables


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=int, default=10_000, metavar="N", help="traces stored for the sizes (10,000)")
    add("--writes", type=int, default=2_000, metavar="N", help="traces written for each rate (2,000)")
    add("--tokenizer", metavar="NAME", help="whose ids are stored; without it, 32,000 tokens are learnt first")
    add("--model", default="pico", metavar="NAME", help="the model that is decoded with and without recording (pico)")
    add("--requests", type=int, default=20, metavar="N", help="requests decoded so; 0: none (20)")
    add("--gen-length", type=int, default=64, metavar="N", help="tokens, and steps, of each (64)")
    add("--seconds", type=float, default=1.0, help="time to spend on each call that is timed, at least (1)")
    add("--output", type=Path, default=RESULTS / "trace.json", metavar="FILE", help="JSON of all of it")
    return parser.parse_args(argv)


def _where(options: argparse.Namespace) -> dict[str, Any]:
    from dlm.evaluation.card import machine

    return {"machine": machine(), "options": {name: str(value) for name, value in vars(options).items()}}


if __name__ == "__main__":
    raise SystemExit(main())
