"""The shipped configs, found by name (`--config quickstart`). Holds no code."""
