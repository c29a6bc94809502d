"""The commands: each parses, calls one function of `dlm`, prints. Knows no algorithm."""

import os

# Looking for pydantic plugins reads the metadata of every installed package: a third of the start of a --help.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
