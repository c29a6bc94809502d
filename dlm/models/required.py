"""Refuses anything else where a function takes a model, with an error that says how to get one."""

import json
import reprlib
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from dlm.errors import UserError
from dlm.models.transformer import Transformer


class Model:
    """Base class of `LM`, for modules that `lm.py` imports."""

    refuses: ClassVar[str] = ""
    """Why no engine runs this model and nothing converts it, in words after its name; empty for a `Transformer`."""


def require_lm(value: Any, where: str) -> None:
    """Raise UserError unless `value` is a loaded model that engines run and exports convert; `where` is the caller."""
    require_model(value, where)
    if value.refuses:
        raise UserError(f"{where}: model {value.name!r} {value.refuses}")


def require_model(value: Any, where: str) -> None:
    """Raise UserError unless `value` is a loaded model of any kind; `where` is the caller."""
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
