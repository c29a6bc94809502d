"""Who may touch an engine's requests and pages: one thread at a time. What others ask for waits until its step is over."""

import asyncio
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import ClassVar

from dlm.errors import UserError

GRACE = 0.05
"""Seconds for which followers of single requests leave the stepping to a thread that has called `step` itself."""

Action = Callable[[], None]
Mend = Callable[[BaseException | None], None]


class Ownership:
    """A thread enters, works alone, and leaves. Actions of any thread are done between: at once if nobody is inside.

    If work or an action is broken off, by an error or a Ctrl-C, `mend` is called with it before anything else is done;
    and once more, with None, if that was broken off too.
    """

    def __init__(self, mend: Mend) -> None:
        self.mend, self.torn = mend, False
        self.inbox: deque[Action] = deque()
        self.left = threading.Condition(threading.RLock())
        """Told when a thread leaves."""
        self._inside: tuple[threading.Thread, FrameType, bool] | None = None
        """The thread, the frame for whose life it is inside, and whether it is a driver."""
        self._driven = float("-inf")
        """When a driver left last."""
        self._waiting: list[Action] = []

    def do(self, action: Action) -> None:
        """Do it now, or as soon as the step that runs is over."""
        self.inbox.append(action)
        self.settle()

    def settle(self) -> None:
        """Do what stands in the inbox, unless a step is running, which will see to it."""
        with HeldInterrupts(), self.left:
            if self._vacant():
                self._whole()

    def work(self, job: Action, *, driver: bool) -> None:
        """Do it as the one thread inside, after all that was waiting. A driver that finds another one: UserError."""
        with HeldInterrupts():
            self._enter(sys._getframe(), driver)
            try:
                self._whole(job)
            finally:
                self._leave()

    def _whole(self, job: Action | None = None) -> None:
        """The inbox and the job, or all of it mended."""
        if self.torn:
            self.mend(None)
        self.torn = True
        try:
            while self.inbox:
                self.inbox.popleft()()
            if job is not None:
                job()
        except BaseException as error:
            self.mend(error)
            self.torn = False
            raise
        self.torn = False

    def _enter(self, frame: FrameType, driver: bool) -> None:
        with self.left:
            while not self._vacant():
                assert self._inside is not None
                if self._inside[0] is threading.current_thread():
                    raise UserError("this engine is in the middle of a step: on_step cannot step it again")
                if driver and self._inside[2]:
                    raise UserError(
                        "another thread is stepping this engine: one thread steps, all others may call add_request, "
                        "cancel and stream_of"
                    )
                self.left.wait(1.0)
            self._inside = threading.current_thread(), frame, driver

    def _leave(self) -> None:
        with self.left:
            while self.inbox:
                self._whole()
            self._driven = time.monotonic() if self._inside is not None and self._inside[2] else float("-inf")
            self._inside = None
            self.left.notify_all()
            waiting, self._waiting = self._waiting, []
            for wake in waiting:
                wake()

    def is_mine(self) -> bool:
        """Whether the thread inside is this one."""
        with self.left:
            return not self._vacant() and self._inside is not None and self._inside[0] is threading.current_thread()

    def others_step(self) -> bool:
        """Whether somebody else does the next step: then this waits until it is over, or for a moment."""
        with self.left:
            delay = self._delay()
            if delay > 0:
                self.left.wait(delay)
            return delay > 0

    async def aothers_step(self) -> bool:
        """The same, for a task."""
        loop = asyncio.get_running_loop()
        with self.left:
            if (delay := self._delay()) <= 0:
                return False
            over = loop.create_future()

            def tell() -> None:
                with suppress(asyncio.InvalidStateError):
                    over.set_result(None)

            def wake() -> None:
                with suppress(RuntimeError):  # its loop was closed
                    loop.call_soon_threadsafe(tell)

            self._waiting.append(wake)
        with suppress(TimeoutError):
            await asyncio.wait_for(over, delay)
        return True

    def _delay(self) -> float:
        """How long to wait for somebody else's step; 0 where nobody is there to do it."""
        if not self._vacant():
            return 1.0
        return max(0.0, self._driven + GRACE - time.monotonic())

    def _vacant(self) -> bool:
        """Whether nobody is inside. One who was interrupted on the way out is not."""
        if self._inside is None:
            return True
        thread, frame, _ = self._inside
        if thread is threading.current_thread():
            caller: FrameType | None = sys._getframe(1)
            while caller is not None and caller is not frame:
                caller = caller.f_back
            gone = caller is None
        else:
            gone = not thread.is_alive()
        if gone:
            self._inside = None
        return gone


class HeldInterrupts:
    """While entered, the first Ctrl-C waits until the block is left; the second one comes through at once.

    State that a step changes is so whole whenever a KeyboardInterrupt is raised. Only the main thread gets signals.
    """

    holder: "ClassVar[HeldInterrupts | None]" = None
    """The outermost one that is entered: those inside it do nothing."""

    def __init__(self) -> None:
        self.came: tuple[int, FrameType | None] | None = None
        self.before: Callable[[int, FrameType | None], object] = signal.default_int_handler

    def __enter__(self) -> "HeldInterrupts":
        if HeldInterrupts.holder is None and threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, self._hold)
            if callable(before):
                self.before, HeldInterrupts.holder = before, self
            else:
                signal.signal(signal.SIGINT, before)  # ignored, or not Python's: it stays so
        return self

    def __exit__(self, *_: object) -> None:
        if HeldInterrupts.holder is self:
            HeldInterrupts.holder = None  # first: the line after it may already be interrupted
            signal.signal(signal.SIGINT, self.before)
            self.deliver()

    def deliver(self) -> None:
        """Let a Ctrl-C that waits come through now."""
        came, self.came = self.came, None
        if came is not None:
            self.before(*came)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self.came is None:
            self.came = number, frame
        else:
            self.before(number, frame)
