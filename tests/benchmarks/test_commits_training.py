"""benchmarks/commits_training.py without a training: what it reads of one, and what it makes of its rounds."""

import sys

import pytest

WRITES = """
import json, sys
out, steps = sys.argv[sys.argv.index("--train.out") + 1], int(sys.argv[sys.argv.index("--train.steps") + 1])
import pathlib
pathlib.Path(out).mkdir()
rows = [{"step": i, "tokens_per_second": 1.0 if i <= 6 else 100.0 * i, "mfu": 0.5} for i in range(1, steps + 1)]
(pathlib.Path(out) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in [*rows, {"step": steps}]))
"""


def test_the_first_steps_do_not_count(script, tmp_path):
    speed = script("commits_training").training_speed([sys.executable, "-c", WRITES], 3, tmp_path / "run")
    assert speed == {"tokens_per_second": 800.0, "mfu": 0.5}  # of 700, 800 and 900


def test_a_training_that_fails_is_shown(script, tmp_path):
    with pytest.raises(SystemExit, match="no such thing"):
        script("commits_training").training_speed([sys.executable, "-c", "raise OSError('no such thing')"], 1, tmp_path)


def test_ratios_are_taken_within_rounds(script):
    def speeds(*found):
        return [{"tokens_per_second": x, "mfu": 0.1} for x in found]

    rows = script("commits_training").summary({"old, fp32": speeds(10, 20, 40), "new, fp32": speeds(20, 30, 40)})
    assert rows["new, fp32"]["of old, fp32"] == {"median": 1.5, "low": 1.0, "high": 2.0}
    assert rows["new, fp32"]["tokens_per_second"]["median"] == 30
