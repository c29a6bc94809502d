"""Refuses anything else where a function takes a model, with an error that says how to get one."""

import json
import reprlib
from pathlib import Path
from typing import Any

from torch import nn

from dlm.errors import UserError
from dlm.models.transformer import Transformer


class Model:
    """Base class of `LM`, for modules that `lm.py` imports."""


def require_lm(value: Any, where: str) -> None:
    """Raise UserError unless `value` is a loaded model; `where` is the caller."""
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
