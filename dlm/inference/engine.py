"""The engine: requests come in at any time, every step is one packed forward for those whose turn it is."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dlm import config as toml
from dlm.diffusion.choose import BrokenLogits
from dlm.errors import UserError
from dlm.inference.config import EngineConfig
from dlm.inference.decide import Question, decide
from dlm.inference.decoding import Decoding, continuations, infillings
from dlm.inference.forward import Forward, cuda_graph
from dlm.inference.fused import Fused
from dlm.inference.keywords import keywords, require_read, sampler_of
from dlm.inference.layout import Layout
from dlm.inference.memory import page_count
from dlm.inference.pages import PagePool
from dlm.inference.prompts import Prompt
from dlm.inference.recording import Listener, Recorder, Recording, Store, finish, note
from dlm.inference.request import Generation, Interrupted, StepEvent
from dlm.inference.scheduler import Scheduler, Turn
from dlm.inference.sequence import Decision, Script, Sequence
from dlm.inference.texts import TextStream, partial_of, result_of
from dlm.models.lm import LM, require_lm
from dlm.models.packing import pack
from dlm.models.subnormals import subnormals_as_zeros

OnStep = Callable[[StepEvent], None]


@dataclass(frozen=True, kw_only=True)
class Event:
    """News of one request: text that will not change any more, and its result when it is finished."""

    request_id: str
    text: str = ""
    tokens: tuple[int, ...] = ()
    """Committed ids that follow those of the event before."""
    result: Generation | None = None
    error: str | None = None
    """Why it ended without a result."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What an engine has done, and what it holds."""

    running: int
    waiting: int
    finished: int
    nfe: int
    """Forward passes of the packed batch."""
    tokens: int
    """Generated, of finished requests, up to and including end-of-text."""
    rows: int
    """Positions that went through the network."""
    pages_used: int
    pages_free: int
    """Blank ones and those that are only kept for prompts with the same beginning."""
    pages_cached: int
    preemptions: int


