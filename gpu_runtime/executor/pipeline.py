"""The stream-pipelined batch executor: a ring of slots.

    decode/pack → H2D → compute → D2H → write

A slot owns the memory and the events of one batch. Three waits make the ring correct: compute waits for
the copy in, the copy out waits for compute, the writer waits for the copy out. A slot goes back to the ring
only after its write, and having a free slot is the only thing that lets a new batch in.

Who does what: one thread takes free slots and hands the batch's pieces to the decode pool; one waits for
each batch's pieces, in order, and queues its copies and its computation; the calling thread waits for each
batch's results, in order, and writes them. The order out is the order in.

Failure contract:
  1. A row that a decoder cannot read leaves a hole, and is reported once with its batch; the batch goes on.
  2. A batch that the engine fails on, while it is queued or while it runs, is bisected until single rows
     fail; those are reported, the rest kept.
     Out of memory is no row's fault, nor is an engine that fails on hundreds of rows in a row: the run ends with
     `DeviceError`.
  3. A row whose output is not finite is reported, not returned as scored.
  4. A decoder that raises anything but a row's failure, a source that raises, or `write` that raises, ends
     the run with that error. Batches already written stay written; no later batch is written.
  5. When a run ends in any way, no thread of it and no piece of it is still working, and nothing on the
     device still uses a slot's memory.
  6. After a failed run the executor can be used again.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.backends.protocol import Engine
from gpu_runtime.datasets.decode import DecodePool
from gpu_runtime.datasets.partition import RowFailure, ShardReader
from gpu_runtime.device.host import usable_cores
from gpu_runtime.device.protocol import Device
from gpu_runtime.errors import DeviceError
from gpu_runtime.executor.failures import bisect_rows, unusable_outputs
from gpu_runtime.executor.slots import Slot, allocate_slot
from gpu_runtime.executor.stage_clock import RunStats, StageTime

_HOPELESS_ROWS = 256
"""After so many rows, in two batches or more of which not one row passed, it is the engine that is broken."""


@dataclass(frozen=True)
class Batch:
    """Rows `start … stop` of one opened shard; never more than the executor's batch size."""

    shard: int
    reader: ShardReader
    start: int
    stop: int


@dataclass(frozen=True)
class ScoredBatch:
    """A finished batch, in input order. `outputs` views (`[stop − start, *shape]`) die when `write` returns;
    `failures` holds the rows (counted from `start`) whose outputs mean nothing."""

    batch: Batch
    outputs: Mapping[str, npt.NDArray[Any]]
    failures: Sequence[RowFailure]


@dataclass
class _Flight:
    """One batch in one slot, between the threads."""

    batch: Batch
    slot: Slot
    pieces: list[Future[list[RowFailure]]]
    failures: list[RowFailure]
    dispatched_at: float = 0.0
    refused: Exception | None = None  # what the engine raised while the batch was being queued

    def finish(self) -> None:
        """Wait until the batch's results are in its slot; raise what failed on the way."""
        self.slot.copied_out.synchronize()
        if self.refused is not None:
            raise self.refused


