import subprocess
import sys

import pytest
from pydantic import ValidationError

from dlm.data.config import READ_BY, DataConfig, TokenizerConfig, special_names
from tests.refusals import refused

PAIR = {"source": "chat", "paths": ("a",), "pack": "row", "prompt_field": "p", "response_field": "r"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"source": "text"}, ["paths"]),
        ({"source": "jsonl"}, ["paths"]),
        ({"source": "tokens"}, ["paths"]),
        ({"source": "datasets"}, ["dataset"]),
        ({"source": "chat", "pack": "row"}, ["paths", "dataset"]),
        ({"source": "stdlib", "paths": ("a",)}, ["paths", "stdlib"]),
        ({"source": "text", "paths": ("a",), "streaming": True}, ["streaming", "datasets"]),
        ({"source": "chat", "paths": ("a",), "prompt_field": "p", "pack": "row"}, ["prompt_field", "response_field"]),
        ({"source": "chat", "paths": ("a",)}, ["pack", "row"]),
        ({**PAIR, "messages_field": "m"}, ["messages_field", "prompt_field"]),
        ({"source": "chat", "paths": ("a",), "pack": "row", "dataset": "x/y"}, ["dataset", "paths"]),
        ({"source": "jsonl", "paths": ("a",), "text_fields": ()}, ["text_fields"]),
        ({"source": "sudoku", "sudoku_empty": (50, 30)}, ["sudoku_empty"]),
        ({"source": "chat", "paths": ("a",), "pack": "row", "heldout_split": "test"}, ["heldout_split", "dataset"]),
        ({"source": "nonsense"}, ["source"]),
        ({"heldout": 0.1}, ["heldout"]),
        ({"heldout_fraction": 1.0}, ["heldout_fraction"]),
    ],
)
def test_what_does_not_fit_is_named(fields, named):
    with pytest.raises(ValidationError) as caught:
        DataConfig(**fields)
    for name in named:
        assert name in str(caught.value)


def test_every_field_that_depends_on_the_source_exists():
    assert set(READ_BY) <= set(DataConfig.model_fields)


def test_every_field_has_a_description():
    for cls in (DataConfig, TokenizerConfig):
        assert [name for name, field in cls.model_fields.items() if not field.description] == []


def test_tokenizer_config():
    assert special_names(TokenizerConfig()) == ("<|endoftext|>", "[MASK]", "<|im_start|>", "<|im_end|>")
    refused("twice", TokenizerConfig, special_tokens=("[MASK]",), error=ValidationError)
    refused("261", TokenizerConfig, vocab_size=260, special_tokens=("<a>",), error=ValidationError)
    refused("no text", TokenizerConfig, data=DataConfig(source="sudoku"), error=ValidationError)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("dlm.data, dlm.data.config", {"torch", "numpy", "tokenizers", "datasets"}),
        ("dlm.data.source, dlm.data.tokenizer_training", {"torch", "transformers"}),
    ],
)
def test_imports_are_light(modules, heavy):
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
