"""The lifecycle in Dagster, asset by asset, on a small real model."""

from __future__ import annotations

import datetime
from typing import Any

import dagster as dg
import pytest

from gpu_runtime.errors import SpecError
from gpu_runtime.promotion.store import PromotionStore
from inference_dags import InferencePipeline

DAY = "2026-01-03"
VARIANTS = ("fp32", "int8-vnni-minmax", "int8-vnni-minmax-first-float")


def key(asset: str) -> dg.AssetKey:
    return dg.AssetKey(["tiny", asset])


def test_a_day_is_scored_and_every_row_is_accounted_for(promoted: Any) -> None:
    promoted.write_day(DAY, null_rows=3)
    result = promoted.materialize("rows", "predictions", day=DAY)
    assert result.success
    assert len(promoted.table().read_day(DAY)) == 197
    quarantine = promoted.table().read_quarantine(DAY)
    assert list(quarantine["row_key"]) == [f"{DAY}-0", f"{DAY}-1", f"{DAY}-2"]
    assert set(quarantine["reason"]) == {"column 'a' is null"}
    metadata = promoted.metadata("predictions")
    assert metadata["dagster/row_count"] == 197 and metadata["quarantined"] == 3 and metadata["rows_in"] == 200
    (check,) = (e for e in result.get_asset_check_evaluations() if e.check_name == "row_accounting")
    assert check.passed


def test_data_version_is_the_content_digest_and_nothing_is_pickled(promoted: Any) -> None:
    for asset, kind in (("onnx_model", "onnx_model"), ("engine", "engine"), ("benchmark", "benchmark")):
        event = promoted.instance.get_latest_materialization_event(key(asset)).asset_materialization
        digest = event.metadata["digest"].value
        assert event.tags["dagster/data_version"] == digest
        assert (promoted.home / "artifacts" / "objects" / kind / digest / "manifest.json").is_file()


def test_without_a_plan_predictions_refuse_and_say_what_to_do(project: Any, failure_text: Any) -> None:
    result = project.materialize("predictions", day=DAY)
    assert not result.success
    assert "no serving plan for this device" in failure_text(result)
    assert "materialize tiny/benchmark and tiny/serving_plan" in failure_text(result)


def test_a_failed_gate_leaves_no_plan_and_blocks_what_is_downstream(project: Any, failure_text: Any) -> None:
    project.settings["gate"]["min_value"] = 0.999
    for asset in ("onnx_model", "calibration", "int8_model", "engine"):
        assert project.materialize(asset).success
    both = project.materialize("benchmark", "serving_plan")
    assert not both.success
    (gate,) = (e for e in both.get_asset_check_evaluations() if e.check_name == "gate")
    assert not gate.passed
    assert not both.asset_materializations_for_node("tiny__serving_plan")
    # The benchmark stays materialized, so the plan asset alone has to refuse as well.
    alone = project.materialize("serving_plan")
    assert not alone.success and "no engine passed the gate" in failure_text(alone)
    scoring = project.materialize("predictions", day=DAY)
    assert not scoring.success and "no serving plan" in failure_text(scoring)


def test_a_failed_gate_keeps_the_plan_in_force(promoted: Any) -> None:
    promoted.settings["gate"]["min_value"] = 0.999
    assert not promoted.materialize("benchmark").success
    assert not promoted.materialize("serving_plan").success
    assert promoted.materialize("predictions", day=DAY).success


def test_a_plan_does_not_score_what_is_declared_otherwise_since_its_gate(promoted: Any, failure_text: Any) -> None:
    promoted.settings["dataset"]["columns"]["x"] = ["f", "e", "d", "c", "b", "a"]
    result = promoted.materialize("predictions", day=DAY)
    assert not result.success
    assert "declaration changed since the gate" in failure_text(result)
    assert promoted.table().current_publication(DAY) is None


@pytest.mark.parametrize("change", ["gate", "version", "engines"])
def test_a_benchmark_of_something_else_promotes_nothing(promoted: Any, failure_text: Any, change: str) -> None:
    if change == "gate":
        promoted.settings["gate"]["max_drop"] = 0.001
    elif change == "version":
        promoted.settings["model_spec"]["version"] = "v2"
    else:
        promoted.settings["int8"].append({"scheme": "vnni", "percentile": 99.9})
        assert promoted.materialize("int8_model").success and promoted.materialize("engine").success
    result = promoted.materialize("serving_plan")
    assert not result.success
    assert ("the benchmark is of another" if change != "version" else "onnx_model: was made") in failure_text(result)
    assert "materialize" in failure_text(result)


