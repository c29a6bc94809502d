"""Which measurements a config asks for, each run and reported in turn."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from dlm.bench.config import BenchConfig
from dlm.bench.finding import Finding, Say
from dlm.errors import UserError

if TYPE_CHECKING:
    from dlm.models.lm import LM

SUBCOMMANDS = {
    "infer": ("infer", "load", "quality"),
    "load": ("load",),
    "quality": ("quality",),
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
    """Run one section."""
    if config.threads is not None:
        import torch

        torch.set_num_threads(config.threads)
    return SECTIONS[section](config, say)


@cache
def _lm(name: str, **placed: Any) -> "LM":
    from dlm.models.loading import load

    return load(name, **placed)


def _infer(config: BenchConfig, say: Say) -> Finding:
    from dlm.bench import infer

    return infer.measure(config, _lm(**config.model.model_dump()), say)


def _load(config: BenchConfig, say: Say) -> Finding:
    from dlm.bench import traffic

    return traffic.measure(config, _lm(**config.model.model_dump()), say)


def _quality(config: BenchConfig, say: Say) -> Finding:
    from dlm.bench import quality

    return quality.measure(config, say)


def _train(config: BenchConfig, say: Say) -> Finding:
    from dlm.bench import train

    return train.measure(config, say)


def _tokenizer(config: BenchConfig, say: Say) -> Finding:
    from dlm.bench import tokenizer

    return tokenizer.measure(config, say)


def _serve(config: BenchConfig, say: Say) -> Finding:
    from dlm.bench import serve

    return serve.measure(config, say)


SECTIONS: dict[str, Callable[[BenchConfig, Say], Finding]] = {
    "infer": _infer,
    "load": _load,
    "quality": _quality,
    "train": _train,
    "tokenizer": _tokenizer,
    "serve": _serve,
}
