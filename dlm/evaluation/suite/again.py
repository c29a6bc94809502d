"""An evaluation run once more from its own file of results, and what came out differently. Decides nothing."""

import json
from pathlib import Path
from typing import Any

from dlm.config import check
from dlm.errors import UserError
from dlm.evaluation.suite.config import EvalConfig


def config_of(file: Path) -> tuple[EvalConfig, dict[str, Any]]:
    """The settings that a file of results was made with, and all that it holds."""
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as results of dlm-eval: {error}") from None
    if not isinstance(values, dict) or not {"config", "about", "runs"} <= values.keys():
        raise UserError(f"{file} holds no results of dlm-eval: it has no config, about and runs")
    return check(EvalConfig, values["config"], str(file)), values


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Every value that is another one, by its place."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = dict.fromkeys([*old, *new])
        return [
            line for name in names for line in differences(old.get(name), new.get(name), f"{where}.{name}".lstrip("."))
        ]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line for i, pair in enumerate(zip(old, new, strict=True)) for line in differences(*pair, f"{where}[{i}]")
        ]
    return [] if old == new else [f"{where}: {_short(old)} → {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
