"""The stream-pipelined batch executor: a ring of slots.

    decode/pack → H2D → compute → D2H → write

A slot owns the memory and the events of one batch. Three waits make the ring correct: compute waits for
the copy in, the copy out waits for compute, the writer waits for the copy out. A slot goes back to the ring
only after its write, and having a free slot is the only thing that lets a new batch in.

Who does what: one thread takes free slots and hands the batch's pieces to the decode pool; one waits for
each batch's pieces, in order, and queues its copies and its computation; one waits for each batch's
results, in order, and writes them. The order out is the order in. The calling thread only watches, so that a
signal or a stage that hangs is noticed whatever the others do.

Failure contract:
  1. A row that a decoder cannot read leaves a hole, and is reported once with its batch; the batch goes on.
     A decoder that raises is tried on fewer rows until single rows fail; those are reported.
  2. A row that holds what must not reach a device (not finite, outside its declared range) leaves a hole, too.
  3. A batch that the engine fails on, while it is queued or while it runs, is bisected until single rows
     fail, twice; those are reported, the rest kept. An engine that then fails on harmless values, too, is broken:
     the run ends with `DeviceError`.
  4. Out of memory is no row's fault: the batch is tried again alone, once the others are done. If two have fitted
     then, one batch at a time is on the device for the rest of the run; one that does not is halved until it does, and
     no later batch is larger. A single row that does not fit ends the run with `DeviceError`; where rows differ in
     length and the shortest fit, it is reported, and so is each later one of its length or longer that does not fit at
     once.
  5. A row whose output is not finite, or not one that the output can be, is reported, not returned as scored.
  6. A source that raises, a decoder that raises an error of this package or has no memory, or `write` that
     raises, ends the run with that error. Batches already written stay written; no later batch is written.
  7. When a run ends, no thread of it and no piece of it is still working, and nothing on the device still uses
     a slot's memory. After a failed run the executor can be used again.
  8. A piece of work that takes longer than `stage_timeout_s` ends the run with `StalledError`, which names its
     stage. An interrupt ends it as soon as the pieces of work in hand are done. If they are not done within
     seconds they are left behind, on daemon threads; the executor refuses to be used again, and a process in which
     they hang to its end ends with status 1.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.backends.protocol import Engine
from gpu_runtime.datasets.batching import Batching, BatchShape
from gpu_runtime.datasets.partition import Piece, RowFailure, ShardReader
from gpu_runtime.datasets.workers import WorkerPool
from gpu_runtime.device.host import PeakMemory, usable_cores
from gpu_runtime.device.protocol import Device
from gpu_runtime.errors import DeviceError
from gpu_runtime.executor.failures import (
    BatchCeiling,
    Rescue,
    is_out_of_memory,
    unusable_inputs,
    unusable_outputs,
)
from gpu_runtime.executor.slots import Slot, allocate_slot
from gpu_runtime.executor.stage_clock import RunStats, StageClock, StageTime
from gpu_runtime.executor.watch import GRACE_S, HEARTBEAT_S, leave_behind, stalled
from gpu_runtime.faults import FaultPlan, around, no_faults


@dataclass(frozen=True)
class Batch:
    """Rows `start … stop` of one opened shard, padded to `length` where they differ in one; as `cut` by the
    executor's batching."""

    shard: int
    reader: ShardReader
    start: int
    stop: int
    length: int | None = None

    @property
    def count(self) -> int:
        return self.stop - self.start

    def elements(self, rows: Sequence[int]) -> int:
        """What the lengths of `rows`, counted from `start`, sum up to; how many they are where all are alike."""
        lengths = self.reader.lengths
        return len(rows) if lengths is None else int(lengths[self.start : self.stop][list(rows)].sum())


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
    given: Mapping[str, npt.NDArray[Any]] | None = None  # the inputs, where the engine takes them as they lie
    shape: BatchShape = field(default_factory=lambda: BatchShape(0))  # what the engine is given, padding included
    padding: int = 0  # elements that the engine computed beside the rows' own
    dispatched_at: float = 0.0
    refused: BaseException | None = None  # what the engine raised while the batch was being queued

    @property
    def rows(self) -> Sequence[int]:
        """Those that can still be scored."""
        rows, lost = range(self.batch.count), {failure.row for failure in self.failures}
        return [row for row in rows if row not in lost] if lost else rows

    @property
    def inputs(self) -> Mapping[str, npt.NDArray[Any]]:
        return self.given or self.slot.staging(self.batch.length)

    def bring_in(self) -> None:
        """Copy into the slot what lies elsewhere, so that rows of it can be changed."""
        for name, values in (self.given or {}).items():
            self.slot.staging()[name][: len(values)] = values
        self.given = None

    def finish(self) -> None:
        """Wait until the batch's results are in its slot; raise what failed on the way."""
        if isinstance(self.refused, _OversizedError):  # nothing was queued: the slot's event is an earlier batch's
            raise self.refused
        self.slot.copied_out.synchronize()
        if self.refused is not None:
            raise self.refused


