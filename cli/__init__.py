"""The commands: each parses its options, calls one function of `dlm`, and prints the result."""

import os

# Pydantic's search for plugins reads the metadata of every installed package: a third of the time of a --help.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
