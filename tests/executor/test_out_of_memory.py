"""Clause 4: out of memory is no row's fault. The batch is halved until it fits, and no later one is larger."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_runtime.datasets.partition import RowFailure
from gpu_runtime.errors import DeviceError, RowError
from gpu_runtime.executor.failures import is_out_of_memory

ALLOCATE = "void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*)"
MESSAGES: dict[str, Exception] = {
    "onnxruntime": RuntimeError(
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running MatMul node. Name:'' Status "
        f"Message: bfc_arena.cc:360 {ALLOCATE} Failed to allocate memory for requested buffer of size 1125899906842624"
    ),
    "onnxruntime's arena": RuntimeError(
        f"bfc_arena.cc:342 {ALLOCATE} Available memory of 8 is smaller than requested bytes of 9"
    ),
    "onnxruntime without arena": RuntimeError(
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running MatMul node. "
        "Name:'' Status Message: std::bad_alloc"
    ),
    "onnxruntime on CUDA": RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; hostname=host ; expr=cudaMalloc"),
    "torch on CUDA": RuntimeError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.00 GiB of which 1 is free"
    ),
    "torch on a CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 1125899906842624 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "tensorrt": RuntimeError(
        "[virtualMemoryBuffer.cpp::resizePhysical::140] Error Code 2: OutOfMemory (Requested size was 9 bytes.)"
    ),
    "tensorrt's allocator": RuntimeError(
        "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)"
    ),
    "CUDA driver": RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed because it was unable to allocate"),
    "CUDA runtime": RuntimeError("cudaErrorMemoryAllocation"),
    "cuBLAS": RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    "cuDNN": RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "openvino": RuntimeError("Exception from src/core/src/runtime/allocator.cpp:79:\nstd::bad_alloc\n"),
    "openvino's primitives": RuntimeError("could not allocate memory"),
    "oneTBB": RuntimeError("bad allocation in previous or concurrent attempt"),
    "the system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "python": MemoryError(),
    "numpy": np._core._exceptions._ArrayMemoryError((1 << 48,), np.dtype("float64")),  # type: ignore[attr-defined]
}
OTHERS = [
    "memory pattern disabled",
    "an illegal memory access was encountered",
    "the memory layout of the tensor is not supported",
    "shape mismatch: 9 bytes of memory expected",
    "index out of range",
    "allocate",
]
OUT = MESSAGES["torch on CUDA"]


class Broken(Exception):
    pass


def no_room_above(rows: int, error: Exception = OUT) -> Callable[[list[int]], None]:
    def during(ids: list[int]) -> None:
        if len(ids) > rows:
            raise error

    return during


@pytest.mark.parametrize("error", MESSAGES.values(), ids=MESSAGES)
@pytest.mark.parametrize("where", ["during", "queueing"])
def test_every_library_s_words_halve_the_batch_until_it_fits(
    bench: Any, shard: Any, record: Any, error: Exception, where: str
) -> None:
    ceilings: list[int] = []
    opened = bench(batch=8, slots=4, streams=2, options={"ceiling_lowered": ceilings.append})
    check = no_room_above(3, error)
    setattr(opened.engine, where, check if where == "during" else lambda: check([0] * opened.engine.offered))
    written, ids = record(), list(range(1, 46))
    stats = opened.run([shard(ids)], written)
    assert written.ids == ids and written.right and not written.failures
    assert ceilings == [4, 2] and opened.executor.batch == 2
    assert stats.rows == 45 and stats.padded_elements == 2 * sum(1 for b in opened.engine.seen if len(b) == 2) - 45


@pytest.mark.parametrize(("rows", "padded"), [(5, 1), (6, 0), (8, 0), (9, 1)])
def test_only_the_padding_of_what_was_kept_counts(bench: Any, shard: Any, record: Any, rows: int, padded: int) -> None:
    """Not that of a shape that did not fit."""
    stats = bench(batch=8, slots=1, during=no_room_above(2)).run([shard(range(1, rows + 1))], record())
    assert stats.padded_elements == padded


class Room:
    """A device for `room` rows; each batch that runs takes `fixed` beside its own."""

    def __init__(self, fixed: int, room: int) -> None:
        self._fixed, self._room, self._used, self._lock = fixed, room, 0, threading.Lock()
        self.most_together, self._together, self.refused = 0, 0, 0

    def __call__(self, ids: list[int]) -> None:
        need = self._fixed + len(ids)
        with self._lock:
            if self._used + need > self._room:
                self.refused += 1
                raise OUT
            self._used, self._together = self._used + need, self._together + 1
            self.most_together = max(self.most_together, self._together)
        time.sleep(0.02)  # longer than it takes to try another batch again
        with self._lock:
            self._used, self._together = self._used - need, self._together - 1


@pytest.mark.parametrize("fixed", [0, 6, 10])
def test_a_batch_that_fits_alone_is_not_made_smaller(bench: Any, shard: Any, record: Any, fixed: int) -> None:
    """Two at once do not fit. Room that another batch takes says nothing about how much one needs."""
    ceilings, written, ids = list[int](), record(), list(range(1, 401))
    room = Room(fixed, room=fixed + 9)
    opened = bench(batch=8, slots=4, streams=2, during=room, options={"ceiling_lowered": ceilings.append})
    opened.run([shard(ids)], written)
    assert written.ids == ids and written.right and not written.failures
    assert ceilings == [] and opened.executor.batch == 8
    assert room.most_together == 1
    assert room.refused <= 6, "once two of the batches have shown it, one at a time is given to the device"


def test_a_batch_that_does_not_fit_alone_is_halved_as_often_as_it_has_to_be(
    bench: Any, shard: Any, record: Any
) -> None:
    ceilings, written, ids = list[int](), record(), list(range(1, 161))
    opened = bench(batch=8, slots=4, streams=2, during=Room(3, 8), options={"ceiling_lowered": ceilings.append})
    opened.run([shard(ids)], written)
    assert written.ids == ids and written.right and not written.failures
    assert ceilings == [4]


def test_room_that_was_missing_once_costs_no_stream(bench: Any, shard: Any, record: Any) -> None:
    room, refused = Room(0, 100), list[int]()

    def during(ids: list[int]) -> None:
        if ids[0] == 1:
            refused.append(1)
            room.most_together = 0
            if len(refused) == 1:
                raise OUT
        room(ids)

    opened = bench(batch=8, slots=4, streams=2, during=during)
    opened.run([shard(range(1, 161))], record())
    assert opened.executor.batch == 8 and room.most_together == 2


@pytest.mark.parametrize("streams", [1, 3])
def test_no_later_batch_and_no_later_run_is_larger_than_what_was_found_to_fit(
    bench: Any, shard: Any, record: Any, streams: int
) -> None:
    slots, ceilings, written = 2 * streams, list[int](), record()
    opened = bench(
        batch=8,
        slots=slots,
        streams=streams,
        during=no_room_above(2),
        options={"ceiling_lowered": ceilings.append},
    )
    opened.run([shard(range(1, 201))], written)
    shapes = [len(batch) for batch in opened.engine.seen]
    assert written.ids == list(range(1, 201)) and written.right and not written.failures
    # What was queued before each lowering had been given already; nothing else may be.
    assert set(shapes) == {8, 4, 2} and shapes.count(8) <= 2 * slots and shapes.count(4) <= 2 * slots
    assert shapes[-50:] == [2] * 50 and written.spans[-1] == (0, 198, 200)
    opened.run([shard(range(201, 230))], written)
    assert {len(batch) for batch in opened.engine.seen[len(shapes) :]} == {2}
    assert written.ids == list(range(1, 230)) and written.right and not written.failures
    assert ceilings == [4, 2]


def late_batches(bench: Any, **hooks: Any) -> tuple[Any, threading.Event]:
    """Batches of 8 in two slots, of which a third is decoded only once the ceiling has come down to 4."""
    lowered = threading.Event()
    return bench(batch=8, slots=2, streams=2, options={"ceiling_lowered": lambda rows: lowered.set()}, **hooks), lowered


def test_a_batch_that_was_cut_before_the_ceiling_came_down_runs_in_parts(bench: Any, shard: Any, record: Any) -> None:
    taken = threading.Event()

    def compute(ids: list[int]) -> None:
        if 9 in ids and len(ids) > 4:
            assert taken.wait(5)
            raise OUT

    def decode(id: int) -> None:
        if id == 17:
            taken.set()
            assert lowered.wait(5)

    opened, lowered = late_batches(bench, during=compute)
    written = record()
    stats = opened.run([shard(range(1, 28), decode)], written)
    assert written.ids == list(range(1, 28)) and written.right and not written.failures
    assert written.spans[2] == (0, 16, 24)  # still one batch to the writer
    assert [batch for batch in opened.engine.seen if set(batch) & set(range(17, 25))] == [
        [17, 18, 19, 20],
        [21, 22, 23, 24],
    ]
    assert stats.padded_elements == 1


def test_what_failed_in_a_slot_before_is_not_held_against_a_batch_that_runs_in_parts(
    bench: Any, shard: Any, record: Any
) -> None:
    """Nothing of it was queued as a whole, so the slot's event still carries the batch before."""
    taken, first_written = threading.Event(), threading.Event()

    def compute(ids: list[int]) -> None:
        if 8 in ids:  # the last that runs in the first slot before the third batch takes it
            raise Broken
        if 9 in ids and len(ids) > 4:
            assert taken.wait(5)
            raise OUT

    def decode(id: int) -> None:
        if id == 9:
            assert first_written.wait(5)
        if id == 17:
            taken.set()
            assert lowered.wait(5)
        if 18 <= id <= 24:
            raise RowError("decode", "not a whole row")

    opened, lowered = late_batches(bench, during=compute)
    written = record(lambda scored: first_written.set())
    opened.run([shard(range(1, 25), decode)], written)
    assert written.ids == [*range(1, 8), *range(9, 18)] and written.right
    assert {id for id, failure in written.failures.items() if failure.stage == "engine"} == {8}
    assert opened.executor.batch == 4


