"""What a server holds: its model, the runner of its engine, its store, its keys. Speaks no HTTP."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from dlm.inference.engine import Engine
from dlm.inference.events import Stats
from dlm.inference.warming import start_up
from dlm.serving.config import ServeConfig
from dlm.serving.keys import Keys
from dlm.serving.log import RequestLog
from dlm.serving.metrics import Metrics
from dlm.serving.refusal import Refusal, leaving
from dlm.serving.runner import Cut, Runner

if TYPE_CHECKING:
    from dlm.models.lm import LM
    from dlm.trace.store import TraceStore

T = TypeVar("T")


class Server:
    """One model behind one engine. `load` takes its time; until then requests are refused."""

    def __init__(self, config: ServeConfig, lm: "LM | None" = None) -> None:
        self.config, self.keys, self.log = config, Keys.of(config.serve), RequestLog(config.serve.log)
        self.metrics = Metrics(self._stats)
        self.worker = ThreadPoolExecutor(1, "dlm-checks")
        """Tokenises and submits: a tokenizer serves one thread at a time."""
        self._lm, self._runner = lm, None
        self.store: TraceStore | None = None
        self.draining = False
        self.created = int(time.time())
        self.failure: BaseException | None = None
        """Why it cannot go on."""

    @property
    def lm(self) -> "LM":
        """The model. Raises Refusal before it is there."""
        return self._there(self._lm)

    @property
    def runner(self) -> Runner:
        """The engine's runner. Raises Refusal before it is there."""
        return self._there(self._runner)

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self._runner is not None and not self.draining and self.failure is None

    def load(self) -> None:
        """Load the model, open the store, start the engine's thread."""
        from dlm.models.loading import load
        from dlm.trace.store import TraceStore

        if self.config.trace.enabled:
            self.store = TraceStore.of(self.config.trace)
        lm = self._lm or load(**self.config.model.model_dump())
        limits = self.config.serve
        engine = Engine.of(lm, self.config.engine, trace=self.store, draft=self.config.draft.model)
        self._note({"event": "memory", "plan": str(engine.memory)})
        start_up(
            engine, self.config.sampler, None, lambda done, of: self._note({"event": "warm", "done": done, "of": of})
        )
        runner = Runner(
            engine, max_waiting=limits.max_waiting, max_failures=limits.max_failures, fatal=self._fail, failed=self._say
        )
        runner.start()
        self._lm, self._runner = lm, runner

    def require_open(self) -> None:
        """Raises Refusal where no further request is taken."""
        if self.draining or self.failure is not None:
            raise leaving()
        self._there(self._runner)

    def cut(self) -> None:
        """End what is under way with an error; in the loop's thread."""
        if self._runner is not None:
            self._runner.close_all(Cut("the server was shut down before this was finished", 503))

    @property
    def busy(self) -> bool:
        """Whether any request is under way."""
        return self._runner is not None and bool(self._runner.channels)

    def close(self) -> None:
        """End the engine, and write what the store holds."""
        self.worker.shutdown(cancel_futures=True)
        if self._runner is not None:
            self._runner.stop()
        if self.store is not None:
            self.store.close()

    def _fail(self, error: BaseException) -> None:
        self.failure = error

    def _note(self, line: Mapping[str, Any]) -> None:
        if self.log.enabled:
            self.log.say(line)

    def _say(self, error: BaseException) -> None:
        self.log.say({"event": "step failed", "error": f"{type(error).__name__}: {error}"})

    def _stats(self) -> Stats | None:
        return None if self._runner is None else self._runner.stats()

    def _there(self, thing: "T | None") -> "T":
        if thing is None:
            raise Refusal(503, "the model is still being loaded: come back soon", code="loading")
        return thing


def known_model(server: Server, name: str | None) -> None:
    """Raises Refusal where a request names another model than the served one."""
    served = server.config.served_name
    if name is not None and name != served:
        raise Refusal(
            404, f"no model {name[:200]!r} here: this server has {served!r}", param="model", code="model_not_found"
        )
