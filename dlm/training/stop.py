"""Stops a run between two steps: the first SIGINT or SIGTERM is kept until the loop reads it."""

import signal
from types import FrameType

import torch
from accelerate import Accelerator

from dlm.training.processes import sum_over_processes


class StopRequest:
    """While entered, `name` is that of the first SIGINT or SIGTERM; a second one acts as it did before."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread, as in some notebooks: signals stay as they are
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        signal.signal(number, self._before[number])

    def anywhere(self, accelerator: Accelerator) -> str | None:
        """The signal that reached any process, so that all of them stop after the same step."""
        if accelerator.num_processes > 1:
            flag = torch.tensor(float(self.name is not None), device=accelerator.device)
            if sum_over_processes(accelerator, flag) > 0:
                self.name = self.name or "SIGTERM"
        return self.name
