"""The engine: requests come in at any time, every step is one packed forward for those whose turn it is."""

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Sized
from dataclasses import replace
from itertools import count, repeat
from typing import Any, Unpack

from dlm import config as toml
from dlm.errors import UserError
from dlm.inference.batch import Batch
from dlm.inference.compute import records_steps
from dlm.inference.config import EngineConfig
from dlm.inference.decoding import Decoding, continuations, infillings
from dlm.inference.drafting.fitting import fitted, require_wanted
from dlm.inference.drafting.making import drafted_page_bytes, named
from dlm.inference.events import Event, Log, Stats, Times
from dlm.inference.keyword_types import EngineKeywords, SamplerKeywords
from dlm.inference.keywords import keywords, require_read, sampler_of
from dlm.inference.memory import fitting, planned
from dlm.inference.ownership import HeldInterrupts, Ownership
from dlm.inference.pages import PagePool
from dlm.inference.prompts import Prompt
from dlm.inference.recording import Listener, Recording, Store
from dlm.inference.request import Generation, Interrupted, StepEvent
from dlm.inference.sequence import Script, Sequence
from dlm.inference.spans import cache_of
from dlm.inference.texts import TextStream, partial_of
from dlm.inference.warming import Progress, warm_up
from dlm.kernels.paths import find
from dlm.models.lm import LM
from dlm.models.packing import pack
from dlm.models.required import require_lm
from dlm.models.subnormals import subnormals_as_zeros

OnStep = Callable[[StepEvent], None]


class Full(UserError):
    """As many requests as `max_waiting` allows are waiting already."""


