"""Finds a checkpoint: in the package, in a folder or a GGUF file, or on the hub."""

import difflib
import re
import reprlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from dlm.data.gguf import is_gguf
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


def available() -> dict[str, str]:
    """The models that come with the package: each name that `dlm.load` or, for drafts, `dlm.load_draft` takes, and what it is."""
    return {name: _about(folder / "README.md") for name, folder in bundled().items()}


def _about(card: Path) -> str:
    """The first sentence of a model card."""
    if not card.is_file():
        return ""
    text = re.sub(r"\A---\n.*?\n---\n", "", card.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return re.split(r"(?<=\.)\s", first, maxsplit=1)[0]


def find(name: str | Path, revision: str | None = None, files: Sequence[str] = HUB_FILES) -> Path:
    """The folder or GGUF file of a checkpoint; a hub id is downloaded into the hub's own cache."""
    if not isinstance(name, str | Path):
        raise UserError(
            f"a model is named by a bundled name, a folder, a GGUF file or a hub id, not by {reprlib.repr(name)}"
        )
    shipped = bundled()
    if str(name) in shipped:
        return shipped[str(name)]
    text = str(name)
    try:
        path = Path(name).expanduser()
        if path.is_dir() or is_gguf(path):
            return path
        if path.exists():
            raise UserError(f"{name} is a file; give the checkpoint's folder ({path.parent}), or a GGUF file")
        if path.suffix == ".gguf":
            return _hub_file(text, revision, path)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a null byte, or of an unknown home folder
        raise UserError(f"no model {reprlib.repr(text)}: {getattr(error, 'strerror', None) or error}") from error
    if isinstance(name, Path) or text.startswith((".", "/", "~")) or text.endswith("/") or text.count("/") != 1:
        known = ", ".join(shipped) or "none"
        raise UserError(
            f"no model {text!r}: no such folder{_beside(path)}; bundled models: {known}; a hub id has the form owner/name"
        )
    if revision is None and path.parent.is_dir():  # more likely a misspelt folder than a hub id
        raise UserError(
            f"no model {text!r}: no such folder{_beside(path)}; for a hub id of the same spelling, name its revision "
            '("main")'
        )
    return _download(text, revision, files)


def _hub_file(text: str, revision: str | None, path: Path) -> Path:
    """A GGUF file that lies in a repository of the hub, as owner/name/file.gguf; all its parts, where it was split."""
    owner, _, rest = text.partition("/")
    name, _, file = rest.partition("/")
    if not file or text.startswith((".", "/", "~")) or path.parent.is_dir():
        raise UserError(f"no model {text!r}: no such file{_beside(path)}; one of the hub is owner/name/file.gguf")
    found = _download(f"{owner}/{name}", revision, [file.replace("-00001-of-", "-*-of-")]) / file
    if not found.is_file():
        raise UserError(f"no model {text!r}: the hub's {owner}/{name} has no {file}")
    return found


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


def _beside(path: Path) -> str:
    """A hint for a folder that does not exist: similar names beside it, or beside its first missing parent."""
    while not path.parent.is_dir():
        path = path.parent
    if path.parent == Path() and path.suffix != ".gguf":
        return ""
    there = sorted(e.name for e in path.parent.iterdir() if e.is_dir() or (e.suffix == path.suffix == ".gguf"))
    if not there:
        return f" ({path.parent} has no folders)"
    near = difflib.get_close_matches(path.name, there, n=3, cutoff=0.5)
    if near:
        return "; did you mean " + " or ".join(str(path.parent / name) for name in near) + "?"
    more = f" and {len(there) - 5} more" if len(there) > 5 else ""
    return f"; {path.parent} has {', '.join(there[:5])}{more}"


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
            f"no model {name!r}: there is no such folder in {Path.cwd()}, and as a hub id it cannot be downloaded: the hub "
            f"is out of reach and the cache has no full copy; go online once, or give the path of a local folder "
            f"({type(error).__name__})"
        ) from error
