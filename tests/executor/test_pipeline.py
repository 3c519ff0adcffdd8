"""The ring's order, bounds and failure contract, on the CPU as a device, with gates instead of luck."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu_runtime.datasets.partition import RowFailure
from gpu_runtime.device.host import HostDevice
from gpu_runtime.device.simulated import SimulatedDevice
from gpu_runtime.errors import DatasetError, DeviceError, RowError
from gpu_runtime.executor.pipeline import Batch
from gpu_runtime.specs import TensorSpec

GATE_S = 5.0  # a gate that stays shut this long is a defect, and the test says which


class Broken(Exception):
    pass


def refuse_rows(*bad: int) -> Any:
    """An engine's or decoder's hook that fails on certain ids."""

    def during(ids: Any) -> None:
        if set(bad) & set(ids if isinstance(ids, list) else [ids]):
            raise Broken("a cell's value that nobody may see")

    return during


def unreadable(*bad: int) -> Any:
    def during(id: int) -> None:
        if id in bad:
            raise RowError("decode", "not a whole row")

    return during


class Gates:
    """One event for each key; waiting for one that nobody opens is an error."""

    def __init__(self) -> None:
        self._events: defaultdict[Any, threading.Event] = defaultdict(threading.Event)

    def open(self, key: Any) -> None:
        self._events[key].set()

    def wait(self, key: Any) -> None:
        assert self._events[key].wait(GATE_S), f"nobody opened {key!r}"


# --- order, shards, padding


@pytest.mark.parametrize(("slots", "streams"), [(2, 1), (4, 2), (7, 3)])
def test_order_out_is_order_in_though_decoders_finish_the_other_way_round(
    bench: Any, shard: Any, record: Any, slots: int, streams: int
) -> None:
    gates, ids, written = Gates(), list(range(48)), record()

    def decode(id: int) -> None:
        batch, row = divmod(id, 4)
        if row == 0 and batch % 2 == 0:  # an even batch's first piece ends after the whole odd batch behind it
            gates.wait(("decoded", 4 * (batch + 1) + 3))
        gates.open(("decoded", id))

    bench(slots=slots, streams=streams).run([shard(ids, decode)], written)
    assert written.ids == ids and written.right and not written.failures
    assert written.spans == [(0, start, start + 4) for start in range(0, 48, 4)]


def test_order_out_is_order_in_though_streams_finish_the_other_way_round(bench: Any, shard: Any, record: Any) -> None:
    gates, ids, written = Gates(), list(range(40)), record()

    def compute(seen: list[int]) -> None:
        batch = seen[0] // 4
        if batch % 2 == 0:
            gates.wait(("computed", batch + 1))
        gates.open(("computed", batch))

    bench(slots=4, streams=2, during=compute).run([shard(ids)], written)
    assert written.ids == ids and written.right


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 8, 11])
def test_the_last_batch_is_padded_for_the_engine_and_sliced_for_the_writer(
    bench: Any, shard: Any, record: Any, rows: int
) -> None:
    opened, ids, written = bench(), list(range(100, 100 + rows)), record()
    stats = opened.run([shard(ids)], written)
    assert written.ids == ids and written.right
    padded = -rows % 4
    assert (stats.rows, stats.batches, stats.padded_elements) == (rows, -(-rows // 4), padded)
    for batch in opened.engine.seen[:-1]:
        assert 0 not in batch
    if padded:  # with a value inside the declared range: the engine refuses anything else
        assert opened.engine.seen[-1][-padded:] == [0] * padded


def test_nothing_of_an_earlier_batch_is_left_in_the_padding(bench: Any, shard: Any, record: Any) -> None:
    opened = bench(slots=1)
    opened.run([shard([7, 8, 9, 10]), shard([11])], record())
    assert opened.engine.seen == [[7, 8, 9, 10], [11, 0, 0, 0]]


def test_batches_never_cross_shards(bench: Any, shard: Any, record: Any) -> None:
    shards, written = [shard(range(6)), shard(range(10, 11)), shard([]), shard(range(20, 28))], record()
    stats = bench().run(shards, written)
    assert written.spans == [(0, 0, 4), (0, 4, 6), (1, 0, 1), (3, 0, 4), (3, 4, 8)]
    assert written.ids == [*range(6), 10, *range(20, 28)] and written.right
    assert (stats.rows, stats.batches, stats.padded_elements) == (15, 5, 5)


def test_the_ring_does_not_drain_at_a_shard_s_border(bench: Any, shard: Any, record: Any) -> None:
    """Every batch computes only once the next one is decoded, the next shard's first one included."""
    gates, ids = Gates(), list(range(24))

    def compute(seen: list[int]) -> None:
        if seen[0] + 4 in ids:
            gates.wait(("decoded", seen[0] + 4))

    written = record()
    shards = [shard(ids[start : start + 8], lambda id: gates.open(("decoded", id))) for start in (0, 8, 16)]
    bench(slots=2, during=compute).run(shards, written)
    assert written.ids == ids and not written.failures