class Engine:
    """Decodes many requests together over one page pool.

    `cache="auto"` never changes a token: it is the exact cache for causal and block-causal families, none for
    bidirectional ones; "prefix" and "dual" are Fast-dLLM's approximations for the latter. Which requests run together,
    when they came, and whether pages ran out in between has no influence on any request's tokens.
    """

    @keywords(EngineConfig)
    def __init__(self, lm: LM, *, trace: Store | None = None, on_step: OnStep | None = None, **settings: Any) -> None:
        self._open(lm, toml.check(EngineConfig, settings, "Engine()"), trace, on_step)

    @classmethod
    def of(cls, lm: LM, config: EngineConfig, trace: Store | None = None, on_step: OnStep | None = None) -> "Engine":
        """An engine as a config describes it."""
        engine = cls.__new__(cls)
        engine._open(lm, config, trace, on_step)
        return engine

    def _open(self, lm: LM, config: EngineConfig, trace: Store | None, on_step: OnStep | None) -> None:
        require_lm(lm, "Engine()")
        self.lm, self.on_step, self.config = lm, on_step, config
        self.cache = cache_of(lm, config.cache)
        require_read(config, self.cache)
        pages = page_count(lm, self.config)
        self.pool = PagePool(lm.network, pages, self.config.page_size, lm.device, lm.dtype)
        self.scheduler = Scheduler(self.pool, self.config, self.cache)
        self.recording: Listener | None = None if trace is None else Recording(trace, lm, self.config, self.cache)
        self.recorders: dict[str, Recorder] = {}
        self.sequences: dict[str, Sequence] = {}
        self.texts: dict[str, TextStream] = {}
        self.news: list[Event] = []
        self.arrivals = self.finished = self.nfe = self.tokens = self.rows = 0
        self.fused = Fused(lm.network)
        self._last: tuple[tuple, Forward] | None = None
        if not lm.network.training:
            pack(lm.network)

    def add_request(
        self, prompt: Prompt, *, request_id: str | None = None, infill: bool = False, sample: int = 0, **settings: Any
    ) -> str:
        """Queue a prompt and return its id; settings are those of `dlm.generate` (or, with `infill`, `dlm.infill`).

        A conversation is a prompt too. Holes have one length each: `dlm.infill` chooses it where a prompt gives a range.
        Raises UserError for settings that do not fit, for an id that is already under way, and for a request that
        could never run in this engine.
        """
        name = str(self.arrivals) if request_id is None else request_id
        make = infillings if infill else continuations
        sampler = sampler_of("add_request()", settings, holes=infill)
        decodings = make(self.lm, prompt, sampler, where="add_request()", request_ids=[name])
        if len(decodings) != 1:
            raise UserError("add_request() takes one prompt and one sample: number them with `sample`")
        request = decodings[0].request
        decoding = Decoding(**{**vars(decodings[0]), "request": type(request)(**{**vars(request), "sample": sample})})
        return self.submit(decoding)

    def submit(self, decoding: Decoding, script: Script | None = None, meta: Mapping[str, Any] | None = None) -> str:
        """`add_request` for what is already checked; `meta` goes into its trace, `script` may change its decisions."""
        name = decoding.request.request_id
        if name in self.sequences:
            raise UserError(f"request id {name!r} is already under way: give each request its own")
        seq = Sequence(decoding, self.lm.config, self.config, self.arrivals)
        if not self.scheduler.has_work:
            self.fused.renew()
        if not seq.done:
            self.scheduler.add(seq)
        seq.script = script
        if self.recording is not None:
            try:
                self._record(seq, meta or {})
            except UserError:  # its id is taken
                self.scheduler.remove(seq)
                raise
        self.arrivals += 1
        self.sequences[name] = seq
        self.texts[name] = TextStream(self.lm, decoding.stop_texts)
        if seq.done:
            self._finish(seq)
        return name

    def cancel(self, request_id: str) -> None:
        """End a request now; its pages are free at once and it gives no further event."""
        if request_id not in self.sequences:
            raise UserError(f"no request {request_id!r} is under way; there are: {', '.join(self.sequences) or 'none'}")
        self._forget(self.sequences[request_id])

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self.sequences or self.news)

    @subnormals_as_zeros()
    def step(self) -> list[Event]:
        """One forward for all requests whose turn it is, and what is new after it."""
        if self.scheduler.has_work:
            network = self.lm.network
            training = network.training
            if training:
                network.eval()
            try:
                with torch.inference_mode():
                    self._forward(self.scheduler.schedule())
            finally:
                if training:
                    network.train()
        news, self.news = self.news, []
        return news

    def stream(self) -> Iterator[Event]:
        """Step until nothing is left to do, telling what is new as it comes; requests may be added meanwhile."""
        while self.has_work:
            yield from self.step()

    async def astream(self) -> AsyncIterator[Event]:
        """`stream` for servers: each step runs in a worker thread, and others may run between two."""
        import asyncio

        while self.has_work:
            for event in await asyncio.to_thread(self.step):
                yield event

    def generate(self, prompts: Prompt | Sized[Prompt], **settings: Any) -> list[Generation]:
        """Decode these prompts, beside whatever else is under way, and return their results in order."""
        names = settings.pop("request_ids", None)
        sampler = sampler_of("generate()", settings, others=("request_ids",))
        return self.run(continuations(self.lm, prompts, sampler, where="generate()", request_ids=names))

    def run(self, decodings: Sized[Decoding]) -> list[Generation]:
        """Submit all and step until they are done. Events of other requests wait for the next `step`.

        All or none are submitted. Ctrl-C ends them, and is raised as `Interrupted`, which holds what there is of them.
        """
        names: list[str] = []
        results: dict[str, Generation] = {}
        others: list[Event] = []
        try:
            for decoding in decodings:
                names.append(self.submit(decoding))  # noqa: PERF401 (those before a refused one are cancelled)
            while len(results) < len(names):
                for event in self.step():
                    if event.request_id not in names:
                        others.append(event)
                    elif event.error is not None:
                        raise UserError(f"request {event.request_id!r}: {event.error}")
                    elif event.result is not None:
                        results[event.request_id] = event.result
        except KeyboardInterrupt:
            raise Interrupted([r for name in names if (r := results.get(name) or self._so_far(name))]) from None
        finally:
            for name in set(names) & self.sequences.keys():
                self.cancel(name)
            self.news = [*others, *(event for event in self.news if event.request_id not in names)]
        return [results[name] for name in names]

    def _so_far(self, name: str) -> Generation | None:
        """What there is of a request under way; None before its first forward."""
        seq = self.sequences.get(name)
        if seq is None or not seq.nfe:
            finished = (event.result for event in self.news if event.request_id == name)
            return next((result for result in finished if result is not None), None)
        return partial_of(self.lm, seq.request, seq.outcome(), seq.masked.tolist())

    def stats(self) -> Stats:
        pages = self.pool.count()
        return Stats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            finished=self.finished,
            nfe=self.nfe,
            tokens=self.tokens,
            rows=self.rows,
            pages_used=pages.used,
            pages_free=pages.free,
            pages_cached=pages.cached,
            preemptions=self.scheduler.preemptions,
        )

    def _forward(self, turns: list[Turn]) -> None:
        """One packed forward and what follows from it."""
        forward = self._lay_out(turns)
        ids = np.concatenate(
            [t.sequence.tokens(lane)[np.asarray(t.span.positions)] for t in turns for lane in range(t.sequence.lanes)]
        )
        starts = forward.layout.starts
        questions = [_question(t, rows) for t, rows in zip(turns, starts, strict=True) if t.span.decides]
        wanted = _union([rows for question in questions for rows in question.rows])
        hidden = forward(ids, wanted)
        self.nfe += 1
        self.rows += len(ids)
        for turn in turns:
            self.scheduler.ran(turn)
        told: list[tuple[Sequence, Decision]] = []
        for seq, answer in decide(self.lm.network, forward.head, hidden, wanted, questions):
            if isinstance(answer, BrokenLogits):
                self._fail(seq, str(answer))
            else:
                told.append((seq, answer))
        if self.on_step is not None:
            with torch.inference_mode(False):  # what leaves this room are ordinary tensors
                for event in _step_events(sorted(told, key=lambda entry: entry[0].number)):
                    self.on_step(event)
        for seq, answer in told:
            if self.recorders and (recorder := self.recorders.get(seq.request.request_id)) is not None:
                note(recorder, seq, answer)
            seq.apply(answer)
            self.scheduler.remember(seq)
            if seq.done:
                self._finish(seq)
            elif not seq.request.holes:
                self._tell(seq)

    def _lay_out(self, turns: list[Turn]) -> Forward:
        """The step's forward; that of the step before where nothing moved."""
        key = tuple((t.sequence.number, t.sequence.version, t.span) for t in turns)
        if self._last is None or self._last[0] != key:
            network = self.lm.network
            graphs = self.config.cuda_graphs and self.lm.device.type == "cuda"
            layout = Layout(turns, self.pool, network)
            capture = cuda_graph if graphs else None
            self._last = key, Forward(network, layout, capture, self.fused, self.config.deterministic)
        return self._last[1]

    def _tell(self, seq: Sequence) -> None:
        """What is new of a request that goes on; ends it where that completes a stop string."""
        stream = self.texts[seq.request.request_id]
        tokens = _until_stop(seq.settled(len(seq.request.ids) + len(stream.tokens)), seq.decoding.stop)
        ended = bool(stream.tokens) and stream.tokens[-1] in seq.decoding.stop
        if not tokens or ended:
            return
        if stream.completes(tokens) and not (seq.script is not None and seq.script.leads(seq.step)):
            self._finish(seq)
        else:
            text = stream.add(tokens)
            self.news.append(Event(request_id=seq.request.request_id, text=text, tokens=tuple(tokens)))

    def _finish(self, seq: Sequence) -> None:
        result = result_of(self.lm, seq.decoding, seq.outcome())
        stream = self.texts[seq.request.request_id]
        rest = result.tokens[len(stream.tokens) :]
        text = "" if seq.request.holes else stream.add(rest, last=True)
        self.finished += 1
        self.tokens += len(result.tokens)
        if (recorder := self.recorders.pop(result.request_id, None)) is not None:
            finish(recorder, seq, result)
        self._forget(seq)
        self.news.append(Event(request_id=result.request_id, text=text, tokens=tuple(rest), result=result))

    def _fail(self, seq: Sequence, error: str) -> None:
        self._forget(seq)
        self.news.append(Event(request_id=seq.request.request_id, error=error))

    def _record(self, seq: Sequence, meta: Mapping[str, Any]) -> None:
        assert self.recording is not None
        recorder = self.recording.begin(seq, meta)
        if recorder is not None:
            self.recorders[seq.request.request_id] = recorder
            seq.keep, seq.topk = frozenset(recorder.keep), recorder.topk if "topk" in recorder.keep else 0

    def _forget(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        if (recorder := self.recorders.pop(seq.request.request_id, None)) is not None:
            recorder.drop()
        del self.sequences[seq.request.request_id], self.texts[seq.request.request_id]


def cache_of(lm: LM, cache: str) -> str:
    """The cache that `cache` means for this family, or an error that says which would do."""
    family, kind = lm.config.model_type, lm.config.attention
    if kind == "bidirectional":
        if cache == "exact":
            raise UserError(
                f'cache = "exact" needs causal or block-causal attention, and {family} is bidirectional, where every '
                'token changes all keys: use "dual" or "prefix", which approximate, or "none"'
            )
        return "none" if cache == "auto" else cache
    if cache == "dual":
        raise UserError(
            f'cache = "dual" is for bidirectional families: {family} is {kind}, so nothing after the active block is '
            'seen: use "exact" (or "auto"), which changes no token'
        )
    return "none" if cache == "none" else "exact"


def _question(turn: Turn, starts: Sized[int]) -> Question:
    """Which columns a request is to decide, and where they are predicted in the packed rows."""
    seq, span = turn.sequence, turn.span
    asked = seq.asked()
    needed = np.maximum(seq.columns[asked] - seq.shift, 0)
    rows = needed - span.positions[0] if isinstance(span.positions, range) else np.searchsorted(span.positions, needed)
    return Question(seq, asked, [rows + start for start in starts])


def _union(rows: list[np.ndarray]) -> np.ndarray:
    """All rows once, ascending; the first one where nothing is asked, for a forward has some result."""
    if len(rows) == 1 and len(rows[0]) and (rows[0][1:] > rows[0][:-1]).all():
        return rows[0]
    wanted = np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.int64)
    return wanted if len(wanted) else np.zeros(1, np.int64)


