"""`make demo`: the whole lifecycle of two real models on real data, materialized in one Dagster instance.

What runs here are the same assets that the UI, the schedules and `dagster asset materialize` run.
"""

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg
from inference_resources import ArtifactStoreResource, GpuResource, PredictionTableResource

from gpu_runtime.benchmark.report import KIND, BenchmarkReport, best_rate, table_rows
from inference_dags.definitions import defs
from inference_dags.metadata import markdown_table
from inference_dags.pipeline import days_between

_LIFECYCLE = ("onnx_model", "calibration", "int8_model", "engine", "benchmark", "serving_plan")


@dataclass(frozen=True)
class Demo:
    """Which days of a model are landed for calibration and gate, and which are landed and scored: first one
    day alone, then a range in one run."""

    model: str
    inputs: str
    land: tuple[str, ...]
    day: str
    days: str
    columns: tuple[str, ...]


DEMOS = (
    Demo(
        "flight_delay",
        "flights",
        ("2013-01-01...2013-06-30", "2013-10-01...2013-12-29"),
        "2013-08-31",
        "2013-09-01...2013-09-30",
        ("row_key", "probability"),
    ),
    Demo(
        "photo_tags",
        "photos",
        ("2026-01-01...2026-01-02",),
        "2026-01-03",
        "2026-01-04...2026-01-06",
        ("row_key", "top_label", "top_score"),
    ),
)


class Runner:
    """Materializes by asset name, as the command line would, and says how long it took."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self._definitions = defs()
        self._instance = instance

    def materialize(self, model: str, assets: Sequence[str], days: str | None = None) -> None:
        first, _, last = (days or "").partition("...")
        tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
        started = time.perf_counter()
        result = dg.materialize(
            [asset for asset in self._definitions.assets or () if isinstance(asset, dg.AssetsDefinition)],
            selection=[dg.AssetKey([model, asset]) for asset in assets],
            resources=self._definitions.resources,
            instance=self._instance,
            partition_key=first if first and not last else None,
            tags=tags if last else None,
            run_config={"loggers": {"console": {"config": {"log_level": "ERROR"}}}},
            raise_on_error=False,
        )
        seconds = time.perf_counter() - started
        print(f"  {'+'.join(assets):<24} {days or '':<26} {seconds:6.1f} s", flush=True)
        if not result.success:
            raise SystemExit(f"{model}: materializing {', '.join(assets)} failed; the reason stands above")

    def resource(self, name: str) -> object:
        return (self._definitions.resources or {})[name]

    def metadata(self, model: str, asset: str) -> dict[str, dg.MetadataValue]:
        event = self._instance.get_latest_materialization_event(dg.AssetKey([model, asset]))
        assert event is not None and event.asset_materialization is not None
        return dict(event.asset_materialization.metadata)


def run(demo: Demo, runner: Runner) -> None:
    print(f"\n{demo.model}")
    for days in demo.land:
        runner.materialize(demo.model, [demo.inputs], days)
    for asset in _LIFECYCLE:
        runner.materialize(demo.model, [asset])
    runner.materialize(demo.model, [demo.inputs, "predictions"], demo.day)
    runner.materialize(demo.model, [demo.inputs, "predictions"], demo.days)


def tell(demo: Demo, runner: Runner) -> None:
    """What happened: the engines, the choice, the days."""
    artifacts, tables, gpu = (runner.resource(name) for name in ("artifacts", "predictions", "gpu"))
    assert isinstance(artifacts, ArtifactStoreResource)
    assert isinstance(tables, PredictionTableResource) and isinstance(gpu, GpuResource)
    report = BenchmarkReport(artifacts.store().get(KIND, str(runner.metadata(demo.model, "benchmark")["digest"].value)))
    with gpu:
        promotion = artifacts.promotions().current(demo.model, gpu.open().device_class)
    print(f"\n== {demo.model} " + "=" * (76 - len(demo.model)))
    print(markdown_table(table_rows(report)))
    print(f"\nRatios of one interleaved run: {_ratios(report)}")
    device = gpu.choice()
    print(f"\nPlan {promotion.number} in force on {device.name} ({device.reason}): {promotion.plan.reason}")
    table = tables.table(demo.model)
    runs = [run for day in (demo.day, *days_between(demo.days)) if (run := table.read_run(day))]
    print(
        f"\n{len(runs)} days: {sum(r['rows_in'] for r in runs):,} rows in = {sum(r['scored'] for r in runs):,} scored"
        f" + {sum(r['quarantined'] for r in runs):,} quarantined, each day in one Delta transaction."
    )
    if worked := [r for r in runs if "run" in r]:
        rate = sum(r["run"]["rows"] for r in worked) / sum(r["run"]["wall_s"] for r in worked)
        largest = max(worked, key=lambda r: r["run"]["rows"])
        print(
            f"{rate:,.0f} rows/s over all days; the largest day {largest['day']}:"
            f" {largest['rows_per_s']:,.0f} rows/s = {largest['of_engine_only']:.0%} of the engine alone,"
            f" {largest['of_shared_cpu_bound']:.0%} of what the shared cores allow;"
            f" held back by {largest['bottleneck']}: {largest['relief']}."
        )
    else:
        print("Every shard had a receipt from an earlier run: no row was scored again.")
    print(f"\nThe table is {table.predictions.uri}. To read a day:")
    year, month, day = (int(part) for part in demo.day.split("-"))
    filters = f"[('date', '=', datetime.date({year}, {month}, {day}))]"
    print(
        f"  python -c \"import datetime, deltalake; print(deltalake.DeltaTable('{_short(table.predictions.uri)}')"
        f'.to_pandas(filters={filters}, columns={list(demo.columns)}))"'
    )


def _ratios(report: BenchmarkReport) -> str:
    results = report.results
    parts = []
    for backend in (None, "onnxruntime", "openvino"):
        fast, base = best_rate(results, "int8", backend), best_rate(results, "fp32", backend)
        if fast and base:
            parts.append(
                f"best INT8 ÷ best FP32 {f'on {backend}' if backend else 'over all backends'} = {fast / base:.2f}"
            )
    return "; ".join(parts) + "."


def _short(path: str) -> str:
    return os.path.relpath(path)


def main() -> None:
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    with dg.DagsterInstance.get() if os.environ.get("DAGSTER_HOME") else dg.DagsterInstance.ephemeral() as instance:
        runner = Runner(instance)
        for demo in DEMOS:
            run(demo, runner)
        for demo in DEMOS:
            tell(demo, runner)
    print(f"\nThe demo's own work took {time.perf_counter() - started:.0f} s. `make ui` shows all of it.")


if __name__ == "__main__":
    main()
