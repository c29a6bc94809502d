"""A second process that uses a store as it is ordered; and traces with a secret in their prompts, to store and to find.

python -m tests.trace.worker STORE      # orders on standard input, answers on standard output
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dlm.trace import TraceStore, dictionaries, from_map
from dlm.trace.facts import digest
from dlm.trace.reader import TraceReader
from dlm.trace.redact import redacted
from dlm.trace.trace import Trace

ROOT = Path(__file__).parents[2]
HANGS = 120.0  # seconds: twice as long as SQLite waits for another process
FEWEST = 24  # traces to learn from
SECRET, ANSWER = 64, 40  # tokens


def secret_tokens(secret: int) -> np.ndarray:
    return 20_000 + (np.arange(SECRET) * 37 + secret * 611) % 30_000


def known(secret: int, content: bytes) -> bool:
    """Whether a part of a secret is in these bytes."""
    tokens = secret_tokens(secret).astype("<u2")
    return any(tokens[i : i + 8].tobytes() in content for i in range(0, SECRET - 8, 4))


def made(name: str, seed: int, secret: int) -> Trace:
    """A trace whose prompt is a secret that many have, and some tokens of its own."""
    rng = np.random.default_rng(seed)
    tokens = np.concatenate((secret_tokens(secret), rng.integers(0, 15_000, 4 + ANSWER)))
    steps = np.concatenate((np.full(SECRET + 4, -1), np.arange(ANSWER)))
    context = {"model": model(seed), "run": seed % 5}
    return from_map(name, tokens, steps, None, own={"seed": seed}, context=context)


def model(seed: int) -> str:
    return f"m{seed % 3}"


@cache
def proof(name: str, seed: int, secret: int, gone: bool) -> str:
    trace = made(name, seed, secret)
    return digest(redacted(trace, "omit") if gone else trace).hex()


def work(path: Path) -> None:
    """Do each order that comes on standard input, a line of JSON, and print its result or error."""
    dictionaries.FEWEST = FEWEST
    store, reader = TraceStore(path, "none"), TraceReader(path)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("reopen"):
            store.close()
            reader.close()
            store, reader = TraceStore(path, "none"), TraceReader(path)
        time.sleep(order.get("wait", 0.0))
        try:
            answer: Any = {"result": DO[order["do"]](store, reader, order)}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


def _put(store: TraceStore, reader: TraceReader, order: dict) -> list[str]:
    done = [store.put(made(*item), overwrite) for *item, overwrite in order["items"]]
    errors = [future.exception(timeout=HANGS) for future in done]
    store._writer.errors.clear()
    return [("" if error is None else type(error).__name__) for error in errors]


def _get(store: TraceStore, reader: TraceReader, order: dict) -> list[str]:
    answers = []
    for name, source in zip(order["names"], (store, reader, store), strict=True):
        try:
            answers.append(digest(source[name]).hex())
        except KeyError:
            answers.append("")
    return answers


def _export(store: TraceStore, reader: TraceReader, order: dict) -> list[tuple[str, str]]:
    from dlm.trace.export import file_system, listed
    from dlm.trace.imports import READERS

    store.export(order["url"], rows=order["rows"])
    fs, root = file_system(order["url"])
    traces = [trace for path in listed(fs, root) for trace in READERS["parquet"](fs, path, None)]
    return [(trace.request_id, digest(trace).hex()) for trace in traces]


def _fsck(store: TraceStore, reader: TraceReader, order: dict) -> dict:
    report = store.fsck()
    return {"ok": report.ok, "damaged": report.damaged, "database": report.database}


DO = {
    "put": _put,
    "get": _get,
    "gc": lambda store, reader, order: store.gc(order["keep"]),
    "redact": lambda store, reader, order: store.redact(order["names"]),
    "recompress": lambda store, reader, order: store.recompress(),
    "train_dict": lambda store, reader, order: store.train_dict(size=order["size"]),
    "fsck": _fsck,
    "export": _export,
    "ls": lambda store, reader, order: [row.request_id for row in reader.ls()],
    "find": lambda store, reader, order: [row.request_id for row in reader.find(model=order["model"])],
    "iterate": lambda store, reader, order: [(trace.request_id, digest(trace).hex()) for trace in reader],
    "stats": lambda store, reader, order: store.stats()["traces"],
}


def given(about: str | None, **defaults: float) -> argparse.Namespace:
    """The options of a program that tries something at random, and how often."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def summed(tried: Any, *kinds: str) -> int:
    """Print the first faults and how many there are of each kind; the exit status."""
    print(*tried.log[:20], ", ".join(f"{tried.faults[kind]} {kind}" for kind in kinds), sep="\n")
    return 1 if tried.faults else 0


class Worker:
    """A process that holds the store open and does what it is ordered."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", "tests.trace.worker", str(path)]
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=ROOT)
        assert self.process.stdin and self.process.stdout
        self.orders, self.answers = self.process.stdin, self.process.stdout
        assert self.answers.readline() == "ready\n"

    def order(self, order: dict) -> None:
        self.orders.write(json.dumps(order) + "\n")
        self.orders.flush()

    def answer(self) -> dict | None:
        """The answer; None where there is none in time."""
        if not select.select([self.answers], [], [], HANGS)[0]:
            return None
        line = self.answers.readline()
        return json.loads(line) if line else {"error": "died", "message": ""}

    def kill(self, after: float) -> dict:
        """Kill it soon, at whatever it is."""
        time.sleep(after)
        self.process.kill()
        self.end()
        return {"killed": True}

    def end(self) -> None:
        self.orders.close()
        try:
            self.process.wait(HANGS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.answers.close()


if __name__ == "__main__":
    work(Path(sys.argv[1]))