@pytest.mark.parametrize("streams", [1, 2, 3, 5])
def test_every_stream_computes_at_once(bench: Any, shard: Any, record: Any, streams: int) -> None:
    """With the slots that the executor chooses, the streams get their batches in turn."""
    together, written = threading.Barrier(streams), record()
    opened = bench(slots=None, streams=streams, during=lambda ids: together.wait(GATE_S))
    opened.run([shard(range(16 * streams))], written)
    assert written.ids == list(range(16 * streams)) and not written.failures


# --- bounds


class CountingDevice(HostDevice):
    def __init__(self) -> None:
        super().__init__()
        self.allocations = 0

    def pinned(self, nbytes: int) -> Any:
        self.allocations += 1
        return super().pinned(nbytes)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_slow_writer_holds_the_source_back_and_nothing_is_allocated(
    bench: Any, shard: Any, record: Any, settled: Any, slots: int
) -> None:
    device, started, finished, in_flight = CountingDevice(), set(), 0, []
    opened = bench(slots=slots, device=device)
    allocated = device.allocations

    def write(scored: Any) -> None:
        nonlocal finished
        expected = min(slots, 12 - finished)
        assert settled(lambda: len(started) - finished >= expected), "the ring does not fill"
        time.sleep(0.003)  # time enough for one batch too many
        in_flight.append(len(started) - finished)
        finished += 1

    opened.run([shard(range(48), lambda id: started.add(id // 4))], record(write))
    assert allocated == slots * 4  # two inputs and two outputs a slot
    assert device.allocations == allocated
    assert max(in_flight) == slots and finished == 12


def test_the_source_is_asked_for_one_batch_ahead_of_the_ring_at_most(bench: Any, shard: Any, record: Any) -> None:
    opened, taken, lead = bench(slots=2), 0, []
    rows = shard(range(40))

    def source() -> Iterator[Batch]:
        nonlocal taken
        for batch in opened.executor.batches(0, rows):
            taken += 1
            yield batch

    def write(scored: Any) -> None:
        time.sleep(0.002)
        lead.append(taken - scored.batch.start // 4)

    opened.run_source(source(), record(write))
    assert max(lead) <= 3


@pytest.mark.parametrize("batch", [0, 9])
def test_a_batch_size_that_the_engine_cannot_take_is_refused(bench: Any, batch: int) -> None:
    opened = bench()
    with pytest.raises(ValueError, match="batch must be 1 … 8"):
        type(opened.executor)(opened.engine, opened.device, batch=batch)


@pytest.mark.parametrize("slots", [0, -1])
def test_a_ring_without_slots_is_refused_instead_of_waiting_forever(bench: Any, slots: int) -> None:
    with pytest.raises(ValueError, match="slots must be at least 1"):
        bench(slots=slots)


# --- clause 1: rows that a decoder cannot read


def test_an_unreadable_row_leaves_a_hole_and_the_others_are_scored(bench: Any, shard: Any, record: Any) -> None:
    opened, written = bench(), record()
    stats = opened.run([shard(range(10, 21), unreadable(12, 20))], written)
    assert written.ids == [i for i in range(10, 21) if i not in (12, 20)] and written.right
    assert written.failures == {
        12: RowFailure(2, "decode", "not a whole row", "RowError"),
        20: RowFailure(2, "decode", "not a whole row", "RowError"),
    }
    assert opened.engine.seen == [[10, 11, 0, 13], [14, 15, 16, 17], [18, 19, 0, 0]]
    assert stats.rows == 11  # rows in = rows scored + rows reported


def test_a_batch_of_nothing_but_holes_goes_on(bench: Any, shard: Any, record: Any) -> None:
    written = record()
    bench().run([shard(range(12), unreadable(*range(4, 8)))], written)
    assert written.ids == [*range(4), *range(8, 12)] and written.right
    assert sorted(written.failures) == [4, 5, 6, 7]


def test_a_row_that_two_pieces_report_is_reported_once(bench: Any, shard: Any, record: Any) -> None:
    rows, written = shard(range(4)), record()
    whole = rows.pieces

    def pieces(start: int, stop: int, staging: Any) -> Any:
        second = [RowFailure(3, "input", "second", "ValueError"), RowFailure(1, "input", "other", "ValueError")]
        return [*whole(start, stop, staging), lambda: [RowFailure(3, "input", "first", "ValueError")], lambda: second]

    rows.pieces = pieces
    bench().run([rows], written)
    assert written.ids == [0, 2]
    assert {id: failure.reason for id, failure in written.failures.items()} == {1: "other", 3: "first"}


# --- clause 2: rows that must not reach the device


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("x", np.nan, "is not finite"),
        ("x", np.inf, "is not finite"),
        ("x", -np.inf, "is not finite"),
        ("x", 0.5, "is below its declared minimum 1"),
        ("id", 10_000, "is above its declared maximum 9999"),
        ("id", -1, "is below its declared minimum 0"),
    ],
)
@pytest.mark.parametrize("device", [HostDevice, SimulatedDevice])
def test_a_value_that_must_not_reach_the_device_does_not(
    bench: Any, shard: Any, record: Any, name: str, value: float, rule: str, device: Any
) -> None:
    """The simulated device's staging memory is garbage beyond the batch: that is nobody's row."""

    def spoil(id: int, row: int, staging: Any) -> None:
        if id in (3, 5, 6):  # the last batch is one of nothing but holes
            staging[name].reshape(len(staging[name]), -1)[row, -1] = value

    opened, written = bench(slots=1, device=device()), record()
    opened.run([shard(range(1, 7), spoil=spoil)], written)
    assert written.ids == [1, 2, 4] and written.right
    assert written.failures == {
        id: RowFailure((id - 1) % 4, "input", f"input {name!r} {rule}", "ValueError") for id in (3, 5, 6)
    }
    assert opened.engine.seen == [[1, 2, 0, 4], [0, 0, 0, 0]]
    for x, ids in zip(opened.engine.taken, opened.engine.seen, strict=True):
        assert np.isfinite(x).all() and (x >= 1).all() and (x[np.asarray(ids) == 0] == 1).all()


# --- clause 3: batches that the engine fails on


@pytest.mark.parametrize("bad", [(5,), (4, 7), (4, 5, 6), (4, 5, 6, 7), (0, 5, 10)], ids=str)
@pytest.mark.parametrize("streams", [1, 2])
def test_the_engine_s_bad_rows_are_found_and_the_rest_is_scored(
    bench: Any, shard: Any, record: Any, bad: tuple[int, ...], streams: int
) -> None:
    opened, written = bench(slots=streams + 1, streams=streams, during=refuse_rows(*bad)), record()
    rows = shard(range(1, 20)) if 0 not in bad else shard([20, *range(1, 20)])
    opened.engine.during = refuse_rows(*(20 if i == 0 else i for i in bad))
    stats = opened.run([rows], written)
    failed = {20 if i == 0 else i for i in bad}
    assert set(written.failures) == failed
    assert written.ids == [i for i in rows.ids if i not in failed] and written.right
    for failure in written.failures.values():
        assert (failure.stage, failure.reason, failure.exception) == (
            "engine",
            "the engine failed on this row",
            "Broken",
        )
    assert stats.rows == len(rows.ids)
    opened.assert_idle_and_usable(rows)


def test_what_the_engine_raises_while_a_batch_is_queued_is_bisected_as_well(
    bench: Any, shard: Any, record: Any
) -> None:
    """And what it had launched before it raised is over before the slot is used again."""
    opened, written = bench(), record()
    for raises in ("queueing", "queued"):  # before the launch, after it
        calls = 0

        def fail_once(raises: str = raises) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise Broken

        setattr(opened.engine, raises, fail_once)
        opened.run([shard(range(1, 17))], written)
        setattr(opened.engine, raises, lambda: None)
    assert written.ids == [*range(1, 17)] * 2 and written.right and not written.failures
    opened.assert_idle_and_usable()


@pytest.mark.parametrize("rows", [1, 6, 4000])
@pytest.mark.parametrize("where", ["queueing", "during"])
def test_an_engine_that_fails_on_harmless_values_too_is_to_blame_and_no_row(
    bench: Any, shard: Any, record: Any, where: str, rows: int
) -> None:
    runs: list[int] = []

    def broken(*ids: Any) -> None:
        runs.append(1)
        raise Broken("no such kernel")

    opened, written = bench(**{where: broken}), record()
    with pytest.raises(DeviceError, match="fails on harmless values, too"):
        opened.run([shard(range(1, rows + 1))], written)
    assert not written.ids and not written.failures
    assert len(runs) < 100  # one batch was enough to tell
    opened.assert_idle_and_usable()


def test_an_engine_that_breaks_in_the_days_last_batch_costs_no_row(bench: Any, shard: Any, record: Any) -> None:
    broken = []

    def breaks(ids: list[int]) -> None:
        if 10 in ids or broken:
            broken.append(ids)
            raise Broken("an illegal memory access")

    opened, written = bench(during=breaks), record()
    with pytest.raises(DeviceError, match="fails on harmless values, too"):
        opened.run([shard(range(1, 11))], written)
    assert not written.failures


def test_a_row_that_failed_alone_is_tried_once_more(bench: Any, shard: Any, record: Any) -> None:
    once, written = iter([Broken("a hiccup")]), record()

    def hiccup(ids: list[int]) -> None:
        if 9 in ids and (error := next(once, None)):
            raise error

    bench(during=hiccup).run([shard(range(1, 10))], written)  # the last batch holds one row
    assert written.ids == list(range(1, 10)) and not written.failures


def test_a_failure_that_does_not_come_back_costs_no_row(bench: Any, shard: Any, record: Any) -> None:
    once, written = iter([Broken("a hiccup")]), record()

    def hiccup(ids: list[int]) -> None:
        if 6 in ids and (error := next(once, None)):
            raise error

    bench(during=hiccup).run([shard(range(1, 13))], written)
    assert written.ids == list(range(1, 13)) and written.right


def test_holes_and_bad_rows_of_one_batch_are_each_reported_with_their_own_reason(
    bench: Any, shard: Any, record: Any
) -> None:
    written = record()
    bench(during=refuse_rows(3)).run([shard(range(1, 5), unreadable(2))], written)
    assert written.ids == [1, 4] and written.right
    assert {id: failure.stage for id, failure in written.failures.items()} == {2: "decode", 3: "engine"}


def test_a_failing_batch_of_holes_alone_is_not_retried_and_adds_no_reason(bench: Any, shard: Any, record: Any) -> None:
    opened, written = bench(during=refuse_rows(0)), record()
    opened.run([shard(range(1, 5), unreadable(1, 2, 3, 4))], written)
    assert {failure.stage for failure in written.failures.values()} == {"decode"}
    assert len(opened.engine.seen) == 1


def test_a_failing_batch_does_not_spoil_the_batches_queued_behind_it(bench: Any, shard: Any, record: Any) -> None:
    """They share its stream, and are on it before the failing one is looked at."""
    gates, written = Gates(), record()
    opened = bench(slots=4)

    def compute(ids: list[int]) -> None:
        if 2 in ids:
            gates.wait("behind")  # the batches behind are decoded, so queued or about to be
            raise Broken

    opened.engine.during = compute
    opened.run([shard(range(1, 33), lambda id: gates.open("behind") if id == 13 else None)], written)
    assert set(written.failures) == {2}
    assert written.ids == [i for i in range(1, 33) if i != 2] and written.right


# --- clause 5: outputs that no engine can have meant


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_whose_output_is_not_finite_is_reported(bench: Any, shard: Any, record: Any, value: float) -> None:
    def spoil(ids: list[int], outputs: Any) -> None:
        for row, id in enumerate(ids):
            if id in (0, 3, 9):  # 0: the padded rows, which concern nobody
                outputs["y"][row, 1] = value

    written = record()
    bench(spoil=spoil).run([shard(range(1, 11))], written)
    assert written.ids == [i for i in range(1, 11) if i not in (3, 9)] and written.right
    assert sorted(written.failures) == [3, 9]
    assert written.failures[3] == RowFailure(2, "output", "output 'y' is not finite", "FloatingPointError")


@pytest.mark.parametrize(
    ("bounds", "row", "rule"),
    [
        ({"minimum": 0}, (-1.0, 7.0), "is below its declared minimum 0"),
        ({"maximum": 50}, (1.0, 51.0), "is above its declared maximum 50"),
        ({"varies": True}, (7.0, 7.0), "is degenerate: all its values are the same"),
        ({"minimum": 0, "maximum": 50, "varies": True}, (np.nan, np.nan), "is not finite"),
    ],
    ids=str,
)
def test_an_output_that_the_engine_cannot_have_meant_is_reported_without_its_value(
    bench: Any, shard: Any, record: Any, bounds: Any, row: tuple[float, float], rule: str
) -> None:
    def spoil(ids: list[int], outputs: Any) -> None:
        for index, id in enumerate(ids):
            if id in (0, 6):  # 0: the padded rows, which concern nobody
                outputs["y"][index] = row

    outputs, written = (TensorSpec("y", "float32", (2,), **bounds), TensorSpec("twice", "int32")), record()
    bench(spoil=spoil, outputs=outputs).run([shard(range(1, 11))], written)
    assert written.ids == [i for i in range(1, 11) if i != 6] and written.right
    assert written.failures == {6: RowFailure(1, "output", f"output 'y' {rule}", "FloatingPointError")}


def test_outputs_are_looked_at_after_a_rescue_as_well(bench: Any, shard: Any, record: Any) -> None:
    def spoil(ids: list[int], outputs: Any) -> None:
        outputs["y"][[row for row, id in enumerate(ids) if id == 4], 0] = np.nan

    written = record()
    bench(during=refuse_rows(3), spoil=spoil).run([shard(range(1, 9), unreadable(1))], written)
    assert written.ids == [2, 5, 6, 7, 8] and written.right
    stages = {id: failure.stage for id, failure in written.failures.items()}
    assert stages == {1: "decode", 3: "engine", 4: "output"}


# --- clauses 6 and 7: runs that end early


@pytest.mark.parametrize("bad", [(10,), (9, 12), (9, 10, 11, 12)], ids=str)
@pytest.mark.parametrize("piece_rows", [1, 2, 4])
def test_the_rows_that_make_a_decoder_raise_are_found_and_the_rest_is_scored(
    bench: Any, shard: Any, record: Any, bad: tuple[int, ...], piece_rows: int
) -> None:
    opened, rows, written = bench(), shard(range(1, 22), refuse_rows(*bad), piece_rows=piece_rows), record()
    stats = opened.run([rows], written)
    assert written.ids == [i for i in range(1, 22) if i not in bad] and written.right
    assert set(written.failures) == set(bad)
    for id, failure in written.failures.items():
        assert failure == RowFailure((id - 1) % 4, "decode", "the decoder failed on this row", "Broken")
    assert stats.rows == 21
    opened.assert_idle_and_usable(rows)


def test_a_piece_that_writes_another_shape_costs_its_row_alone(bench: Any, shard: Any, record: Any) -> None:
    def spoil(id: int, row: int, staging: Any) -> None:
        if id == 7:
            staging["x"][row] = np.ones(5)

    opened, written = bench(), record()
    opened.run([shard(range(1, 14), spoil=spoil)], written)
    assert written.ids == [i for i in range(1, 14) if i != 7] and written.right
    assert written.failures == {7: RowFailure(2, "decode", "the decoder failed on this row", "ValueError")}


def test_other_pieces_of_a_batch_are_done_before_its_rows_are_tried_again(bench: Any, shard: Any, record: Any) -> None:
    """Or they would write into rows that were decoded meanwhile."""
    at_work, tried_again = threading.Event(), threading.Event()
    rows, written, tries, together = shard(range(1, 5)), record(), [], []

    def decode(id: int) -> None:
        tries.append(id)
        if id == 3 and tries.count(3) == 1:
            at_work.set()
            tried_again.wait(0.1)
        if id == 1 and tries.count(1) == 1:
            at_work.wait(GATE_S)
            raise Broken
        if id == 1:
            together.append(rows.working)
            tried_again.set()

    rows.during = decode
    bench().run([rows], written)
    assert together == [1] and written.ids == [1, 2, 3, 4] and written.right


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (DatasetError("the file changed", stage="dataset"), DatasetError),
        (MemoryError(), DeviceError),
        (SystemExit(2), SystemExit),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["own", "memory", "exit", "interrupt"],
)
def test_what_is_no_row_s_fault_ends_the_run_when_a_decoder_raises_it(
    bench: Any, shard: Any, record: Any, error: BaseException, raised: type[BaseException]
) -> None:
    def decode(id: int) -> None:
        if id == 10:
            raise error

    opened, rows, written = bench(), shard(range(1, 33), decode), record()
    with pytest.raises(raised) as caught:
        opened.run([rows], written)
    assert error in (caught.value, caught.value.__cause__)
    assert written.ids == list(range(1, 9)) and written.right and not written.failures
    opened.assert_idle_and_usable(rows)


@pytest.mark.parametrize("error", [Broken("source"), SystemExit(2)], ids=["own", "exit"])
def test_a_source_that_raises_ends_the_run_after_the_batches_it_gave(
    bench: Any, shard: Any, record: Any, error: BaseException
) -> None:
    opened, rows, written = bench(), shard(range(1, 33)), record()

    def source() -> Iterator[Batch]:
        for number, batch in enumerate(opened.executor.batches(0, rows)):
            if number == 5:
                raise error
            yield batch

    with pytest.raises(type(error)) as caught:
        opened.run_source(source(), written)
    assert caught.value is error
    assert written.ids == list(range(1, 21)) and written.right
    opened.assert_idle_and_usable(rows)


def test_a_shard_that_raises_while_it_cuts_pieces_leaves_none_behind(bench: Any, shard: Any, record: Any) -> None:
    gates = Gates()
    opened, rows, written = bench(), shard(range(1, 9), lambda id: gates.open("started") or time.sleep(0.01)), record()
    whole = rows.pieces

    def pieces(start: int, stop: int, staging: Any) -> Iterator[Any]:
        yield from whole(start, stop, staging)
        gates.wait("started")
        raise Broken

    rows.pieces = pieces
    with pytest.raises(Broken):
        opened.run([rows], written)
    assert rows.working == 0 and written.ids == []
    opened.assert_idle_and_usable(rows)


@pytest.mark.parametrize(
    "error", [Broken("disk full"), KeyboardInterrupt(), SystemExit(1)], ids=["own", "interrupt", "exit"]
)
@pytest.mark.parametrize("streams", [1, 2])
def test_a_write_that_raises_ends_the_run(
    bench: Any, shard: Any, record: Any, streams: int, error: BaseException
) -> None:
    def write(scored: Any) -> None:
        if scored.batch.start == 8:
            raise error

    opened, rows, written = bench(slots=streams + 2, streams=streams), shard(range(1, 65)), record(write)
    with pytest.raises(type(error)) as caught:
        opened.run([rows], written)
    assert caught.value is error
    assert written.ids == list(range(1, 9)) and written.right
    opened.assert_idle_and_usable(rows)


def test_an_engine_that_raises_what_is_no_exception_of_a_batch_ends_the_run(
    bench: Any, shard: Any, record: Any
) -> None:
    gates, error = Gates(), SystemExit(7)

    def compute(ids: list[int]) -> None:
        if 5 in ids:
            gates.wait("the batch behind works")
            raise error
        if 9 in ids:
            gates.open("the batch behind works")
            time.sleep(0.05)

    opened, rows, written = bench(slots=4, streams=2, during=compute), shard(range(1, 13)), record()
    with pytest.raises(SystemExit) as caught:
        opened.run([rows], written)
    assert caught.value is error
    assert written.ids == [1, 2, 3, 4]
    opened.assert_idle_and_usable(rows)


def test_an_exit_raised_after_a_batch_was_launched_leaves_nothing_at_work(bench: Any, shard: Any, record: Any) -> None:
    """What the engine had launched before it raised is behind an event all the same."""
    gates, error = Gates(), SystemExit(7)

    def queued() -> None:
        gates.wait("at work")
        raise error

    def compute(ids: list[int]) -> None:
        gates.open("at work")
        time.sleep(0.05)

    opened, rows = bench(during=compute, queued=queued), shard(range(1, 13))
    with pytest.raises(SystemExit) as caught:
        opened.run([rows], record())
    assert caught.value is error
    opened.assert_idle_and_usable(rows)


@pytest.mark.parametrize("busy", ["decode", "compute", "source"])
def test_a_run_that_ends_waits_for_whatever_still_works_in_it(
    bench: Any, shard: Any, record: Any, limited: Any, busy: str
) -> None:
    """`write` fails while another stage is in the middle of something: `run` may not return before that ends."""
    gates, ended = Gates(), threading.Event()

    def work(stage: str, id: int) -> None:
        if stage == busy and id == 9:
            gates.open("busy")
            gates.wait("let it end")

    opened = bench(slots=4, streams=2, during=lambda ids: work("compute", ids[0]))
    rows = shard(range(1, 33), lambda id: work("decode", id))

    def source() -> Iterator[Batch]:
        for batch in opened.executor.batches(0, rows):
            work("source", batch.start + 1)
            yield batch

    def write(scored: Any) -> None:
        gates.wait("busy")
        raise Broken

    def run() -> None:
        with pytest.raises(Broken):
            opened.run_source(source(), write)
        ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    gates.wait("busy")
    assert not ended.wait(0.05), f"the run ended while {busy} was still at work"
    gates.open("let it end")
    limited(thread.join)
    assert ended.is_set()
    opened.assert_idle_and_usable(rows)


def test_pieces_that_had_not_started_are_never_started(bench: Any, shard: Any, record: Any) -> None:
    gates, decoded = Gates(), []

    def decode(id: int) -> None:
        decoded.append(id)
        if id == 5:
            gates.open("second batch")
        if id >= 5:
            time.sleep(0.01)

    def write(scored: Any) -> None:
        gates.wait("second batch")
        raise Broken

    opened, rows = bench(slots=4, decode_workers=1), shard(range(1, 65), decode, piece_rows=1)
    with pytest.raises(Broken):
        opened.run([rows], write)
    count = len(decoded)
    opened.assert_idle_and_usable(rows)
    assert len(decoded) == count < 16


@pytest.mark.parametrize("name", ["settle", "fill", "dispatch", "write"])
def test_a_run_that_gets_no_thread_ends_with_that_error(
    bench: Any, shard: Any, record: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    opened, rows = bench(), shard(range(1, 33))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            opened.run([rows], record())
    opened.assert_idle_and_usable(rows)


def test_one_executor_survives_every_kind_of_failure_in_turn(bench: Any, shard: Any, record: Any) -> None:
    opened = bench(slots=3, streams=2)

    def write(scored: Any) -> None:
        raise Broken

    def decode(id: int) -> None:
        if id == 9:
            raise DatasetError("the file changed", stage="dataset")

    for _ in range(3):
        with pytest.raises(DatasetError):
            opened.run([shard(range(1, 33), decode)], record())
        with pytest.raises(Broken):
            opened.run([shard(range(1, 33))], write)
        opened.engine.during = refuse_rows(7)
        opened.run([shard(range(1, 33))], record())
        opened.assert_idle_and_usable()


def test_a_closed_executor_refuses_to_run_and_does_not_hang(bench: Any, shard: Any, record: Any) -> None:
    opened = bench()
    opened.run([shard(range(8))], record())
    opened.executor.close()
    opened.executor.close()
    written = record()
    with pytest.raises(RuntimeError, match="closed"):
        opened.run([shard(range(8))], written)
    assert written.spans == []


# --- what a run says about itself


def test_an_empty_run_has_empty_statistics(bench: Any, record: Any) -> None:
    stats = bench().run([], record())
    assert (stats.rows, stats.batches, stats.padded_elements, stats.latency_p99_ms) == (0, 0, 0, 0.0)
    assert all(stage.busy_s == 0 for name, stage in stats.stages.items() if name != "read")


def test_statistics_are_of_one_run_not_of_all(bench: Any, shard: Any, record: Any) -> None:
    opened = bench(during=lambda ids: time.sleep(0.002))
    first = opened.run([shard(range(40))], record())
    second = opened.run([shard(range(6))], record())
    assert (second.rows, second.batches, second.padded_elements) == (6, 2, 2)
    assert second.stages["compute"].busy_s < first.stages["compute"].busy_s
    assert 0 < second.latency_p50_ms <= second.latency_p90_ms <= second.latency_p99_ms


@pytest.mark.parametrize(
    ("slow", "relief"), [("decode", "decode workers"), ("compute", "faster precision"), ("write", "output columns")]
)
@pytest.mark.parametrize("workers", [1, 16])
def test_the_slow_stage_is_named_as_the_bottleneck(
    bench: Any, shard: Any, record: Any, slow: str, relief: str, workers: int
) -> None:
    """With many more workers than the ring holds pieces as well: idle hands do not make decoding look fast."""

    def work(stage: str) -> None:
        time.sleep(0.02 if stage == slow else 0.002)

    opened = bench(decode_workers=workers, during=lambda ids: work("compute"))
    rows = shard(range(48), lambda id: work("decode") if id % 4 == 0 else None, piece_rows=4)
    stats = opened.run([rows], record(lambda scored: work("write")))
    assert stats.bottleneck == slow
    assert relief in stats.relief
    others = [stage.occupancy for name, stage in stats.stages.items() if name != slow]
    assert max(others) < stats.stages[slow].occupancy <= 1.001
    assert stats.stages[slow].occupancy > 0.35  # of sixteen workers, three that are never idle would be 0.19


def test_packing_rows_is_named_where_it_holds_the_run_back(bench: Any, shard: Any, record: Any) -> None:
    """A source that packs columns into rows, or checks what it shows, does so on the one thread that reads."""
    opened, rows = bench(during=lambda ids: time.sleep(0.002)), shard(range(48))

    def packed(start: int, stop: int) -> Any:
        time.sleep(0.02)
        staging = {spec.name: np.zeros((stop - start, *spec.shape), spec.dtype) for spec in opened.engine.file.inputs}
        for piece in rows.pieces(start, stop, staging):
            piece()
        return staging

    rows.view = packed
    written = record()
    stats = opened.run([rows], written)
    assert written.ids == list(range(48)) and written.right
    assert stats.bottleneck == "read" and "column layout" in stats.relief


@pytest.mark.parametrize("slow", ["read", "decode", "compute", "write"])
def test_the_time_that_others_stood_idle_is_the_slow_stages(bench: Any, shard: Any, record: Any, slow: str) -> None:
    def work(stage: str) -> None:
        time.sleep(0.02 if stage == slow else 0.001)

    opened = bench(slots=3, decode_workers=1, during=lambda ids: work("compute"))

    def shards() -> Any:
        for first in range(0, 48, 4):
            work("read")
            yield shard(range(first, first + 4), lambda id: work("decode") if id % 4 == 0 else None, piece_rows=4)

    stats = opened.run(shards(), record(lambda scored: work("write")))
    waits = {name: stage.wait_s for name, stage in stats.stages.items()}
    assert max(waits, key=waits.__getitem__) == slow
    assert waits[slow] > 0.5 * stats.wall_s > sum(waits.values()) - waits[slow]


def test_efficiency_is_cpu_time_over_that_of_all_cores(bench: Any, shard: Any, record: Any) -> None:
    stats = replace(bench().run([shard(range(4))], record()), cpu_s=3.0, cores=2, wall_s=2.0)
    assert stats.efficiency == 0.75


def test_a_decoder_limited_by_the_ring_is_the_bottleneck_before_a_busy_engine(
    bench: Any, shard: Any, record: Any
) -> None:
    """Three slots, one piece each: of sixteen workers three can work, and those hardly rest."""
    opened = bench(slots=3, decode_workers=16, during=lambda ids: time.sleep(0.005))
    rows = shard(range(64), lambda id: time.sleep(0.02) if id % 4 == 0 else None, piece_rows=4)
    stats = opened.run([rows], record())
    assert stats.bottleneck == "decode"


# --- the fault plan


def test_the_fault_plan_is_told_of_each_batch_before_and_after(bench: Any, shard: Any, record: Any) -> None:
    told: list[str] = []
    written = record(lambda scored: told.append("write"))
    bench(slots=1, options={"faults": told.append}).run([shard(range(1, 11))], written)
    assert told == ["before decode", "after decode", "before enqueue", "after enqueue", "write"] * 3


@pytest.mark.parametrize("point", ["before decode", "after decode", "before enqueue", "after enqueue"])
def test_what_a_fault_plan_raises_ends_the_run(bench: Any, shard: Any, record: Any, point: str) -> None:
    told: list[str] = []

    def faults(reached: str) -> None:
        told.append(reached)
        if reached == point and told.count(point) == 2:
            raise Broken

    opened, rows, written = bench(options={"faults": faults}), shard(range(1, 33)), record()
    with pytest.raises(Broken):
        opened.run([rows], written)
    assert written.ids == [1, 2, 3, 4]
    opened.assert_idle_and_usable(rows)
