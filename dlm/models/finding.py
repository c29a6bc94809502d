"""Where a checkpoint is: in the package, in a folder, or on the hub. Knows nothing of what is inside."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from dlm.errors import UserError

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
"""What is downloaded: never pickled weights, never code."""
TOKENIZER_FILES = [
    "tokenizer*.json",
    "special_tokens_map.json",
    "*.jinja",
    "*.model",
    "vocab.*",
    "*.tiktoken",
    "merges.txt",
]
"""What is downloaded where the tokenizer alone is needed."""


def bundled() -> dict[str, Path]:
    """The models that come with the package."""
    root = Path(str(resources.files("dlm"))) / "bundled"
    return {p.name: p for p in sorted(root.iterdir()) if (p / "config.json").is_file()} if root.is_dir() else {}


def find(name: str | Path, revision: str | None = None, files: Sequence[str] = HUB_FILES) -> Path:
    """The folder of a checkpoint; a hub id is downloaded into the hub's own cache."""
    shipped = bundled()
    if str(name) in shipped:
        return shipped[str(name)]
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{name} is a file; give the checkpoint's folder ({path.parent})")
    text = str(name)
    if isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") != 1:
        known = ", ".join(shipped) or "none"
        raise UserError(f"no model {text!r}: no such folder; bundled models: {known}; a hub id has the form owner/name")
    return _download(text, revision, files)


def find_tokenizer(name: str | Path) -> Path:
    """The folder or file of a tokenizer, for `load_tokenizer`: of a bundled model, a folder, a tokenizer.json, a hub id."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    try:
        return find(name, files=TOKENIZER_FILES)
    except UserError as error:
        reason = str(error).removeprefix(f"no model {str(name)!r}: ")
        raise UserError(f"no tokenizer {str(name)!r}: {reason}; dlm-tokenizer makes a folder with one") from error


def _download(name: str, revision: str | None, files: Sequence[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except errors.GatedRepoError as error:
        raise UserError(f"{name} is gated: accept its terms on the hub, then `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"no model {name!r} on the hub, and no such folder (a private one needs `hf auth login`)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r}") from error
    except errors.HFValidationError as error:
        raise UserError(f"{name!r} is neither a folder nor a hub id: {error}") from error
    # HfHubHTTPError descends from its HTTP client's own error, and the client is another one from version to version.
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, *errors.HfHubHTTPError.__mro__[:2]) as error:  # pyright: ignore[reportGeneralTypeIssues]
        raise UserError(
            f"cannot download {name!r}: the hub is out of reach and the cache has no full copy; "
            f"go online once, or give the path of a local folder ({type(error).__name__})"
        ) from error
