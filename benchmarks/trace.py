"""What a trace costs: bytes, microseconds, writes a second; and that every state of thousands comes back.

    python benchmarks/trace.py                      # sizes, times, writes, start-up; benchmarks/results/trace.json
    python benchmarks/trace.py --states 10000       # also: replay so many random traces of every strategy

Text is Python's standard library under a byte-level BPE of 32,000 tokens learnt from it (`--tokenizer` takes another).
Times are the least of many single calls: what the work takes when nothing disturbs it. It knows no model.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from dlm.evaluation.table import markdown
from dlm.trace import Trace, TraceStore
from dlm.trace.codec import decode, encode
from dlm.trace.dictionaries import trained
from dlm.trace.facts import Facts, facts

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
LENGTH, STEPS, VOCAB = 128, 64, 32_000
CONTEXT = {
    "model": "pico",
    "weights": "6f1c" * 8,
    "tokenizer": "a0b3" * 8,
    "sampler": {"steps": STEPS, "temperature": 0.0},
}

CONTEXT_FACTS = Facts(facts(CONTEXT))  # as a store holds it


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    traces = list(_traces(_text(options.tokenizer, options.traces * LENGTH), options.traces))
    report: dict[str, Any] = {"traces": len(traces), "length": LENGTH, "steps": STEPS}
    parts = {
        "microseconds": lambda: times(traces),
        "start": start,
        "bytes": lambda: sizes(traces),
        "writes": lambda: writes(traces[: options.writes]),
        **({"states": lambda: states(options.states)} if options.states else {}),
    }
    for name, measure in parts.items():
        report[name] = measure()
        print(f"\n## {name}\n\n{markdown(report[name])}", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "trace.json").write_text(json.dumps(report, indent=2) + "\n")


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=int, default=10_000, help="traces stored for the sizes (10000)")
    add("--writes", type=int, default=2_000, help="traces written for each rate (2000)")
    add("--states", type=int, default=0, help="random traces whose every state is compared (0)")
    add("--tokenizer", help="a tokenizer.json of about 32,000 tokens")
    add("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    return parser.parse_args(argv)


def _text(tokenizer: str | None, count: int) -> np.ndarray:
    """Ids of the standard library's source, under a tokenizer of 32,000 tokens that is learnt from it if none is given."""
    import sysconfig

    import tokenizers

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [file for file in files if not {"test", "tests", "site-packages", "pydoc_data"} & set(file.parts)]
    if tokenizer:
        backend = tokenizers.Tokenizer.from_file(tokenizer)
    else:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        learn = tokenizers.trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["[MASK]"], show_progress=False)
        backend.train([str(file) for file in files], learn)
    ids: list[int] = []
    for file in files:
        ids += backend.encode(file.read_text("utf-8", "replace")).ids
        if len(ids) >= count:
            break
    return np.array(ids[:count], np.int32)


