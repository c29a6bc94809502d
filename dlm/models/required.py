"""What a function that takes a model does with anything else: an error that says how to get one."""

import json
import reprlib
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from dlm.errors import UserError
from dlm.models.transformer import Transformer


class Model:
    """A loaded model: the part of `LM` that saving and converting can name below `lm.py`."""

    refuses: ClassVar[str] = ""
    """Why no engine runs this model and nothing converts it, in words after its name; empty for a `Transformer`."""


def require_lm(value: Any, where: str) -> None:
    """An error where something else stands for a model of tokens: a name, a bare network, a model that decodes itself.

    `where` is the caller.
    """
    require_model(value, where)
    if value.refuses:
        raise UserError(f"{where}: model {value.name!r} {value.refuses}")


def require_model(value: Any, where: str) -> None:
    """The same, where any loaded model will do."""
    if isinstance(value, Model):
        return
    if isinstance(value, str | Path):
        given, fix = f"{str(value)!r}, the name of a model", f"dlm.load({json.dumps(str(value), ensure_ascii=False)})"
    elif isinstance(value, Transformer):
        given, fix = "a network without its tokenizer", "dlm.LM(network, tokenizer)"
    elif isinstance(value, nn.Module):
        given, fix = f"a module ({type(value).__name__})", "dlm.load(folder), or dlm.models.hf.unwrap(model)"
    else:
        given, fix = f"{reprlib.repr(value)} ({type(value).__name__})", "dlm.load(name)"
    raise UserError(f"{where}: expected a loaded model, not {given}: use {fix}")
