"""A process that trains and is killed with SIGKILL while it writes a checkpoint."""

import os
import signal
import subprocess
import sys
from importlib import import_module

from dlm.training import checkpoint
from dlm.training.config import TrainConfig


def run(config: TrainConfig, at: int, module: str = "dlm") -> int:
    """Train, after importing `module`, until the `at`-th call of checkpoint.sync; the exit status."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.training.killed", module, str(at), config.model_dump_json()]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode


def main(module: str, at: str, text: str) -> None:
    from dlm.training.loop import train

    import_module(module)
    write, left = checkpoint.sync, [int(at)]

    def sync(path):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path)

    checkpoint.sync = sync
    train(TrainConfig.model_validate_json(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
