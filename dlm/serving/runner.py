"""The one thread that steps an engine, and the channels by which its news reach the tasks of a server."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dlm.errors import UserError
from dlm.inference.decoding import Decoding
from dlm.inference.engine import Engine
from dlm.inference.events import Event, Log, Stats
from dlm.serving.notes import Note, Notes, Wish
from dlm.serving.refusal import Refusal, crowded

IDLE = 0.5
"""Seconds after which the thread looks whether it is to end, where nothing wakes it."""

News = tuple[int, "Event | Note"]
"""The number of a choice, and what is new of it."""


@dataclass(frozen=True)
class Cut:
    """Why a channel was closed from this side."""

    reason: str
    status: int = 500


class Channel:
    """The news of one HTTP request, which may be several of the engine's, in the order they came."""

    def __init__(self, runner: "Runner", names: Sequence[str], most: int) -> None:
        self.runner, self.loop, self.most = runner, asyncio.get_running_loop(), most
        self.numbers = {name: number for number, name in enumerate(names)}
        self.open = set(names)
        """Requests that have not ended."""
        self.begun = asyncio.Event()
        """One of them has taken part in a step, or ended."""
        self.closed: Cut | None = None
        self.cut = asyncio.Event()
        """It was closed before its end."""
        self._news: list[News] = []
        self._ready = asyncio.Event()

    def put(self, news: Sequence[tuple[str, "Event | Note"]]) -> None:
        """Take news; in the loop's thread. A reader that leaves too much unread is cut off."""
        for name, item in news:
            self._news.append((self.numbers[name], item))
            if isinstance(item, Event) and item.last:
                self.open.discard(name)
        self.begun.set()
        self._ready.set()
        if len(self._news) > self.most:
            self.close(Cut(f"{len(self._news)} events were not read in time, and {self.most} may wait"))

    async def get(self) -> list[News]:
        """All that is new, as soon as there is any; nothing once it was closed."""
        await self._ready.wait()
        self._ready.clear()
        news, self._news = self._news, []
        return [] if self.closed is not None else news

    def close(self, cut: Cut) -> None:
        """Tell the reader why nothing more comes, and end what is under way."""
        if self.closed is None:
            self.closed = cut
            for event in (self.cut, self.begun, self._ready):
                event.set()
            self.runner.forget(self)


