"""How long each stage of a run worked and waited; names the stage that held the run back, or that hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

_RELIEF: dict[str, str] = {
    "read": "fewer and larger files, a column layout that needs less conversion, as one array for many columns, or a "
    "faster disk",
    "decode": "more decode workers, smaller source files, or decoding on the device",
    "dispatch": "larger batches, or narrower inputs: every value is checked",
    "compute": "a faster precision or backend, a larger batch, more streams, or another device",
    "write": "fewer or narrower output columns, or a faster disk",
}

_STAGE_OF = {
    "read": "read",
    "cut": "read",
    "decode": "decode",
    "check": "dispatch",
    "queue": "compute",
    "compute": "compute",
    "check of results": "write",
    "write": "write",
}
"""Activity → the stage that hangs when it does not end. Waiting for another stage is no stage's work."""


class StageClock:
    """What the threads of a run spend their time on. Each activity belongs to one thread; any may read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since: dict[str, float] = {}

    def seconds(self, activity: str) -> float:
        return self._seconds.get(activity, 0.0)

    @contextmanager
    def at(self, activity: str) -> Iterator[None]:
        started = self._since[activity] = time.perf_counter()
        try:
            yield
        finally:
            self._since.pop(activity, None)
            self._seconds[activity] = self.seconds(activity) + time.perf_counter() - started

    def progress(self, activity: str) -> None:
        """A part of the work in hand is done: it does not hang."""
        self._since[activity] = time.perf_counter()

    def longest(self) -> tuple[str, float]:
        """The stage that has been at its present piece of work for longest, and for how many seconds."""
        now = time.perf_counter()
        under_way = [(_STAGE_OF[what], now - since) for what, since in self._since.copy().items() if what in _STAGE_OF]
        return max(under_way, key=lambda item: item[1], default=("none", 0.0))


@dataclass(frozen=True)
class StageTime:
    """`busy_s` sums over the stage's `width` parallel workers; `wait_s` is how long the next stage stood idle
    for it; `occupancy` = busy ÷ (wall × width). Reading is opening shards and packing columns into rows; dispatching is
    checking what was read and queueing it; writing has the check of the results in it."""

    busy_s: float
    wait_s: float
    width: int
    occupancy: float


@dataclass(frozen=True)
class RunStats:
    """What one run of the executor did.

    `cpu_s` is all the CPU time of this process during the run, by every stage, padding and retries included. On a
    shared CPU the bound is cores ÷ (CPU-seconds per row), so `efficiency` = cpu_s ÷ (cores × wall_s): how much of
    the cores' time was worked. `elements` is what was asked of the engine: rows, or their lengths summed up where they
    differ; `padded_elements` what it computed beside them. Latencies are from a batch's dispatch until the writer held
    its results, in milliseconds. `peak_memory_mib` is this process' largest resident memory during the run, where the
    system tells.
    """

    rows: int
    batches: int
    elements: int
    padded_elements: int
    wall_s: float
    cpu_s: float
    cores: int
    stages: Mapping[str, StageTime]
    latency_p50_ms: float
    latency_p90_ms: float
    latency_p99_ms: float
    peak_memory_mib: float | None

    @property
    def padding(self) -> float:
        """Computed for nothing ÷ asked for: what filling up batches, and rows to the length of their batch, cost."""
        return self.padded_elements / self.elements if self.elements else 0.0

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.wall_s if self.wall_s else 0.0

    @property
    def efficiency(self) -> float:
        """Rows per second ÷ the bound of a machine whose stages share its cores."""
        return self.cpu_s / (self.cores * self.wall_s) if self.wall_s else 0.0

    @property
    def bottleneck(self) -> str:
        """The busiest stage."""
        return max(self.stages, key=lambda name: self.stages[name].occupancy) if self.stages else "none"

    @property
    def relief(self) -> str:
        """What would lift the bottleneck."""
        return _RELIEF.get(self.bottleneck, "nothing to relieve")
