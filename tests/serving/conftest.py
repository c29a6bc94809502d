"""Servers that the tests of this room share."""

from collections.abc import Iterator

import pytest

from .live import Live, live, model


@pytest.fixture(scope="package")
def diffusion() -> Iterator[Live]:
    """A bidirectional model."""
    with live() as running:
        yield running


@pytest.fixture(scope="package")
def blockwise() -> Iterator[Live]:
    """A block-causal model, blocks of four."""
    with live(lm=model("sdar")) as running:
        yield running


@pytest.fixture(scope="package")
def causal() -> Iterator[Live]:
    """An autoregressive model."""
    with live(lm=model("llama")) as running:
        yield running
