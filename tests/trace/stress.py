"""Two processes that do things to one store at the same moment, against a model of what must hold.

    python -m tests.trace.stress --pairs 20000 --seed 0      # prints a summary; exit status 1 if anything is wrong

Each pair is two random operations, one in each of two processes that hold the store open all along. The model knows of every
id what the store may answer, whichever operation came first. After each pair a third process reads everything. Lost: a
trace that was acknowledged and not deleted is gone or cannot be read (now and then a process is killed and another takes its
place: then what it did may have come about, or not). Wrong: anything else than what was put, or an error
that is no answer. Undone: a prompt that was taken out is back, in a trace or in a dictionary. Hanging: no answer in 30 s.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dlm.trace import TraceStore, dictionaries, from_map
from dlm.trace.codec import digest
from dlm.trace.reader import TraceReader
from dlm.trace.redact import redacted
from dlm.trace.trace import Trace

ROOT = Path(__file__).parents[2]
HANGS = 30.0  # seconds
NAMES, AT_FIRST, KEEP = 60, 40, (46, 43, 40, 37, 37, 14)  # a small store, for many pairs
FEWEST = 24  # traces to learn from
SECRET, ANSWER = 64, 40  # tokens
OPERATIONS = (
    "put",
    "get",
    "gc",
    "redact",
    "recompress",
    "train_dict",
    "fsck",
    "export",
    "ls",
    "find",
    "iterate",
    "stats",
)
WEIGHTS = (8, 4, 2, 2, 2, 3, 1, 1, 1, 1, 2, 1)
State = tuple[int, int, bool]  # seed, secret, redacted


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


# One of the two processes


def work(path: Path) -> None:
    """Do what the lines on standard input say, and print what came of it."""
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


class Worker:
    """A process that does what it is told."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.trace.stress", "--work", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdin and self.process.stdout
        self.orders, self.answers = self.process.stdin, self.process.stdout
        assert self.answers.readline() == "ready\n"

    def tell(self, order: dict) -> None:
        self.orders.write(json.dumps(order) + "\n")
        self.orders.flush()

    def hear(self) -> dict | None:
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


# The model


