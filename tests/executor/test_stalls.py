"""Clause 8: a stage that hangs, and a run that is interrupted. Nothing here measures time; all is let go at the end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_runtime.errors import DeviceError, StalledError
from gpu_runtime.executor import pipeline
from gpu_runtime.executor.pipeline import Batch
from gpu_runtime.executor.stage_clock import StageClock

TIMEOUT_S = 0.2


class Broken(Exception):
    pass


HANGS = {  # what hangs → the stage that is told
    "source": "read",
    "source's end": "read",
    "pieces": "read",
    "decoder": "decode",
    "decoder, tried again": "decode",
    "enqueue": "compute",
    "engine": "compute",
    "engine, tried again": "compute",
    "write": "write",
}


@pytest.mark.parametrize("hangs", HANGS)
def test_a_stage_that_hangs_ends_the_run_and_names_itself(
    bench: Any, shard: Any, record: Any, limited: Any, settled: Any, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    monkeypatch.setattr(pipeline, "GRACE_S", 0.05)
    let_go, tries = threading.Event(), list[str]()

    def work(what: str, at: bool = True) -> None:
        if at and hangs == what:
            let_go.wait()
        if at and hangs == f"{what}, tried again":
            tries.append(what)
            if len(tries) == 1:
                raise Broken
            let_go.wait()

    opened = bench(
        slots=4,
        options={"stage_timeout_s": TIMEOUT_S},
        during=lambda ids: work("engine", 9 in ids),
        queueing=lambda: work("enqueue", len(opened.engine.seen) > 0),
    )
    rows = shard(range(1, 33), lambda id: work("decoder", id == 9))
    whole = rows.pieces

    def pieces(start: int, stop: int, staging: Any) -> Any:
        work("pieces", start == 8)
        if start == 8 and hangs == "source's end":  # so that it has to be closed before it has given all
            raise Broken
        return whole(start, stop, staging)

    rows.pieces = pieces
    written = record(lambda scored: work("write", scored.batch.start == 8))

    def source() -> Iterator[Batch]:
        try:
            for batch in opened.executor.batches(0, rows):
                work("source", batch.start == 8)
                yield batch
        finally:
            work("source's end")

    try:
        with pytest.raises(StalledError, match="stage hangs") as caught:
            opened.run_source(source(), written)
        assert caught.value.stage == HANGS[hangs]
        done = list(written.ids)
        with pytest.raises(DeviceError, match="left work behind that hangs"):
            opened.run([shard(range(4))], record())
        limited(opened.executor.close)
        limited(opened.device.close)
    finally:
        let_go.set()
    assert settled(lambda: not [t for t in threading.enumerate() if t.name in ("fill", "dispatch", "write", "settle")])
    if hangs != "write":  # which is handed its rows before it hangs
        assert written.ids == done, "written after the run had ended"
    assert rows.working == 0 and opened.engine.working == 0


def test_a_run_that_fails_gives_up_on_an_engine_that_hangs_behind_it(
    bench: Any, shard: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, at_work = threading.Event(), threading.Event()

    def compute(ids: list[int]) -> None:
        if 5 in ids:
            at_work.set()
            let_go.wait()

    def write(scored: Any) -> None:
        at_work.wait(5)
        raise Broken

    opened = bench(options={"stage_timeout_s": TIMEOUT_S}, during=compute)
    try:
        with pytest.raises(Broken):
            opened.run([shard(range(1, 33))], record(write))
        with pytest.raises(DeviceError, match="left work behind that hangs"):
            opened.run([shard(range(4))], record())
        opened.executor.close()
    finally:
        let_go.set()


SLOW = ["source", "decoder", "decoder, failing", "engine", "engine, failing", "engine, full", "write"]


@pytest.mark.parametrize("slow", SLOW)
def test_a_slow_stage_that_gets_on_does_not_hang(bench: Any, shard: Any, record: Any, slow: str) -> None:
    """Each piece of its work is far shorter than the limit, all of them together far longer, even of one batch."""
    step_s, limit_s = 0.06, 0.5

    def decode(id: int) -> None:
        if slow.startswith("decoder"):
            time.sleep(step_s)
        if slow == "decoder, failing" and id % 2:
            raise Broken

    def compute(ids: list[int]) -> None:
        if slow.startswith("engine"):
            time.sleep(step_s)
        if slow == "engine, failing" and any(id % 2 for id in ids):
            raise Broken
        if slow == "engine, full" and len(ids) > 1:
            raise MemoryError

    opened = bench(batch=8, decode_workers=1, options={"stage_timeout_s": limit_s}, during=compute)
    rows, ids = shard(range(1, 17), decode, piece_rows=1), list(range(1, 17))

    def source() -> Iterator[Batch]:
        for batch in opened.executor.batches(0, rows):
            for start in range(batch.start, batch.stop, 1 if slow in ("source", "engine", "write") else 8):
                time.sleep(step_s if slow == "source" else 0)
                yield Batch(0, rows, start, start + 1 if slow in ("source", "engine", "write") else batch.stop)

    written = record(lambda scored: time.sleep(step_s if slow == "write" else 0))
    started = time.perf_counter()
    opened.run_source(source(), written)
    assert time.perf_counter() - started > 0.9 * limit_s, "not slow enough to tell"
    assert written.ids == ([id for id in ids if not id % 2] if "failing" in slow else ids) and written.right


def test_nothing_under_way_is_no_stage_and_neither_is_waiting_for_a_slot() -> None:
    clock = StageClock()
    assert clock.longest() == ("none", 0.0)
    with clock.at("wait for a slot"):
        assert clock.longest() == ("none", 0.0)
        with clock.at("queue"):
            assert clock.longest()[0] == "compute"
            time.sleep(0.001)
            with clock.at("write"):
                assert clock.longest()[0] == "compute"
                clock.progress("queue")
                assert clock.longest()[0] == "write"
    assert clock.longest() == ("none", 0.0)


PROGRAM = """
import os, signal, sys, threading, time
from conftest import MemoryShard, Record, StrictEngine, comes_true, threads_of_a_run
from gpu_runtime.device.host import HostDevice
from gpu_runtime.errors import DeviceError, StalledError
from gpu_runtime.executor import pipeline
from gpu_runtime.executor.pipeline import StreamExecutor

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where tests run in the background

