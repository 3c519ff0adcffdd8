"""The assets of one model. Each body: inputs, one `gpu_runtime` call, value and metadata."""

# No `from __future__ import annotations` here: Dagster reads the parameters' annotations as they are.

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
from inference_resources import ArtifactStoreResource, DatasetResource, GpuResource, PredictionTableResource

from gpu_runtime.backends.engine_set import build_engines
from gpu_runtime.benchmark.report import run_benchmark
from gpu_runtime.benchmark.trial import Feed
from gpu_runtime.datasets.declaration import declaration_of
from gpu_runtime.datasets.partition import DatasetPartition, Source
from gpu_runtime.errors import InferenceError
from gpu_runtime.export.onnx_export import export_model
from gpu_runtime.promotion.plan import choose_plan
from gpu_runtime.quantize.calibration import calibrate
from gpu_runtime.quantize.int8 import quantize
from gpu_runtime.scoring import Predictions, score_days
from gpu_runtime.specs import digest_of, to_plain
from inference_dags.assets.range_run import RangeRun, origin
from inference_dags.assets.upstream import Upstream
from inference_dags.checks import results as checks
from inference_dags.metadata import (
    artifact_metadata,
    benchmark_metadata,
    inputs_metadata,
    predictions_metadata,
    table,
)
from inference_dags.pipeline import Pipeline
from inference_dags.schedules import daily_job

_CALIBRATION_BATCH = 16
_Decorator = Callable[[Callable[..., Any]], dg.AssetsDefinition]


class ScoringConfig(dg.Config):
    """`force`: score every row again, though the day is published or has receipts."""

    force: bool = False


def build_lifecycle(pipeline: Pipeline) -> dg.Definitions:
    """Every asset, check, job and schedule of one model."""
    job, schedule = daily_job(pipeline)
    assets = [
        daily_input(pipeline),
        onnx_model(pipeline),
        calibration(pipeline),
        int8_model(pipeline),
        engine(pipeline),
        benchmark(pipeline),
        serving_plan(pipeline),
        predictions(pipeline),
    ]
    return dg.Definitions(assets=assets, jobs=[job], schedules=[schedule])


def _asset(pipeline: Pipeline, name: str, settings: Any, kinds: set[str], **more: Any) -> _Decorator:
    """The decorator's arguments that all assets of a model share; `settings` are what its code depends on."""
    decorator: _Decorator = dg.asset(
        key=pipeline.key(name),
        group_name=pipeline.name,
        code_version=digest_of(settings)[:12],
        kinds=kinds,
        owners=list(pipeline.owners) or None,
        **more,
    )
    return decorator


def _days(pipeline: Pipeline, days: tuple[str, ...]) -> dg.AssetDep:
    return dg.AssetDep(pipeline.input_key, partition_mapping=dg.SpecificPartitionsPartitionMapping(list(days)))


