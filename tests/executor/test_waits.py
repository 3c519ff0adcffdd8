"""Each wait of the ring is taken out of the executor's source, and the deferred, poisoned device tells."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpu_runtime.device.host import HostDevice
from gpu_runtime.device.simulated import SimulatedDevice
from gpu_runtime.errors import DatasetError, DeviceError

Edit = tuple[str, str]
RING = [(2, 1), (3, 1), (4, 2)]  # (slots, streams)

WRITE = """\
            with self._clock.at("write"):
                self._write("""
RETIRE = """\
            for tensor in (*flight.slot.inputs, *flight.slot.outputs):
                executor.device.retire(tensor.staging, tensor.buffer)
"""
TOGETHER = "                if self._fitted_alone > 1:"
FREE = "            self._free.put(flight.slot)\n"

WAITS: dict[str, list[Edit]] = {
    "compute waits for the copy in": [("        slot.compute.wait(slot.copied_in)\n", "")],
    "the copy out waits for compute": [("        self._copy_out.wait(slot.computed)\n", "")],
    "the writer waits for the copy out": [("        self.slot.copied_out.synchronize()\n", "")],
    "a slot is freed after its write": [(RETIRE + FREE, ""), (WRITE, RETIRE + FREE + WRITE)],
}


def is_right(opened: Any, shard: Any, record: Any, rows: int = 30) -> bool:
    """Whether a run writes every row, in order, with the values that the engine's formula gives."""
    written = record()
    try:
        opened.run([shard(range(1, rows + 1))], written)
    except Exception:
        return False
    return bool(written.ids == list(range(1, rows + 1)) and written.right)


@pytest.mark.parametrize(("slots", "streams"), RING)
def test_the_source_as_it_stands_is_right(
    bench: Any, shard: Any, record: Any, executor_module: Any, slots: int, streams: int
) -> None:
    module = executor_module([])
    assert is_right(bench(slots=slots, streams=streams, device=SimulatedDevice(), module=module), shard, record)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(("slots", "streams"), RING)
def test_without_this_wait_the_outputs_are_wrong(
    bench: Any, shard: Any, record: Any, executor_module: Any, slots: int, streams: int, wait: str
) -> None:
    module = executor_module(WAITS[wait])
    assert not is_right(bench(slots=slots, streams=streams, device=SimulatedDevice(), module=module), shard, record)


@pytest.mark.parametrize("wait", WAITS)
def test_without_this_wait_a_single_batch_is_wrong_already(
    bench: Any, shard: Any, record: Any, executor_module: Any, wait: str
) -> None:
    """No luck with neighbours is needed."""
    module = executor_module(WAITS[wait])
    assert not is_right(bench(device=SimulatedDevice(), module=module), shard, record, rows=4)


@pytest.mark.parametrize(("edits", "right"), [([], True), ([(FREE, ""), (WRITE, FREE + WRITE)], False)])
def test_a_slot_freed_during_its_write_is_overrun_by_the_next_batch(
    bench: Any, shard: Any, record: Any, executor_module: Any, edits: list[Edit], right: bool
) -> None:
    """`write` gives the batch that would take the slot too early the time to do so."""
    decoded = threading.Event()

    def write(scored: Any) -> None:
        if scored.batch.start == 0:
            assert decoded.wait(0.1 if right else 5) is not right, "only a slot freed too early lets the third batch in"

    opened = bench(slots=2, device=SimulatedDevice(), module=executor_module(edits))
    written = record(write)
    opened.run([shard(range(1, 17), lambda id: decoded.set() if id == 12 else None)], written)
    assert (written.ids == list(range(1, 17)) and written.right) is right


@pytest.mark.parametrize(
    ("edits", "right"),
    [([], True), ([(f"            with self._device:\n{TOGETHER}", f"            if True:\n{TOGETHER}")], False)],
)
def test_a_rescue_and_a_new_batch_are_not_queued_into_each_other(
    bench: Any, shard: Any, record: Any, executor_module: Any, settled: Any, edits: list[Edit], right: bool
) -> None:
    """In between, the failure of one would reach the other's event, and its own event would say all is well."""
    rescuing, enqueued = threading.Event(), itertools.count(1)
    opened = bench(slots=2, device=SimulatedDevice(), module=executor_module(edits))
    pending = opened.executor._compute[0]._pending
    rows = shard(range(1, 9))

    def compute(ids: list[int]) -> None:
        assert 2 not in ids

    def queued() -> None:
        if next(enqueued) == 2:  # the rescue's first: [wait, launch] are queued, its event is not
            rescuing.set()
            settled(
                lambda: len(pending) == 5, 0.1 if right else 5
            )  # the new batch's [wait, launch, record] behind them

    def source() -> Iterator[Any]:
        first, second = opened.executor.batches(0, rows)
        yield first
        rescuing.wait(5)
        yield second

    opened.engine.during, opened.engine.queued = compute, queued
    written = record()
    opened.run_source(source(), written)
    assert (written.ids == [1, 3, 4, 5, 6, 7, 8] and set(written.failures) == {2} and written.right) is right


@pytest.mark.parametrize("wait", ["compute waits for the copy in", "the copy out waits for compute"])
def test_a_rescue_needs_the_waits_too(bench: Any, shard: Any, record: Any, executor_module: Any, wait: str) -> None:
    def compute(ids: list[int]) -> None:
        assert 6 not in ids

    outcomes = []
    for edits in ([], WAITS[wait]):
        written = record()
        opened = bench(device=SimulatedDevice(), module=executor_module(edits), during=compute)
        with contextlib.suppress(DeviceError):  # what is not there yet looks like an engine that is broken
            opened.run([shard(range(1, 17))], written)
        outcomes.append(written.ids == [i for i in range(1, 17) if i != 6] and written.right)
    assert outcomes == [True, False]


PIECES = "                _await_all(flight.pieces)\n"
LAST_WAITS: dict[str, tuple[str, str, str]] = {  # → (who is at work, the line, with the line before it)
    "the caller waits for the run to settle": ("source", "            self._settled.wait(patience)\n", ""),
    "its threads are waited for": ("source", "                thread.join()\n", ""),
    "the device is waited for": ("compute", "                    event.synchronize()\n", ""),
    "pieces of a batch that comes too late": ("decode, late", PIECES, "            if self._stop.is_set():\n"),
    "pieces of a batch that nobody takes": ("decode, left", PIECES, "            if isinstance(flight, _Flight):\n"),
}


@pytest.mark.parametrize("wait", LAST_WAITS)
@pytest.mark.parametrize("waits", [True, False])
def test_the_end_of_a_run_waits_for_what_is_at_work(
    bench: Any, shard: Any, record: Any, executor_module: Any, settled: Any, wait: str, waits: bool
) -> None:
    at_work, let_go, ended = threading.Event(), threading.Event(), threading.Event()
    busy, line, before = LAST_WAITS[wait]
    edits = [(before + line, before + line.replace(line.strip(), "pass"))]

    def work(stage: str, id: int) -> None:
        if busy.startswith(stage) and id == 9:
            at_work.set()
            let_go.wait(0.1 if waits else 5)
            ended.set()
        if busy == "decode, left" and stage == "decode" and id == 5:  # nobody takes the batches behind this one
            at_work.wait(5)
            raise DatasetError("the file changed", stage="dataset")

    def queueing() -> None:
        if busy == "decode, late" and opened.engine.seen:  # the second batch is queued until the run is ending
            settled(lambda: opened.executor._abandoned)
            time.sleep(0.05)  # the run's threads are told right after that

    def source() -> Iterator[Any]:
        for batch in opened.executor.batches(0, rows):
            work("source", batch.start + 1)
            yield batch

    def write(scored: Any) -> None:
        at_work.wait(5)
        if busy != "decode, left":
            raise ArithmeticError

    module = executor_module([] if waits else edits)
    hooks = {"during": lambda ids: work("compute", ids[0]), "queueing": queueing}
    opened = bench(slots=4, streams=2, module=module, **hooks)
    rows = shard(range(1, 17), lambda id: work("decode", id))
    try:
        with pytest.raises((ArithmeticError, DatasetError)):
            opened.run_source(source(), record(write))
        assert ended.is_set() is waits
    finally:
        let_go.set()
        names = ("fill", "dispatch", "write", "settle")
        settled(lambda: not [t for t in threading.enumerate() if t.name in names])  # what was left behind ends
        opened.executor._abandoned = not waits


@pytest.mark.parametrize(("slots", "streams"), RING)
def test_the_host_and_the_simulated_device_give_the_same_results(
    bench: Any, shard: Any, record: Any, slots: int, streams: int
) -> None:
    def compute(ids: list[int]) -> None:
        assert 6 not in ids and 21 not in ids

    def spoil(ids: list[int], outputs: Any) -> None:
        outputs["y"][[row for row, id in enumerate(ids) if id == 10]] = float("inf")

    found = []
    for device in (HostDevice(), SimulatedDevice()):
        written = record()
        opened = bench(slots=slots, streams=streams, device=device, during=compute, spoil=spoil)
        stats = opened.run([shard(range(1, 14)), shard(range(20, 33))], written)
        found.append((written.ids, written.rows, written.failures, written.spans, stats.rows, stats.padded_elements))
    assert found[0] == found[1]
    assert sorted(found[0][2]) == [6, 10, 21]


def test_a_failed_run_leaves_the_simulated_device_usable(bench: Any, shard: Any, record: Any) -> None:
    def write(scored: Any) -> None:
        if scored.batch.start == 4:
            raise ArithmeticError

    opened = bench(slots=4, streams=2, device=SimulatedDevice())
    for _ in range(3):
        with pytest.raises(ArithmeticError):
            opened.run([shard(range(1, 33))], record(write))
        opened.assert_idle_and_usable()
