"""The threads that read and decode beside the engine."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")

_READERS, _ITEMS_PER_TURN = 4, 64
"""Storage answers several requests at once, whatever the number of cores. With eight, files on a local disk are read
more slowly than with four: they wait for the interpreter's lock."""


class WorkerPool:
    """Threads for pieces of work that release the GIL, so that they run beside each other and the engine.

    They are daemons, unlike those of `ThreadPoolExecutor`: a decoder that hangs must not keep the process alive.
    """

    def __init__(self, workers: int, name: str = "decode") -> None:
        self.workers, self._name = workers, name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self.busy_s = 0.0

    def submit(self, piece: Callable[[], T]) -> Future[T]:
        """Once the pool is closed the piece counts as cancelled: whoever was given up on may still bring some."""
        if self._closed:
            late: Future[T] = Future()
            late.cancel()
            late.set_running_or_notify_cancel()  # or whoever waits for it waits for ever
            return late
        if len(self._threads) < self.workers:
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)
        future: Future[T] = Future()
        self._work.put((future, piece))
        return future

    def _run(self) -> None:
        while (entry := self._work.get()) is not None:
            self._do(*entry)
            del entry  # an idle thread must not keep its last piece alive, and a whole shard with it

    def _do(self, future: Future[Any], piece: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        started, result, failure = time.perf_counter(), None, None
        try:
            result = piece()
        except BaseException as error:
            failure = error
        with self._lock:
            self.busy_s += time.perf_counter() - started
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)

    def close(self, wait: bool = True) -> None:
        """End the threads once their present piece is done; pieces that nobody cancelled are done before."""
        self._closed = True
        for _ in self._threads:
            self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()
        self._threads.clear()


def side_by_side(function: Callable[[Item], T], items: Sequence[Item], name: str) -> list[T]:
    """`function` of each item, in their order, on several threads that mostly wait for storage.

    Raises what the first item, in that order, raised; what has not begun by then is left out.
    """
    if len(items) <= 1:
        return [function(item) for item in items]
    step = min(_ITEMS_PER_TURN, -(-len(items) // _READERS))  # a turn each would cost more than a small file does
    with contextlib.closing(WorkerPool(_READERS, name)) as pool:
        turns: list[Future[list[T]]] = [
            pool.submit(partial(list, map(function, items[first : first + step])))
            for first in range(0, len(items), step)
        ]
        try:
            return [made for turn in turns for made in turn.result()]
        finally:
            for turn in turns:
                turn.cancel()
