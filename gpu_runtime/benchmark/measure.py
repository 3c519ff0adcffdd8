"""Latency and throughput of engines alone: warm, interleaved, synchronised."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.backends.protocol import Engine, EngineFile, EngineOptions
from gpu_runtime.backends.registry import get_backend
from gpu_runtime.datasets.batching import Batching, BatchShape
from gpu_runtime.datasets.sample import RowSample
from gpu_runtime.device.host import anonymous_memory_mib
from gpu_runtime.device.protocol import Device, Stream
from gpu_runtime.executor.slots import Slot, allocate_slot

_WAVES = 2
"""Batches for each slot where they are of several lengths: enough for the sample's mix, few enough to be quick."""


@dataclass(frozen=True)
class Setting:
    """One way to run an engine. `batch` is a number of rows; where they differ in length, of elements (rows × length),
    and `lengths` is what rows are padded to."""

    engine: str  # EngineFile.key
    batch: int
    streams: int
    threads: int
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))

    def batching(self, file: EngineFile) -> Batching:
        return Batching(self.batch, file.max_batch, self.lengths)


@dataclass(frozen=True)
class Measurement:
    """Medians over interleaved rounds: `rows_per_s` with a second batch queued behind every one that runs, as in
    the executor; latencies in milliseconds, from queueing to result, with one batch on every stream (of fewer than a
    hundred `batches`, p99 is as good as the slowest). `cpu_s_per_row` is all CPU time of this process meanwhile.
    `memory_mib` is what the loaded engine, having run its largest batches, and two slots for each stream took of this
    process' own memory, the rows that are read or decoded for them left out; None where the system does not tell."""

    setting: Setting
    rows_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    batches: int
    rounds: int
    cpu_s_per_row: float
    memory_mib: float | None


class LoadedSetting:
    """An engine loaded and warm at one setting, fed with real rows."""

    def __init__(self, file: EngineFile, setting: Setting, device: Device, sample: RowSample) -> None:
        self.setting, self._device = setting, device
        before = anonymous_memory_mib()
        options = EngineOptions(setting.streams, setting.threads)
        self._feeds: list[tuple[Slot, BatchShape]] = []
        self._streams: list[Stream] = []
        self.latencies_ms: list[float] = []
        self.rates: list[float] = []
        self.cpu_s_per_row: list[float] = []
        self._engine: Engine = get_backend(file.backend).load(file, device, options)
        try:
            self._warm_up(file, sample)
        except BaseException:  # out of memory, as a rule: the next setting needs it
            self.close()
            raise
        after = anonymous_memory_mib()
        self.memory_mib = None if before is None or after is None else max(0.0, after - before)

    def _warm_up(self, file: EngineFile, sample: RowSample) -> None:
        """Fill the slots and run each twice: that allocates memory and chooses kernels. Where rows differ in length the
        largest batches come before, which the sample may not have: what cannot run them must show here, not at night.
        """
        setting, device, self._rows = self.setting, self._device, 0
        batching = setting.batching(file)
        self._streams = [device.stream() for _ in range(setting.streams)]
        contexts = [(self._engine.create_context(), stream) for stream in self._streams]
        slots = [allocate_slot(file, device, batching.shapes, *one) for one in 2 * contexts]  # as in the executor
        for largest in batching.largest if setting.lengths else ():
            for slot in slots:  # all at once, as at night
                slot.fill_holes(range(largest.rows), largest.length)
                self._copy_in(slot, largest)
                slot.enqueue(device, largest)
                slot.compute.record(slot.computed)
            for slot in slots:
                slot.computed.synchronize()
        for i, (shape, rows, count) in enumerate(_batches(sample, batching, len(slots))):
            more = i >= len(slots)  # for the sample's mix of lengths
            slot = allocate_slot(file, device, [shape], *contexts[i % len(contexts)]) if more else slots[i]
            for tensor in slot.inputs:
                values = rows[tensor.spec.name]
                places = np.arange(shape.rows) % len(values)
                np.take(values, places, axis=0, out=tensor.rows(shape.length)[: shape.rows])
            self._copy_in(slot, shape)
            self._feeds.append((slot, shape))
            self._rows += count
        self._run(1, 2 * setting.streams, [])
        self._wave_s = self._run(1, 2 * setting.streams, [])

    def _copy_in(self, slot: Slot, shape: BatchShape) -> None:
        for tensor in slot.inputs:
            nbytes = tensor.spec.nbytes(shape.rows, shape.length)
            self._device.copy_in(tensor.staging, tensor.buffer, nbytes, slot.compute)

    def round(self, seconds: float) -> None:
        """Half of the time for latencies, half for the rate."""
        streams = self.setting.streams
        # Whole waves only: a last one that leaves streams idle would underrate settings with many of them.
        waves = max(1, round(seconds / 2 / self._wave_s))
        self._run(waves, streams, self.latencies_ms)
        rows, cpu = waves * self._rows, time.process_time()
        self.rates.append(rows / self._run(waves, 2 * streams, []))
        self.cpu_s_per_row.append((time.process_time() - cpu) / rows)

    def _run(self, waves: int, in_flight: int, latencies_ms: list[float]) -> float:
        """Run every slot `waves` times, at most `in_flight` at once; returns the seconds, and adds the latencies."""
        waiting: deque[tuple[Slot, float]] = deque()
        started = time.perf_counter()
        for slot, shape in itertools.chain.from_iterable(itertools.repeat(self._feeds, waves)):
            if len(waiting) == in_flight:
                latencies_ms.append(_finish(*waiting.popleft()))
            queued = time.perf_counter()
            slot.enqueue(self._device, shape)
            slot.compute.record(slot.computed)
            waiting.append((slot, queued))
        while waiting:
            latencies_ms.append(_finish(*waiting.popleft()))
        return time.perf_counter() - started

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._engine.close()


