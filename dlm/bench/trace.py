"""[trace]: what traces cost, of bytes and of time. Knows no format: `dlm.trace` writes and reads."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlm.bench.config import BenchConfig, TraceBenchSection
from dlm.bench.finding import Finding, Say, Table
from dlm.bench.samples import LENGTH, STEPS

if TYPE_CHECKING:
    from dlm.models.lm import LM

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
PEER = {"what": "what", "ours": "dlm", "theirs": "DiffTrace", "ratio": "DiffTrace / dlm"}


def measure(config: BenchConfig, load: "Callable[[], LM]", say: Say) -> Finding:
    """Sizes, times, start, writes; then an engine with and without recording, and DiffTrace where it is given."""
    from dlm.bench import records
    from dlm.bench.samples import samples

    s = config.trace or TraceBenchSection()
    say(f"{s.traces} traces of {LENGTH} tokens in {STEPS} steps")
    traces, lessons = samples(s)
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
        "Traces: time", TIMES, records.times(traces, lessons, s.seconds), f"The fastest of many calls; {shape}."
    )
    values["start"] = table("Traces: start", STARTS, records.start(), "The least of ten runs, for each column.")
    values["writes"] = table("Traces: writes", WRITES, records.writes(traces[: s.writes]))
    if s.requests:
        from dlm.bench import overhead

        values["overhead"] = table("Traces: recording", OVERHEAD, overhead.measure(load(), s, say), overhead.TEXT)
    if s.peer_path is not None:
        from dlm.bench import difftrace

        values["difftrace"] = table("Traces: DiffTrace", PEER, difftrace.measure(s, traces), difftrace.TEXT)
    return Finding(values={"trace": values}, tables=tables)
