"""Writes a checkpoint's folder: all its files appear at once, and nothing but a checkpoint is replaced."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dlm.atomic import filled
from dlm.errors import UserError
from dlm.models.settings import read_json
from dlm.models.shards import INDEX

TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tokenizer_config.json")
BESIDE = ("README.md", "LICENSE", "special_tokens_map.json", "chat_template.jinja")
"""Files that a new checkpoint's folder may hold already, besides a tokenizer."""
READ_FIRST = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Tokenizer files that would be read in place of what `Tokenizer.save` writes."""


def check_folder(folder: Path) -> None:
    """UserError where a checkpoint cannot or should not be written: it may replace a checkpoint, but not other files."""
    with _writing(folder):
        if not folder.is_dir():
            if folder.exists():
                raise UserError(f"{folder} is a file: give a folder")
            return
        names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    others = [name for name in names if name not in (*TOKENIZER, *BESIDE)]
    if others and "adapter_config.json" not in names and "model_type" not in read_json(folder / "config.json"):
        raise UserError(
            f"{folder} holds {others[0]!r} and is no checkpoint: give a new folder, or overwrite=True (--overwrite) to "
            "write into this one"
        )


@contextmanager
def replacing(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder whose files take their places in `folder` at the end, unless an error ends the block."""
    if not overwrite:
        check_folder(folder)
    with _writing(folder), filled(folder, order=_config_last, outdated=_outdated) as work:
        yield work


def _config_last(file: Path) -> tuple[bool, bool, str]:
    """A folder is a checkpoint once it has config.json, so that one comes last."""
    return file.name == "config.json", file.suffix == ".json", file.name


def _outdated(folder: Path, names: set[str]) -> set[str]:
    """Files of an earlier checkpoint that the new one, with these `names`, does not replace."""
    old = {path.name for path in (*folder.glob("model*.safetensors"), *folder.glob(INDEX))}
    if "tokenizer.json" in names:
        old |= {name for name in READ_FIRST if (folder / name).is_file()}
    return old - names


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns read-only folders, full disks and the like into UserErrors."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if isinstance(error, OSError) and error.filename in [str(path) for path in folder.parents]:
            reason += f": {error.filename}"
        raise UserError(
            f"{folder} cannot be written ({reason}): give a folder that you may write to, on a disk with room for it"
        ) from error
