"""Work beside the executor's, watched as the executor watches its own: a piece of it that hangs ends the run."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from gpu_runtime.errors import StalledError

T = TypeVar("T")

HEARTBEAT_S = 1.0
"""How often a waiting thread looks up. A signal that comes just before it goes to sleep does not wake it."""

GRACE_S = 5.0
"""How long a run that was interrupted, or that stalled, waits for the work in hand."""

_PACKAGE = Path(__file__).parent.parent

_left_behind: list[Callable[[], bool]] = []


def leave_behind(done: Callable[[], bool]) -> None:
    """Give work up that hangs; `done` tells whether it has ended (no use to ask its thread: one whose `join` was
    interrupted counts as dead). If it has not when the process has nothing else to do, the process ends with status 1
    at once: a library's own exit may wait for its threads (Arrow's does), and then for ever."""
    if not _left_behind:
        atexit.register(_end_process)
    _left_behind[:] = [*(other for other in _left_behind if not other()), done]


def _end_process() -> None:
    if not all(done() for done in _left_behind):
        atexit.unregister(_end_process)
        atexit._run_exitfuncs()  # those of others first: they flush logs and queues
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(1)


class Watch:
    """Runs one piece of work after another, each on a daemon thread, while the calling thread only waits: so that a
    signal, or storage that hangs, is noticed whatever the work does.

    `item` names what all of it is for. `limit_s`: a piece that takes longer raises `StalledError`, and is left behind.
    """

    def __init__(self, item: str, limit_s: float) -> None:
        self.item, self._limit_s = item, limit_s

    def __call__(self, stage: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises."""
        done: Future[T] = Future()
        thread = threading.Thread(target=_do, args=(work, done), name=stage, daemon=True)
        started = time.perf_counter()
        thread.start()
        try:
            while not done.done():
                seconds = time.perf_counter() - started
                if seconds >= self._limit_s:
                    leave_behind(done.done)
                    raise stalled(stage, self.item, self._limit_s, seconds, _place(thread))
                wait([done], timeout=min(HEARTBEAT_S, self._limit_s - seconds))
        except StalledError:
            raise
        except BaseException:  # whoever wants the run to end: Ctrl-C, Dagster's terminate
            leave_behind(done.done)
            wait([done], GRACE_S)
            raise
        return done.result()


def stalled(stage: str, item: str, limit_s: float, seconds: float, place: str = "") -> StalledError:
    return StalledError(
        f"the {stage} stage hangs",
        stage=stage,
        item=item,
        expected=f"each piece of its work done within {limit_s:g} s",
        got=f"{seconds:.0f} s and no end{place}",
        next_step="look at what it waits for (disk, network, device); finished shards are kept: run again",
    )


def _do(work: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


def _place(thread: threading.Thread) -> str:
    """Where in this package the thread is."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_PACKAGE) and file != Path(__file__):
            return f", in {file.relative_to(_PACKAGE).as_posix()}: {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
