"""The response to a request: whole or streamed, ended when the client leaves. Decides no token and no text."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from dlm.errors import UserError
from dlm.inference.events import Event
from dlm.serving.ask import Ask, refused
from dlm.serving.choice import Choice
from dlm.serving.lengths import chosen
from dlm.serving.notes import Note, Wish
from dlm.serving.refusal import Refusal, crowded
from dlm.serving.runner import Channel, Cut
from dlm.serving.shape import Shape

if TYPE_CHECKING:
    from dlm.serving.server import Server

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PARTING = 2.0
"""Seconds for the last words to a client whose request was cut off."""
SILENCE = 15.0
"""Seconds without a chunk after which a comment is sent, so that nothing between takes the connection for dead."""


def encoded(value: Any) -> bytes:
    """JSON in ASCII: it can be sent whatever characters it holds."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


class Answer(Response):
    """A response that submits its requests when it is sent, and ends them when nobody reads it any more."""

    def __init__(self, server: "Server", ask: Ask, owner: str | None) -> None:
        super().__init__()
        self.server, self.owner = server, owner
        self.limits = server.config.serve
        self._take(ask)
        self.started = False
        """Whether the status was sent."""
        self.sent = 0.0
        """When the last chunk of a stream was sent, on the loop's clock."""
        self.channel: Channel | None = None
        self.facts: dict[str, Any] = {}
        """For the log."""

    def _take(self, ask: Ask) -> None:
        self.ask = ask
        self.choices = [Choice(self.server.lm, ask, number) for number in range(len(ask.decodings))]
        self.shape = Shape(ask, self.server.config.served_name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. When the client leaves, or its time is over, its requests end."""
        self.facts = scope.setdefault("dlm", {})
        self.facts |= {"request_id": self.ask.id, "prompt_tokens": self.ask.prompt_tokens, "seed": self.ask.seed}
        names = [decoding.request.request_id for decoding in self.ask.decodings]
        try:
            self.channel = self.server.runner.channel(names, self.limits.max_unread)
        except Refusal as refusal:
            return await self._refuse(refusal, send)
        work = asyncio.ensure_future(self._work(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        cut = asyncio.ensure_future(self.channel.cut.wait())
        try:
            seconds = self.limits.timeout
            await asyncio.wait({work, gone, cut}, return_when=asyncio.FIRST_COMPLETED, timeout=seconds)
            if cut.done() and not work.done():
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED, timeout=PARTING)
            if work.done():
                await work
            elif gone.done():
                self.facts["gone"] = True
            elif not cut.done():
                work.cancel()
                await asyncio.wait({work})
                refusal = Refusal(503, f"not finished within {seconds:g} s", code="timeout", retry=False)
                with suppress(TimeoutError):  # it may not read this either
                    await asyncio.wait_for(self._refuse(refusal, send), PARTING)
        except (OSError, asyncio.CancelledError):
            self.facts["gone"] = True
            raise
        finally:
            for task in (work, gone, cut):
                task.cancel()
            self.channel.close(Cut("over"))
            self._note_facts()

    async def _work(self, send: Send) -> None:
        try:
            await self._begin()
            await (self._stream(send) if self.ask.body.stream else self._whole(send))
        except Refusal as refusal:
            await self._refuse(refusal, send)

    async def _begin(self) -> None:
        """Submit, and wait for the first step: until then a refusal can still have its status."""
        channel = self.channel
        assert channel is not None
        if self.ask.prompts:
            self._take(await chosen(self.server, self.ask))
        try:
            await self._submit(channel)
        except UserError as error:
            raise refused(error) from None
        try:
            await asyncio.wait_for(channel.begun.wait(), self.limits.max_wait)
        except TimeoutError:
            raise crowded(f"it waited {self.limits.max_wait:g} s for its first step") from None

    async def _submit(self, channel: Channel) -> None:
        """Hand the requests to the engine. With a store that takes a worker thread, for the store looks their ids up first."""
        runner = self.server.runner
        submit = partial(runner.submit, self.ask.decodings, self._wish(), self.ask.confidence)
        if self.server.store is None:
            return submit()
        submitted = asyncio.get_running_loop().run_in_executor(self.server.worker, submit)
        try:
            await asyncio.shield(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(lambda done: done.exception() or runner.end(list(channel.numbers)))
            raise

    def _wish(self) -> Wish:
        denoise, top = self.ask.body.stream_mode == "denoise", self.ask.top or 0
        keep = {"confidence"} if denoise or top else set()
        return Wish(
            keep=frozenset(keep | ({"topk"} if top else set())),
            topk=top,
            recorded=self.ask.body.trace is not False,
            facts={} if self.owner is None else {"owner": self.owner},
        )

    async def _whole(self, send: Send) -> None:
        async for _ in self._news():
            pass
        await self._recorded()
        answer = self.shape.whole(self.choices) | self._echoed()
        await self._send(200, encoded(answer), send)

    async def _stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self.ask.id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self.started = True
        first = []
        for choice in self.choices:
            first += [self.shape.role(choice.number)] if self.ask.chat else []
            if self.ask.body.stream_mode == "denoise":
                first.append(self.shape.step(choice.number, choice.layout()))
            if (echo := choice.begin()).text:
                first.append(self.shape.chunk(choice.number, echo))
        pinging = asyncio.ensure_future(self._ping(send))
        try:
            if first:
                await self._chunks(first, send)
            async for chunks in self._news():
                if chunks:
                    await self._chunks(chunks, send)
            await self._recorded()
        finally:
            pinging.cancel()
        last = [self.shape.finish(choice) | self._echoed(choice) for choice in self.choices]
        options = self.ask.body.stream_options
        if options is not None and options.include_usage:
            last.append(self.shape.final(self.choices))
        await self._chunks(last, send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b""})

    async def _ping(self, send: Send) -> None:
        """A comment whenever nothing was sent for a while."""
        clock = asyncio.get_running_loop().time
        self.sent = clock()
        while True:
            await asyncio.sleep(max(0.0, self.sent + SILENCE - clock()))
            if clock() - self.sent >= SILENCE:
                self.sent = clock()
                await send(_part(b": ping\n\n"))

    async def _news(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Chunks for what is new, until all choices are done. Raises Refusal where a request fails."""
        assert self.channel is not None
        if not self.ask.body.stream:
            for choice in self.choices:
                choice.begin()
        while not all(map(self._is_over, self.choices)):
            news = await self.channel.get()
            if self.channel.closed is not None:
                raise Refusal(self.channel.closed.status, self.channel.closed.reason)
            yield [chunk for number, item in news for chunk in self._chunk(self.choices[number], item)]

    def _chunk(self, choice: Choice, item: Event | Note) -> list[dict[str, Any]]:
        """What one piece of news is in the stream."""
        denoise, streams = self.ask.body.stream_mode == "denoise", self.ask.body.stream
        if isinstance(item, Note):
            choice.note(item)
            shown = denoise and streams and not choice.done
            return [self.shape.step(choice.number, choice.step(item))] if shown else []
        if item.error is not None and not choice.done:
            raise Refusal(500, f"the model could not finish this: {item.error}", code="decoding_failed")
        was_done = choice.done
        delta = choice.feed(item)
        if choice.done and not was_done and self._is_over(choice) and item.result is None:
            self.server.runner.end([item.request_id])  # what the cap cuts off need not be decoded
        return [self.shape.chunk(choice.number, delta)] if streams and (delta.text or delta.tokens) else []

    @property
    def _records(self) -> bool:
        return self.server.store is not None and self.ask.body.trace is not False

    def _is_over(self, choice: Choice) -> bool:
        """Whether nothing more is to come of it; a trace goes on to the end of the canvas."""
        return choice.done and (choice.result is not None or not self._records)

    async def _recorded(self) -> None:
        """Wait until traces are on the disk: who has the answer can read them."""
        if self.server.store is not None and self._records:
            await asyncio.get_running_loop().run_in_executor(None, self.server.store.flush)

    def _echoed(self, choice: Choice | None = None) -> dict[str, Any]:
        """The facts with the names of traces, where there are any."""
        if self.server.store is None or not self._records:
            return {}
        names = [d.request.request_id for d in self.ask.decodings if self.server.store.wants(d.request.request_id)]
        if choice is not None:
            return {"dlm": {**choice.facts(), "trace": names[choice.number] if len(names) > choice.number else None}}
        facts = self.shape.facts(self.choices)
        return {
            "dlm": {**facts, "traces": names} if len(self.choices) > 1 else {**facts, "trace": (names or [None])[0]}
        }

    async def _refuse(self, refusal: Refusal, send: Send) -> None:
        """An error with its status, or as the last chunk where that was sent already."""
        self.facts["error"] = refusal.message
        if self.started:
            self.facts["status"] = refusal.status
            await send(_part(b"data: " + encoded(refusal.body()) + b"\n\n"))
            await send({"type": "http.response.body", "body": b""})
        else:
            headers = [(name.encode(), value.encode()) for name, value in refusal.headers().items()]
            await self._send(refusal.status, encoded(refusal.body()), send, headers)

    async def _send(self, status: int, body: bytes, send: Send, headers: Any = ()) -> None:
        own = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self.ask.id.encode()),
        ]
        self.started = True
        await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
        await send({"type": "http.response.body", "body": body})

    async def _chunks(self, chunks: list[dict[str, Any]], send: Send, end: bytes = b"") -> None:
        self.sent = asyncio.get_running_loop().time()
        await send(_part(b"".join(b"data: " + encoded(chunk) + b"\n\n" for chunk in chunks) + end))

    def _note_facts(self) -> None:
        """For the log and the metrics."""
        done = [choice for choice in self.choices if choice.done]
        self.facts["completion_tokens"] = sum(len(choice.tokens) for choice in self.choices)
        self.facts["finish_reasons"] = [choice.finish_reason for choice in self.choices]
        self.facts["choices"] = done
        if self.limits.log_text:
            self.facts["text"] = [choice.text for choice in self.choices]


def _part(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
