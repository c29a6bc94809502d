"""Runs interpreted.py and interpreted_experts.py: Triton's interpreter is chosen before a kernel is defined, so it needs a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("cases", [6, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernels", ["interpreted.py", "interpreted_experts.py"])
def test_kernels_equal_their_twins_under_the_interpreter(kernels, cases):
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'dlm[gpu]'")
    here = Path(__file__)
    options = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    ours = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, *options, here.with_name(kernels)]
    ours |= {"TRITON_INTERPRET": "1", "DLM_KERNEL_CASES": str(cases)}
    done = subprocess.run(command, cwd=here.parents[2], env=ours, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
