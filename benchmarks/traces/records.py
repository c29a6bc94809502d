"""What records and their store cost: bytes, microseconds, writes a second, time to start."""

import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from traces.samples import CONTEXT, LENGTH, STEPS, VOCABULARY

from dlm.trace.codec import decode, encode
from dlm.trace.dictionaries import trained
from dlm.trace.facts import Facts, facts
from dlm.trace.store import TraceStore
from dlm.trace.trace import Trace


def sizes(traces: list[Trace], lessons: list[Trace]) -> list[dict[str, Any]]:
    """Rows of bytes a trace: of the record alone, of the whole file, and the bounds that entropy sets."""
    counts = np.bincount(np.concatenate([trace.first_token for trace in traces])).astype(float)
    share = counts[counts > 0] / counts.sum()
    order = math.lgamma(LENGTH + 1) / math.log(2) - STEPS * math.lgamma(LENGTH // STEPS + 1) / math.log(2)
    uniform = LENGTH * (math.log2(VOCABULARY) + math.log2(STEPS)) / 8
    unigram = (-(share * np.log2(share)).sum() * LENGTH + order) / 8
    rows: list[dict[str, Any]] = [
        {"what": "bound: uniform tokens, uniform steps", "record": uniform},
        {"what": "bound: these tokens one by one, equal steps", "record": unigram},
    ]
    choices = {
        "stored": False,
        "stored, dictionary learnt from other files": trained(lessons, 1),
        "stored, dictionary learnt from half of themselves": trained(traces[: len(traces) // 2], 1),
    }
    for what, dictionary in choices.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "traces.db"
            with TraceStore(path, "none", dictionary) as store:
                for trace in traces:
                    store.put(trace)
                record = store.stats()["record_bytes_per_trace"]
            rows.append({"what": what, "record": record, "file": path.stat().st_size / len(traces)})
    return rows


def times(traces: list[Trace], lessons: list[Trace], seconds: float) -> list[dict[str, Any]]:
    """Microseconds of one call, the least of many, and how often the interpreter counts to 100 meanwhile."""
    trace, dictionary = traces[0], zstandard.ZstdCompressionDict(trained(lessons, 1))
    plain, small = encode(trace), encode(trace, dictionary)
    name, context = trace.request_id, Facts(facts(CONTEXT))  # what a store holds

    def read() -> Trace:
        return decode(small, name, context, lambda number: dictionary)

    assert (read().states() == trace.states()).all()
    calls: dict[str, Callable[[], Any]] = {
        "encode": lambda: encode(trace),
        "encode, with a dictionary": lambda: encode(trace, dictionary),
        "decode, check, final tokens": lambda: decode(plain, name, context).tokens,
        "decode, check, all states": lambda: decode(plain, name, context).states(),
        "decode, check, final tokens, with a dictionary": lambda: read().tokens,
    }
    count = least(lambda: sum(range(100)), seconds)
    rows = [{"what": what, "microseconds": least(call, seconds)} for what, call in calls.items()]
    count = min(count, least(lambda: sum(range(100)), seconds))
    rows.append({"what": "sum(range(100)), for comparison", "microseconds": count})
    return [{**row, "counts": row["microseconds"] / count} for row in rows]


def least(call: Callable[[], Any], seconds: float) -> float:
    """Microseconds of the fastest of many single calls: what it takes when nothing disturbs it."""
    fastest, until = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter_ns()
        call()
        fastest = min(fastest, time.perf_counter_ns() - started)
    return fastest / 1000


def writes(traces: list[Trace]) -> list[dict[str, Any]]:
    """Traces a second until all are on the disk, by durability and number of processes."""
    rows = []
    for durability, processes in product(("trace", "group", "none"), (1, 3)):
        count = len(traces) // (10 if durability == "trace" else 1) // processes
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            # Python 3.12 warns about forks beside threads; the tokenizer's threads do nothing here.
            warnings.simplefilter("ignore", DeprecationWarning)
            path = Path(folder) / "traces.db"
            TraceStore(path).close()
            started = time.perf_counter()
            parts = [traces[number * count : (number + 1) * count] for number in range(processes)]
            children = [get_context("fork").Process(target=_put, args=(path, durability, part)) for part in parts]
            for child in children:
                child.start()
            for child in children:
                child.join()
            took = time.perf_counter() - started
            with TraceStore(path) as store:
                assert not any(child.exitcode for child in children) and len(store) == count * processes
        rows.append({"durability": durability, "processes": processes, "traces_a_second": count * processes / took})
    return rows


def _put(path: Path, durability: Any, traces: list[Trace]) -> None:
    with TraceStore(path, durability) as store:
        for trace in traces:
            store.put(trace)


def start(runs: int = 10) -> list[dict[str, Any]]:
    """From the command line to the printed text: seconds by the clock and of CPU, the least of some runs each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces.db"
        with TraceStore(path) as store, store.record("x", prompt=[5, 6], mask_id=1) as rec:
            rec.step([5, 6, 7])
        commands = {
            "dlm-replay x": [sys.executable, "-m", "dlm.cli.replay", "x", "--store", str(path)],
            "import dlm.trace, and a store": [sys.executable, "-c", "import dlm.trace; dlm.trace.TraceStore"],
            "import numpy, for comparison": [sys.executable, "-c", "import numpy"],
        }
        return [{"what": what, **_least_run(argv, runs)} for what, argv in commands.items()]


def _least_run(argv: list[str], runs: int) -> dict[str, float]:
    clock = cpu = math.inf
    for _ in range(runs):
        before = os.times()
        subprocess.run(argv, check=True, capture_output=True)
        after = os.times()
        clock = min(clock, after.elapsed - before.elapsed)
        cpu = min(cpu, sum(after[2:4]) - sum(before[2:4]))  # of children
    return {"seconds": clock, "cpu_seconds": cpu}
