"""What every request passes before a route sees it: size of the body, key, log and metrics."""

import time
import traceback
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers

from dlm.serving.answer import Receive, Scope, Send, encoded
from dlm.serving.refusal import Refusal

if TYPE_CHECKING:
    from dlm.serving.server import Server

OPEN = frozenset({"/", "/health", "/ready", "/metrics", "/docs", "/openapi.json", "/docs/oauth2-redirect"})
"""Paths without a key."""


class Gate:
    """ASGI middleware around all routes."""

    def __init__(self, app: Any, server: "Server") -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, status = time.monotonic(), 0
        facts: dict[str, Any] = scope.setdefault("dlm", {})

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        owner = None
        try:
            headers = Headers(scope=scope)
            if self.server.keys.needed and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
                owner = self.server.keys.owner(headers.get("authorization"))
                if owner is None:
                    raise Refusal(401, 'no valid key: send one as "Authorization: Bearer KEY"', code="invalid_api_key")
            facts["owner"] = owner
            most = self.server.config.serve.max_body
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length) > most:
                raise Refusal(413, _too_large(most).detail)
            await self.app(scope, _limited(receive, most), sending)
        except Refusal as refusal:
            facts["error"] = refusal.message
            await refuse(refusal, sending)
        except Exception as error:
            self.server.log.say({"event": "failed", "path": scope["path"], "error": traceback.format_exc()})
            facts["error"] = f"{type(error).__name__}"
            if not status:
                await refuse(Refusal(500, "the server made a mistake; its log says which"), sending)
        finally:
            seconds = time.monotonic() - started
            code = 499 if facts.get("gone") else facts.get("status", status)
            self.server.metrics.done(code, seconds, facts.pop("choices", ()))
            if scope["path"] not in ("/health", "/ready", "/metrics"):
                self.server.log.write(scope["method"], scope["path"], code, seconds, owner, facts)


async def refuse(refusal: Refusal, send: Send) -> None:
    """An error as a response."""
    body = encoded(refusal.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers()}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _limited(receive: Receive, most: int) -> Receive:
    """The body's parts, as long as they are not too many."""
    seen = 0

    async def limited() -> Any:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise _too_large(most)
        return message

    return limited


def _too_large(most: int) -> HTTPException:
    """What FastAPI lets pass while it reads a body; of all else it says that the body cannot be parsed."""
    return HTTPException(413, f"the body has more than {most} bytes: ask in several requests")
