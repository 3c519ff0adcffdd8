"""Everything one model's `defs.yaml` says, checked and ready for the assets."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import dagster as dg

from gpu_runtime.benchmark.objective import Objective
from gpu_runtime.benchmark.report import Sweep
from gpu_runtime.datasets.declaration import DatasetSpec
from gpu_runtime.predictions.shard_file import PredictionSchema
from gpu_runtime.quality.gate import GatePolicy
from gpu_runtime.quantize.int8 import Int8Recipe
from gpu_runtime.scoring import ScoringPolicy
from gpu_runtime.specs import ModelSpec, TensorSpec


@dataclass(frozen=True)
class RowsFrom:
    """Which rows calibration or the gate look at: about `rows` of these days, drawn with `seed`."""

    days: tuple[str, ...]
    rows: int
    seed: int = 0


@dataclass(frozen=True)
class Pipeline:
    """One model's lifecycle. `land` is `module:function(day, folder)` that brings a day's files, if we do."""

    model: ModelSpec
    dataset: DatasetSpec
    partitions: dg.DailyPartitionsDefinition
    land: str | None
    calibration: RowsFrom
    int8: tuple[Int8Recipe, ...]
    backends: tuple[str, ...]
    gate: GatePolicy
    gate_rows: RowsFrom
    sweep: Sweep
    objective: Objective
    scoring: ScoringPolicy
    max_drift: float
    class_names: dict[str, tuple[str, ...]]
    hour_of_day: int
    owners: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.model.name

    def key(self, asset: str) -> dg.AssetKey:
        return dg.AssetKey([self.name, asset])

    @property
    def input_key(self) -> dg.AssetKey:
        return self.key(self.dataset.name)

    def schema(self, outputs: tuple[TensorSpec, ...]) -> PredictionSchema:
        """The declared columns of the predictions, for the engine's outputs."""
        return PredictionSchema(outputs, self.class_names)


def days_between(text: str) -> tuple[str, ...]:
    """`A...B` (both included) or a single day, as ISO days; calendar days, so that no clock change matters."""
    first, _, last = text.partition("...")
    day, end = datetime.date.fromisoformat(first), datetime.date.fromisoformat(last or first)
    if end < day:
        raise ValueError(f"days {text!r}: the last day is before the first")
    return tuple((day + datetime.timedelta(days=offset)).isoformat() for offset in range((end - day).days + 1))