class Engine:
    """Decodes many requests together over one page pool.

    `cache="auto"` never changes a token: it is the exact cache for causal and block-causal families, none for
    bidirectional ones; "prefix" and "dual" are Fast-dLLM's approximations for the latter. Which requests run together,
    when they came, and whether pages ran out in between has no influence on any request's tokens: on a CPU in fp32, and
    elsewhere with `deterministic=True`, where a library's products would round by how many rows they have.

    Any thread or task may call `add_request`, `cancel`, `stream_of`, `stats` and `close`; what they ask for takes effect
    between two steps. One thread at a time steps. After an exception or a Ctrl-C in a step, those requests that had
    begun end with an error event, their pages are free, and the engine goes on with the others. An engine is a context
    manager that closes itself.

    `draft` guesses tokens that the model then checks, several in one forward: a `dlm.load_draft`, its folder, "ngram", a
    diffusion model of the same tokenizer or, where the model itself is one, "self". Requests take part unless they say
    draft=False, and their text is that of no draft (but see `verify`).

    The weights are those of its start until `reload()`. Where they changed and nobody said so, an idle engine refuses
    the next request; the tokens of requests under way are then of old weights, of new ones, or of both.
    """

    @keywords(EngineConfig)
    def __init__(
        self,
        lm: LM,
        *,
        draft: Any = None,
        trace: Store | None = None,
        on_step: OnStep | None = None,
        **settings: Unpack[EngineKeywords],
    ) -> None:
        self._open(lm, toml.check(EngineConfig, settings, "Engine()"), trace, on_step, draft)

    @classmethod
    def of(
        cls, lm: LM, config: EngineConfig, trace: Store | None = None, on_step: OnStep | None = None, draft: Any = None
    ) -> "Engine":
        """An engine as a config describes it."""
        engine = cls.__new__(cls)
        engine._open(lm, config, trace, on_step, draft)
        return engine

    def _open(
        self, lm: LM, config: EngineConfig, trace: Store | None, on_step: OnStep | None, draft: Any = None
    ) -> None:
        require_lm(lm, "Engine()")
        draft = named(draft, lm, "Engine()")
        self.lm, self.config = lm, config
        self.cache = cache_of(lm.config, config.cache)
        require_read(config, self.cache)
        if not lm.network.training:
            pack(lm.network)  # before its pages are counted: the weights are copied once
        path, drafted = find(config.kernels, lm.device, lm.dtype), drafted_page_bytes(draft, config.page_size)
        self.memory = planned(lm, config, draft, drafted, path.paged, records_steps(lm, config, path))
        """What it holds memory for."""
        with fitting(self.memory, config):
            pool = PagePool(lm.network, self.memory.page_count, config.page_size, lm.device, lm.dtype)
            self.batch = Batch(lm, pool, config, self.cache, draft)
        self.memory = replace(self.memory, weights=self.memory.weights + self.batch.stepper.compute.copied)
        self.batch.on_step = on_step
        self.recording: Listener | None = None
        if trace is not None:
            self.recording = Recording(trace, lm, self.config, self.cache, str(getattr(draft, "name", draft)))
        self.owner = Ownership(self.batch.mend)
        self.closed = False
        self._numbers = count()

    def add_request(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        infill: bool = False,
        sample: int = 0,
        deadline: float | None = None,
        confidence: bool = False,
        draft: bool | None = None,
        **settings: Unpack[SamplerKeywords],
    ) -> str:
        """Queue a prompt and return its id; settings are those of `dlm.generate` (or, with `infill`, `dlm.infill`).

        A conversation is a prompt too. Holes have one length each: `dlm.infill` chooses it where a prompt gives a range.
        A request that is not finished `deadline` seconds from now ends with an error event. With `confidence` its
        events carry how sure the model was of each token. `draft=False` decodes it without the engine's draft. Any thread may call this while another one steps.
        Raises UserError for settings that do not fit, for an id that is already under way, and for a request that
        could never run in this engine; its subclass `Full` when `max_waiting` requests wait already.
        """
        if deadline is not None and not deadline > 0:
            raise UserError(f"add_request(): deadline = {deadline!r} is in the past: give seconds from now, or None")
        name = str(next(self._numbers)) if request_id is None else request_id
        make = infillings if infill else continuations
        sampler = sampler_of("add_request()", settings, holes=infill)
        decodings = make(self.lm, prompt, sampler, where="add_request()", request_ids=[name])
        if len(decodings) != 1:
            raise UserError("add_request() takes one prompt and one sample: number them with `sample`")
        decoding = replace(decodings[0], request=replace(decodings[0].request, sample=sample), drafted=draft)
        require_wanted(settings, draft is not False and self.batch.draft is not None, "add_request()")
        return self.submit(decoding, deadline=deadline, confidence=confidence)

    def submit(
        self,
        decoding: Decoding,
        script: Script | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        deadline: float | None = None,
        confidence: bool = False,
        log: Log | None = None,
        weights_checked: bool = False,
    ) -> str:
        """`add_request` for what is already checked.

        `meta` goes into its trace, `script` may change its decisions, and `log` gets its events. `weights_checked` says that
        nobody changes the model's weights: an idle engine then does not look, which takes as long as a model has tensors.
        """
        decoding = fitted(decoding, self.batch.draft, self.batch.drafter, self.cache)
        strategy, text = self.batch.strategy_of(decoding), TextStream(self.lm, decoding.stop_texts)
        log = log or Log()
        seq = Sequence(decoding, text, self.lm.config, self.config, strategy, script=script, log=log)
        if confidence:
            seq.watch_confidence()
        if not seq.done:
            self.batch.scheduler.require_fit(seq)
        name = seq.request_id
        with HeldInterrupts(), self.owner.left:
            if self.closed:
                raise UserError("this engine is closed: make a new one")
            if name in self.batch.sequences:
                raise UserError(f"request id {name!r} is already under way: give each request its own")
            most, waiting = self.config.max_waiting, len(self.batch.scheduler.waiting) + len(self.owner.inbox)
            if most is not None and waiting >= most:
                raise Full(f"{waiting} requests are waiting, and max_waiting = {most}: come back later, or raise it")
            if not (self.batch.sequences or weights_checked):
                self.batch.stepper.compute.check()
            if self.recording is not None:
                seq.listen(self.recording.begin(seq, meta or {}))  # raises where the store has a trace of that id
            now = time.monotonic()
            seq.number, self.batch.arrivals = self.batch.arrivals, self.batch.arrivals + 1
            seq.times, seq.deadline = Times(queued=now), None if deadline is None else now + deadline
            self.owner.inbox.append(lambda: self.batch.admit(seq))  # first: what is registered must not be forgotten
            log.requests.append(seq)
            self.batch.sequences[name] = seq
            self.owner.settle()
        return name

    def cancel(self, request_id: str) -> None:
        """End a request; it gives no further event. Its pages are free as soon as no step is running."""
        with HeldInterrupts(), self.owner.left:
            seq = self._under_way(request_id)
            self.owner.inbox.append(lambda: self.batch.forget(seq))
            del self.batch.sequences[request_id]
            self.owner.settle()

    def close(self) -> None:
        """End all requests with an error event, and give the pages' memory back. No further request is taken."""
        self.closed = True
        self.owner.do(self.batch.close)
        while self.owner.inbox and not self.owner.is_mine() and self.owner.others_step():
            pass

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reload(self) -> None:
        """Take the model's weights as they are now. Raises UserError while requests that have begun are under way."""
        with HeldInterrupts(), self.owner.left:
            begun = [name for name, seq in self.batch.sequences.items() if seq.begun]
            if begun:
                raise UserError(
                    f"reload(): {len(begun)} requests have begun with the weights as they were ({begun[0]!r} is one): let "
                    "them finish, or cancel them"
                )
            self.owner.do(self._reload)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self.batch.sequences or self.batch.news or self.owner.inbox)

    def step(self) -> list[Event]:
        """One forward for all requests whose turn it is, and what is new after it.

        Raises UserError where another thread is stepping.
        """
        self._advance(driver=True)
        return self.news()

    def news(self) -> list[Event]:
        """Events that no caller has received yet: after a step that raised, the ends of the requests it took with it."""
        return list(map(deque.popleft, repeat(self.batch.news, len(self.batch.news))))  # all or, if interrupted, none

    def has_begun(self, request_id: str) -> bool:
        """Whether a request is under way and has taken part in a step."""
        seq = self.batch.sequences.get(request_id)
        return seq is not None and seq.begun

    def stream(self) -> Iterator[Event]:
        """Step until nothing is left to do, telling what is new as it comes; requests may be added meanwhile."""
        while self.has_work:
            yield from self.step()

    async def astream(self) -> AsyncIterator[Event]:
        """`stream` for tasks: each step runs in a worker thread."""
        import asyncio

        while self.has_work:
            if not await self.owner.aothers_step():
                await asyncio.to_thread(self._advance)
            while self.batch.news:
                yield self.batch.news.popleft()

    def stream_of(self, request_id: str) -> Iterator[Event]:
        """All events of one request, from its first to its last, as they come.

        Steps the engine while nobody else does. A request that is cancelled just ends. `stream` gives the
        same events too. Raises UserError for an id that is not known (any more).
        """
        log = self._log_of(request_id)

        def follow() -> Iterator[Event]:
            number = 0
            while True:
                events, closed = log.since(number)
                yield from events
                if closed:
                    return
                number += len(events)
                if not events:
                    self._turn()

        return follow()

    def astream_of(self, request_id: str) -> AsyncIterator[Event]:
        """`stream_of` for tasks: steps run in a worker thread."""
        import asyncio

        log = self._log_of(request_id)

        async def follow() -> AsyncIterator[Event]:
            number = 0
            while True:
                events, closed = log.since(number)
                for event in events:
                    yield event
                if closed:
                    return
                number += len(events)
                if not events and not await self.owner.aothers_step():
                    await asyncio.to_thread(self._advance)

        return follow()

    def generate(
        self,
        prompts: Prompt | Sized[Prompt],
        *,
        request_ids: Sized[str] | None = None,
        draft: bool | None = None,
        **settings: Unpack[SamplerKeywords],
    ) -> list[Generation]:
        """The results of these prompts, in order, decoded beside whatever else is under way.

        `draft=False` decodes without the engine's draft.
        """
        sampler = sampler_of("generate()", settings, others=("request_ids", "draft"))
        require_wanted(settings, draft is not False and self.batch.draft is not None, "generate()")
        decodings = continuations(self.lm, prompts, sampler, where="generate()", request_ids=request_ids)
        return self.run([replace(decoding, drafted=draft) for decoding in decodings])

    def run(self, decodings: Sized[Decoding]) -> list[Generation]:
        """Submit all and step until they are done; their events go to nobody else.

        All or none are submitted. Ctrl-C ends them, and is raised as `Interrupted`, which holds what there is of them.
        """
        log = Log(private=True)
        results: dict[str, Generation] = {}
        try:
            with HeldInterrupts() as held:  # once, and not at each step
                for decoding in decodings:
                    self.submit(decoding, log=log)
                number = 0
                while len(results) < len(decodings):
                    if number == len(log.events):
                        self._turn()
                        held.deliver()
                    for event in log.events[number:]:
                        number += 1
                        if event.error is not None:
                            raise UserError(f"request {event.request_id!r}: {event.error}")
                        if event.result is not None:
                            results[event.request_id] = event.result
        except KeyboardInterrupt:
            results |= {event.request_id: event.result for event in log.events if event.result is not None}
            so_far = (results.get(seq.request_id) or self._so_far(seq) for seq in log.requests)
            raise Interrupted([result for result in so_far if result is not None]) from None
        finally:
            for name in [name for name, seq in list(self.batch.sequences.items()) if seq.log is log]:
                self.cancel(name)
        return [results[seq.request_id] for seq in log.requests]

    def warm_up(
        self,
        *,
        batches: Sized[int] | None = None,
        lengths: Sized[int] = (64,),
        progress: Progress | None = None,
        **settings: Any,
    ) -> int:
        """Compile kernels and record graphs now rather than at the first requests; returns how many graphs there are.

        Decodes each of `batches` (1, 2, 4 … max_num_requests) prompts of each of `lengths` tokens, by settings that are
        those of `generate`. Requests of other settings, or longer ones, are recorded as they come. `progress` is called
        with how many batches are done, and of how many. Nothing of it is traced or counted.
        """
        with fitting(self.memory, self.config):
            return warm_up(self, batches, lengths, progress, settings)

    def stats(self) -> Stats:
        """What the engine has done so far, and what it holds now."""
        return self.batch.stats()

    def _reload(self) -> None:
        self.batch.reload()
        if isinstance(self.recording, Recording):
            self.recording.renew()

    def _under_way(self, name: str) -> Sequence:
        if name not in self.batch.sequences:
            raise UserError(f"no request {name!r} is under way; there are: {', '.join(self.batch.sequences) or 'none'}")
        return self.batch.sequences[name]

    def _log_of(self, name: str) -> Log:
        ended = self.batch.ended.get(name)
        return self._under_way(name).log if name in self.batch.sequences or ended is None else ended

    def _so_far(self, seq: Sequence) -> Generation | None:
        """What there is of an unfinished request; None before its first forward."""
        return partial_of(self.lm, seq.request, seq.outcome(), seq.canvas.masked.tolist()) if seq.nfe else None

    def _turn(self) -> None:
        """One more step, by this thread or by another one that is at it."""
        if not self.owner.others_step():
            self._advance()

    @subnormals_as_zeros()
    def _advance(self, driver: bool = False) -> None:
        self.owner.work(self.batch.step, driver=driver)
