"""What a command line takes besides the keys of its config: plain options, and words without dashes."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """A plain option. With a `metavar` it takes a value; with `sets` it is short for an override."""

    name: str
    metavar: str = ""
    help: str = ""
    sets: str = ""  # dotted key of the config that it sets; to true, if it takes no value
    repeatable: bool = False
    required: bool = False
    alone: str | None = None  # the value if none is given; None: one is required
    kind: Callable[[str], Any] = str  # turns text into the value, or raises ValueError


@dataclass(frozen=True)
class Word:
    """A word without dashes that a command takes: `dlm-replay ID`."""

    name: str
    help: str
    required: bool = True
    repeatable: bool = False


def model_flag(key: str, meaning: str = "The model") -> Flag:
    """`--model NAME`, short for the key by which this command names its model."""
    return Flag(
        "--model",
        "NAME",
        f"{meaning}: a bundled model (pico, pico-block, pico-causal, sudoku), a folder, a GGUF file, or a hub id. Short for --{key}.",
        sets=key,
    )


def count(text: str) -> int:
    """A number of things: 0 to 2**53."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 17 else -1
    if not 0 <= number <= 2**53:
        raise ValueError(f"{text[:60]!r} is no number from 0 to {2**53}")
    return number


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """A kind of value: one of these names."""

    def name(text: str) -> str:
        if text not in names:
            raise ValueError(f"invalid choice: {text[:60]!r} (choose from {', '.join(map(repr, names))})")
        return text

    return name


CONFIG_FLAGS = (
    Flag("--config", "FILE", "TOML file or shipped config name; later ones win.", repeatable=True),
    Flag("--print-config", help="Print the merged config as TOML that reproduces the run, and stop."),
)
COMMON_FLAGS = (
    Flag("--version", help="Print the version, and stop."),
    Flag("--help", help="Print this page, and stop."),
)
STORE_FLAGS = (
    Flag("--store", "FILE", "The trace store (default: DLM_TRACES, else runs/traces.db)."),
    Flag("--json", help="Print JSON."),
)
