"""`dlm-train --launch`: starts the same command once for each GPU of this machine, by accelerate."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dlm.config import SHIPPED
from dlm.errors import UserError, nearest


def launch(kind: str, command: Sequence[str]) -> None:
    """Become `accelerate launch` of `python -m dlm.cli.train` with these options; returns only by an error.

    `kind` is a shipped file of configs/accelerate (ddp, fsdp2, …) or a path to another.
    """
    shipped = {path.stem: path for path in sorted((SHIPPED / "accelerate").glob("*.yaml"))}
    path = shipped.get(kind, Path(kind))
    if not path.is_file():
        raise UserError(f"--launch {kind}: no such file{nearest(kind, list(shipped))} (shipped: {', '.join(shipped)})")
    start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path), *_processes(path)]
    os.execv(sys.executable, [*start, "-m", "dlm.cli.train", *command])


def _processes(path: Path) -> list[str]:
    """The option for one process a GPU; none where the file says how many."""
    import torch
    import yaml

    if "num_processes" in yaml.safe_load(path.read_text()):
        return []
    count = torch.cuda.device_count()
    if not count:
        raise UserError(f"--launch {path.stem}: starts a process for each GPU, and there is none; cpu-2 needs none")
    return ["--num_processes", str(count)]
