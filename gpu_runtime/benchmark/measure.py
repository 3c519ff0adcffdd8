"""Latency and throughput of engines alone: warm, interleaved, synchronised."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.backends.protocol import Engine, EngineFile, EngineOptions
from gpu_runtime.backends.registry import get_backend
from gpu_runtime.device.protocol import Device
from gpu_runtime.executor.slots import Slot, allocate_slot


@dataclass(frozen=True)
class Setting:
    """One way to run an engine."""

    engine: str  # EngineFile.key
    batch: int
    streams: int
    threads: int


@dataclass(frozen=True)
class Measurement:
    """Medians over interleaved rounds; latencies of single batches in milliseconds, from queueing to result."""

    setting: Setting
    rows_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    batches: int
    rounds: int


class LoadedSetting:
    """An engine loaded and warm at one setting, fed with real rows."""

    def __init__(
        self, file: EngineFile, setting: Setting, device: Device, rows: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        self.setting = setting
        self._device = device
        options = EngineOptions(setting.streams, setting.threads)
        self._engine: Engine = get_backend(file.backend).load(file, device, options)
        self._slots = [
            allocate_slot(file, device, setting.batch, self._engine.create_context(), device.stream())
            for _ in range(setting.streams)
        ]
        for slot in self._slots:
            for tensor in slot.inputs:
                values = rows[tensor.spec.name]
                np.take(values, np.arange(setting.batch) % len(values), axis=0, out=tensor.rows)
                self._device.copy_in(tensor.staging, tensor.buffer, tensor.staging.nbytes, slot.compute)
        self.latencies_ms: list[float] = []
        self.rates: list[float] = []
        self.run(2 * setting.streams)  # first runs allocate memory and choose kernels
        self.latencies_ms.clear()
        self.rates.clear()

    def run(self, batches: int) -> float:
        """Run `batches` with every stream busy; records their latencies and the rate, returns the seconds."""
        waiting: deque[tuple[Slot, float]] = deque()
        started = time.perf_counter()
        for i in range(batches):
            if len(waiting) == len(self._slots):
                self._finish(*waiting.popleft())
            slot = self._slots[i % len(self._slots)]
            queued = time.perf_counter()
            slot.context.enqueue(
                {t.spec.name: t.array for t in slot.inputs},
                {t.spec.name: t.array for t in slot.outputs},
                slot.compute,
            )
            slot.compute.record(slot.computed)
            waiting.append((slot, queued))
        while waiting:
            self._finish(*waiting.popleft())
        seconds = time.perf_counter() - started
        self.rates.append(batches * self.setting.batch / seconds)
        return seconds

    def _finish(self, slot: Slot, queued: float) -> None:
        slot.computed.synchronize()
        self.latencies_ms.append((time.perf_counter() - queued) * 1e3)

    def close(self) -> None:
        for slot in self._slots:
            slot.compute.close()
        self._engine.close()


def measure(
    engines: Mapping[str, EngineFile],
    settings: Sequence[Setting],
    device: Device,
    rows: Mapping[str, npt.NDArray[Any]],
    *,
    rounds: int = 3,
    round_s: float = 0.25,
) -> list[Measurement]:
    """Measure every setting, one round of each in turn, so that a drift of the machine meets all alike."""
    with contextlib.ExitStack() as stack:
        loaded = []
        for setting in settings:
            one = LoadedSetting(engines[setting.engine], setting, device, rows)
            stack.callback(one.close)
            loaded.append(one)
        counts = [
            max(setting.streams, int(round_s / (one.run(setting.streams) / setting.streams)))
            for setting, one in zip(settings, loaded, strict=True)
        ]
        for one in loaded:
            one.latencies_ms.clear()
            one.rates.clear()
        for _ in range(rounds):
            for one, count in zip(loaded, counts, strict=True):
                one.run(count)
        return [_summary(one, rounds) for one in loaded]


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
    )
