"""A server as a process: it listens, loads, says so, drains on SIGTERM and ends."""

import asyncio
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from dlm.errors import UserError
from dlm.serving.config import ServeConfig
from dlm.serving.keys import Keys

if TYPE_CHECKING:
    from dlm.serving.server import Server

SHARE = 0.0005
"""Seconds after which the engine's thread lets the one that answers run, or the other way round: much less than a step."""
CLOSING = 5
"""Seconds for connections to close once all answers were sent."""


def serve(config: ServeConfig, say: Callable[[str], None] = print) -> int:
    """Serve until a signal comes. Returns the exit status: 0, or 1 where the engine failed for good.

    `say` gets one line with the URL when requests are taken. Raises UserError for a model, a file or an address that
    cannot be had.
    """
    Keys.of(config.serve)
    listener = _listener(config)
    _raise_file_limit()

    from dlm.serving.app import app_of  # imports torch: a mistake above is answered before
    from dlm.serving.server import Server

    sys.setswitchinterval(SHARE)
    server = Server(config)
    settings = uvicorn.Config(
        app_of(server),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=CLOSING,
        lifespan="off",
        ws="none",
    )
    process = Process(settings, server, lambda: say(f"dlm-serve: {config.served_name} at {_url(config, listener)}"))
    try:
        process.run(sockets=[listener])
    finally:
        listener.close()
        server.close()
    if process.mistake is not None:
        raise process.mistake
    return 1 if server.failure is not None else 0


def serve_replicas(config: ServeConfig, say: Callable[[str], None] = print) -> int:
    """`serve` by replicas of Ray Serve, until a signal comes."""
    Keys.of(config.serve)
    _listener(config).close()

    from dlm.serving import ray

    leaving = threading.Event()
    url = ray.start(config)
    for number in (signal.SIGTERM, signal.SIGINT):  # now: Ray takes them for itself when it starts
        signal.signal(number, lambda *_: leaving.set())
    say(f"dlm-serve: {config.served_name} at {url} ({config.replicas.least} replicas)")
    leaving.wait()
    ray.stop()
    return 0


class Process(uvicorn.Server):
    """Uvicorn's server with our start and end."""

    def __init__(self, config: uvicorn.Config, server: "Server", ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.server, self.say_ready = server, ready
        self.mistake: BaseException | None = None
        self._leaving = threading.Event()

    async def main_loop(self) -> None:
        """Load beside answering, then wait for the end."""
        loading = asyncio.ensure_future(asyncio.to_thread(self.server.load))
        announced = False
        while not (self._leaving.is_set() or self.should_exit or self.server.failure is not None):
            await self.on_tick(0)
            if loading.done() and not announced:
                announced = True
                if (error := loading.exception()) is not None:
                    self.mistake = error
                    return
                self.say_ready()
            await asyncio.sleep(0.05)
        self.server.draining = True
        if not loading.done():
            with suppress(Exception):
                await loading
        if self.server.failure is None:
            await self._drain()
        self.server.cut()
        await asyncio.sleep(0)

    async def _drain(self) -> None:
        """Let what is under way finish, for as long as `grace` says; a second signal cuts it short."""
        end = asyncio.get_running_loop().time() + self.server.config.serve.grace
        while self.server.busy and asyncio.get_running_loop().time() < end and not self.force_exit:
            await self.on_tick(0)
            await asyncio.sleep(0.02)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the end; a second one hastens it."""
        if self._leaving.is_set():
            self.force_exit = sig in (signal.SIGINT, signal.SIGTERM)
        self._leaving.set()
        self.server.draining = True


def _listener(config: ServeConfig) -> socket.socket:
    """The socket, bound before anything is loaded. Raises UserError where it cannot be."""
    host, port = config.serve.host, config.serve.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"serve.host = {host!r}: {error.strerror or error}: give an address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.set_inheritable(False)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise UserError(
            f"serve.host = {host!r}, serve.port = {port}: {error.strerror}: give another --serve.port, or 0 for a free one"
        ) from None
    return listener


def _url(config: ServeConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = config.serve.host if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _raise_file_limit() -> None:
    """As many connections as the system lets this process have."""
    with suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
