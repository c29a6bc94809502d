"""Small things every data test needs: a tokenizer, a private cache, a way to take samples."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm.data.config import TokenizerConfig
from dlm.data.tokenizer import Tokenizer
from dlm.data.tokenizer_training import train_tokenizer

TEXTS = [
    "def area(r):\n    return 3.14 * r ** 2\n",
    "for i in range(10):\n    print(i, 'ünïcode ✓')\n",
    "x = {'a': [1, 2, 3]}\n",
] * 5


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's caches."""
    monkeypatch.setenv("DLM_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
    if "datasets" in sys.modules:
        monkeypatch.setattr(sys.modules["datasets"].config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A 320-token BPE with mask, end-of-text and chat tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(TokenizerConfig(output=str(folder), vocab_size=320), TEXTS)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of 12 text files of different lengths."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02d}.txt").write_text(
            "\n".join(f"line {j} of file {i}: {'word ' * (j % 4)}" for j in range(i + 1))
        )
    return folder


def take(stream: Iterator[Any], n: int) -> list[Any]:
    return list(islice(stream, n))


def assert_same(left: list[Any], right: list[Any]) -> None:
    """Bitwise equality of two lists of samples."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a["index"] == b["index"]
        assert a.keys() == b.keys()
        for name in set(a) - {"index"}:
            assert a[name].dtype == b[name].dtype
            np.testing.assert_array_equal(a[name], b[name])


PAIRS = {"source": "chat", "pack": "row", "prompt_field": "p", "response_field": "r", "heldout_fraction": 0}
"""A source of questions `p` and answers `r`."""
