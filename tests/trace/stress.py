"""Two processes that do things to one store at the same moment, against a model of what must hold.

    python -m tests.trace.stress --pairs 20000 --seed 0      # prints a summary; exit status 1 if anything is wrong

Each pair is two random operations, one in each of two processes that keep the store open. The model knows what the store
may answer for every id, whichever operation came first; after each pair this process reads everything. Now and then a
process is killed: what it was doing may have happened or not. Faults are lost (an acknowledged trace is gone or unreadable),
wrong (another answer or error than the model allows), undone (a redacted prompt is back in a trace or a dictionary) and
hanging (no answer in two minutes).
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlm.trace import TraceStore
from dlm.trace.facts import digest
from dlm.trace.reader import TraceReader
from tests.trace.worker import FEWEST, Worker, given, known, made, model, proof, summed

NAMES, AT_FIRST, KEEP = 60, 40, (46, 43, 40, 37, 37, 14)  # a small store, for many pairs
OPERATIONS = {"put": 8, "get": 4, "gc": 2, "redact": 2, "recompress": 2, "train_dict": 3}
OPERATIONS |= {"fsck": 1, "export": 1, "ls": 1, "find": 1, "iterate": 2, "stats": 1}
"""How often each is drawn."""
State = tuple[int, int, bool]  # seed, secret, redacted


@dataclass
class Model:
    """What the store certainly holds between two pairs, and what was seen of it so far."""

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
    log: list[str] = field(default_factory=list)
    """The faults in words."""
    seed: int = 0
    killed: float = 0.0
    """Chance that a process is killed at an operation."""

    def fault(self, kind: str, what: str) -> None:
        self.faults[kind] += 1
        self.log.append(f"{kind}: {what}"[:1000])
        print(self.log[-1], file=sys.stderr, flush=True)

    def draw(self, folder: Path, number: int) -> dict:
        """A random operation."""
        rng = self.rng
        order: dict[str, Any] = {
            "do": rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0],
            "wait": rng.choice((0, 0, 0.001, 0.004)),
        }
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
            every = rng.random() < 0.3 or not self.order
            order["names"] = None if every else rng.sample(self.order, min(4, len(self.order)))
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
        first, last = ({name: {state for state, _ in found} for name, found in by.items()} for by in (end, ever))
        return first, last

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
        beside = " beside ".join(f"{o} -> {str(answer)[:200]}" for o, answer in zip(orders, answers, strict=True))
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
        if any(o["do"] == "redact" and "result" in answer for o, answer in zip(orders, answers, strict=True)):
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


def stress(folder: Path, pairs: int, seed: int, killed: float = 0.0) -> Model:
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
                worker.order(order)
            answers = [
                worker.kill(order["killed"]) if "killed" in order else worker.answer()
                for worker, order in sorted(zip(workers, orders, strict=True), key=lambda pair: "killed" not in pair[1])
            ]
            if "killed" in orders[1] and "killed" not in orders[0]:
                answers.reverse()
            workers = [Worker(path) if "killed" in o else w for w, o in zip(workers, orders, strict=True)]
            if None in answers:
                held.fault("hanging", str(orders))
                break
            held.check(reader, orders, answers)  # type: ignore[arg-type]
            if held.rng.random() < 0.02:
                reader.close()
            if (number + 1) % 500 == 0:
                print(f"{number + 1} pairs, {sum(held.faults.values())} faults", file=sys.stderr, flush=True)
    finally:
        reader.close()
        for worker in workers:
            worker.end()
    return held


if __name__ == "__main__":
    options = given(__doc__, pairs=20_000, seed=0, killed=0.004)  # the chance that a process is killed at an operation
    with tempfile.TemporaryDirectory() as folder:
        held = stress(Path(folder), options.pairs, options.seed, options.killed)
    print(f"{options.pairs} pairs from two processes, seed {options.seed}, {time.process_time():.0f} s of one:")
    raise SystemExit(summed(held, "lost", "wrong", "undone", "hanging"))
