"""Plain options of commands, beside those that their config makes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A plain option. With a `metavar` it takes a value; with `sets` it is short for an override."""

    name: str
    help: str
    metavar: str = ""
    sets: str = ""  # dotted key that gets the value, or becomes true
    repeatable: bool = False


def model_flag(key: str, meaning: str = "The model") -> Flag:
    """`--model NAME`, short for the key by which this command names its model."""
    return Flag(
        name="--model",
        metavar="NAME",
        sets=key,
        help=f"{meaning}: a bundled model (pico, sudoku), a folder, or a hub id. Short for --{key}.",
    )


COMMON_FLAGS = (
    Flag(name="--config", metavar="FILE", repeatable=True, help="TOML file or shipped config name; later ones win."),
    Flag(name="--print-config", help="Print the merged config as TOML that reproduces the run, and stop."),
    Flag(name="--version", help="Print the version, and stop."),
    Flag(name="--help", help="Print this page, and stop."),
)
