"""[trace]: its defaults agree with the store's, and what it refuses."""

import inspect

import pytest

from dlm.config import check
from dlm.errors import UserError
from dlm.trace import TraceStore
from dlm.trace.config import TraceConfig


def test_defaults_are_the_stores():
    config, store = TraceConfig(), inspect.signature(TraceStore).parameters
    for name in ("durability", "fraction", "prompts", "queue_size"):
        assert getattr(config, name) == store[name].default


@pytest.mark.parametrize("value", ["tokens+logits", ""])
def test_granularity_is_checked(value):
    with pytest.raises(UserError, match="cannot keep .*; known: tokens, masks"):
        check(TraceConfig, {"keep": value}, "x.toml")
