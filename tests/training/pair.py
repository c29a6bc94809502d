"""What each process of test_processes.py runs: a straight run, and one that stops, saves and goes on."""

import sys
from pathlib import Path

from dlm.config import load
from dlm.training.config import TrainConfig
from dlm.training.loop import train
from dlm.training.run import Run

STEPS, STOP = 6, 3


def main(folder: Path) -> None:
    straight = load(TrainConfig, [folder / "straight.toml"])
    stopped = load(TrainConfig, [folder / "straight.toml"], {"train.out": str(folder / "stopped")})
    train(straight)
    run = Run(stopped)
    for _ in range(STOP):
        run.optimiser_step()
    run.save_checkpoint()
    train(stopped)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
