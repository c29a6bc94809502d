"""What a function that takes a model does with anything else: an error that says how to get one."""

import json
import reprlib
from pathlib import Path
from typing import Any

from torch import nn

from dlm.errors import UserError
from dlm.models.transformer import Transformer


class Model:
    """A loaded model. `LM` is the only one, and this the part of it that saving and converting can name below `lm.py`."""


def require_lm(value: Any, where: str) -> None:
    """An error where something else stands for a model: a name, a folder, a bare network; `where` is the caller."""
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