def _until_stop(tokens: Sized[int], stop: frozenset[int]) -> list[int]:
    ended = next((i for i, token in enumerate(tokens) if token in stop), len(tokens))
    return list(tokens[: ended + 1])


def _step_events(told: list[tuple[Sequence, Decision]]) -> Iterator[StepEvent]:
    """What a forward changed, before it is applied; one event for all requests that have had as many steps."""
    for place in sorted({(seq.step, seq.nfe) for seq, _ in told}):
        rows = [(seq, decision) for seq, decision in told if (seq.step, seq.nfe) == place]
        longest = max(seq.length for seq, _ in rows)
        canvas = torch.full((len(rows), longest), rows[0][0].mask_id)
        changes = torch.zeros(3, len(rows), longest, dtype=torch.bool)
        for i, (seq, decision) in enumerate(rows):
            after = seq.canvas[: seq.length].copy()
            for kind, flags in enumerate((decision.commit, decision.edited, decision.remasked)):
                if flags is not None:
                    at = seq.columns[flags]
                    after[at] = decision.token[flags] if kind < 2 else seq.mask_id
                    changes[kind, i, torch.from_numpy(at)] = True
            canvas[i, : seq.length] = torch.from_numpy(after)
        yield StepEvent(
            step=place[0],
            nfe=place[1],
            request_ids=tuple(seq.request.request_id for seq, _ in rows),
            prompt_lengths=tuple(seq.request.prompt_length for seq, _ in rows),
            lengths=tuple(seq.length for seq, _ in rows),
            canvas=canvas,
            committed=changes[0],
            edited=changes[1],
            remasked=changes[2],
        )