def forever():
    threading.Event().wait()

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

engine, shard, written = StrictEngine(streams=2), MemoryShard(range(1, 65)), Record()
with HostDevice() as device, StreamExecutor(engine, device, batch=4, slots=4, decode_workers=4, {options}) as executor:
    def run():
        executor.run(executor.batches(0, shard), written)
    {body}
"""


def program(body: str, options: str = "") -> str:
    return PROGRAM.format(options=options, body=body.strip("\n").replace("\n", "\n    "))


@pytest.mark.parametrize("hangs", ["decoder", "engine", "write"])
def test_a_process_ends_by_itself_though_a_thread_of_it_hangs_for_ever(alone: Any, hangs: str) -> None:
    ended = alone(
        program(
            """
pipeline.GRACE_S = 0.05
if sys.argv[1] == "decoder":
    shard.during = lambda id: forever() if id == 9 else None
elif sys.argv[1] == "engine":
    engine.during = lambda ids: forever() if 9 in ids else None
else:
    written.during = lambda scored: forever()
try:
    run()
except StalledError as error:
    print("stalled:", error.stage)
""",
            f"stage_timeout_s={TIMEOUT_S}",
        ),
        hangs,
    )
    assert (ended.returncode, ended.stdout.strip()) == (1, f"stalled: {HANGS[hangs]}"), ended.stderr


def test_an_interrupt_ends_the_run_once_the_work_in_hand_is_done(alone: Any) -> None:
    """A real signal, while the main thread only watches. The batch being written is finished, none is after it."""
    ended = alone(
        program(
            """
def write(scored):
    if scored.batch.start == 8:
        interrupt()
        assert comes_true(lambda: executor._abandoned), "nobody noticed"
        time.sleep(0.05)

written.during = write
try:
    run()
except KeyboardInterrupt:
    print(written.ids == list(range(1, 13)), written.right, threads_of_a_run(), engine.working + shard.working)
    seen, written = len(engine.seen), Record()
    run()
    print(written.ids == list(range(1, 65)), written.right, len(engine.seen) - seen)
    raise
"""
        )
    )
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert ended.stdout.splitlines() == ["True True [] 0", "True True 16"]


INTERRUPTED = {
    "a decoder hangs": """
pipeline.GRACE_S = 0.05
shard.during = lambda id: (interrupt(), forever()) if id == 9 else None
""",
    "a second interrupt while an engine hangs": """
pipeline.GRACE_S = 100.0
def compute(ids):
    if 9 in ids:
        interrupt()
        comes_true(lambda: executor._abandoned)
        time.sleep(0.05)
        interrupt()
        forever()
engine.during = compute
""",
    "an engine hangs behind a run that failed": """
at_work = threading.Event()
def compute(ids):
    if 5 in ids:
        at_work.set()
        comes_true(lambda: executor._abandoned)
        time.sleep(0.05)
        interrupt()
        forever()
def write(scored):
    at_work.wait()
    raise ArithmeticError
engine.during, written.during = compute, write
""",
    "a long search for bad rows": """
pipeline.GRACE_S = 100.0
tries = []
def compute(ids):
    if 9 in ids:
        tries.append(ids)
        if len(tries) == 2:
            interrupt()
            comes_true(lambda: executor._abandoned)
            time.sleep(0.05)
        if len(tries) > 2:
            written.ids = ["tried again after the interrupt"]
        raise ArithmeticError
engine.during = compute
""",
}


@pytest.mark.parametrize("case", INTERRUPTED)
def test_an_interrupt_is_heard_whatever_hangs(alone: Any, case: str) -> None:
    ended = alone(
        program(
            INTERRUPTED[case]
            + """
try:
    run()
except KeyboardInterrupt:
    print(written.ids == list(range(1, len(written.ids) + 1)), len(written.ids) <= 8)
    try:
        executor.run([], written)
        print("usable")
    except DeviceError as error:
        print("refused")
    raise
"""
        )
    )
    hangs = case != "a long search for bad rows"
    assert ended.returncode == (1 if hangs else -signal.SIGINT), ended.stderr
    assert ended.stdout.splitlines() == ["True True", "refused" if hangs else "usable"]
