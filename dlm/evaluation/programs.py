"""Records of code benchmarks made programs, run in the sandbox; and pass@k of what came of them. Asks no model.

A program is what its data set's own checker runs: HumanEval's `check(entry_point)`, MBPP's assertions, and for infilling
the text with the hole filled. So a record says how a program is made, and nothing else judges it.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any, Literal

from dlm.errors import UserError

Kind = Literal["humaneval", "mbpp", "infilling"]
FIELDS: dict[Kind, tuple[str, ...]] = {
    "humaneval": ("prompt", "test", "entry_point"),
    "mbpp": ("test_list",),
    "infilling": ("prompt", "suffix", "canonical_solution", "test", "entry_point"),
}
"""What a record of each data set must have, by its published names."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One record: what a model is shown, what is to be written, and the program that judges it."""

    name: str
    kind: Kind
    prompt: str
    """Text before what is to be written; of MBPP its description."""
    suffix: str = ""
    """Text behind it: infilling only."""
    solution: str = ""
    """The data set's own, where it has one."""
    head: str = ""
    tail: str = ""
    """What the program has before and behind what is written."""
    tests: tuple[str, ...] = ()
    """MBPP's assertions, which its prompt shows."""
    signature: str = ""
    """The name that is called."""

    def program(self, written: str) -> str:
        """The whole program with `written` in its place."""
        return self.head + written + self.tail


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Records of a JSON or JSONL file, gzip or not."""
    path = Path(path)
    if not path.exists():
        raise UserError(
            f"{path} cannot be read: no such file. Name the data set's file, or with --eval.data its folder"
        )
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as JSON lines, plain or gzip: {error}") from None
    try:
        found = (
            json.loads(text) if text.lstrip()[:1] == "[" else [json.loads(l) for l in text.splitlines() if l.strip()]
        )
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} holds no JSON, and no JSON object a line: {error}") from None
    if not found or not all(isinstance(record, dict) for record in found):
        raise UserError(f"{path} holds no record: give a file with one JSON object a line, or a list of objects")
    return found


def read_problems(path: str | Path, kind: Kind, limit: int | None = None) -> list[Problem]:
    """The problems of a file of HumanEval, MBPP (sanitized or full) or HumanEval-infilling, in its order.

    The "plus" versions have the same fields. Raises UserError for a record that lacks one.
    """
    return [problem_of(record, kind, f"{path}, record {i}") for i, record in enumerate(read_records(path)[:limit], 1)]


def problem_of(record: dict[str, Any], kind: Kind, where: str = "record") -> Problem:
    """One record as a problem."""
    for name in FIELDS[kind]:
        wanted = list if name == "test_list" else str
        if not isinstance(record.get(name), wanted):
            raise UserError(
                f"{where}: `{name}` is missing or no {wanted.__name__}; {kind} has {', '.join(FIELDS[kind])}"
            )
    name = str(record.get("task_id", where))
    if kind == "mbpp":
        return _mbpp(record, name, where)
    entry, prompt = record["entry_point"], record["prompt"]
    suffix = record["suffix"] if kind == "infilling" else ""
    return Problem(
        name=name,
        kind=kind,
        prompt=prompt,
        suffix=suffix,
        solution=record.get("canonical_solution") or "",
        head=prompt,
        tail=f"{suffix}\n{record['test']}\ncheck({entry})",
        signature=entry,
    )


def _mbpp(record: dict[str, Any], name: str, where: str) -> Problem:
    text = record.get("prompt", record.get("text"))
    if not isinstance(text, str):
        raise UserError(f"{where}: `prompt` (of the full set `text`) is missing")
    tests = tuple(map(str, record["test_list"]))
    setup = record.get("test_imports", record.get("test_setup_code")) or []
    setup = [setup] if isinstance(setup, str) else setup
    return Problem(
        name=name,
        kind="mbpp",
        prompt=text,
        solution=record.get("code") or "",
        head="".join(f"{line}\n" for line in setup),
        tail="\n" + "\n".join(tests),
        tests=tests,
        signature=tests[0].partition("(")[0].removeprefix("assert ").strip() if tests else "",
    )


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The unbiased estimate of pass@k from `samples` of which `right` passed: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374), eq. 1. Raises UserError where there are fewer samples than k.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise UserError(f"pass@{k} of {samples} samples, {right} right: it takes at least {k} samples")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> tuple[float, float | None]:
    """Its mean over problems, each (samples, right), and the standard error of the choice of problems."""
    values = [pass_at_k(samples, right, k) for samples, right in counts]
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    spread = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, (spread / len(values)) ** 0.5
