"""What traces cost: bytes, microseconds, writes a second, time to start, and time of the engine that records them.

python benchmarks/trace.py                     # all of it; benchmarks/results/trace.json
python benchmarks/trace.py --peer-path FOLDER  # beside DiffTrace's own code, a checkout of it
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import RESULTS, parser, write
from traces import difftrace, overhead, records
from traces.samples import LENGTH, STEPS, samples

from dlm.errors import UserError
from dlm.evaluation.card import Table, machine

BYTES = {"what": "bytes a trace", "record": "record", "file": "file"}
TIMES = {"what": "one call", "microseconds": "µs", "counts": "× sum(range(100))"}
STARTS = {"what": "command", "seconds": "seconds", "cpu_seconds": "CPU, seconds"}
WRITES = {"durability": "durability", "processes": "processes", "traces_a_second": "traces/s"}
OVERHEAD = {"what": "recording", "off": "off, µs", "more": "more, µs", "percent": "more, %"}
OVERHEAD |= {"interval": "95 % of it, %", "pairs": "pairs"}
PEER = {"what": "what", "ours": "dlm", "theirs": "DiffTrace", "ratio": "DiffTrace / dlm"}


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    try:
        values, tables = measure(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n\n".join(map(str, tables)))
    named = {name: str(value) for name, value in vars(options).items()}
    write(options.output, {"trace": values, "machine": machine(), "options": named})
    return 0


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Table]]:
    """Sizes, times, start, writes; then an engine with and without recording, and DiffTrace where it is given."""
    shape = f"{LENGTH} tokens in {STEPS} steps"
    say(f"{options.traces} traces of {shape}")
    traces, lessons = samples(options.traces, options.tokenizer)
    values: dict[str, Any] = {"traces": len(traces), "length": LENGTH, "steps": STEPS}
    tables: list[Table] = []

    def add(key: str, title: str, headings: dict[str, str], rows: list[dict[str, Any]], text: str = "") -> None:
        say(f"measured: {title}")
        tables.append(Table(title=f"Traces: {title}", headings=headings, rows=rows, text=text))
        values[key] = rows

    text = f"{len(traces)} traces of {shape}; file: all included."
    add("bytes", "size", BYTES, records.sizes(traces, lessons), text)
    text = f"The fastest of many calls; {shape}."
    add("microseconds", "time", TIMES, records.times(traces, lessons, options.seconds), text)
    add("start", "start", STARTS, records.start(), "The least of ten runs, for each column.")
    add("writes", "writes", WRITES, records.writes(traces[: options.writes]))
    if options.requests:
        import dlm

        rows = overhead.measure(dlm.load(options.model), options.requests, options.gen_length, say)
        add("overhead", "recording", OVERHEAD, rows, overhead.TEXT)
    if options.peer_path is not None:
        rows = difftrace.measure(options.peer_path, options.seconds, traces)
        add("difftrace", "DiffTrace", PEER, rows, difftrace.TEXT)
    return values, tables


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    words = parser(__doc__)
    add = words.add_argument
    add("--traces", type=int, default=10_000, metavar="N", help="traces stored for the sizes (10,000)")
    add("--writes", type=int, default=2_000, metavar="N", help="traces written for each rate (2,000)")
    add("--tokenizer", metavar="NAME", help="whose ids are stored; without it, 32,000 tokens are learnt first")
    add("--model", default="pico", metavar="NAME", help="the model that is decoded with and without recording (pico)")
    add("--requests", type=int, default=20, metavar="N", help="requests decoded so; 0: none (20)")
    add("--gen-length", type=int, default=64, metavar="N", help="tokens, and steps, of each (64)")
    add("--seconds", type=float, default=1.0, help="time to spend on each call that is timed, at least (1)")
    add("--peer-path", type=Path, metavar="FOLDER", help="a checkout of DiffTrace: its code does the same beside ours")
    add("--output", type=Path, default=RESULTS / "trace.json", metavar="FILE", help="JSON of all of it")
    return words.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