def test_a_single_row_that_does_not_fit_ends_the_run_and_is_not_to_blame(bench: Any, shard: Any, record: Any) -> None:
    ceilings: list[int] = []
    opened, written = bench(batch=8, options={"ceiling_lowered": ceilings.append}), record()

    def compute(ids: list[int]) -> None:
        if 11 in ids:
            raise OUT

    opened.engine.during = compute
    rows = shard(range(1, 33))
    with pytest.raises(DeviceError, match=r"out of memory while running a single row.*no row is to blame") as caught:
        opened.run([rows], written)
    assert caught.value.__cause__ is OUT
    assert written.ids == list(range(1, 9)) and not written.failures
    assert ceilings == [4, 2, 1]
    opened.assert_idle_and_usable(rows)


@pytest.mark.parametrize("first", ["out of memory", "the bad row"])
def test_a_bad_row_in_a_batch_that_does_not_fit_either_is_found(
    bench: Any, shard: Any, record: Any, first: str
) -> None:
    seen: list[int] = []

    def compute(ids: list[int]) -> None:
        seen.append(len(ids))
        if 6 in ids and (len(ids) <= 2 or (first == "the bad row" and len(seen) == 1)):
            raise Broken
        if len(ids) > 2:
            raise OUT

    opened, written = bench(batch=8, slots=1, during=compute), record()
    opened.run([shard(range(1, 17))], written)
    assert written.ids == [i for i in range(1, 17) if i != 6] and written.right
    assert written.failures == {6: RowFailure(5, "engine", "the engine failed on this row", "Broken")}
    assert opened.executor.batch == 2