@pytest.mark.parametrize("change", ["version", "weights and version", "max_batch", "file", "recipes", "backends"])
def test_nothing_downstream_is_made_from_what_was_declared_before(
    promoted: Any, failure_text: Any, new_weights: Any, change: str
) -> None:
    spec = promoted.settings["model_spec"]
    if "weights" in change:
        new_weights(promoted)
    if "version" in change:
        spec["version"] = "v2"
    elif change == "max_batch":
        spec["max_batch"] = 32
    elif change == "file":
        (promoted.root / "tiny" / "model.onnx").rename(promoted.root / "tiny" / "other.onnx")
        spec["onnx"] = "other.onnx"
    elif change == "recipes":
        promoted.settings["int8"] = [{"scheme": "vnni", "percentile": 99.9}]
    elif change == "backends":
        promoted.settings["backends"] = ["openvino"]
    for asset in ("benchmark", "serving_plan"):
        result = promoted.materialize(asset)
        assert not result.success and "was made from something older" in failure_text(result), asset


def test_other_gate_rows_need_another_benchmark(promoted: Any, failure_text: Any) -> None:
    promoted.settings["gate"]["rows"]["days"] = DAY
    result = promoted.materialize("serving_plan")
    assert not result.success and "the benchmark is of another set of gate rows" in failure_text(result)


@pytest.mark.parametrize(
    ("then", "refused", "stale"),
    [
        ((), "engine", "int8_model: was made from something older"),
        ((), "int8_model", "the calibration is of another export"),
        (("calibration", "int8_model"), "benchmark", "engine: was made from something older"),
        (("calibration", "int8_model", "engine"), "serving_plan", "the benchmark is of another engine set"),
    ],
)
def test_new_weights_serve_only_after_every_stage_saw_them(
    promoted: Any, failure_text: Any, new_weights: Any, then: tuple[str, ...], refused: str, stale: str
) -> None:
    new_weights(promoted)
    for asset in ("onnx_model", *then):
        assert promoted.materialize(asset).success, asset
    result = promoted.materialize(refused)
    assert not result.success and stale in failure_text(result)


def test_an_output_range_quarantines_what_lies_outside_and_a_new_one_is_no_older_engines(
    project: Any, failure_text: Any
) -> None:
    project.settings["gate"]["min_speedup"] = 1000  # FP32 serves: the same scores whatever was fastest
    project.lifecycle()
    assert project.materialize("predictions", day=DAY).success
    scores = project.table().read_day(DAY)["score"]
    low, high = (float(scores.quantile(share)) for share in (0.1, 0.9))
    project.settings["max_quarantined_fraction"] = 1.0
    for bounds, outside in (
        ({"minimum": low}, scores < low),
        ({"minimum": low, "maximum": high}, ~scores.between(low, high)),
    ):
        project.settings["model_spec"]["output_ranges"] = {"score": bounds}
        for asset in ("onnx_model", "calibration", "int8_model"):
            assert project.materialize(asset).success, asset
        result = project.materialize("benchmark")
        assert not result.success and "engine: was made from something older" in failure_text(result)
        for asset in ("engine", "benchmark", "serving_plan"):
            assert project.materialize(asset).success, asset
        assert project.materialize("predictions", day=DAY).success
        lost = project.table().read_quarantine(DAY)
        assert len(lost) == outside.sum() > 0 and set(lost["stage"]) == {"output"}
        assert lost["reason"].str.startswith("output 'score' is ").all()


def test_new_weights_give_new_scores_for_a_day_scored_before(promoted: Any, new_weights: Any) -> None:
    assert promoted.materialize("predictions", day=DAY).success
    before = promoted.table().read_day(DAY)
    new_weights(promoted)
    promoted.lifecycle()
    assert promoted.materialize("predictions", day=DAY).success
    after = promoted.table().read_day(DAY)
    assert len(after) == len(before) == 200
    assert promoted.metadata("predictions")["resumed_shards"] == 0
    assert abs(before.set_index("row_key")["score"] - after.set_index("row_key")["score"]).max() > 0.1


def test_a_day_is_scored_before_its_labels_arrive(promoted: Any) -> None:
    import pyarrow.parquet as pq

    file = promoted.home / "data" / "rows" / DAY / "rows.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["label"]), file)
    assert promoted.materialize("rows", "predictions", day=DAY).success
    assert len(promoted.table().read_day(DAY)) == 200


def test_int8_that_is_not_faster_is_refused_and_fp32_serves(project: Any) -> None:
    project.settings["gate"]["min_speedup"] = 1000
    project.lifecycle()
    assert project.metadata("serving_plan")["engine"].endswith(":fp32")


def test_an_unchanged_plan_keeps_its_number_and_its_data_version(promoted: Any) -> None:
    before = promoted.metadata("serving_plan")
    assert promoted.materialize("serving_plan").success
    after = promoted.metadata("serving_plan")
    assert (before["promotion"], before["digest"]) == (after["promotion"], after["digest"]) == (1, before["digest"])
    store = PromotionStore(promoted.home / "artifacts")
    assert len(list((store.root / "promotions" / "tiny").rglob("*.json"))) == 1


def test_an_instance_that_knows_nothing_finds_artifacts_by_their_recipe(promoted: Any) -> None:
    with dg.DagsterInstance.ephemeral() as empty:
        for asset in ("calibration", "int8_model", "engine", "benchmark", "serving_plan"):
            assert promoted.materialize(asset, instance=empty).success, asset
        assert promoted.materialize("predictions", day=DAY, instance=empty).success


