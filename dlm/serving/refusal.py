"""The answer to a request that cannot be served: a status and OpenAI's error object."""

from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY = {429: "1", 503: "5"}
"""Seconds after which to ask again, by status."""


class Refusal(Exception):
    """A request that is answered with an error. `param` is the field it is about."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = True
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """When to come back, where that may help."""
        headers = {"retry-after": RETRY[self.status]} if self.status in RETRY and self.retry else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status >= 429 and not self.retry:
            headers["x-should-retry"] = "false"  # openai-python obeys it
        return headers


def crowded(reason: str) -> Refusal:
    """Too many are waiting."""
    return Refusal(429, f"{reason}: come back later", code="queue_full")


def leaving() -> Refusal:
    """The server is about to end."""
    return Refusal(503, "the server is shutting down: ask another one, or come back later", code="shutting_down")
