"""What each process of test_processes.py runs with train.compile: a run, and how many graphs were compiled for it."""

import os
import sys
from pathlib import Path

from torch._dynamo.utils import counters

from dlm.config import load
from dlm.training.config import TrainConfig
from dlm.training.loop import train

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train(load(TrainConfig, [folder / "straight.toml"]))
    graphs = counters["stats"]["unique_graphs"]
    (folder / f"graphs-{os.environ['RANK']}").write_text(str(graphs))
