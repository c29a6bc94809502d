"""The most memory that a `with` block took."""

import resource
import sys
from pathlib import Path
from typing import Self

import torch


class Peak:
    """A context; `.bytes` afterwards. On a GPU what tensors took, elsewhere the process's resident memory.

    Where the kernel cannot reset its peak (outside Linux), it is the process's peak so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _forget_peak()
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _peak_resident()


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # no such file, or not allowed: the peak is then the process's
        return


def _peak_resident() -> int:
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
