"""How long each stage of a run worked and waited; names the stage that held the run back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_RELIEF: dict[str, str] = {
    "read": "fewer and larger files, a column layout that needs less conversion, or a faster disk",
    "decode": "more decode workers, smaller source files, or decoding on the device",
    "compute": "a faster precision or backend, a larger batch, more streams, or another device",
    "write": "fewer or narrower output columns, or a faster disk",
}


@dataclass(frozen=True)
class StageTime:
    """`busy_s` sums over the stage's `width` parallel workers; `wait_s` is how long the next stage stood idle
    for it; `occupancy` = busy ÷ (wall × width)."""

    busy_s: float
    wait_s: float
    width: int
    occupancy: float


@dataclass(frozen=True)
class RunStats:
    """What one run of the executor did.

    `cpu_s` is all the CPU time of this process during the run, by every stage, padding and retries included. On a
    shared CPU the bound is cores ÷ (CPU-seconds per row), so `efficiency` = cpu_s ÷ (cores × wall_s): how much of
    the cores' time was worked. Latencies are from a batch's dispatch until the writer held its results, in
    milliseconds.
    """

    rows: int
    batches: int
    padded_rows: int
    wall_s: float
    cpu_s: float
    cores: int
    stages: Mapping[str, StageTime]
    latency_p50_ms: float
    latency_p90_ms: float
    latency_p99_ms: float

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
