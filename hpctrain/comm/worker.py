"""Worker: a thread that does a group's communication in order, while the caller goes on."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread

from hpctrain.comm.group import DONE, Handle


class Task(Handle):
    """Work that was handed to the worker, and how it ended."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._ended = Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # it belongs to whoever waits
            self._error = error
        self._work = None  # lets go of the tensors
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


class Worker:
    """Runs work in the order in which it was given: on its thread when ``later``, else where it was called.

    The thread starts with the first work that is wanted ``later``; ``threads`` says whether one may run at all.
    """

    def __init__(self, name: str, threads: bool) -> None:
        self._name, self._threads = name, threads
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._newest: Task | None = None
        self._thread: Thread | None = None

    @property
    def idle(self) -> bool:
        return self._newest is None or self._newest.done()

    def do(self, work: Callable[[], None], later: bool) -> Handle:
        if not later and self.idle:
            work()
            return DONE
        if not self._threads:
            return self._now(work)
        task = self._give(work)
        if not later:
            task.wait()
        return task

    def close(self) -> None:
        """End the thread when its work is done."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _now(self, work: Callable[[], None]) -> Handle:
        """Without a thread, work that is wanted later is done at once; its error still waits for ``wait``."""
        task = Task(work)
        task.run()
        return task

    def _give(self, work: Callable[[], None]) -> Task:
        if self._thread is None:
            self._thread = Thread(target=self._run, name=f"hpctrain-{self._name}", daemon=True)
            self._thread.start()
        self._newest = Task(work)
        self._queue.put(self._newest)
        return self._newest

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
