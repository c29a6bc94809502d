import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.checkpoints import CHECKPOINTS
from tests.hostile.run import SETTINGS
from tests.hostile.templates import TEMPLATES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory as Linux does")
KINDS = {"checkpoint": CHECKPOINTS, "template": TEMPLATES, "setting": SETTINGS}
NAMES = [f"{kind}: {name}" for kind, names in KINDS.items() for name in names]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """How each ended, from one process for all."""
    command, root = [sys.executable, "-m", "tests.hostile.run", "--json"], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, input="y\n" * 99)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_it_ends_in_a_user_error(name, outcomes):
    if name not in outcomes:
        assert CHECKPOINTS[name.removeprefix("checkpoint: ")][0] == "adapter"
        pytest.skip("needs the extra `qlora`: peft")
    found = outcomes[name]
    assert found["kind"] == "UserError", found["said"]
    assert found["said"].strip()
    assert "MemoryError" not in found["said"]
