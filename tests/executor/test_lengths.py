"""Rows that differ in length go through the ring like others: right, each once, in few shapes, within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.backends.protocol import EngineFile, EngineOptions
from gpu_runtime.datasets.batching import longest_first
from gpu_runtime.datasets.partition import RowFailure
from gpu_runtime.device.host import HostDevice, cpu_class
from gpu_runtime.device.simulated import SimulatedDevice
from gpu_runtime.errors import DeviceError
from gpu_runtime.executor.pipeline import ScoredBatch, StreamExecutor
from gpu_runtime.specs import TensorSpec

IDS = TensorSpec("ids", "int32", (-1,), minimum=1, maximum=9_999)
MASK = TensorSpec("mask", "int32", (-1,), mask=True)
SUM = TensorSpec("sum", "int64", ())
MAX_BATCH, LENGTHS, BUDGET = 8, (2, 5, 12), 24


@dataclass
class Summing:
    """Sums each row's ids where the mask says that there are some. `during(ids)` runs first, on the stream."""

    during: Callable[[Any], None] = lambda ids: None
    shapes: list[tuple[int, int]] = field(default_factory=list)
    options = EngineOptions(streams=2)
    file = EngineFile(
        Path("engine"), "", "numpy", "1", "fp32", "fp32", None, cpu_class(), "", (IDS, MASK), (SUM,), MAX_BATCH, 0,
        max_length=LENGTHS[-1],
    )  # fmt: skip

    def create_context(self) -> Summing:
        return self

    def close(self) -> None:
        pass

    def enqueue(self, inputs: Any, outputs: Any, stream: Any) -> None:
        ids, mask = inputs["ids"], inputs["mask"]
        assert ids.shape == mask.shape and len(outputs["sum"]) == len(ids)

        def run() -> None:
            self.shapes.append(ids.shape)
            assert (ids >= 1).all() and set(np.unique(mask)) <= {0, 1} and (mask.sum(axis=1) > 0).all()
            self.during(ids)
            np.sum(ids * mask, axis=1, out=outputs["sum"])

        stream.launch(run)


class Sequences:
    """Row i holds `lengths[i]` ids, all of them `first + i`; the reader gives the longest first."""

    def __init__(self, lengths: list[int], first: int = 1) -> None:
        found = np.asarray(lengths)
        self.order = longest_first(found)
        self.lengths, self.rows = found[self.order], len(lengths)
        self.ids = first + self.order

    def view(self, start: int, stop: int) -> None:
        raise AssertionError("rows of unequal length lie nowhere as the engine takes them")

    def pieces(self, start: int, stop: int, staging: Any) -> Any:
        def fill() -> list[RowFailure]:
            staging["ids"][:], staging["mask"][:] = IDS.filler, 0
            for row in range(start, stop):
                staging["ids"][row - start, : self.lengths[row]] = self.ids[row]
                staging["mask"][row - start, : self.lengths[row]] = 1
            return []

        return [fill] if stop > start else []


class Sums:
    """What was written: row of the shard → its sum; and which rows failed."""

    def __init__(self) -> None:
        self.found: dict[int, int] = {}
        self.failed: dict[int, str] = {}

    def __call__(self, scored: ScoredBatch) -> None:
        shard, start = scored.batch.reader, scored.batch.start
        order: Any = shard.order
        bad = {failure.row: failure.reason for failure in scored.failures}
        for row in range(scored.batch.count):
            place = int(order[start + row])
            assert place not in self.found and place not in self.failed
            if row in bad:
                self.failed[place] = bad[row]
            else:
                self.found[place] = int(scored.outputs["sum"][row])


def expected(lengths: list[int], first: int = 1) -> dict[int, int]:
    return {row: length * (first + row) for row, length in enumerate(lengths)}


@pytest.fixture(params=[HostDevice, SimulatedDevice])
def device(request: Any) -> Iterator[Any]:
    with request.param() as opened:
        yield opened


def run(engine: Summing, device: Any, lengths: list[int], **options: Any) -> tuple[Sums, Any, StreamExecutor]:
    written, shard = Sums(), Sequences(lengths)
    with StreamExecutor(engine, device, batch=BUDGET, lengths=LENGTHS, decode_workers=2, **options) as executor:
        stats = executor.run(executor.batches(0, shard), written)  # type: ignore[arg-type]
    return written, stats, executor


MIXED = np.random.default_rng(0).integers(1, 13, 60).tolist()


def test_each_row_gives_what_it_gives_alone_in_few_shapes(device: Any) -> None:
    engine = Summing()
    written, stats, _ = run(engine, device, MIXED)
    assert written.found == expected(MIXED) and not written.failed
    # One shape for each length, whatever the rows: 24 elements of 12, 5 and 2, but never more than 8 rows.
    assert set(engine.shapes) == {(2, 12), (4, 5), (8, 2)}
    assert (stats.rows, stats.elements) == (60, sum(MIXED))
    assert stats.padded_elements == sum(rows * length for rows, length in engine.shapes) - sum(MIXED)
    assert stats.padding == stats.padded_elements / sum(MIXED)