class StreamExecutor:
    """Runs batches through one engine on one device. Open it with `with`; buffers live as long.

    `batch`: rows of a batch; where rows differ in length, its budget of elements (rows × length). `lengths`: what such
    rows are padded to, ascending up to the engine's longest. `slots`: batches on their way at once; more than the
    engine's streams, so that the next batch is decoded while every stream computes, and a multiple of them, because a
    slot keeps its stream and a stream with more slots than another would get more batches.
    `stage_timeout_s`: the longest that one shard may take to open, one piece of a batch to be decoded, or one batch
    to be computed or written.
    `ceiling_lowered` is told the batch that fits, whenever the device had no room for more.
    """

    def __init__(
        self,
        engine: Engine,
        device: Device,
        *,
        batch: int,
        lengths: Sequence[int] = (),
        slots: int | None = None,
        decode_workers: int | None = None,
        stage_timeout_s: float | None = None,
        ceiling_lowered: Callable[[int], None] = lambda rows: None,
        faults: FaultPlan = no_faults,
    ) -> None:
        file = engine.file
        longest = lengths[-1] if lengths else None
        if longest != file.max_length:
            raise ValueError(f"lengths must end with {file.max_length} for {file.key}, got {longest}")
        if not 1 <= batch <= file.max_batch * (longest or 1):
            raise ValueError(f"batch must be 1 … {file.max_batch * (longest or 1)} for {file.key}, got {batch}")
        if slots is not None and slots < 1:
            raise ValueError(f"slots must be at least 1, got {slots}")
        if stage_timeout_s is not None and stage_timeout_s <= 0:
            raise ValueError(f"stage_timeout_s must be positive, got {stage_timeout_s}")
        self.engine, self.device, self.stage_timeout_s, self.faults = engine, device, stage_timeout_s, faults
        self.ceiling = BatchCeiling(Batching(batch, file.max_batch, tuple(lengths)), ceiling_lowered)
        streams = engine.options.streams
        self._copy_in, self._copy_out = device.stream(), device.stream()
        self._compute = [device.stream() for _ in range(streams)]
        contexts = [engine.create_context() for _ in range(streams)]
        self._slots = [
            allocate_slot(file, device, self.ceiling.batching.shapes, contexts[i % streams], self._compute[i % streams])
            for i in range(slots or max(3, 2 * streams))
        ]
        self._pool = WorkerPool(decode_workers or usable_cores())
        self._in_use = threading.Lock()
        self._closed = False
        self._abandoned = False  # something of an earlier run still hangs in a slot

    @property
    def batch(self) -> int:
        """Rows (elements, where rows differ in length) of the largest batch: as asked for, or what was found to fit."""
        return self.ceiling.batching.budget

    def close(self) -> None:
        self._closed, wait = True, not self._abandoned
        self._pool.close(wait)
        for stream in (self._copy_in, *self._compute, self._copy_out):
            stream.close(wait)

    def __enter__(self) -> StreamExecutor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def batches(self, shard: int, reader: ShardReader) -> Iterator[Batch]:
        """A shard cut into batches; the last one may be short."""
        start = 0
        while start < reader.rows:  # one at a time: the ceiling may come down in between
            lengths = None if reader.lengths is None else reader.lengths[start:]
            _, count, length = next(self.ceiling.batching.cut(reader.rows - start, lengths))
            yield Batch(shard, reader, start, start + count, length)
            start += count

    def run(self, batches: Iterable[Batch], write: Callable[[ScoredBatch], None], item: str | None = None) -> RunStats:
        """Score `batches` and hand each to `write`, on one thread and in order. See the failure contract.

        `item` says in errors what is being scored; the engine, if it is left out."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("this executor is running already: its slots serve one run at a time")
        try:
            if self._abandoned:
                raise DeviceError(
                    "an earlier run left work behind that hangs", stage="execute", next_step="start a new process"
                )
            if self._closed:
                raise RuntimeError("this executor is closed")
            return _Run(self, batches, write, item or self.engine.file.key).execute()
        finally:
            self._in_use.release()

    def _queue(self, flight: _Flight) -> None:
        """Queue copy in, computation and copy out of a slot's first rows, in the flight's shape."""
        slot, shape = flight.slot, flight.shape
        flight.refused = None
        for tensor in slot.inputs:
            nbytes = tensor.spec.nbytes(shape.rows, shape.length)
            self.device.copy_in(tensor.staging, tensor.buffer, nbytes, self._copy_in)
        self._copy_in.record(slot.copied_in)
        slot.compute.wait(slot.copied_in)
        try:
            slot.enqueue(self.device, shape, flight.given)
        except BaseException as error:  # the rest is queued all the same: events must cover what it had queued
            flight.refused = error
        slot.compute.record(slot.computed)
        self._copy_out.wait(slot.computed)
        for tensor in slot.outputs:
            nbytes = tensor.spec.nbytes(shape.rows)
            self.device.copy_out(tensor.buffer, tensor.staging, nbytes, self._copy_out)
        self._copy_out.record(slot.copied_out)


class _Stopped(BaseException):
    """The run is ending; a thread of it leaves its loop. No `Exception`: no bisection may take it for a row's fault."""


