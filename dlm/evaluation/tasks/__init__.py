"""Evaluation tasks, a file each. To add one: a file with a `Task`, and a line in TASKS."""

from dlm.evaluation.task import Task
from dlm.evaluation.tasks.gsm8k import GSM8K
from dlm.evaluation.tasks.hotpotqa import HotpotQA
from dlm.evaluation.tasks.line import Line
from dlm.evaluation.tasks.math import Math
from dlm.evaluation.tasks.mmlu import MMLU

TASKS: dict[str, Task] = {
    "gsm8k": GSM8K(),
    "math": Math(),
    "math500": Math(),
    "mmlu": MMLU(),
    "hotpotqa": HotpotQA(),
    "longbench_hotpotqa": HotpotQA(),
    "line": Line(),
}
"""Name, which is the `source` of a dataset's rows -> task."""