def test_every_rung_of_the_ladder_in_one_batch_blames_each_row_for_its_own(bench: Any, shard: Any, record: Any) -> None:
    """Rows move together on the way to the engine when others are lost; their results must find the way back."""

    def decode(id: int) -> None:
        if id == 2:
            raise RowError("decode", "not a whole row")
        if id == 3:
            raise Broken

    def spoil_input(id: int, row: int, staging: Any) -> None:
        if id == 5:
            staging["x"][row, 0] = np.nan

    def compute(ids: list[int]) -> None:
        no_room_above(2)(ids)
        if 6 in ids:
            raise Broken

    def spoil_output(ids: list[int], outputs: Any) -> None:
        outputs["y"][[row for row, id in enumerate(ids) if id == 7], 0] = np.nan

    opened, written = bench(batch=8, during=compute, spoil=spoil_output), record()
    opened.run([shard(range(1, 17), decode, spoil=spoil_input)], written)
    assert written.ids == [1, 4, *range(8, 17)] and written.right
    assert {id: (failure.row, failure.stage) for id, failure in written.failures.items()} == {
        2: (1, "decode"),
        3: (2, "decode"),
        5: (4, "input"),
        6: (5, "engine"),
        7: (6, "output"),
    }


@pytest.mark.parametrize("words", OTHERS)
def test_other_words_about_memory_are_the_row_s_fault(bench: Any, shard: Any, record: Any, words: str) -> None:
    def compute(ids: list[int]) -> None:
        if 6 in ids:
            raise RuntimeError(words)

    opened, written = bench(during=compute), record()
    assert not is_out_of_memory(RuntimeError(words))
    opened.run([shard(range(1, 17))], written)
    assert set(written.failures) == {6} and len(written.ids) == 15 and written.right
    assert opened.executor.batch == 4
