"""Programs of code benchmarks: their verdicts against the data sets' own way of checking, and pass@k against brute force."""

import gzip
import json
import subprocess
import sys
from itertools import combinations

import pytest

from dlm.errors import UserError
from dlm.evaluation import pass_at_k, read_problems
from dlm.evaluation.programs import mean_pass_at_k, problem_of
from dlm.evaluation.sandbox import Sandbox

ADD = {
    "task_id": "Mine/0",
    "prompt": 'def add(a, b):\n    """The sum."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert abs(candidate(0.1, 0.2) - 0.3) < 1e-6\n",
}
LAST = {
    "task_id": 7,
    "prompt": "Write a function to find the last element.",
    "code": "def last(x):\n    return x[-1]",
    "test_imports": ["import math"],
    "test_list": ["assert last([1, 2]) == 2", "assert last([math.pi]) == math.pi"],
}
HOLE = {**ADD, "prompt": "def add(a, b):\n", "suffix": "    return c\n", "canonical_solution": "    c = a + b\n"}
WRITTEN = {
    "humaneval": ["    return a + b", "    return a - b", "    return", "", "    return (", "  return a\n   + b", "    raise SystemExit(0)",
                  "    c = 0\n    for x in (a, b):\n        c += x\n    return c", "    return b + a\n\ndef check(f): pass\n", "    import numpyy"],
    "mbpp": ["def last(x):\n    return x[-1]", "def last(x):\n    return x[0]", "def first(x): ...", "", "last = max", "def last(x): return x[-1", "import os"],
    "infilling": ["    c = a + b\n", "    c = a\n", "", "    c = sum((a, b))\n", "c = a + b\n", "    return a + b\n", "    c = (a +\n"],
}  # fmt: skip


def by_hand(kind, record, written):
    """What the data set's own harness runs, in an interpreter of its own: right where it ends with status 0."""
    if kind == "mbpp":
        program = "\n".join([*record["test_imports"], written, *record["test_list"]])
    else:
        program = record["prompt"] + written + record.get("suffix", "") + "\n" + record["test"] + "\n"
        program += f"check({record['entry_point']})"
    ended = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, timeout=60, check=False)
    return ended.returncode == 0 and "SystemExit" not in written  # theirs run programs by exec: leaving is failing


@pytest.mark.parametrize("kind", WRITTEN)
def test_verdicts_are_those_of_the_data_sets_own_checkers(kind):
    record = {"humaneval": ADD, "mbpp": LAST, "infilling": HOLE}[kind]
    problem = problem_of(record, kind)
    with Sandbox(1) as sandbox:
        found = sandbox.run_all([problem.program(written) for written in WRITTEN[kind]], timeout=20)
    assert [verdict.passed for verdict in found] == [by_hand(kind, record, written) for written in WRITTEN[kind]]
    assert sum(verdict.passed for verdict in found) >= 2


def test_the_fields_of_the_full_mbpp():
    full = {
        "task_id": 7,
        "text": "Write it.",
        "code": "x = 1",
        "test_setup_code": "import math",
        "test_list": ["assert f(2)"],
    }
    problem = problem_of(full, "mbpp")
    assert problem.program("def f(x): return x") == "import math\ndef f(x): return x\nassert f(2)"
    assert (problem.signature, problem.prompt, problem.solution) == ("f", "Write it.", "x = 1")


def test_files(tmp_path):
    lines = "\n".join(json.dumps({**ADD, "task_id": str(i)}) for i in range(4))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "b.json").write_text(json.dumps([LAST]))
    assert [p.name for p in read_problems(tmp_path / "a.jsonl.gz", "humaneval", limit=3)] == ["0", "1", "2"]
    assert read_problems(tmp_path / "b.json", "mbpp")[0].tests == tuple(LAST["test_list"])


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("", "humaneval", "holds no record"),
        ("x", "humaneval", "holds no JSON"),
        ("[1]", "humaneval", "holds no record"),
        ('{"prompt": "a"}', "humaneval", "record 1: `test` is missing or no str"),
        (json.dumps(ADD), "infilling", "`suffix` is missing"),
        (json.dumps(ADD), "mbpp", "`test_list` is missing or no list"),
        ('{"test_list": []}', "mbpp", "`prompt` (of the full set `text`) is missing"),
    ],
)
def test_what_is_no_problem(tmp_path, text, kind, says):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(UserError) as caught:
        read_problems(tmp_path / "x.jsonl", kind)
    assert says in str(caught.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_problems(tmp_path / "none", kind)


def test_pass_at_k_is_the_share_of_all_choices_of_k():
    for n in range(1, 7):
        for right in range(n + 1):
            outcomes = [i < right for i in range(n)]
            for k in range(1, n + 1):
                draws = [any(draw) for draw in combinations(outcomes, k)]
                assert pass_at_k(n, right, k) == pytest.approx(sum(draws) / len(draws))
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - 0.1237, abs=1e-3)  # numpy.prod(1 - k / arange(n-c+1, n+1))
    mean, error = mean_pass_at_k([(2, 1), (2, 2), (2, 0)], 1)
    assert (mean, error) == (pytest.approx(0.5), pytest.approx(0.5 / 3**0.5))
    assert mean_pass_at_k([(3, 3)], 2) == (1.0, None)
    with pytest.raises(UserError, match="at least 3 samples"):
        pass_at_k(2, 1, 3)