def measure(
    engines: Mapping[str, EngineFile],
    settings: Sequence[Setting],
    device: Device,
    sample: RowSample,
    *,
    rounds: int = 3,
    round_s: float = 0.25,
) -> list[Measurement]:
    """Measure every setting on rows of `sample`, one round of each in turn, so that a drift of the machine meets all
    alike."""
    with contextlib.ExitStack() as stack:
        loaded = []
        for setting in settings:
            one = LoadedSetting(engines[setting.engine], setting, device, sample)
            stack.callback(one.close)
            loaded.append(one)
        for _ in range(rounds):
            for one in loaded:
                one.round(round_s)
        return [_summary(one, rounds) for one in loaded]


def _batches(
    sample: RowSample, batching: Batching, slots: int
) -> Iterator[tuple[BatchShape, Mapping[str, npt.NDArray[Any]], int]]:
    """For each slot a shape, rows to fill it with, and how many of them count. Where rows differ in length, these are
    batches of the sample from its longest rows to its shortest, a few for each slot that the executor would have."""
    if sample.lengths is None:
        shape = batching.shape(None)
        yield from itertools.repeat((shape, sample.inputs, shape.rows), slots)
        return
    cuts = list(batching.cut(sample.rows, sample.lengths))
    for place in np.linspace(0, len(cuts) - 1, _WAVES * slots).round().astype(int):
        start, stop, length = cuts[place]
        yield batching.shape(length), sample.part(start, stop, length), stop - start


def _finish(slot: Slot, queued: float) -> float:
    slot.computed.synchronize()
    return (time.perf_counter() - queued) * 1e3


def _summary(one: LoadedSetting, rounds: int) -> Measurement:
    p50, p90, p99 = np.percentile(one.latencies_ms, [50, 90, 99])
    return Measurement(
        one.setting,
        float(np.median(one.rates)),
        float(p50),
        float(p90),
        float(p99),
        len(one.latencies_ms),
        rounds,
        float(np.median(one.cpu_s_per_row)),
        one.memory_mib,
    )
