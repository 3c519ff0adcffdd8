"""The whole executor over real shards, for what an engine alone cannot tell: slots and decode workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpu_runtime.backends.protocol import EngineFile, EngineOptions
from gpu_runtime.backends.registry import get_backend
from gpu_runtime.benchmark.measure import Measurement, Setting
from gpu_runtime.benchmark.objective import Objective
from gpu_runtime.datasets.partition import ShardReader, Source
from gpu_runtime.device.host import usable_cores
from gpu_runtime.device.protocol import Device
from gpu_runtime.executor.pipeline import Batch, StreamExecutor

_OPENED = 4
"""Shards of whose first parts the trials take batches in turn: all of them are held at once."""


@dataclass(frozen=True)
class Feed:
    """What trials read: a dataset, and days of it that are there."""

    source: Source
    days: tuple[str, ...]

    def open(self) -> list[ShardReader]:
        shards = (shard for day in self.days for shard in self.source.partition(day).shards if shard.rows)
        return [next(iter(self.source.parts(shard))) for shard in itertools.islice(shards, _OPENED)]


@dataclass(frozen=True)
class Trial:
    """A setting fed by `decode_workers` threads through `slots` batches on their way at once. Medians over
    interleaved rounds, from a row's decoding to its result: opening shards and writing tables are left out."""

    setting: Setting
    slots: int
    decode_workers: int
    rows_per_s: float
    cpu_s_per_row: float
    rounds: int


def run_trials(
    file: EngineFile,
    measured: Measurement,
    objective: Objective,
    device: Device,
    readers: Sequence[ShardReader],
    rounds: int,
    trial_s: float,
) -> list[Trial]:
    """Two and three slots for each stream × 1, 2, 4 … decode workers, up to the cores; three slots only where the
    third ones keep `max_memory_mib`, too. Nothing without readers."""
    if not readers:
        return []
    setting, streams = measured.setting, measured.setting.streams
    batching, tensors = setting.batching(file), (*file.inputs, *file.outputs)
    third = streams * max(sum(t.nbytes(s.rows, s.length) for t in tensors) for s in batching.shapes) / 2**20
    larger = replace(measured, memory_mib=None if measured.memory_mib is None else measured.memory_mib + third)
    layouts = [
        (slots * streams, workers)
        for slots in ((2, 3) if objective.keeps(larger) else (2,))
        for workers in powers_of_two(usable_cores())
    ]
    batches = 0
    found: dict[tuple[int, int], list[tuple[float, float]]] = {layout: [] for layout in layouts}
    with get_backend(file.backend).load(file, device, EngineOptions(streams, setting.threads)) as engine:
        for _ in range(rounds):
            for slots, workers in layouts:
                # One executor at a time: each has buffers, and its contexts may have large ones of their own.
                with StreamExecutor(
                    engine,
                    device,
                    batch=setting.batch,
                    lengths=setting.lengths,
                    slots=slots,
                    decode_workers=workers,
                ) as executor:
                    # Touches memory, starts threads, and tells how many batches take that long: as many for each
                    # layout, so that filling and draining the ring costs all alike.
                    warm = executor.run(some_batches(executor, readers, 4 * streams), lambda scored: None)
                    batches = batches or max(4 * streams, round(trial_s * warm.batches / warm.wall_s))
                    stats = executor.run(some_batches(executor, readers, batches), lambda scored: None)
                found[slots, workers].append((stats.rows_per_s, stats.cpu_s / stats.rows))
    medians = {layout: np.median(rates, axis=0) for layout, rates in found.items()}
    return [Trial(setting, *layout, float(rate), float(cpu), rounds) for layout, (rate, cpu) in medians.items()]


def best_trial(trials: Sequence[Trial], objective: Objective) -> Trial | None:
    """The best by what the objective optimises; among those as good as equal, the one of the fewest slots and then
    of the fewest decode workers. None when there were no trials."""
    return min(objective.best(trials), key=lambda one: (one.slots, one.decode_workers), default=None)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 … below `most`, and `most`."""
    return [*itertools.takewhile(lambda n: n < most, (2**i for i in itertools.count())), most]


def some_batches(executor: StreamExecutor, readers: Sequence[ShardReader], count: int) -> Iterator[Batch]:
    """`count` batches, spread evenly over all of the shards': where rows differ in length, the longest come first."""
    batches = [batch for reader in readers for batch in executor.batches(0, reader)]
    places = np.linspace(0, len(batches), count, endpoint=False) if count < len(batches) else np.arange(count)
    return (batches[int(place) % len(batches)] for place in places)