def test_a_stage_whose_input_was_never_made_names_the_asset_to_materialize(project: Any, failure_text: Any) -> None:
    result = project.materialize("int8_model")
    assert not result.success
    assert "materialize tiny/onnx_model" in failure_text(result)


def test_the_tick_of_a_night_asks_for_the_day_before_and_only_for_scoring(project: Any) -> None:
    definitions = project.definitions()
    schedule = definitions.resolve_schedule_def("tiny_nightly")
    repository = definitions.get_repository_def()
    at = datetime.datetime(2026, 1, 10, 2, 0, tzinfo=datetime.UTC)
    tick = schedule.evaluate_tick(dg.build_schedule_context(scheduled_execution_time=at, repository_def=repository))
    assert [request.partition_key for request in tick.run_requests or []] == ["2026-01-09"]
    job = definitions.resolve_job_def("tiny_daily")
    assert {k.path[-1] for k in job.asset_layer.executable_asset_keys} == {"rows", "predictions"}


@pytest.mark.parametrize("asset", ["engine", "benchmark", "predictions"])
def test_what_touches_a_device_waits_for_the_gpu_pool(project: Any, asset: str) -> None:
    graph = project.definitions().resolve_asset_graph()
    (definition,) = (a for a in graph.assets_defs if key(asset) in a.keys)
    assert definition.op.pool == "gpu"
    assert graph.get(key("predictions")).backfill_policy == dg.BackfillPolicy.single_run()


def test_benchmark_shows_a_table_and_a_plot_that_the_ui_draws_in_place(promoted: Any) -> None:
    metadata = promoted.metadata("benchmark")
    engines = (
        {record.data["engine"] for record in metadata["engines"].records}
        if hasattr(metadata["engines"], "records")
        else {record.data["engine"] for record in metadata["engines"]}
    )
    assert engines == {f"{b}:{v}" for b in ("onnxruntime", "openvino") for v in VARIANTS}
    assert metadata["rows_per_s"].startswith("![") and len(metadata["rows_per_s"]) < 1000


def records(value: Any) -> list[dict[str, Any]]:
    return [dict(record.data) for record in getattr(value, "records", value)]


def test_the_plan_carries_what_the_benchmark_found_for_the_objective(promoted: Any) -> None:
    benchmark, plan = promoted.metadata("benchmark"), promoted.metadata("serving_plan")
    fed = {(one["slots"], one["decode_workers"]) for one in records(benchmark["trials"])}
    assert (plan["slots"], plan["decode_workers"]) in fed and len(fed) > 1
    assert plan["objective"]["optimize"] == "rows_per_s"
    best = {(one["engine"], one["batch"], one["streams"], one["threads"]) for one in records(benchmark["frontier"])}
    assert best and all(engine.partition(":")[0] in ("onnxruntime", "openvino") for engine, *_ in best)
    assert "No other setting equals these in speed, p99 and memory" in plan["reason"]


def test_bounds_that_nothing_keeps_leave_the_plan_in_force(promoted: Any, failure_text: Any) -> None:
    promoted.settings["objective"] = {"max_p99_batch_ms": 1e-6}
    before_it_is_measured = promoted.materialize("serving_plan")
    assert not before_it_is_measured.success
    assert "the benchmark is of another objective" in failure_text(before_it_is_measured)
    assert promoted.materialize("benchmark").success
    refused = promoted.materialize("serving_plan")
    assert not refused.success and "max_p99_batch_ms = 1e-06" in failure_text(refused)
    assert promoted.materialize("predictions", day=DAY).success


@pytest.mark.parametrize(
    ("hour_of_day", "finish_by", "hours"), [(2, "06:30", 4.5), (22, "06:00", 8.0), (2, "01:59", 23 + 59 / 60)]
)
def test_finish_by_is_the_time_of_day_after_the_schedules_hour(
    project: Any, hour_of_day: int, finish_by: str, hours: float
) -> None:
    settings = {"finish_by": finish_by, "rows_per_day": 3600}
    component = InferencePipeline(**{**project.settings, "hour_of_day": hour_of_day, "objective": settings})
    objective = component.pipeline(project.root / "tiny").objective
    assert objective.finish_within_s == pytest.approx(hours * 3600)
    assert objective.required_rows_per_s == pytest.approx(1 / hours)


@pytest.mark.parametrize("finish_by", ["02:00", "six", "25:00"])
def test_a_time_to_finish_by_that_cannot_be_meant_is_refused_when_it_is_declared(project: Any, finish_by: str) -> None:
    component = InferencePipeline(**{**project.settings, "objective": {"finish_by": finish_by, "rows_per_day": 10}})
    with pytest.raises(SpecError, match=f"not a time to finish by.*02:00.*Got {finish_by}"):
        component.pipeline(project.root / "tiny")
