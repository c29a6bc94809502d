"""Holes of unknown length in a request: their lengths are chosen on the server's own engine, beside what else it decodes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from dlm.inference.decoding import Decoding
from dlm.inference.events import Event
from dlm.inference.lengths import choosing
from dlm.serving.ask import Ask, with_lengths
from dlm.serving.notes import Wish
from dlm.serving.refusal import Refusal
from dlm.serving.runner import Cut

if TYPE_CHECKING:
    from dlm.serving.server import Server

AT_ONCE = 16
"""Requests of one step that are under way at a time, so that others are not kept waiting."""


async def chosen(server: "Server", ask: Ask) -> Ask:
    """The request with one length for each hole, as `dlm.infill` chooses it. Raises Refusal where the engine cannot."""
    search, numbers = choosing(server.lm, ask.prompts), count()
    sure: Mapping[str, Sequence[float]] | None = None

    def go_on() -> tuple[list[Decoding], Any]:
        """The requests to decode next or, at the end, what was chosen: an exception of a generator ends no future."""
        try:
            return (next(search) if sure is None else search.send(sure)), None
        except StopIteration as done:
            return [], done.value

    loop, most = asyncio.get_running_loop(), min(AT_ONCE, server.config.engine.max_num_requests)
    while True:
        decodings, choice = await loop.run_in_executor(server.worker, go_on)
        if choice is not None:
            return await loop.run_in_executor(server.worker, partial(with_lengths, server.lm, ask, *choice))
        sure = {}
        for start in range(0, len(decodings), most):
            part = decodings[start : start + most]
            names = {f"{ask.id}-length-{next(numbers)}": decoding for decoding in part}
            sure |= await _decoded(server, names, len(ask.decodings))


async def _decoded(server: "Server", decodings: Mapping[str, Decoding], wait: int) -> dict[str, Sequence[float]]:
    """How sure the model was of each request's tokens, by the id it came with; so many others wait for these."""
    names, found = list(decodings), {}
    channel = server.runner.channel(names, server.config.serve.max_unread, instead=wait)
    try:
        renamed = [replace(d, request=replace(d.request, request_id=name)) for name, d in decodings.items()]
        server.runner.submit(renamed, Wish(recorded=False), confidence=True)
        while len(found) < len(names):
            news = await channel.get()
            if channel.closed is not None:
                raise Refusal(channel.closed.status, channel.closed.reason)
            for number, event in news:
                if isinstance(event, Event) and event.last:
                    if event.error is not None:
                        raise Refusal(500, f"the model could not finish this: {event.error}", code="decoding_failed")
                    found[decodings[names[number]].request.request_id] = event.confidence or ()
    finally:
        channel.close(Cut("over"))
    return found