class StreamExecutor:
    """Runs batches through one engine on one device. Open it with `with`; buffers live as long.

    `batch`: rows of the engine's shape. `slots`: batches on their way at once; more than the engine's streams,
    so that the next batch is decoded while every stream computes, and a multiple of them, because a slot
    keeps its stream and a stream with more slots than another would get more batches.
    """

    def __init__(
        self,
        engine: Engine,
        device: Device,
        *,
        batch: int,
        slots: int | None = None,
        decode_workers: int | None = None,
    ) -> None:
        if not 1 <= batch <= engine.file.max_batch:
            raise ValueError(f"batch must be 1 … {engine.file.max_batch} for {engine.file.key}, got {batch}")
        if slots is not None and slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        self.engine, self.device, self.batch = engine, device, batch
        streams = engine.options.streams
        self._copy_in, self._copy_out = device.stream(), device.stream()
        self._compute = [device.stream() for _ in range(streams)]
        contexts = [engine.create_context() for _ in range(streams)]
        self._slots = [
            allocate_slot(engine.file, device, batch, contexts[i % streams], self._compute[i % streams])
            for i in range(slots or max(3, 2 * streams))
        ]
        self._pool = DecodePool(decode_workers or usable_cores())
        # One batch's copies and computation are queued as a whole: a failure skips up to the next event,
        # which has to be the same batch's.
        self._queueing = threading.Lock()
        self._in_use = threading.Lock()

    def close(self) -> None:
        self._pool.close()
        for stream in (self._copy_in, *self._compute, self._copy_out):
            stream.close()

    def __enter__(self) -> StreamExecutor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def batches(self, shard: int, reader: ShardReader) -> Iterator[Batch]:
        """A shard cut into batches; the last one may be short."""
        for start in range(0, reader.rows, self.batch):
            yield Batch(shard, reader, start, min(start + self.batch, reader.rows))

    def run(self, batches: Iterable[Batch], write: Callable[[ScoredBatch], None]) -> RunStats:
        """Score `batches` and hand each to `write`, on this thread and in order. See the failure contract."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("this executor is running already: its slots serve one run at a time")
        try:
            return _Run(self, batches, write).execute()
        finally:
            self._in_use.release()

    def _queue(self, flight: _Flight) -> None:
        """Queue copy in, computation and copy out of one slot."""
        slot = flight.slot
        flight.refused = None
        with self._queueing:
            for tensor in slot.inputs:
                self.device.copy_in(tensor.staging, tensor.buffer, tensor.staging.nbytes, self._copy_in)
            self._copy_in.record(slot.copied_in)
            slot.compute.wait(slot.copied_in)
            try:
                slot.enqueue()
            except Exception as error:  # the rest is queued all the same: events must cover what it had queued
                flight.refused = error
            slot.compute.record(slot.computed)
            self._copy_out.wait(slot.computed)
            for tensor in slot.outputs:
                self.device.copy_out(tensor.buffer, tensor.staging, tensor.staging.nbytes, self._copy_out)
            self._copy_out.record(slot.copied_out)


class _Stopped(Exception):
    """The run is ending; a thread of it leaves its loop."""


class _Run:
    def __init__(
        self, executor: StreamExecutor, batches: Iterable[Batch], write: Callable[[ScoredBatch], None]
    ) -> None:
        self._executor, self._batches, self._write = executor, batches, write
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._filling: queue.SimpleQueue[_Flight | BaseException | None] = queue.SimpleQueue()
        self._running: queue.SimpleQueue[_Flight | BaseException | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._rows = self._count = self._padded = 0
        self._wait_free_s = self._wait_decode_s = self._wait_compute_s = self._write_s = self._read_s = 0.0
        self._latencies_ms: list[float] = []
        self._most_pieces = 1
        self._hopeless = 0  # rows in a row that the engine failed on

    def execute(self) -> RunStats:
        executor = self._executor
        for slot in executor._slots:
            self._free.put(slot)
        pool, streams = executor._pool, executor._compute
        decode_before, compute_before = pool.busy_s, sum(s.busy_s for s in streams)
        wall, cpu = time.perf_counter(), time.process_time()
        threads = [
            threading.Thread(target=self._guarded, args=(self._fill, self._filling), name="fill", daemon=True),
            threading.Thread(target=self._guarded, args=(self._dispatch, self._running), name="dispatch", daemon=True),
        ]
        try:
            for thread in threads:
                thread.start()
            self._drain()
        finally:
            self._stop.set()
            self._free.put(None)
            for thread in threads:
                if thread.ident is not None:  # None: it could not be started
                    thread.join()
            self._settle()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        decoding = min(pool.workers, len(executor._slots) * self._most_pieces)  # workers that can have work
        busy = {
            "read": (self._read_s, 0.0, 1),
            "decode": (pool.busy_s - decode_before, self._wait_decode_s, decoding),
            "compute": (sum(s.busy_s for s in streams) - compute_before, self._wait_compute_s, len(streams)),
            "write": (self._write_s, self._wait_free_s, 1),
        }
        p50, p90, p99 = np.percentile(self._latencies_ms or [0.0], [50, 90, 99])
        return RunStats(
            rows=self._rows,
            batches=self._count,
            padded_rows=self._padded,
            wall_s=wall,
            cpu_s=cpu,
            cores=usable_cores(),
            stages={n: StageTime(b, w, k, b / (wall * k) if wall else 0.0) for n, (b, w, k) in busy.items()},
            latency_p50_ms=float(p50),
            latency_p90_ms=float(p90),
            latency_p99_ms=float(p99),
        )

    def _guarded(self, body: Callable[[], None], out: queue.SimpleQueue[Any]) -> None:
        """Run a thread's loop; whatever ends it goes down the line, so that the calling thread hears of it."""
        try:
            body()
        except _Stopped:
            out.put(None)
        except BaseException as error:
            out.put(error)
        else:
            out.put(None)

    def _fill(self) -> None:
        batches = iter(self._batches)
        try:
            self._fill_from(batches)
        finally:
            if isinstance(batches, Generator):
                batches.close()  # here, not whenever it is collected: it may hold files and threads

    def _fill_from(self, batches: Iterator[Batch]) -> None:
        executor = self._executor
        while True:
            started = time.perf_counter()
            batch = next(batches, None)  # opens the next shard where one ends
            self._read_s += time.perf_counter() - started
            if batch is None:
                return
            started = time.perf_counter()
            slot = self._free.get()
            self._wait_free_s += time.perf_counter() - started
            if slot is None or self._stop.is_set():
                raise _Stopped
            count = batch.stop - batch.start
            rows = {name: array[:count] for name, array in slot.staging.items()}
            pieces: list[Future[list[RowFailure]]] = []
            try:
                for piece in batch.reader.pieces(batch.start, batch.stop, rows):
                    pieces.append(executor._pool.submit(piece))
            except BaseException:
                _await_all(pieces)
                raise
            self._most_pieces = max(self._most_pieces, len(pieces))
            self._filling.put(_Flight(batch, slot, pieces, []))

    def _dispatch(self) -> None:
        executor = self._executor
        while (flight := self._filling.get()) is not None:
            if isinstance(flight, BaseException):
                raise flight
            if self._stop.is_set():
                _await_all(flight.pieces)
                continue
            started = time.perf_counter()
            try:
                flight.failures += [failure for piece in flight.pieces for failure in piece.result()]
            finally:
                _await_all(flight.pieces)
            self._wait_decode_s += time.perf_counter() - started
            count = flight.batch.stop - flight.batch.start
            flight.slot.fill_holes([failure.row for failure in flight.failures] + list(range(count, executor.batch)))
            flight.dispatched_at = time.perf_counter()
            executor._queue(flight)
            self._running.put(flight)

    def _drain(self) -> None:
        executor = self._executor
        while (flight := self._running.get()) is not None:
            if isinstance(flight, BaseException):
                raise flight
            started = time.perf_counter()
            count = flight.batch.stop - flight.batch.start
            missing = {failure.row for failure in flight.failures}
            rows = [row for row in range(count) if row not in missing]
            results = flight.slot.results
            try:
                flight.finish()
            except Exception as error:
                results = self._rescue(flight, rows, error)
            else:
                self._hopeless = 0
            ready = time.perf_counter()
            self._wait_compute_s += ready - started
            self._latencies_ms.append((ready - flight.dispatched_at) * 1e3)
            lost = {failure.row for failure in flight.failures}
            flight.failures += unusable_outputs(results, [row for row in rows if row not in lost])
            first = {failure.row: failure for failure in reversed(flight.failures)}  # each row is reported once
            failures = [first[row] for row in sorted(first)]
            outputs = {name: values[:count] for name, values in results.items()}
            self._write(ScoredBatch(flight.batch, outputs, failures))
            self._write_s += time.perf_counter() - ready
            self._rows, self._count = self._rows + count, self._count + 1
            self._padded += executor.batch - count
            for tensor in (*flight.slot.inputs, *flight.slot.outputs):
                executor.device.retire(tensor.staging, tensor.buffer)
            self._free.put(flight.slot)

    def _rescue(self, flight: _Flight, rows: list[int], error: Exception) -> dict[str, npt.NDArray[Any]]:
        """Score what can be scored of a batch that failed as a whole; its failures are added to the flight."""
        slot, executor = flight.slot, self._executor
        inputs = {tensor.spec.name: tensor.rows.copy() for tensor in slot.inputs}
        kept = {tensor.spec.name: np.zeros_like(tensor.rows) for tensor in slot.outputs}

        def run(part: Sequence[int]) -> None:
            chosen = set(part)
            for tensor in slot.inputs:
                tensor.rows[:] = inputs[tensor.spec.name]
            slot.fill_holes([row for row in range(executor.batch) if row not in chosen])
            executor._queue(flight)
            flight.finish()
            for tensor in slot.outputs:
                kept[tensor.spec.name][list(part)] = tensor.rows[list(part)]

        failures = bisect_rows(rows, run, error, executor.engine.file.key)
        flight.failures += failures
        earlier, self._hopeless = self._hopeless, self._hopeless + len(rows) if len(failures) == len(rows) else 0
        if earlier and self._hopeless >= _HOPELESS_ROWS:
            raise DeviceError(
                f"the engine failed on each of {self._hopeless} rows in a row",
                stage="execute",
                item=executor.engine.file.key,
                got=type(error).__name__,  # the cause has the rest; its text may quote a cell
                next_step="materialize engine, benchmark and serving_plan again; no row is to blame",
            ) from error
        return kept

    def _settle(self) -> None:
        """Wait until no piece and nothing on the device uses a slot; failures there no longer matter."""
        while not self._filling.empty():
            flight = self._filling.get()
            if isinstance(flight, _Flight):
                _await_all(flight.pieces)
        for slot in self._executor._slots:
            for event in (slot.copied_in, slot.computed, slot.copied_out):
                with contextlib.suppress(BaseException):  # an engine may fail with any; the next is awaited too
                    event.synchronize()


def _await_all(pieces: list[Future[list[RowFailure]]]) -> None:
    """Nobody writes into the slot any more once this returns."""
    for piece in pieces:
        piece.cancel()
    wait(pieces)