@dataclass
class Model:
    """What the store holds for certain between two pairs, and what was seen of it so far."""

    rng: random.Random
    states: dict[str, State] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """Ids, oldest first."""
    secret: int = 0
    """That of new traces; another one after each redaction."""
    banned: set[int] = field(default_factory=set)
    """Secrets that no trace has any more because it was redacted."""
    numbers: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """Digest of everything that ever had a number."""
    faults: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)
    seed: int = 0
    killed: float = 0.0
    """Chance that a process is killed at an operation."""

    def fault(self, kind: str, what: str) -> None:
        self.faults[kind] += 1
        self.told.append(f"{kind}: {what}"[:1000])
        print(self.told[-1], file=sys.stderr, flush=True)

    def draw(self, folder: Path, number: int) -> dict:
        """A random operation."""
        rng = self.rng
        order: dict[str, Any] = {"do": rng.choices(OPERATIONS, WEIGHTS)[0], "wait": rng.choice((0, 0, 0.001, 0.004))}
        order["reopen"] = rng.random() < 0.02
        if rng.random() < self.killed:
            order["killed"] = rng.random() * 0.02
        some = [f"r{rng.randrange(NAMES)}" for _ in range(3)]
        if order["do"] == "put":
            order["items"] = [self._item(name) for name in dict.fromkeys(some)]
        elif order["do"] == "get":
            order["names"] = some
        elif order["do"] == "gc":
            order["keep"] = rng.choice(KEEP)
        elif order["do"] == "redact":
            order["names"] = (
                None if rng.random() < 0.3 or not self.order else rng.sample(self.order, min(4, len(self.order)))
            )
        elif order["do"] == "train_dict":
            order["size"] = rng.choice((1024, 4096))
        elif order["do"] == "export":
            order |= {"url": str(folder / f"export-{number}-{rng.random()}"), "rows": rng.choice((15, 1000))}
        elif order["do"] == "find":
            order["model"] = model(rng.randrange(3))
        return order

    def _item(self, name: str) -> list:
        self.seed += 1
        return [name, self.seed, self.secret, self.rng.random() < 0.5]

    def after(self, order: dict, answer: dict, other: dict, name: str, states: set) -> set:
        """What may become of these states of an id by this operation; each a pair (state or None, put just now)."""
        if "killed" in answer:  # done, or not, or in part
            return states | self.after(order, {"result": [""] * 3}, other, name, states)
        if order["do"] == "put" and "result" in answer:
            for (which, seed, secret, _), error in zip(order["items"], answer["result"], strict=False):
                if which == name and not error:
                    return {((seed, secret, False), True)}
        if order["do"] == "redact" and "result" in answer and (order["names"] is None or name in order["names"]):
            return {(state and (*state[:2], True), fresh) for state, fresh in states}
        if order["do"] == "gc" and "result" in answer:
            return {gone for state, fresh in states for gone in self._deleted(order, other, name, state, fresh)}
        return states

    def _deleted(self, order: dict, other: dict, name: str, state: State | None, fresh: bool) -> set:
        if state is None or fresh or name not in self.order:
            return {(state, fresh)}
        rank = len(self.order) - 1 - self.order.index(name)
        pushed = len(other["items"]) if other["do"] == "put" else 0
        if rank >= order["keep"]:
            return {(None, False)}
        return {(state, fresh)} if rank < order["keep"] - pushed else {(state, fresh), (None, False)}

    def possible(self, orders: list[dict], answers: list[dict]) -> tuple[dict[str, set], dict[str, set]]:
        """By id: the states it may have in the end, and those it may have had at any moment."""
        end, ever = {}, {}
        for name in {*self.states, *(item[0] for order in orders for item in order.get("items", ()))}:
            start = {(self.states.get(name), False)}
            end[name], ever[name] = set(), set(start)
            for first in (0, 1):
                then = self.after(orders[first], answers[first], orders[1 - first], name, start)
                last = self.after(orders[1 - first], answers[1 - first], orders[first], name, then)
                end[name] |= last
                ever[name] |= then | last
        states = [{name: {state for state, _ in found} for name, found in by.items()} for by in (end, ever)]
        return states[0], states[1]

    def judge(self, order: dict, answer: dict, other: dict, ever: dict[str, set]) -> None:
        """Whether an answer is one that the model allows."""
        if "killed" in answer:
            return
        do, what = order["do"], f"{order} beside {other['do']} -> {str(answer)[:300]}"
        if "error" in answer:
            few = min(len(self.order), *(o["keep"] for o in (order, other) if "keep" in o), 10**6) < FEWEST
            missing = do == "redact" and any(None in ever.get(name, {None}) for name in order["names"] or ())
            little = "no dictionary can be learnt" in answer["message"] or (few and "too few" in answer["message"])
            allowed = (do == "train_dict" and little) or (missing and answer["error"] == "UnknownTrace")
            if not allowed:
                self.fault("lost" if "Corrupt" in answer["error"] else "wrong", what)
            return
        result = answer["result"]
        proofs = {name: {proof(name, *state) for state in states if state} for name, states in ever.items()}
        steady = {name for name, states in ever.items() if len(states) == 1 and None not in states}
        if do == "put":
            for (name, _, _, overwrite), error in zip(order["items"], result, strict=True):
                could = self.states.get(name) is not None or any(name == item[0] for item in other.get("items", ()))
                if error and (overwrite or error != "DuplicateTrace" or not could):
                    self.fault("wrong", what)
                if not error and not overwrite and name in steady:
                    self.fault("wrong", what)
        elif do == "get":
            for name, found in zip(order["names"], result, strict=True):
                if found == "" and name in steady:
                    self.fault("lost", f"{name} unknown: {what}")
                elif found and found not in proofs.get(name, ()):
                    self.fault("wrong", f"{name}: {what}")
        elif do in ("iterate", "export"):
            for name, found in result:
                if found not in proofs.get(name, ()):
                    self.fault("wrong", f"{name}: {do} beside {other}")
            if missed := steady - {name for name, _ in result}:
                self.fault("lost", f"{missed} not in {do} beside {other}")
        elif do in ("ls", "find"):
            fits = {
                name: [state and model(state[0]) == order.get("model", state and model(state[0])) for state in states]
                for name, states in ever.items()
            }
            if strange := [name for name in result if not any(fits.get(name, ()))]:
                self.fault("wrong", f"{strange} in {do} beside {other}")
            if missed := {name for name in steady if all(fits[name])} - set(result):
                self.fault("lost", f"{missed} not in {do} beside {other}")
        elif do == "train_dict" and ("dictionary", result) in self.numbers:
            self.fault("wrong", f"number again: {what}")
        elif do == "fsck" and not result["ok"]:
            self.fault("wrong", what)

    def check(self, reader: TraceReader, orders: list[dict], answers: list[dict]) -> None:
        """Read everything, and hold it against what may be."""
        end, ever = self.possible(orders, answers)
        for i in (0, 1):
            self.judge(orders[i], answers[i], orders[1 - i], ever)
        beside = " beside ".join(
            f"{order} -> {str(answer)[:200]}" for order, answer in zip(orders, answers, strict=True)
        )
        found: dict[str, State] = {}
        order = [row.request_id for row in reader.ls()]
        for name in order:
            try:
                seen = digest(reader[name]).hex()
            except ValueError as error:
                self.fault("lost", f"{error}: {beside}")
                continue
            allowed = {proof(name, *state): state for state in end.get(name, ()) if state}
            if seen in allowed:
                found[name] = allowed[seen]
            else:
                before = self.states.get(name)
                back = before is not None and before[2] and seen == proof(name, *before[:2], False)
                self.fault("undone" if back else "wrong", f"{name}: {beside}")
                if before is not None:
                    found[name] = before
        for name, states in end.items():
            if name not in found and None not in states:
                self.fault("lost", f"{name}: {beside}")
        redaction = any(
            order["do"] == "redact" and "result" in answer for order, answer in zip(orders, answers, strict=True)
        )
        if redaction:
            plain = {secret for _, secret, gone in found.values() if not gone}
            self.banned |= {secret for _, secret, _ in self.states.values()} - plain
            self.secret += 1
        self.states, self.order = found, [name for name in order if name in found]
        self._check_numbers(reader, beside)

    def _check_numbers(self, reader: TraceReader, beside: str) -> None:
        query = reader.database.query
        for number, proof_, content in query("SELECT dictionary, digest, content FROM dictionaries"):
            if self.numbers.setdefault(("dictionary", number), proof_) != proof_:
                self.fault("wrong", f"dictionary {number} is another: {beside}")
            for secret in self.banned:
                if known(secret, content):
                    self.fault("undone", f"secret {secret} is in dictionary {number}: {beside}")
        for number, proof_ in query("SELECT context, digest FROM contexts"):
            if proof_ != b"" and self.numbers.setdefault(("context", number), proof_) != proof_:
                self.fault("wrong", f"context {number} is another: {beside}")
        if len(self.banned) > 40:
            self.banned = set(sorted(self.banned)[-20:])


