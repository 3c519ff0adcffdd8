"""Rows that lie in memory as the engine takes them are handed on as they lie, where device and host share memory.

Whatever happens to such a batch, the memory it lies in stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpu_runtime.datasets.partition import RowFailure, origins_of
from gpu_runtime.device.simulated import SimulatedDevice
from gpu_runtime.errors import DatasetError, DeviceError
from gpu_runtime.executor.pipeline import Batch


class Broken(Exception):
    pass


class HeldShard:
    """Rows `ids` in two arrays. `looking(start)` runs in each `view`, which gives nothing where it returns False."""

    working, lengths = 0, None

    def __init__(self, ids: Sequence[int], looking: Callable[[int], Any] = lambda start: True) -> None:
        self.ids, self.rows, self._looking = list(ids), len(ids), looking
        rows = np.asarray(self.ids, np.int32)
        x = np.stack([1 + rows % 7, 1 + rows % 5, 1 + rows % 3], axis=1).astype(np.float32)
        self.arrays: dict[str, Any] = {"x": x, "id": rows}
        self.copied: list[tuple[int, int]] = []

    def origins(self, start: int, stop: int) -> Any:
        return origins_of([str(id) for id in self.ids[start:stop]], "memory", range(start, stop))

    def labels(self) -> None:
        return None

    def view(self, start: int, stop: int) -> Any:
        return {name: values[start:stop] for name, values in self.arrays.items()} if self._looking(start) else None

    def pieces(self, start: int, stop: int, staging: Any) -> Any:
        def copy() -> list[RowFailure]:
            self.copied.append((start, stop))
            for name, values in self.arrays.items():
                staging[name][:] = values[start:stop]
            return []

        return [copy]

    def lies_in(self, inputs: Any) -> bool:
        """Whether the engine was given this memory: all of its inputs, or none of them."""
        (shared,) = {np.shares_memory(inputs[name], values) for name, values in self.arrays.items()}
        return shared


@pytest.fixture
def untouched() -> Iterator[Callable[..., HeldShard]]:
    """`untouched(ids, …)` makes a shard whose arrays, when the test ends, must be what they were when it ran."""
    made: list[tuple[HeldShard, dict[str, Any]]] = []

    def make(ids: Sequence[int], *looking: Any, **cells: tuple[int, Any]) -> HeldShard:
        """`cells`: input → the row and the value that its last number gets."""
        shard = HeldShard(ids, *looking)
        for name, (row, value) in cells.items():
            shard.arrays[name].reshape(shard.rows, -1)[row, -1] = value
        for values in shard.arrays.values():
            values.flags.writeable = False  # as Arrow's are
        made.append((shard, {name: values.copy() for name, values in shard.arrays.items()}))
        return shard

    yield make
    for shard, before in made:
        for name, values in before.items():
            np.testing.assert_array_equal(shard.arrays[name], values)


def refuse(*bad: int) -> Callable[[list[int]], None]:
    def during(ids: list[int]) -> None:
        if set(bad) & set(ids):
            raise Broken("a cell's value that nobody may see")

    return during


@pytest.mark.parametrize("streams", [1, 2])
def test_a_full_batch_is_handed_on_as_it_lies_and_the_short_last_one_is_copied(
    bench: Any, record: Any, untouched: Any, streams: int
) -> None:
    opened, rows, written = bench(slots=2 * streams, streams=streams), untouched(range(1, 11)), record()
    stats = opened.run([rows], written)
    assert written.ids == rows.ids and written.right and not written.failures
    assert sorted(opened.engine.seen) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert [rows.lies_in(inputs) for inputs in opened.engine.handed] == [True, True, False]
    for inputs, start in zip(opened.engine.handed, (0, 4), strict=False):
        assert all(inputs[name].ctypes.data == values[start:].ctypes.data for name, values in rows.arrays.items())
    assert rows.copied == [(8, 10)], "no piece of a handed batch is decoded"
    assert (stats.rows, stats.batches, stats.padded_elements) == (10, 3, 2)
    opened.assert_idle_and_usable(rows)


def test_a_device_with_memory_of_its_own_is_given_copies(bench: Any, record: Any, untouched: Any) -> None:
    asked: list[int] = []
    opened, rows, written = bench(device=SimulatedDevice()), untouched(range(1, 11), asked.append), record()
    opened.run([rows], written)
    assert written.ids == rows.ids and written.right
    assert not any(rows.lies_in(inputs) for inputs in opened.engine.handed)
    assert (asked, sorted(rows.copied)) == ([], [(0, 4), (4, 8), (8, 10)])


def test_a_source_may_hand_on_some_batches_and_fill_others(bench: Any, record: Any, untouched: Any) -> None:
    opened, rows, written = bench(slots=1), untouched(range(1, 17), lambda start: start in (0, 8)), record()
    opened.run([rows], written)
    assert written.ids == rows.ids and written.right
    assert [rows.lies_in(inputs) for inputs in opened.engine.handed] == [True, False, True, False]
    assert rows.copied == [(4, 8), (12, 16)]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("x", np.nan, "is not finite"),
        ("x", np.inf, "is not finite"),
        ("x", 0.5, "is below its declared minimum 1"),
        ("id", 10_000, "is above its declared maximum 9999"),
        ("id", -1, "is below its declared minimum 0"),
    ],
)
def test_a_value_that_must_not_reach_the_device_becomes_a_hole_in_a_copy(
    bench: Any, record: Any, untouched: Any, name: str, value: float, rule: str
) -> None:
    rows, written = untouched(range(1, 13), **{name: (5, value)}), record()
    opened = bench(slots=1)
    opened.run([rows], written)
    assert written.ids == [id for id in range(1, 13) if id != 6] and written.right
    assert written.failures == {6: RowFailure(1, "input", f"input {name!r} {rule}", "ValueError")}
    assert opened.engine.seen == [[1, 2, 3, 4], [5, 0, 7, 8], [9, 10, 11, 12]]
    assert [rows.lies_in(inputs) for inputs in opened.engine.handed] == [True, False, True]
    assert all(np.isfinite(x).all() and (x >= 1).all() for x in opened.engine.taken)
    assert (opened.engine.taken[1][1] == 1).all(), "the hole is harmless in every input"


@pytest.mark.parametrize("bad", [(6,), (5, 8), (5, 6, 7, 8)], ids=str)
@pytest.mark.parametrize("streams", [1, 2])
def test_a_handed_batch_that_the_engine_fails_on_is_bisected(
    bench: Any, record: Any, untouched: Any, bad: tuple[int, ...], streams: int
) -> None:
    rows, written = untouched(range(1, 21)), record()
    opened = bench(slots=2 * streams, streams=streams, during=refuse(*bad))
    opened.run([rows], written)
    assert written.ids == [id for id in rows.ids if id not in bad] and written.right
    assert written.failures == {
        id: RowFailure((id - 1) % 4, "engine", "the engine failed on this row", "Broken") for id in bad
    }
    assert rows.copied == [], "what was handed is brought in, not decoded"
    opened.assert_idle_and_usable(rows)


def test_a_handed_batch_that_cannot_be_queued_is_bisected_too(bench: Any, record: Any, untouched: Any) -> None:
    calls: list[int] = []

    def fail_once() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Broken

    opened, rows, written = bench(queueing=fail_once), untouched(range(1, 17)), record()
    opened.run([rows], written)
    assert written.ids == rows.ids and written.right and not written.failures


def test_an_engine_that_is_broken_costs_no_handed_row(bench: Any, record: Any, untouched: Any) -> None:
    def broken(ids: list[int]) -> None:
        raise Broken("no such kernel")

    opened, rows, written = bench(during=broken), untouched(range(1, 17)), record()
    with pytest.raises(DeviceError, match="fails on harmless values, too"):
        opened.run([rows], written)
    assert not written.ids and not written.failures
    opened.assert_idle_and_usable(rows)


@pytest.mark.parametrize("late", [0, 24])
@pytest.mark.parametrize("streams", [1, 2])
def test_handed_batches_are_halved_until_they_fit_and_later_ones_are_handed_again(
    bench: Any, record: Any, untouched: Any, streams: int, late: int
) -> None:
    """The device loses its room from some row on; batches on their way by then were cut too large."""
    ceilings: list[int] = []

    def room_for_two(ids: list[int]) -> None:
        if len(ids) > 2 and max(ids) > late:
            raise MemoryError

    rows, written = untouched(range(1, 302)), record()
    opened = bench(
        batch=8,
        slots=4 * streams,
        streams=streams,
        during=room_for_two,
        options={"ceiling_lowered": ceilings.append},
    )
    opened.run([rows], written)
    assert written.ids == rows.ids and written.right and not written.failures
    assert ceilings == [4, 2] and opened.executor.batch == 2
    handed = [len(inputs["id"]) for inputs in opened.engine.handed if rows.lies_in(inputs)]
    assert handed[0] == 8 and handed[-9:] == [2] * 9
    assert handed.count(8) >= late // 8
    opened.assert_idle_and_usable(rows)


@pytest.mark.parametrize("error", [Broken("at its end"), DatasetError("got shorter", stage="dataset")], ids=str)
def test_what_a_view_raises_ends_the_run(bench: Any, record: Any, untouched: Any, error: Exception) -> None:
    def looking(start: int) -> bool:
        if start == 8:
            raise error
        return True

    opened, rows, written = bench(), untouched(range(1, 21), looking), record()
    with pytest.raises(type(error)) as caught:
        opened.run([rows], written)
    assert caught.value is error
    assert written.ids == list(range(1, 9))[: len(written.ids)] and written.right and not written.failures
    assert rows.copied == []
    opened.assert_idle_and_usable(rows)


def test_a_batch_that_is_full_no_more_once_the_ceiling_came_down_is_filled_in(
    bench: Any, record: Any, untouched: Any
) -> None:
    """Cut at eight rows, taken up when four fit: it is the rescue's, which needs it in the slot."""
    opened, rows, written = bench(batch=8), untouched(range(1, 9)), record()

    def batches() -> Iterator[Batch]:
        opened.executor.ceiling.batching = replace(opened.executor.ceiling.batching, budget=4)
        yield Batch(0, rows, 0, 8)

    opened.run_source(batches(), written)
    assert written.ids == rows.ids and written.right and rows.copied == [(0, 8)]
    assert opened.engine.seen == [[1, 2, 3, 4], [5, 6, 7, 8]]
