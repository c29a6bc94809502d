"""One line of JSON for each request. Prompts and answers are in it only with [serve] log_text."""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TextIO

SHOWN = (
    "request_id",
    "prompt_tokens",
    "completion_tokens",
    "finish_reasons",
    "seed",
    "gone",
    "error",
    "text",
    "prompt",
)


class RequestLog:
    """Writes a line when a request is over."""

    def __init__(self, enabled: bool, stream: TextIO | None = None) -> None:
        self.enabled, self.stream = enabled, stream

    def write(
        self, method: str, path: str, status: int, seconds: float, owner: str | None, facts: Mapping[str, Any]
    ) -> None:
        """The line of one request; `facts` are what its answer noted."""
        if not self.enabled:
            return
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "method": method,
            "path": path,
            "status": status,
            "ms": round(1000 * seconds, 1),
        }
        line |= {} if owner is None else {"owner": owner}
        line |= {name: facts[name] for name in SHOWN if facts.get(name) is not None}
        self.say(line)

    def say(self, line: Mapping[str, Any]) -> None:
        """Any other line; a stream that is closed or full loses it."""
        with suppress(OSError, ValueError):
            print(json.dumps(line, default=str), file=self.stream or sys.stderr, flush=True)
