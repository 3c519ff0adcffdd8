"""Work beside the executor's: what hangs is named and left behind, and a signal is noticed whatever hangs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gpu_runtime import artifacts
from gpu_runtime.errors import StalledError
from gpu_runtime.executor.watch import Watch


def test_what_the_work_returns_or_raises_is_the_callers() -> None:
    watch = Watch("a day", 60)
    assert watch("publish", lambda: 17) == 17
    for error in (KeyError("x"), TimeoutError(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            watch("publish", lambda error=error: (_ for _ in ()).throw(error))  # type: ignore[misc]
        assert caught.value is error


def test_work_that_hangs_is_named_with_the_place_where_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, ended = threading.Event(), threading.Event()

    def hang(*_: Any) -> bytes:
        let_go.wait()
        ended.set()
        return b""

    class File:
        open = hang

    try:
        with pytest.raises(StalledError) as caught:
            Watch("tiny 2026-03-01", 0.2)("look-up", lambda: artifacts.file_digest(File()))  # type: ignore[arg-type]
        text = str(caught.value)
        assert caught.value.stage == "look-up" and "tiny 2026-03-01: the look-up stage hangs" in text
        assert "within 0.2 s" in text and "no end, in artifacts.py: file_digest" in text
    finally:
        let_go.set()
    assert ended.wait(10)


def test_pieces_of_work_that_get_on_are_as_slow_as_they_like() -> None:
    watch, done = Watch("a day", 0.5), list[int]()
    for number in range(4):
        watch("publish", lambda number=number: threading.Event().wait(0.2) or done.append(number))  # type: ignore[misc]
    assert done == [0, 1, 2, 3]


PROGRAM = """
import os, signal, sys, threading, time
from gpu_runtime.executor import watch

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where tests run in the background
watch.GRACE_S = float(sys.argv[1])
going, ended = threading.Event(), threading.Event()

def work():
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    going.wait(float(sys.argv[2]))
    ended.set()

try:
    watch.Watch("a day", 600)("publish", work)
except KeyboardInterrupt:
    print("interrupted", ended.is_set())
"""


@pytest.mark.parametrize(("grace", "takes", "ended"), [("60", "0.5", True), ("0.05", "600", False)])
def test_a_signal_ends_the_wait_once_the_work_in_hand_had_its_time(
    alone: Any, grace: str, takes: str, ended: bool
) -> None:
    made = alone(PROGRAM, grace, takes)
    assert (made.returncode, made.stdout.strip()) == (0 if ended else 1, f"interrupted {ended}"), made.stderr


LEFT_BEHIND = """
import atexit, io, sys, threading
import pyarrow as pa, pyarrow.parquet as pq
from gpu_runtime.errors import StalledError
from gpu_runtime.executor.watch import Watch

written = io.BytesIO()
pq.write_table(pa.table({"a": list(range(100_000))}), written, row_group_size=10_000)

class Disk(io.BytesIO):
    '''Answers until the footer is read, then hangs in a thread of Arrow's own.'''
    def read(self, *given):
        if threading.current_thread().name.startswith("Dummy"):
            hung.set()
            never.wait()
        return super().read(*given)

hung, never = threading.Event(), threading.Event()
atexit.register(print, "flushed")
try:
    Watch("a day", 1)("look-up", lambda: pq.ParquetFile(Disk(written.getvalue()), pre_buffer=True).read())
except StalledError as error:
    print(error.stage, hung.is_set())
if sys.argv[1] == "is let go":
    never.set()
    for thread in threading.enumerate():
        if thread.name == "look-up":
            thread.join()
"""


@pytest.mark.parametrize(("then", "status"), [("hangs on", 1), ("is let go", 0)])
def test_a_process_ends_though_a_library_waits_for_a_thread_of_its_own_that_hangs(
    alone: Any, then: str, status: int
) -> None:
    """Arrow's pool is waited for when a process ends, by C and not by Python: no daemon thread helps there."""
    ended = alone(LEFT_BEHIND, then)
    assert (ended.returncode, ended.stdout.split()) == (status, ["look-up", "True", "flushed"]), ended.stderr