def _traces(ids: np.ndarray, count: int) -> Iterator[Trace]:
    rng, name = np.random.default_rng(0), Random(0)
    rows = np.resize(ids, (count, LENGTH))
    for i in rng.permutation(count).tolist():
        steps = rng.permutation(np.repeat(np.arange(STEPS, dtype=np.int32), LENGTH // STEPS))
        yield Trace(
            request_id=f"{name.getrandbits(32):08x}",
            mask_id=1,
            num_steps=STEPS,
            first_step=steps,
            first_token=rows[i],
            own={"seed": i},
            context=CONTEXT,
        )


def sizes(traces: list[Trace]) -> list[dict[str, Any]]:
    """Bytes a trace, of the record alone and of the whole file; entropy bounds beside."""
    counts = np.bincount(np.concatenate([trace.first_token for trace in traces])).astype(float)
    share = counts[counts > 0] / counts.sum()
    order = math.lgamma(LENGTH + 1) / math.log(2) - STEPS * math.lgamma(LENGTH // STEPS + 1) / math.log(2)
    rows = [
        {
            "what": "bound: uniform tokens, uniform steps",
            "file": None,
            "record": LENGTH * (math.log2(VOCAB) + math.log2(STEPS)) / 8,
        },
        {
            "what": "bound: unigram entropy, equal steps",
            "file": None,
            "record": (-(share * np.log2(share)).sum() * LENGTH + order) / 8,
        },
    ]
    learnt = trained(traces[: len(traces) // 2], 1)
    for name, dictionary in (("stored", False), ("stored, with a dictionary", learnt)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "traces.db"
            with TraceStore(path, "none", dictionary) as store:
                for trace in traces:
                    store.put(trace)
                record = store.stats()["record_bytes_per_trace"]
            rows.append({"what": name, "record": record, "file": path.stat().st_size / len(traces)})
    return rows


def times(traces: list[Trace]) -> list[dict[str, Any]]:
    """Microseconds of one call, the least of many."""
    import zstandard

    trace, dictionary = traces[0], zstandard.ZstdCompressionDict(trained(traces[:2000], 1))
    plain, small = encode(trace), encode(trace, dictionary)
    name, get = trace.request_id, lambda number: dictionary
    calls: dict[str, Callable[[], Any]] = {
        "encode": lambda: encode(trace),
        "encode, with a dictionary": lambda: encode(trace, dictionary),
        "decode, check, final tokens": lambda: decode(plain, name, CONTEXT_FACTS).tokens,
        "decode, check, all states": lambda: decode(plain, name, CONTEXT_FACTS).states(),
        "decode, check, final tokens, with a dictionary": lambda: decode(small, name, CONTEXT_FACTS, get).tokens,
        "the interpreter: sum(range(100))": lambda: sum(range(100)),
    }
    assert (decode(small, name, CONTEXT_FACTS, get).states() == trace.states()).all()
    return [{"what": what, "microseconds": _least(call)} for what, call in calls.items()]


def _least(call: Callable[[], Any], seconds: float = 1.0) -> float:
    least, until = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter_ns()
        call()
        least = min(least, time.perf_counter_ns() - started)
    return least / 1000


def writes(traces: list[Trace]) -> list[dict[str, Any]]:
    """Traces a second until all are on the disk, by durability and number of processes."""
    rows = []
    for durability in ("trace", "group", "none"):
        for processes in (1, 3):
            count = len(traces) // (10 if durability == "trace" else 1) // processes
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "traces.db"
                TraceStore(path).close()
                children, started = [], time.perf_counter()
                for number in range(processes):
                    child = os.fork()
                    if child == 0:
                        _write(path, durability, traces[number * count : (number + 1) * count])
                        os._exit(0)
                    children.append(child)
                failed = [child for child in children if os.waitpid(child, 0)[1]]
                seconds = time.perf_counter() - started
                with TraceStore(path) as store:
                    assert not failed and len(store) == count * processes
            rows.append(
                {"durability": durability, "processes": processes, "traces a second": count * processes / seconds}
            )
    return rows


def _write(path: Path, durability: Any, traces: list[Trace]) -> None:
    with TraceStore(path, durability) as store:
        for trace in traces:
            store.put(trace)


def start() -> list[dict[str, Any]]:
    """Seconds from the command line to the printed text: the least of ten."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces.db"
        with TraceStore(path) as store, store.record("x", prompt=[5, 6], mask_id=1) as rec:
            rec.step([5, 6, 7])
        argv = [sys.executable, "-m", "dlm.cli.replay", "x", "--store", str(path)]
        least = math.inf
        for _ in range(10):
            started = time.perf_counter()
            subprocess.run(argv, check=True, capture_output=True)
            least = min(least, time.perf_counter() - started)
    return [{"what": "dlm-replay", "seconds": least}]


def states(count: int) -> list[dict[str, Any]]:
    """Random traces of every strategy, lengths 1 to 4,096 and steps 1 to 1,024: each state as the sampler had it."""
    sys.path.insert(0, str(ROOT))
    from tests.trace.synthetic import anything

    rng, compared, revised = np.random.default_rng(0), 0, 0
    with tempfile.TemporaryDirectory() as folder, TraceStore(Path(folder) / "traces.db", "none") as store:
        for i in range(count):
            made = anything(rng, 4096, 1024, name=str(i))
            store.put(made.trace)
            trace = store[str(i)]
            for k, canvas in enumerate(made.canvases):
                assert (trace.state(k)[: trace.length_at(k)] == canvas).all() and trace.length_at(k) == len(canvas)
            trace.check()
            compared, revised = compared + len(made.canvases), revised + bool(len(trace.later))
    return [{"traces": count, "states compared": compared, "traces with edits or remasks": revised}]


if __name__ == "__main__":
    main()