class Runner:
    """Owns an engine: steps it in a thread while there is work, and delivers what is new to the channels.

    In that thread, `failed` is called with the error of each step that fails, and `fatal` when `max_failures` steps failed
    one after the other.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int,
        max_failures: int,
        fatal: Callable[[BaseException], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.engine, self.max_waiting, self.max_failures = engine, max_waiting, max_failures
        self.fatal, self.failed = fatal, failed
        self.notes = Notes(engine.recording, self._note)
        engine.recording = self.notes
        self.channels: dict[str, Channel] = {}
        self.fresh: set[str] = set()
        """Requests that have not begun."""
        self.failures = 0
        self._outbox: list[tuple[str, Event | Note]] = []
        """What a step has brought, until it is delivered."""
        self._wake, self._ended = threading.Event(), False
        self.thread = threading.Thread(target=self._run, name="dlm-engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self.thread.start()

    def stop(self) -> None:
        """End the thread after its step, and close the engine."""
        self._ended = True
        self._wake.set()
        if self.thread.is_alive():
            self.thread.join()
        self.engine.close()

    def require_room(self, more: int = 1) -> None:
        """Raises Refusal where so many more could neither run nor wait."""
        room = self.engine.config.max_num_requests + self.max_waiting
        if more > room:
            raise Refusal(400, f"{more} answers at once, and this server has room for {room}: ask in several requests")
        if len(self.channels) + more > room:
            raise crowded(f"{len(self.fresh)} requests are waiting, and max_waiting = {self.max_waiting}")

    def channel(self, names: Sequence[str], most: int, instead: int = 0) -> Channel:
        """A channel for requests that are about to be submitted. Raises Refusal where too many wait.

        `instead` is the number of those that have a place already and only wait for these.
        """
        self.require_room(len(names) - instead)
        channel = Channel(self, names, most)
        for name in names:
            self.channels[name] = channel
            self.fresh.add(name)
        return channel

    def submit(self, decodings: Sequence[Decoding], wish: Wish, confidence: bool) -> None:
        """Hand checked requests to the engine; any thread may call this. All or none are taken.

        Raises UserError for a request that could never run.
        """
        done: list[str] = []
        try:
            for decoding in decodings:
                name = decoding.request.request_id
                self.notes.wishes[name] = wish
                log = Log(kept=False)
                self.engine.submit(
                    decoding, confidence=confidence, log=log, weights_checked=True
                )  # the model is the server's
                done.append(name)
        except BaseException:
            self._cancel(done)
            raise
        finally:
            for decoding in decodings:
                self.notes.wishes.pop(decoding.request.request_id, None)
        self._wake.set()

    def forget(self, channel: Channel) -> None:
        """End whatever of a channel is under way; in the loop's thread."""
        for name in channel.numbers:
            self.channels.pop(name, None)
            self.fresh.discard(name)
        self._cancel(channel.open)
        channel.open = set()

    def end(self, names: Sequence[str]) -> None:
        """End single requests, whose news nobody wants any more; in the loop's thread."""
        for name in names:
            self.fresh.discard(name)
            if (channel := self.channels.pop(name, None)) is not None:
                channel.open.discard(name)
        self._cancel(names)

    def close_all(self, cut: Cut) -> None:
        """Close every channel; in the loop's thread."""
        for channel in set(self.channels.values()):
            channel.close(cut)

    def stats(self) -> Stats:
        """What the engine has done, and holds."""
        return self.engine.stats()

    def _cancel(self, names: Any) -> None:
        for name in list(names):
            with suppress(UserError):  # it has just ended by itself
                self.engine.cancel(name)

    def _run(self) -> None:
        while not self._ended:
            self._wake.clear()
            if not self.engine.has_work:
                self._wake.wait(IDLE)
                continue
            try:
                self._outbox.extend((event.request_id, event) for event in self.engine.step())
                self.failures = 0
            except Exception as error:
                self.failures += 1
                self.failed(error)
                with suppress(Exception):  # the events of those that ended with the step
                    self._outbox.extend((event.request_id, event) for event in self.engine.news())
                if self.failures >= self.max_failures:
                    self._deliver()
                    self.fatal(error)
                    return
            self._deliver()

    def _note(self, name: str, note: Note) -> None:
        self._outbox.append((name, note))

    def _deliver(self) -> None:
        """Hand what is new to the loops of those who wait for it: one call a loop and step."""
        news, self._outbox = self._outbox, []
        begun = [name for name in list(self.fresh) if self.engine.has_begun(name)]  # the loop's thread adds to it
        packets: dict[asyncio.AbstractEventLoop, dict[Channel, list[tuple[str, Event | Note]]]] = {}
        for name, item in news:
            if (channel := self.channels.get(name)) is not None:
                packets.setdefault(channel.loop, {}).setdefault(channel, []).append((name, item))
        started: dict[asyncio.AbstractEventLoop, list[str]] = {}
        for name in begun:
            if (channel := self.channels.get(name)) is not None:
                started.setdefault(channel.loop, []).append(name)
        for loop in {*packets, *started}:
            with suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(self._hand_out, packets.get(loop, {}), started.get(loop, []))

    def _hand_out(self, packets: dict[Channel, list[tuple[str, "Event | Note"]]], begun: list[str]) -> None:
        for name in begun:
            self.fresh.discard(name)
            if (channel := self.channels.get(name)) is not None:
                channel.begun.set()
        for channel, news in packets.items():
            if channel.closed is None:
                for name, item in news:
                    if isinstance(item, Event) and item.last:
                        self.channels.pop(name, None)
                        self.fresh.discard(name)
                channel.put(news)