def daily_input(pipeline: Pipeline) -> dg.AssetsDefinition:
    @_asset(
        pipeline,
        pipeline.dataset.name,
        {"dataset": dataclasses.replace(pipeline.dataset, tokenizer=None), "land": pipeline.land},
        {pipeline.dataset.format},
        description="One day's inputs. Its data version is the digest of the files' fingerprints.",
        partitions_def=pipeline.partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def inputs(context: dg.AssetExecutionContext, dataset: DatasetResource) -> Iterator[dg.MaterializeResult]:
        source, land = dataset.source(pipeline.dataset, pipeline.model), _land(pipeline.land)
        run = RangeRun(context, pipeline.input_key, {})
        for day in context.partition_keys:
            try:
                partition = _landed(day, dataset.day_folder(pipeline.dataset, day), source, land)
            except Exception as error:
                if context.has_partition_key:
                    raise
                run.failed(day, error)
                continue
            version, metadata = partition.digest, inputs_metadata(partition)
            if context.has_partition_key:
                yield dg.MaterializeResult(data_version=dg.DataVersion(version), metadata=metadata)
                return
            run.done(day, "registered", version, metadata)
        run.check()
        yield dg.MaterializeResult()
        run.repeat()

    return inputs


def _landed(day: str, folder: Path, source: Source, land: Callable[[str, Path], None] | None) -> DatasetPartition:
    """Bring the day's files, if that is ours to do, and look at them."""
    if land is not None:
        folder.mkdir(parents=True, exist_ok=True)
        land(day, folder)
    return source.partition(day)


def onnx_model(pipeline: Pipeline) -> dg.AssetsDefinition:
    key = pipeline.key("onnx_model")

    @_asset(
        pipeline,
        "onnx_model",
        pipeline.model,
        {"onnx"},
        description="The model as an ONNX graph with a dynamic batch; normalisation and top-k are baked in.",
        check_specs=[checks.parity_spec(key)],
    )
    def exported(artifacts: ArtifactStoreResource) -> dg.MaterializeResult:
        model = export_model(pipeline.model, artifacts.store())
        facts = model.artifact.metadata
        return dg.MaterializeResult(
            data_version=dg.DataVersion(model.digest),
            metadata={
                **artifact_metadata(model.artifact),
                "opset": facts["opset"],
                "max_batch": facts["max_batch"],
                "tensors": table(
                    [
                        {"tensor": t.name, "is": role, "dtype": t.dtype, "row shape": str(t.shape)}
                        for role, specs in (("input", model.graph().inputs), ("output", model.graph().outputs))
                        for t in specs
                    ]
                ),
            },
            check_results=[checks.parity_result(model.parity)],
        )

    return exported


def calibration(pipeline: Pipeline) -> dg.AssetsDefinition:
    @_asset(
        pipeline,
        "calibration",
        pipeline.calibration,
        {"onnx"},
        description="Ranges of every activation, measured in one pass over real rows.",
        deps=[pipeline.key("onnx_model"), _days(pipeline, pipeline.calibration.days)],
    )
    def measured(
        context: dg.AssetExecutionContext, artifacts: ArtifactStoreResource, dataset: DatasetResource
    ) -> dg.MaterializeResult:
        upstream = _upstream(context, pipeline, artifacts, dataset)
        sample = upstream.sample(pipeline.calibration)
        found = calibrate(upstream.exported(), sample.batches(_CALIBRATION_BATCH), sample.digest, artifacts.store())
        return dg.MaterializeResult(
            data_version=dg.DataVersion(found.digest),
            metadata={
                **artifact_metadata(found.artifact),
                "dagster/row_count": found.artifact.metadata["rows"],
                "tensors": len(found.artifact.metadata["tensors"]),
            },
        )

    return measured


def int8_model(pipeline: Pipeline) -> dg.AssetsDefinition:
    @_asset(
        pipeline,
        "int8_model",
        pipeline.int8,
        {"onnx"},
        description="INT8 graphs by static Q/DQ, one for each recipe.",
        deps=[pipeline.key("onnx_model"), pipeline.key("calibration")],
    )
    def quantized(
        context: dg.AssetExecutionContext, artifacts: ArtifactStoreResource, dataset: DatasetResource
    ) -> dg.MaterializeResult:
        upstream = _upstream(context, pipeline, artifacts, dataset)
        made = quantize(upstream.exported(), upstream.calibration(), pipeline.int8, artifacts.store())
        return dg.MaterializeResult(
            data_version=dg.DataVersion(made.digest),
            metadata={
                **artifact_metadata(made.artifact),
                "variants": table([{"variant": k, **v} for k, v in made.artifact.metadata["variants"].items()]),
            },
        )

    return quantized


def engine(pipeline: Pipeline) -> dg.AssetsDefinition:
    @_asset(
        pipeline,
        "engine",
        pipeline.backends,
        set(pipeline.backends),
        description="Every graph built by every backend for this class of device, or the reason why not.",
        deps=[pipeline.key("onnx_model"), pipeline.key("int8_model")],
        pool="gpu",
    )
    def built(
        context: dg.AssetExecutionContext,
        artifacts: ArtifactStoreResource,
        dataset: DatasetResource,
        gpu: GpuResource,
    ) -> dg.MaterializeResult:
        graphs = _upstream(context, pipeline, artifacts, dataset).graphs()
        made = build_engines(pipeline.name, graphs, pipeline.backends, gpu.open().device_class, artifacts.store())
        return dg.MaterializeResult(
            data_version=dg.DataVersion(made.digest),
            metadata={
                **artifact_metadata(made.artifact),
                "device": f"{gpu.choice().name}: {gpu.choice().reason}",
                "engines": table(
                    [
                        {
                            "engine": e.key,
                            "built for": e.device_class.id,
                            "version": e.backend_version,
                            "kb": e.nbytes // 1024,
                        }
                        for e in made.engines.values()
                    ]
                ),
                "not_built": dg.MetadataValue.json(dict(made.not_built)),
            },
        )

    return built


def benchmark(pipeline: Pipeline) -> dg.AssetsDefinition:
    key = pipeline.key("benchmark")

    @_asset(
        pipeline,
        "benchmark",
        {
            "gate": pipeline.gate,
            "rows": pipeline.gate_rows,
            "sweep": pipeline.sweep,
            "objective": pipeline.objective,
        },
        set(pipeline.backends),
        description="Accuracy, latency and throughput of every built engine on this device, and the gate's verdict.",
        deps=[pipeline.key("engine"), _days(pipeline, pipeline.gate_rows.days)],
        check_specs=[checks.gate_spec(key)],
        pool="gpu",
    )
    def measured(
        context: dg.AssetExecutionContext,
        artifacts: ArtifactStoreResource,
        dataset: DatasetResource,
        gpu: GpuResource,
    ) -> dg.MaterializeResult:
        upstream = _upstream(context, pipeline, artifacts, dataset)
        device = gpu.open()
        report = run_benchmark(
            pipeline.model,
            upstream.declaration,
            upstream.engines(device.device_class),
            upstream.exported().graph(),
            upstream.sample(pipeline.gate_rows, labelled=pipeline.gate.needs_labels),
            pipeline.gate,
            pipeline.sweep,
            device,
            artifacts.store(),
            pipeline.objective,
            Feed(upstream.source, pipeline.gate_rows.days),
        )
        return dg.MaterializeResult(
            data_version=dg.DataVersion(report.digest),
            metadata=benchmark_metadata(report),
            check_results=[checks.gate_result(report)],
        )

    return measured


def serving_plan(pipeline: Pipeline) -> dg.AssetsDefinition:
    @_asset(
        pipeline,
        "serving_plan",
        {"model": pipeline.name, "version": pipeline.model.version},
        {"json"},
        description="The engine and settings in force on this class of device. Only what passed the gate gets here.",
        deps=[pipeline.key("benchmark")],
    )
    def promoted(
        context: dg.AssetExecutionContext,
        artifacts: ArtifactStoreResource,
        dataset: DatasetResource,
        gpu: GpuResource,
    ) -> dg.MaterializeResult:
        upstream, device_class = _upstream(context, pipeline, artifacts, dataset), gpu.open().device_class
        plan = choose_plan(
            upstream.report(device_class),
            declaration=upstream.declaration,
            engine_set=upstream.engines(device_class).digest,
            gate_set=upstream.sample_digest(pipeline.gate_rows),
            policy=pipeline.gate,
            device_class=device_class,
            objective=pipeline.objective,
        )
        promotion = artifacts.promotions().promote(plan)
        plan = promotion.plan
        return dg.MaterializeResult(
            data_version=dg.DataVersion(plan.scoring_key),  # another batch size makes no day stale
            metadata={
                "digest": plan.digest,
                "promotion": promotion.number,
                "engine": plan.engine,
                "batch": plan.batch,
                "streams": plan.streams,
                "threads": plan.threads,
                "slots": plan.slots or "as the executor takes by itself",
                "decode_workers": plan.decode_workers,
                "objective": dg.MetadataValue.json(to_plain(plan.objective)),
                "device_class": plan.device_class.id,
                "engine_rows_per_s": plan.engine_rows_per_s,
                "reason": dg.MetadataValue.md(plan.reason),
            },
        )

    return promoted


def predictions(pipeline: Pipeline) -> dg.AssetsDefinition:
    @_asset(
        pipeline,
        "predictions",
        {"model": pipeline.model, "names": pipeline.class_names},  # what a run may cost or take changes no score
        {"deltalake"},
        description="One day's scores, published whole by one Delta transaction; unusable rows are in quarantine.",
        deps=[pipeline.key("serving_plan"), pipeline.input_key],
        partitions_def=pipeline.partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        check_specs=checks.day_specs(pipeline),
        pool="gpu",
    )
    def scored(
        context: dg.AssetExecutionContext,
        config: ScoringConfig,
        artifacts: ArtifactStoreResource,
        dataset: DatasetResource,
        predictions: PredictionTableResource,
        gpu: GpuResource,
    ) -> Iterator[dg.MaterializeResult]:
        plan = artifacts.promotions().current(pipeline.name, gpu.open().device_class).plan
        source = dataset.source(pipeline.dataset, pipeline.model)
        plan.check_declaration(declaration_of(pipeline.model, source))
        days = score_days(
            context.partition_keys,
            gpu.scorer(plan, artifacts.store(), pipeline.scoring),
            source,
            pipeline.schema(plan.engine_file(artifacts.store()).outputs),
            predictions.table(pipeline.name),
            context.run.run_id,
            force=config.force,
        )
        yield from _published(context, pipeline, days)

    return scored


def _published(
    context: dg.AssetExecutionContext, pipeline: Pipeline, days: Iterator[tuple[str, Predictions | InferenceError]]
) -> Iterator[dg.MaterializeResult]:
    """Score the days, telling Dagster of each as it is published; then of the bad ones, all at once."""
    key = pipeline.key("predictions")
    run = RangeRun(context, key, {pipeline.key("serving_plan"): False, pipeline.input_key: True})
    results: dict[str, list[dg.AssetCheckResult]] = {}
    for day, outcome in days:
        if isinstance(outcome, InferenceError):
            if context.has_partition_key:
                context.log.error(f"{day} failed{origin(outcome)}")
                raise outcome from None
            run.failed(day, outcome)
            continue
        version, metadata = outcome.day_key, predictions_metadata(outcome)
        found = checks.day_results(pipeline, outcome)
        if context.has_partition_key:
            yield dg.MaterializeResult(data_version=dg.DataVersion(version), metadata=metadata, check_results=found)
            return
        run.done(day, "reused" if outcome.reused else "published", version, metadata, found)
        results[day] = found
    run.check()
    yield dg.MaterializeResult(check_results=checks.all_days(results))
    run.repeat()


def _upstream(
    context: dg.AssetExecutionContext, pipeline: Pipeline, artifacts: ArtifactStoreResource, dataset: DatasetResource
) -> Upstream:
    source = dataset.source(pipeline.dataset, pipeline.model)
    return Upstream(context, pipeline, artifacts.store(), source)


def _land(reference: str | None) -> Callable[[str, Path], None] | None:
    if reference is None:
        return None
    module, _, function = reference.partition(":")
    land: Callable[[str, Path], None] = getattr(importlib.import_module(module), function)
    return land
