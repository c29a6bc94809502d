"""Whether two configs describe the same run: which settings may differ where one goes on from the other."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlm.errors import UserError
from dlm.training.config import TrainConfig

# Changing these between stop and resume does not change the numbers that a run computes.
FREE = {"log", "watch", "profile", "checkpoint", "eval", "data.prefetch", "data.cache", "train.gradient_checkpointing"}
FREE |= {f"train.{name}" for name in ("out", "resume", "threads", "device", "save_dtype")}
FREE |= {"adapter.merge"}
EXTENDABLE = {"train.steps", "train.decay_steps"}  # under some schedules


def other_settings(saved: dict[str, Any], config: TrainConfig) -> Iterator[tuple[str, object, object]]:
    """Dotted keys that differ and would change the numbers of a run, with the saved value and the config's."""
    free = FREE | EXTENDABLE if config.extendable else FREE
    return _differences(saved, config.model_dump(mode="json"), free, "")


def check_same_run(checkpoint: Path, config: TrainConfig) -> None:
    """Refuse to resume under another config, where the difference would change the numbers."""
    for key, was, now in other_settings(json.loads((checkpoint / "config.json").read_text()), config):
        raise UserError(
            f"{checkpoint}: was written with {key} = {was!r}, but now {key} = {now!r}; "
            "resume with the same config, give another train.out, or set train.resume = false"
        )


def _differences(old: dict, new: dict, free: set[str], prefix: str) -> Iterator[tuple[str, object, object]]:
    for key in sorted({*old, *new}):
        was, now, dotted = old.get(key), new.get(key), prefix + key
        if dotted in free or was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _differences(was, now, free, f"{dotted}.")
        else:
            yield dotted, was, now