class _OversizedError(Exception):
    """The batch was cut before the ceiling came down: it has to run in parts."""


class _Run:
    def __init__(
        self, executor: StreamExecutor, batches: Iterable[Batch], write: Callable[[ScoredBatch], None], item: str
    ) -> None:
        self._executor, self._batches, self._write, self._item = executor, batches, write, item
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._filling: queue.SimpleQueue[_Flight | BaseException | None] = queue.SimpleQueue()
        self._running: queue.SimpleQueue[_Flight | BaseException | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._stop, self._settled = threading.Event(), threading.Event()
        self._clock = StageClock()
        self._rows = self._count = self._elements = self._padded = 0
        self._latencies_ms: list[float] = []
        self._most_pieces = 1
        # Whoever holds it is the only one to queue anything. One batch's copies and computation are queued as a whole:
        # a failure skips up to the next event, which has to be the same batch's.
        self._device = threading.Lock()
        self._fitted_alone = 0  # batches that the device had no room for beside others, and had alone
        self._too_long: int | None = None  # rows padded to this length have not fitted alone, and shorter ones have

    def execute(self) -> RunStats:
        executor = self._executor
        for slot in executor._slots:
            self._free.put(slot)
        pool, streams = executor._pool, executor._compute
        decode_before, compute_before = pool.busy_s, sum(s.busy_s for s in streams)
        memory, wall, cpu = PeakMemory(), time.perf_counter(), time.process_time()
        threads = [
            threading.Thread(target=self._guarded, args=(body, out), name=name, daemon=True)
            for name, body, out in (
                ("fill", self._fill, self._filling),
                ("dispatch", self._dispatch, self._running),
                ("write", self._drain, self._ended),
            )
        ]
        settling = threading.Thread(target=self._settle, args=(threads,), name="settle", daemon=True)
        patience = executor.stage_timeout_s
        try:
            try:
                for thread in (settling, *threads):
                    thread.start()
                failure = self._watch()
            except BaseException:  # a stall, or whoever wants the run to end: Ctrl-C, Dagster's terminate
                patience = GRACE_S
                raise
            if failure is not None:
                raise failure
        finally:
            self._end(settling, patience)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        decoding = min(pool.workers, len(executor._slots) * self._most_pieces)  # workers that can have work
        clock = self._clock

        def idle(waited: str, *waited_before: str) -> float:
            """For the stage that hands on, not for what that stage itself waited for."""
            return max(0.0, clock.seconds(waited) - sum(map(clock.seconds, waited_before)))

        busy = {
            "read": (clock.seconds("read") + clock.seconds("cut"), idle("wait for a batch", "wait for a slot"), 1),
            "decode": (pool.busy_s - decode_before, clock.seconds("decode"), decoding),
            "dispatch": (
                clock.seconds("check") + clock.seconds("queue"),
                idle("wait for a queued batch", "wait for a batch", "decode"),
                1,
            ),
            "compute": (sum(s.busy_s for s in streams) - compute_before, clock.seconds("compute"), len(streams)),
            "write": (
                clock.seconds("write") + clock.seconds("check of results"),
                idle("wait for a slot", "decode", "compute"),
                1,
            ),
        }
        p50, p90, p99 = np.percentile(self._latencies_ms or [0.0], [50, 90, 99])
        return RunStats(
            rows=self._rows,
            batches=self._count,
            elements=self._elements,
            padded_elements=self._padded,
            wall_s=wall,
            cpu_s=cpu,
            cores=usable_cores(),
            stages={n: StageTime(b, w, k, b / (wall * k) if wall else 0.0) for n, (b, w, k) in busy.items()},
            latency_p50_ms=float(p50),
            latency_p90_ms=float(p90),
            latency_p99_ms=float(p99),
            peak_memory_mib=memory.mib,
        )

    def _watch(self) -> BaseException | None:
        """Wait for the writer to end; returns what ended it early. Raises `StalledError` when a stage hangs."""
        limit_s = self._executor.stage_timeout_s
        while True:
            stage, seconds = self._clock.longest()
            if limit_s is not None and seconds >= limit_s:
                raise stalled(stage, self._item, limit_s, seconds)
            try:
                return self._ended.get(timeout=min(HEARTBEAT_S, (limit_s or HEARTBEAT_S) - seconds))
            except queue.Empty:
                continue  # the oldest piece of work may be as old as the limit by now

    def _end(self, settling: threading.Thread, patience: float | None) -> None:
        """Nothing of the run works any more once this returns, or the executor is marked as abandoned."""
        self._executor._abandoned = True  # until the contrary is seen: a second interrupt may end this wait
        self._stop.set()
        self._free.put(None)
        if settling.ident is None:  # it could not be started, so nothing was
            self._settled.set()
        try:
            self._settled.wait(patience)
        finally:
            self._executor._abandoned = not self._settled.is_set()
            if self._executor._abandoned:
                leave_behind(self._settled.is_set)
        if settling.ident is not None and not self._executor._abandoned:
            settling.join()

    def _progress(self, stage: str) -> None:
        """A piece of the stage's work is done: it does not hang, and the run may end here."""
        self._clock.progress(stage)
        if self._stop.is_set():
            raise _Stopped

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
                with self._clock.at("read"):
                    batches.close()  # here, not whenever it is collected: it may hold files and threads

    def _fill_from(self, batches: Iterator[Batch]) -> None:
        executor = self._executor
        while True:
            with self._clock.at("read"):
                batch = next(batches, None)  # opens the next shard where one ends
            if batch is None:
                return
            with self._clock.at("wait for a slot"):
                slot = self._free.get()
            if slot is None or self._stop.is_set():
                raise _Stopped
            executor.faults("before decode")
            pieces: list[Future[list[RowFailure]]] = []
            try:
                with self._clock.at("cut"):
                    whole = batch.length is None and batch.count == executor.batch
                    takes_views = executor.device.shares_host_memory and whole
                    given = batch.reader.view(batch.start, batch.stop) if takes_views else None
                    if given is None:
                        staging = _staging(slot, batch.length, 0, batch.count)
                        for piece in batch.reader.pieces(batch.start, batch.stop, staging):
                            pieces.append(executor._pool.submit(piece))
            except BaseException:
                _await_all(pieces)
                raise
            self._most_pieces = max(self._most_pieces, len(pieces))
            self._filling.put(_Flight(batch, slot, pieces, [], given))

    def _dispatch(self) -> None:
        executor = self._executor
        while (flight := self._next("wait for a batch", self._filling)) is not None:
            if self._stop.is_set():
                _await_all(flight.pieces)
                continue
            with self._clock.at("decode"):
                flight.failures += self._decoded(flight)
            executor.faults("after decode")
            with self._clock.at("check"):
                flight.failures += unusable_inputs(executor.engine.file.inputs, flight.inputs, flight.rows)
                if flight.failures:
                    flight.bring_in()
            with self._device:
                if self._fitted_alone > 1:  # the first time, another process may have needed the room
                    self._await_device()
                flight.dispatched_at = time.perf_counter()
                with self._clock.at("queue"), around(executor.faults, "enqueue"):
                    self._send(flight)
            self._running.put(flight)

    def _next(self, activity: str, flights: queue.SimpleQueue[_Flight | BaseException | None]) -> _Flight | None:
        """The next batch of the stage before; None after the last. Raises what that stage ended with."""
        with self._clock.at(activity):
            flight = flights.get()
        if isinstance(flight, BaseException):
            raise flight
        return flight

    def _await_device(self) -> None:
        """Whatever is on its way on the device is done."""
        for slot in self._executor._slots:
            with contextlib.suppress(Exception):  # that batch's own turn will tell
                slot.copied_out.synchronize()

    def _decoded(self, flight: _Flight) -> list[RowFailure]:
        """Wait for the batch's pieces; if one of them raised, find the rows that make it raise."""
        try:
            try:
                found = self._results([piece.result for piece in flight.pieces])
            finally:
                _await_all(flight.pieces)
            return found
        except Exception as error:
            first_error = error
        batch, failures = flight.batch, list[RowFailure]()

        def decode(part: Sequence[int]) -> None:
            start, stop = part[0], part[-1] + 1
            staging = _staging(flight.slot, batch.length, start, stop)
            found = self._results(batch.reader.pieces(batch.start + start, batch.start + stop, staging))
            failures.extend(RowFailure(start + one.row, one.stage, one.reason, one.exception) for one in found)

        rows = range(batch.count)
        decoder = Rescue(
            decode, "decode", "decoder", f"shard {batch.shard}", between_parts=lambda: self._progress("decode")
        )
        return decoder.after(first_error, rows, BatchShape(batch.count, batch.length)) + failures

    def _results(self, pieces: Iterable[Piece]) -> list[RowFailure]:
        failures: list[RowFailure] = []
        for piece in pieces:
            failures += piece()
            self._progress("decode")
        return failures

    def _send(self, flight: _Flight) -> None:
        """Fill the holes of the batch and queue it, unless it was cut before the ceiling came down."""
        batch, shape = flight.batch, self._executor.ceiling.shape(flight.batch.length)
        flight.shape = shape
        if batch.count > shape.rows:
            flight.refused = _OversizedError()
            return
        flight.padding = shape.elements - batch.elements(range(batch.count))
        holes = [failure.row for failure in flight.failures] + list(range(batch.count, shape.rows))
        flight.slot.fill_holes(holes, batch.length)
        self._executor._queue(flight)

    def _drain(self) -> None:
        executor = self._executor
        while (flight := self._next("wait for a queued batch", self._running)) is not None:
            if self._stop.is_set():
                continue
            count, results = flight.batch.count, flight.slot.results
            with self._clock.at("compute"):
                try:
                    flight.finish()
                except Exception as error:
                    with self._device:  # another batch's memory could make this one's rows look too many
                        results = self._rescue(flight, error)
            self._latencies_ms.append((time.perf_counter() - flight.dispatched_at) * 1e3)
            with self._clock.at("check of results"):
                flight.failures += unusable_outputs(executor.engine.file.outputs, results, flight.rows)
            first = {failure.row: failure for failure in reversed(flight.failures)}  # each row is reported once
            failures = [first[row] for row in sorted(first)]
            outputs = {name: values[:count] for name, values in results.items()}
            if self._stop.is_set():  # it may have been waited for in vain: nobody expects this batch any more
                raise _Stopped
            with self._clock.at("write"):
                self._write(ScoredBatch(flight.batch, outputs, failures))
            self._rows, self._count = self._rows + count, self._count + 1
            self._elements += flight.batch.elements(range(count))
            self._padded += flight.padding
            for tensor in (*flight.slot.inputs, *flight.slot.outputs):
                executor.device.retire(tensor.staging, tensor.buffer)
            self._free.put(flight.slot)

    def _rescue(self, flight: _Flight, error: Exception) -> dict[str, npt.NDArray[Any]]:
        """Score what can be scored of a batch that failed as a whole; its failures are added to the flight."""
        slot, executor, rows, tried = flight.slot, self._executor, flight.rows, flight.shape
        length, whole = flight.batch.length, flight.batch.count
        flight.bring_in()
        flight.padding = 0
        staging = slot.staging(length)
        inputs = {name: values[:whole].copy() for name, values in staging.items()}
        kept = {name: np.zeros_like(values[:whole]) for name, values in slot.results.items()}

        def run(part: Sequence[int]) -> None:
            count, flight.shape = len(part), executor.ceiling.shape(length)
            for name, values in staging.items():
                values[:count] = inputs[name][list(part)]
            slot.fill_holes(range(count, flight.shape.rows), length)
            executor._queue(flight)
            flight.finish()
            for name, values in slot.results.items():
                kept[name][list(part)] = values[:count]
            flight.padding += flight.shape.elements - flight.batch.elements(part)

        def shorter_fit() -> bool:
            if self._is_too_long(length):
                return True
            # Nothing is shorter than the shortest: such a row is never to blame.
            if length == executor.ceiling.batching.shortest.length or self._harmless(flight) is not None:
                return False
            self._too_long = length
            return True

        engine = Rescue(
            run,
            "engine",
            "engine",
            executor.engine.file.key,
            executor.ceiling,
            length,
            shorter_fit=shorter_fit,
            between_parts=lambda: self._progress("compute"),
        )
        again = isinstance(error, _OversizedError)
        if is_out_of_memory(error) and not self._is_too_long(length):
            self._await_device()  # the others' memory comes free first: it may be all that was missing
            again = True
        budget = executor.ceiling.batching.budget
        failures = engine.rows(rows) if again else engine.after(error, rows, tried)
        if is_out_of_memory(error) and not failures and executor.ceiling.batching.budget == budget:
            self._fitted_alone += 1
        if failures:
            self._check_engine(flight, error)
        flight.failures += failures
        return kept

    def _check_engine(self, flight: _Flight, error: Exception) -> None:
        """An engine that fails on harmless values, too, is broken: then no row is to blame. Of the shortest length:
        at the batch's own, the length may be what it fails on."""
        if self._harmless(flight) is not None:
            raise DeviceError(
                "the engine fails on harmless values, too",
                stage="execute",
                item=self._executor.engine.file.key,
                got=type(error).__name__,  # the cause has the rest; its text may quote a cell
                next_step="look at the device, and run again; if it stays so, materialize engine, benchmark and "
                "serving_plan again. No row is to blame",
            ) from error

    def _is_too_long(self, length: int | None) -> bool:
        return length is not None and self._too_long is not None and length >= self._too_long

    def _harmless(self, flight: _Flight) -> Exception | None:
        """What the engine raises for harmless values, in the least shape that it may meet."""
        flight.shape = self._executor.ceiling.batching.shortest
        flight.slot.fill_holes(range(flight.shape.rows), flight.shape.length)
        self._executor._queue(flight)
        try:
            flight.finish()
        except Exception as error:
            return error
        return None

    def _settle(self, threads: list[threading.Thread]) -> None:
        """A thread of its own, so that its waits can be given up: once the run ends, wait until no thread, no piece
        and nothing on the device uses a slot. Failures there no longer matter."""
        self._stop.wait()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        while not self._filling.empty():
            flight = self._filling.get()
            if isinstance(flight, _Flight):
                _await_all(flight.pieces)
        for slot in self._executor._slots:
            for event in (slot.copied_in, slot.computed, slot.copied_out):
                with contextlib.suppress(BaseException):  # an engine may fail with any; the next is awaited too
                    event.synchronize()
        self._settled.set()


def _staging(slot: Slot, length: int | None, start: int, stop: int) -> dict[str, npt.NDArray[Any]]:
    """The slot's input rows `start … stop`, for a decoder to fill."""
    return {name: rows[start:stop] for name, rows in slot.staging(length).items()}


def _await_all(pieces: list[Future[list[RowFailure]]]) -> None:
    """Nobody writes into the slot any more once this returns."""
    for piece in pieces:
        piece.cancel()
    wait(pieces)
