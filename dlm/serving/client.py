"""A client of any server that speaks OpenAI's protocol, ours above all. Needs the standard library only."""

import http.client
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from dlm.errors import UserError

KEY_VARIABLES = ("DLM_API_KEY", "OPENAI_API_KEY")


class Refused(UserError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """One server, by its address with or without /v1. A key comes from `key`, DLM_API_KEY or OPENAI_API_KEY.

    Each call has a connection of its own, so any thread may make it. Raises `Refused` for what the server refuses and
    UserError where there is none.
    """

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"url = {url[:80]!r} is no address of a server: write it as in http://127.0.0.1:8000")
        try:
            port = parts.port
        except ValueError:
            raise UserError(f"url = {url[:80]!r}: its port is no number from 0 to 65535") from None
        self.url, self.timeout = url, timeout
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self._place = (parts.hostname, port)
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        key = key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def model(self) -> str:
        """The id of the first model that is served."""
        return str(self.get("/v1/models")["data"][0]["id"])

    def get(self, path: str) -> Any:
        """The JSON there."""
        with closing(self._sent("GET", path, None)[0]) as response:
            return self._json(response)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers this."""
        response, connection = self._sent("POST", path, body)
        with closing(connection), closing(response):
            return self._json(response)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks that answer this, as they come. Raises UserError for a stream that ends in an error, or too early."""
        response, connection = self._sent("POST", path, {**body, "stream": True})
        with closing(connection), closing(response):
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise Refused(f"{self.url}: {_message(chunk)}", 500)
                yield chunk
        raise UserError(f"{self.url}: the answer broke off before its end: ask again")

    def _sent(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        connection = self._kind(*self._place, timeout=self.timeout)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self.base + path, content, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise UserError(f"{self.url}: no answer ({error}): is dlm-serve running there?") from None
        if response.status != 200:
            with closing(connection), closing(response):
                raise Refused(f"{self.url}: {_message(_parsed(response.read()))}", response.status)
        return response, connection

    def _json(self, response: http.client.HTTPResponse) -> Any:
        found = _parsed(response.read())
        if found is None:
            raise UserError(f"{self.url}: the answer is no JSON: is this a server of OpenAI's protocol?")
        return found


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:1000]
