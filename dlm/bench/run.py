"""Which measurements a config asks for, each run and reported in turn."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dlm.bench.config import BenchConfig
from dlm.bench.finding import Finding, Say
from dlm.errors import UserError

if TYPE_CHECKING:
    from dlm.models.lm import LM

SUBCOMMANDS = {
    "infer": ("infer", "load"),
    "load": ("load",),
    "train": ("train",),
    "tokenizer": ("tokenizer",),
    "serve": ("serve",),
}
"""Word on the command line -> sections. The first is run in any case, others where the config has them."""


def wanted(config: BenchConfig, subcommand: str | None) -> list[str]:
    """The sections to run: those present, or those a subcommand stands for."""
    if subcommand is not None:
        first, *others = SUBCOMMANDS[subcommand]
        return [first, *(name for name in others if getattr(config, name) is not None)]
    present = [name for name in SECTIONS if getattr(config, name) is not None]
    if not present:
        raise UserError(
            f"nothing to measure: say which ({', '.join(SUBCOMMANDS)}), as in dlm-bench infer, or give a --config "
            "with a section of that name"
        )
    return present


def measure(config: BenchConfig, section: str, say: Say) -> Finding:
    if config.threads is not None:
        import torch

        torch.set_num_threads(config.threads)
    return SECTIONS[section](config, say)


@cache
def _lm(name: str, **placed: Any) -> "LM":
    from dlm.models.loading import load

    return load(name, **placed)


def _section(module: str, with_model: bool = False) -> Callable[[BenchConfig, Say], Finding]:
    """The `measure` of one of this package's modules, imported when it is called."""

    def run(config: BenchConfig, say: Say) -> Finding:
        model = (_lm(**config.model.model_dump()),) if with_model else ()
        return import_module(f"dlm.bench.{module}").measure(config, *model, say)

    return run


SECTIONS = {
    "infer": _section("infer", with_model=True),
    "load": _section("traffic", with_model=True),
    "train": _section("train"),
    "tokenizer": _section("tokenizer"),
    "serve": _section("serve"),
}
