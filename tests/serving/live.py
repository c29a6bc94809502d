"""A server in this process, on a port of its own, and tiny models behind it."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from dlm.config import check
from dlm.serving.app import app_of
from dlm.serving.config import ServeConfig
from dlm.serving.server import Server
from tests.inference.requests import FAMILIES
from tests.inference.tiny import text_lm

WORDS = ["alpha", "be ta", "gäm-ma\n", "x = [MASK] + \\[MASK:3]", "del (ta)", "ε"]


def model(family: str = "llada", **fields: Any):
    """A tiny model that reads text."""
    lm = text_lm(**{**{k: v for k, v in FAMILIES[family].items() if k != "mask_token_id"}, **fields})
    lm.name = "tiny"
    return lm


def config(**sections: Any) -> ServeConfig:
    """Settings of a quiet server."""
    serve = {"name": "tiny", "log": False, "grace": 5.0, **sections.pop("serve", {})}
    return check(ServeConfig, {"serve": serve, **sections}, "the test")


class Live:
    """A running server: its address, its parts and a client."""

    def __init__(self, server: Server, port: int) -> None:
        self.server, self.url = server, f"http://127.0.0.1:{port}"
        # Unlimited: to keep a limit, the pool may close a connection that another thread is about to read from (httpcore #1110).
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
        self.client = httpx.Client(base_url=self.url, timeout=600, limits=unlimited)

    def post(self, body: Any, path: str = "/v1/completions", **kinds: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kinds)

    def chunks(self, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
        """What a stream sends, without [DONE], which must end it."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def text(self, body: dict[str, Any], path: str = "/v1/completions") -> str:
        answer = self.post(body, path)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    def slow(self, seconds: float) -> None:
        """From now on every step takes this long at least: a request of many steps is still running when a test looks."""
        stepper = self.server.runner.engine.batch.stepper
        step = stepper.run
        stepper.run = lambda scheduled: (time.sleep(seconds), step(scheduled))[1]

    def settled(self) -> bool:
        """Whether no request is left anywhere."""
        runner, stats = self.server.runner, self.server.runner.stats()
        batch = runner.engine.batch
        kept = runner.channels or runner.fresh or runner.notes.wishes or batch.sequences or batch.ended
        return not kept and stats.running == stats.waiting == stats.pages_used == 0


def soon(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether this becomes true before long."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def streamed(chunks: list[dict[str, Any]], number: int = 0) -> str:
    """The text that these chunks add up to."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices if c["index"] == number)


@contextmanager
def live(settings: ServeConfig | None = None, lm: Any = None, load: bool = True) -> Iterator[Live]:
    """A server that is ready."""
    server = Server(settings or config(), lm or model())
    if load:
        server.load()
    listening = uvicorn.Server(
        uvicorn.Config(
            app_of(server),
            port=0,
            log_level="warning",
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=75,
        )
    )
    thread = threading.Thread(target=lambda: asyncio.run(listening.serve()), daemon=True)
    thread.start()
    while not listening.started:
        threading.Event().wait(0.01)
    running = Live(server, listening.servers[0].sockets[0].getsockname()[1])
    try:
        yield running
    finally:
        running.client.close()
        listening.should_exit = True
        thread.join()
        server.close()
