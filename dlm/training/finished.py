"""A finished run: finished.json beside its final model, so that nobody trains it twice."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dlm.atomic import write_text
from dlm.training import checkpoint
from dlm.training.checkpoint import Digest, Name
from dlm.training.config import TrainConfig
from dlm.training.same import other_settings

FILE = "finished.json"
Measured = tuple[float, float | None] | None  # a mean and its standard error


class Finished(BaseModel):
    """The run that wrote the final model of a folder: its last step, its results, its config, its files."""

    model_config = ConfigDict(extra="forbid")
    step: int
    bound: Measured
    bits_per_byte: Measured
    files: dict[Name, Digest]
    config: dict[str, Any]


def note(config: TrainConfig, step: int, bound: Measured, bits_per_byte: Measured) -> None:
    """Write the file, after the model."""
    out = Path(config.train.out)
    files = {
        path.name: checkpoint.digest(path) for kind in ("*config.json", "*.safetensors") for path in out.glob(kind)
    }
    facts = {"step": step, "bound": bound, "bits_per_byte": bits_per_byte, "files": files}
    found = Finished.model_validate({**facts, "config": config.model_dump(mode="json")})
    write_text(out / FILE, found.model_dump_json(indent=1) + "\n")


def look(config: TrainConfig) -> Finished | None:
    """What the folder says of the run that `config` describes, if that is at its last step."""
    try:
        found = Finished.model_validate_json((Path(config.train.out) / FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    same = not any(other_settings(found.config, config))
    return found if same and found.step >= config.train.steps else None


def is_whole(found: Finished, config: TrainConfig) -> bool:
    """Whether the final model and the newest checkpoint, if there is one, are as they were written."""
    out = Path(config.train.out)
    newest = checkpoint.found(out / "checkpoints")[:1]
    right = all(checkpoint.step_of(path) == found.step and not checkpoint.damage(path) for path in newest)
    return right and not any(checkpoint.differing(out, found.files))