def test_a_row_of_the_longest_length_alone_is_a_batch(device: Any) -> None:
    engine = Summing()
    written, stats, _ = run(engine, device, [12])
    assert written.found == {0: 12} and engine.shapes == [(2, 12)] and stats.padded_elements == 12


def test_a_row_that_the_engine_fails_on_is_found_and_the_rest_kept(device: Any) -> None:
    def refuse(ids: Any) -> None:
        if (ids == 18).any():
            raise RuntimeError("no")

    written, stats, _ = run(Summing(refuse), device, MIXED)
    assert list(written.failed) == [17]
    assert written.found == {row: total for row, total in expected(MIXED).items() if row != 17}
    assert stats.rows == 60 and stats.padded_elements >= 0


def test_out_of_memory_lowers_the_budget_of_all_lengths(device: Any) -> None:
    told: list[int] = []

    def room_for_ten(ids: Any) -> None:
        if ids.size > 12:
            raise MemoryError

    engine = Summing(room_for_ten)
    written, _, executor = run(engine, device, MIXED, ceiling_lowered=told.append)
    assert written.found == expected(MIXED) and not written.failed
    assert told == [12] and executor.batch == 12
    ran = {shape for shape in engine.shapes if shape[0] * shape[1] <= 12}
    assert ran == {(1, 12), (2, 5), (6, 2)}


def test_a_row_too_long_for_the_device_is_reported_where_shorter_ones_fit(device: Any) -> None:
    lengths = [5, 12, 2, 12, 4]

    def room_for_five(ids: Any) -> None:
        if ids.shape[1] > 5:
            raise MemoryError

    written, stats, _ = run(Summing(room_for_five), device, lengths)
    reason = "the device has no memory for a row of this length"
    assert written.failed == {1: reason, 3: reason} and stats.rows == 5
    assert written.found == {row: total for row, total in expected(lengths).items() if row not in (1, 3)}


def test_rows_that_are_too_long_do_not_each_cost_a_whole_search_for_room() -> None:
    lengths = [12] * 20 + [5] * 4

    def room_for_five(ids: Any) -> None:
        if ids.shape[1] > 5:
            raise MemoryError

    engine = Summing(room_for_five)
    with HostDevice() as device:
        written, _, _ = run(engine, device, lengths, slots=1)
    assert list(written.failed) == list(range(20)) and list(written.found) == list(range(20, 24))
    # Once for each row; the first batch, of two, is also tried as a whole, twice.
    assert sum(length == 12 for _, length in engine.shapes) == 20 + 2


def test_no_row_of_the_shortest_length_is_blamed_for_the_memory(device: Any) -> None:
    def room_for_fillers(ids: Any) -> None:
        if (ids > IDS.filler).any():
            raise MemoryError

    with pytest.raises(DeviceError, match="out of memory while running a single row"):
        run(Summing(room_for_fillers), device, [2, 2])


def test_an_engine_that_fails_on_one_length_costs_the_rows_of_that_length(device: Any) -> None:
    lengths = [5, 12, 2, 11]

    def no_twelve(ids: Any) -> None:
        if ids.shape[1] == 12:
            raise RuntimeError("no kernel")

    written, _, _ = run(Summing(no_twelve), device, lengths)
    assert written.failed == dict.fromkeys((1, 3), "the engine failed on this row")
    assert written.found == {row: total for row, total in expected(lengths).items() if row in (0, 2)}


def test_an_engine_that_fails_on_every_length_ends_the_run(device: Any) -> None:
    def broken(ids: Any) -> None:
        raise RuntimeError("no kernel")

    with pytest.raises(DeviceError, match="fails on harmless values, too"):
        run(Summing(broken), device, [12, 2])


def test_a_device_without_room_for_the_shortest_row_ends_the_run(device: Any) -> None:
    def no_room(ids: Any) -> None:
        raise MemoryError

    with pytest.raises(DeviceError, match="out of memory while running a single row"):
        run(Summing(no_room), device, [12, 2])


def test_an_executor_wants_lengths_that_end_with_the_engines_longest() -> None:
    with HostDevice() as device, pytest.raises(ValueError, match=r"lengths must end with 12 .*, got 9"):
        StreamExecutor(Summing(), device, batch=8, lengths=(4, 9))
    with HostDevice() as device, pytest.raises(ValueError, match=r"batch must be 1 … 96"):
        StreamExecutor(Summing(), device, batch=97, lengths=LENGTHS)


def test_short_and_long_shards_follow_each_other(device: Any) -> None:
    engine, found = Summing(), dict[int, int]()
    shards = [[3, 1, 12], [], [2] * 20, [5]]

    def write(scored: ScoredBatch) -> None:
        one = Sums()
        one(scored)
        found.update({1_000 * scored.batch.shard + row: total for row, total in one.found.items()})

    with StreamExecutor(engine, device, batch=BUDGET, lengths=LENGTHS, decode_workers=2) as executor:
        executor.run(
            (
                batch
                for number, lengths in enumerate(shards)
                for batch in executor.batches(number, Sequences(lengths))  # type: ignore[arg-type]
            ),
            write,
        )
    wanted = {1_000 * n + row: total for n, lengths in enumerate(shards) for row, total in expected(lengths).items()}
    assert found == wanted
