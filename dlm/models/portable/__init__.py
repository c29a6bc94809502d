"""Modelling code that goes along with a checkpoint of family `dlm`, so that transformers alone can read it.

`configuration_dlm.py` and `modeling_dlm.py` are copied into the folder as they are, and config.json names them in its
`auto_map`. They import torch and transformers only, and nothing of `dlm`.
"""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

CODE = ("configuration_dlm.py", "modeling_dlm.py")
AUTO_MAP = {
    "AutoConfig": "configuration_dlm.DLMConfig",
    "AutoModel": "modeling_dlm.DLMForMaskedLM",
    "AutoModelForMaskedLM": "modeling_dlm.DLMForMaskedLM",
    "AutoModelForCausalLM": "modeling_dlm.DLMForMaskedLM",
}
"""What transformers' Auto classes are called -> where the code is: module.Class, in the checkpoint's own folder."""


def write_code(folder: Path) -> None:
    """Copy the modelling code into a checkpoint's folder."""
    for name in CODE:
        text = (resources.files(__name__) / name).read_text("utf-8")
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def hub_code(auto_map: Any) -> dict[str, str]:
    """The entries whose code lies in a repository on the hub ("owner/name--module.Class")."""
    return {auto: where for auto, where in _entries(auto_map).items() if "--" in where}


def local_code(auto_map: Any, folder: Path) -> list[Path]:
    """The Python files in `folder`, if `auto_map` names code there and all that it names is there; else none.

    Links are no files here: they may lead to what is not the checkpoint's to give away.
    """
    modules = {where.partition(".")[0] for where in _entries(auto_map).values() if "--" not in where}
    files = sorted(path for path in folder.glob("*.py") if path.is_file() and not path.is_symlink())
    return files if modules and modules <= {path.stem for path in files} else []


def _entries(auto_map: Any) -> dict[str, str]:
    found = auto_map.items() if isinstance(auto_map, Mapping) else ()
    return {auto: where for auto, where in found if isinstance(where, str)}
