"""InferencePipeline: a model's whole lifecycle from one `defs.yaml`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal

import dagster as dg
from pydantic import Field

from gpu_runtime.backends.registry import check_known
from gpu_runtime.benchmark.objective import Objective
from gpu_runtime.benchmark.report import Sweep
from gpu_runtime.datasets.declaration import DatasetSpec
from gpu_runtime.errors import SpecError
from gpu_runtime.quality.gate import GatePolicy, Metric
from gpu_runtime.quantize.int8 import Int8Recipe
from gpu_runtime.scoring import ScoringPolicy
from gpu_runtime.specs import (
    Dtype,
    ImageNormalization,
    ModelSpec,
    OnnxSource,
    Postprocess,
    TensorSpec,
    TopK,
    TorchSource,
)
from inference_dags.pipeline import Pipeline, RowsFrom, days_between


class Settings(dg.Model, dg.Resolvable):
    """A block of `defs.yaml`; unknown keys are errors."""


class InputSettings(Settings):
    """One input as the dataset supplies it. `shape` is one row's; -1 is a dimension in which rows differ. A `mask` is
    filled by the runtime: 1 where a row has values, 0 where it is padded."""

    name: str
    dtype: Dtype
    shape: list[int] = Field(default=[])
    minimum: float | None = None
    maximum: float | None = None
    mask: bool = False


class NormalizationSettings(Settings):
    """Baked into the graph: (x − mean) / std for each channel of a uint8 image."""

    mean: list[float]
    std: list[float]


class RangeSettings(Settings):
    """What every element of an output can be; a row outside is quarantined."""

    minimum: float | None = None
    maximum: float | None = None


class ModelSettings(Settings):
    """The model. Either `factory` (`module:function`, returns a torch module) or `onnx` (a file)."""

    version: str | int  # Dagster's templates read a quoted number as a number
    factory: str | None = None
    onnx: str | None = None
    inputs: list[InputSettings]
    outputs: list[str]
    normalize: dict[str, NormalizationSettings] = Field(default={})
    top_k: int | None = None
    postprocess: dict[str, Postprocess] = Field(default={})
    max_batch: int = 64
    max_length: int | None = None
    output_ranges: dict[str, RangeSettings] = Field(default={})


class DatasetSettings(Settings):
    """The data that arrives every day under `<data root>/<name>/<day>/`.

    `vocabularies` name files beside defs.yaml with one known value a line. `land` is `module:function(day,
    folder)`; leave it out when another system writes the folders. Without `last_day` the days go on. `tokenizer` is a
    tokenizer.json beside defs.yaml that turns a text column into ids; texts of more than `max_length` are quarantined,
    or cut with `truncate`. `rows_per_shard`: the most that a run which dies has to score again; without it, what suits
    the format.
    """

    name: str
    format: Literal["parquet", "images", "arrays"]
    first_day: str
    last_day: str | None = None
    timezone: str = "UTC"
    land: str | None = None
    columns: dict[str, list[str]] = Field(default={})
    vocabularies: dict[str, str] = Field(default={})
    row_key: str | None = None
    label: str | None = None
    crop_fraction: float = 0.875
    tokenizer: str | None = None
    truncate: bool = False
    rows_per_shard: int | None = Field(default=None, ge=1)


class RowsSettings(Settings):
    """About `rows` rows from `days` (`2013-01-01...2013-01-31`, both included, or one day)."""

    days: str
    rows: int
    seed: int = 0


class Int8Settings(Settings):
    """One way to make the INT8 graph; `percentile` 100 is min-max. The gate decides between them."""

    scheme: Literal["vnni", "tensorrt"]
    percentile: float = 100.0
    keep_first_float: bool = False
    per_channel: bool = True


class GateSettings(Settings):
    """What a built engine must keep to serve. `rows` names the rows it is judged on."""

    metric: Metric
    output: str
    max_drop: float
    min_speedup: float = 1.0
    min_value: float | None = None
    rows: RowsSettings


class SweepSettings(Settings):
    """Which batch sizes the benchmark tries, and how long; see `gpu_runtime.benchmark.report.Sweep`."""

    batches: list[int] = Field(default=[1, 8, 32])
    budgets: list[int] = Field(default=[512, 1024, 2048, 4096])
    finalists: int = 2
    rounds: int = 5
    round_s: float = 0.2
    probe_s: float = 0.05
    trial_rounds: int = 3
    trial_s: float = 0.5


class ObjectiveSettings(Settings):
    """What the plan's settings are chosen for; see `gpu_runtime.benchmark.objective.Objective`.

    `finish_by` is when the nightly run has to be done: a time of day (`"06:00"`) in the dataset's timezone, the next
    one after `hour_of_day`. `rows_per_day` is how many rows it scores until then.
    """

    optimize: Literal["rows_per_s", "cost"] = "rows_per_s"
    max_p99_batch_ms: float | None = None
    max_memory_mib: float | None = None
    finish_by: str | None = None
    rows_per_day: int | None = None


class InferencePipeline(dg.Component, dg.Model, dg.Resolvable):
    """Export → calibrate → INT8 → engines → benchmark and gate → serving plan → daily predictions.

    The folder's name is the model's name. `class_names` maps an index output to a file of names beside
    defs.yaml and adds a column of names to the predictions. `stage_timeout_s`: a piece of work that takes
    longer ends the run: a shard being opened, a batch decoded, computed or written, the day published.
    `price_per_hour`: what an hour of the machine costs; then each day says what a million of its rows did.
    `max_drift`: a day whose outputs are distributed further than that from the last published day's (Jensen–Shannon
    distance, 0 … 1) gets a warning.
    """

    model_spec: ModelSettings
    dataset: DatasetSettings
    calibration: RowsSettings
    int8: list[Int8Settings]
    gate: GateSettings
    backends: list[str] = Field(default=["onnxruntime", "openvino", "tensorrt_rtx"])
    benchmark: SweepSettings = SweepSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    class_names: dict[str, str] = Field(default={})
    max_quarantined_fraction: float = 0.05
    stage_timeout_s: float = 600.0
    price_per_hour: float | None = None
    max_drift: float = 0.3
    hour_of_day: int = 2
    owners: list[str] = Field(default=[])

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        from inference_dags.assets.lifecycle import build_lifecycle

        return build_lifecycle(self.pipeline(context.path))

    def pipeline(self, folder: Path) -> Pipeline:
        """The settings as the values the runtime works with; each is checked as it is made."""
        model, dataset, gate = self.model_spec, self.dataset, self.gate
        for backend in self.backends:
            check_known(backend)
        spec = _model_spec(folder, model)
        dataset_spec = DatasetSpec(
            name=dataset.name,
            format=dataset.format,
            columns={name: tuple(columns) for name, columns in dataset.columns.items()},
            vocabularies={name: _lines(folder / file) for name, file in dataset.vocabularies.items()},
            row_key=dataset.row_key,
            label=dataset.label,
            crop_fraction=dataset.crop_fraction,
            tokenizer=str(_file(folder / dataset.tokenizer)) if dataset.tokenizer else None,
            truncate=dataset.truncate,
            rows_per_shard=dataset.rows_per_shard,
        )
        dataset_spec.source(Path(), spec)  # columns that do not fill the inputs are told now, not at night
        return Pipeline(
            model=spec,
            dataset=dataset_spec,
            partitions=_daily(dataset),
            land=dataset.land,
            calibration=_rows(self.calibration),
            int8=tuple(
                Int8Recipe(one.scheme, one.percentile, one.keep_first_float, one.per_channel) for one in self.int8
            ),
            backends=tuple(self.backends),
            gate=GatePolicy(gate.metric, gate.output, gate.max_drop, gate.min_speedup, gate.min_value),
            gate_rows=_rows(gate.rows),
            sweep=Sweep(
                **{
                    **dict(self.benchmark),
                    "batches": tuple(self.benchmark.batches),
                    "budgets": tuple(self.benchmark.budgets),
                }
            ),
            objective=_objective(self.objective, self.hour_of_day),
            scoring=ScoringPolicy(self.max_quarantined_fraction, self.stage_timeout_s, self.price_per_hour),
            max_drift=self.max_drift,
            class_names={name: _lines(folder / file) for name, file in self.class_names.items()},
            hour_of_day=self.hour_of_day,
            owners=tuple(self.owners),
        )


def _model_spec(folder: Path, model: ModelSettings) -> ModelSpec:
    if (model.factory is None) == (model.onnx is None):
        raise ValueError(f"{folder.name}: give either `factory` or `onnx` under `model_spec`")
    source = TorchSource(model.factory) if model.factory else OnnxSource(str(folder / (model.onnx or "")))
    return ModelSpec(
        name=folder.name,
        version=str(model.version),
        source=source,
        inputs=tuple(
            TensorSpec(t.name, t.dtype, tuple(t.shape), t.minimum, t.maximum, mask=t.mask) for t in model.inputs
        ),
        outputs=tuple(model.outputs),
        normalize={name: ImageNormalization(tuple(one.mean), tuple(one.std)) for name, one in model.normalize.items()},
        top_k=TopK(model.top_k) if model.top_k else None,
        postprocess=model.postprocess,
        max_batch=model.max_batch,
        max_length=model.max_length,
        output_ranges={name: (one.minimum, one.maximum) for name, one in model.output_ranges.items()},
    )


def _daily(dataset: DatasetSettings) -> dg.DailyPartitionsDefinition:
    end = None
    if dataset.last_day:
        end = (datetime.date.fromisoformat(dataset.last_day) + datetime.timedelta(days=1)).isoformat()
    return dg.DailyPartitionsDefinition(start_date=dataset.first_day, end_date=end, timezone=dataset.timezone)


def _objective(settings: ObjectiveSettings, hour_of_day: int) -> Objective:
    within = None if settings.finish_by is None else _seconds_until(settings.finish_by, hour_of_day)
    return Objective(
        settings.optimize, settings.max_p99_batch_ms, settings.max_memory_mib, settings.rows_per_day, within
    )


def _seconds_until(finish_by: str, hour_of_day: int) -> float:
    """From the schedule's hour until that time of day comes next. A night in which the clocks change is an hour
    longer or shorter."""
    try:
        until = datetime.time.fromisoformat(finish_by)
    except ValueError:
        until = datetime.time(hour_of_day)
    minutes = (60 * until.hour + until.minute - 60 * hour_of_day) % (24 * 60)
    if not minutes:
        raise SpecError(
            "not a time to finish by",
            stage="defs.yaml",
            item="objective.finish_by",
            expected=f'a time of day in quotes, "HH:MM", other than hour_of_day, {hour_of_day:02}:00',
            got=finish_by,
        )
    return 60.0 * minutes


def _rows(settings: RowsSettings) -> RowsFrom:
    return RowsFrom(days_between(settings.days), settings.rows, settings.seed)


def _lines(path: Path) -> tuple[str, ...]:
    """One value a line."""
    return tuple(_file(path).read_text(encoding="utf-8").splitlines())


def _file(path: Path) -> Path:
    if not path.is_file():
        raise SpecError("no such file", stage="defs.yaml", item=path.name, expected=f"a file in {path.parent.name}/")
    return path