def stress(folder: Path, pairs: int, seed: int, killed: float = 0.0, progress: bool = False) -> Model:
    """Run so many pairs; the model, with its faults."""
    held = Model(random.Random(seed), killed=killed)
    path = folder / "traces.db"
    with TraceStore(path, "none") as store:
        for i in range(AT_FIRST):
            item = held._item(f"r{i}")
            store.put(made(*item[:3]))
            held.states[item[0]], held.order = (*item[1:3], False), [*held.order, item[0]]
    workers, reader = [Worker(path), Worker(path)], TraceReader(path)
    try:
        for number in range(pairs):
            orders = [held.draw(folder, number) for _ in workers]
            for worker, order in zip(workers, orders, strict=True):
                worker.tell(order)
            answers = [
                worker.kill(order["killed"]) if "killed" in order else worker.hear()
                for worker, order in sorted(zip(workers, orders, strict=True), key=lambda pair: "killed" not in pair[1])
            ]
            if "killed" in orders[1] and "killed" not in orders[0]:
                answers.reverse()
            workers = [
                Worker(path) if "killed" in order else worker for worker, order in zip(workers, orders, strict=True)
            ]
            if None in answers:
                held.fault("hanging", str(orders))
                break
            held.check(reader, orders, answers)  # type: ignore[arg-type]
            if held.rng.random() < 0.02:
                reader.close()
            if progress and (number + 1) % 500 == 0:
                print(f"{number + 1} pairs, {sum(held.faults.values())} faults", file=sys.stderr, flush=True)
    finally:
        reader.close()
        for worker in workers:
            worker.end()
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--killed", type=float, default=0.004, help="chance that a process is killed at an operation")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        held = stress(Path(folder), options.pairs, options.seed, options.killed, progress=True)
    for line in held.told[:20]:
        print(line)
    counts = ", ".join(f"{held.faults[kind]} {kind}" for kind in ("lost", "wrong", "undone", "hanging"))
    print(
        f"{options.pairs} pairs from two processes, seed {options.seed}, {time.monotonic() - started:.0f} s: {counts}"
    )
    return 1 if held.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
