"""The keywords of `dlm.generate` and its like, as type checkers see them, are the settings themselves.

python -m tests.inference.test_keyword_types > dlm/inference/keyword_types.py      # after a setting has changed
"""

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import dlm
from dlm.inference import keyword_types
from dlm.inference.config import EngineConfig, SamplerConfig
from dlm.inference.drafting.fitting import READ_WITH_A_DRAFT
from dlm.inference.readers import ENGINE_ALONE, FILLS, HOLES

FILE = Path(keyword_types.__file__)
ENDS = (*HOLES, *READ_WITH_A_DRAFT)
HEAD = '''"""The keywords of `dlm.generate` and its like, for type checkers. Do not edit it.

Made from the settings by `python -m tests.inference.test_keyword_types > dlm/inference/keyword_types.py`.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

from dlm.diffusion.unmask import Rule
'''
CLASSES: dict[str, tuple[str, str, Iterable[str]]] = {
    "DecodeKeywords": (
        "TypedDict",
        "How masks become tokens.",
        [*(SamplerConfig.model_fields.keys() - {*ENDS, *FILLS}), "remasking"],
    ),
    "FillKeywords": ("DecodeKeywords", "How holes are filled.", FILLS),
    "ContinueKeywords": ("DecodeKeywords", "How a text is continued.", ENDS),
    "SamplerKeywords": ("FillKeywords, ContinueKeywords", "Of one request, whatever it asks for.", ()),
    "KnownEngineKeywords": (
        "TypedDict",
        "What runs at a time, where all requests are known.",
        EngineConfig.model_fields.keys() - {*ENGINE_ALONE},
    ),
    "EngineKeywords": ("KnownEngineKeywords", "Of `dlm.Engine`.", ENGINE_ALONE),
    "GenerateKeywords": ("ContinueKeywords, KnownEngineKeywords", "Of `dlm.generate`.", ()),
    "InfillKeywords": ("FillKeywords, KnownEngineKeywords", "Of `dlm.infill`.", ()),
}
"""Class -> what it is derived from, what it is, and the settings that it adds."""
SPELLED = {"rule": "str | Rule", "remasking": "str"}  # a table that may grow; LLaDA's name for it


def spelled(annotation: Any) -> str:
    """A type as Python writes it."""
    if get_origin(annotation) in (Union, UnionType):
        return " | ".join(map(spelled, get_args(annotation)))
    if get_origin(annotation) is Literal:
        return f"Literal[{', '.join(map(json.dumps, get_args(annotation)))}]"
    if annotation == tuple[str, ...]:  # checked as a tuple, taken as any sequence
        return "Sequence[str]"
    return "None" if annotation is type(None) else annotation.__name__


def source() -> str:
    """What keyword_types.py has to be."""
    fields, parts = SamplerConfig.model_fields | EngineConfig.model_fields, [HEAD]
    for name, (bases, what, added) in CLASSES.items():
        lines = [f'\n\nclass {name}({bases}, total=False):\n    """{what}"""\n']
        order = [*fields, "remasking"]
        types = {key: SPELLED.get(key) or spelled(fields[key].annotation) for key in sorted(added, key=order.index)}
        lines += ["\n", *(f"    {key}: {kind}\n" for key, kind in types.items())] if types else []
        parts.append("".join(lines))
    return "".join(parts)


def test_they_are_made_of_the_settings():
    assert FILE.read_text("utf-8") == source()


@pytest.mark.parametrize("name", ["generate", "infill", "Engine"])
def test_they_are_those_of_the_signature(name):
    own = {"lm", "prompts", "draft", "trace", "request_ids", "batch_size", "on_step"}
    types = get_type_hints(getattr(keyword_types, f"{name.capitalize()}Keywords"))
    assert types.keys() - {"remasking"} == inspect.signature(getattr(dlm, name)).parameters.keys() - own


if __name__ == "__main__":
    print(source(), end="")
