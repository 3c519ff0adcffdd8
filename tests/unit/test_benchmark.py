"""The benchmark: real engines, judged on this device before they are timed, with the verdict in the report."""

from __future__ import annotations

import getpass
import json
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.engine_set import EngineSet, build_engines
from gpu_runtime.backends.registry import get_backend
from gpu_runtime.benchmark import report as report_module
from gpu_runtime.benchmark import trial as trial_module
from gpu_runtime.benchmark.environment import describe_environment
from gpu_runtime.benchmark.measure import Measurement, Setting, measure
from gpu_runtime.benchmark.objective import Objective
from gpu_runtime.benchmark.report import (
    BenchmarkReport,
    Sweep,
    benchmark_recipe,
    best_rate,
    frontier_rows,
    run_benchmark,
    run_rows,
    table_rows,
    trial_rows,
)
from gpu_runtime.benchmark.trial import Feed, powers_of_two, run_trials, some_batches
from gpu_runtime.datasets.sample import RowSample
from gpu_runtime.device.host import HostDevice, cpu_class, usable_cores
from gpu_runtime.errors import DatasetError, GateError
from gpu_runtime.export.onnx_export import export_model
from gpu_runtime.quality.gate import GatePolicy
from gpu_runtime.quantize.calibration import Calibration
from gpu_runtime.quantize.int8 import Int8Recipe, quantize
from gpu_runtime.specs import Graph, ModelSpec, OnnxSource, TensorSpec

POLICY = GatePolicy("auc", "probability", max_drop=0.02, min_speedup=0.0)
QUICK = Sweep(batches=(1, 8), rounds=1, round_s=0.02, probe_s=0.005, trial_rounds=1, trial_s=0.01)
OBJECTIVE = Objective(max_p99_batch_ms=1e6)
DAY = "2026-01-01"
GOOD, BAD = "int8-vnni-minmax", "int8-bad"


@pytest.fixture(scope="module")
def gate_rows(served: SimpleNamespace, flights: Any) -> RowSample:
    """Labels are FP32's own opinion, so that its AUC is 1."""
    rows = flights.rows(101, seed=21)
    scores = served.run(rows)["probability"]
    return RowSample(rows, (scores > np.median(scores)).astype(np.float64), "gate rows")


@pytest.fixture(scope="module")
def engines(
    served: SimpleNamespace, calibration: Calibration, flights: Any, tmp_path_factory: pytest.TempPathFactory
) -> EngineSet:
    """FP32, a good INT8 engine, and one that pretends to be this model: it has other weights."""
    good = quantize(served.exported, calibration, (Int8Recipe("vnni"),), served.store).graphs()[0]
    stranger = export_model(flights.spec(tmp_path_factory.mktemp("stranger"), seed=4), served.store).graph()
    bad: Graph = replace(stranger, variant=BAD, precision="int8", scheme="vnni")
    graphs = [served.exported.graph(), good, bad]
    return build_engines("flights", graphs, ["onnxruntime", "openvino"], cpu_class(), served.store)


@pytest.fixture(scope="module")
def report(
    served: SimpleNamespace,
    engines: EngineSet,
    gate_rows: RowSample,
    flights: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> BenchmarkReport:
    root = tmp_path_factory.mktemp("days")
    flights.write_day(root, DAY, 101)
    with HostDevice() as device:
        return run_benchmark(
            served.spec,
            "declared",
            engines,
            served.exported.graph(),
            gate_rows,
            POLICY,
            QUICK,
            device,
            served.store,
            OBJECTIVE,
            Feed(flights.source(root), (DAY,)),
        )


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("rows", [1, 8, 13])
def test_an_engines_answer_to_every_row_is_the_references(
    served: SimpleNamespace, engines: EngineSet, flights: Any, backend: str, rows: int
) -> None:
    sample = RowSample(flights.rows(rows, seed=2), None, "rows")
    with HostDevice() as device:
        got = run_rows(engines.engines[f"{backend}:fp32"], device, sample, "probability")
    np.testing.assert_allclose(got, served.run(sample.inputs)["probability"], atol=1e-5)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_an_engine_that_loses_accuracy_is_refused_and_timed_all_the_same(report: BenchmarkReport, backend: str) -> None:
    results = {result.engine: result for result in report.results}
    bad, good = results[f"{backend}:{BAD}"], results[f"{backend}:{GOOD}"]
    assert (bad.verdict.passed, good.verdict.passed) == (False, True)
    assert bad.verdict.reasons[0].startswith("auc 0.")
    assert bad.value is not None and good.value is not None
    assert bad.value < 0.98 <= good.value
    assert bad.best is not None


def test_engines_that_passed_are_listed_fastest_first(report: BenchmarkReport) -> None:
    rates = [result.best.rows_per_s for result in report.passed if result.best]
    assert rates == sorted(rates, reverse=True)
    assert {result.engine for result in report.passed} == {
        f"{backend}:{variant}" for backend in ("onnxruntime", "openvino") for variant in ("fp32", GOOD)
    }


def test_the_speedup_is_against_the_best_fp32_engine(report: BenchmarkReport) -> None:
    best = best_rate(report.results, "fp32")
    for result in report.results:
        assert result.best is not None and best is not None
        assert result.speedup == pytest.approx(result.best.rows_per_s / best)


def test_every_setting_was_tried(report: BenchmarkReport) -> None:
    for result in report.results:
        assert {probe.setting.batch for probe in result.probes} == {1, 8}
        assert len(result.measurements) == QUICK.finalists


def test_an_engine_too_slow_for_the_gate_is_refused(
    served: SimpleNamespace, engines: EngineSet, gate_rows: RowSample, store: ArtifactStore
) -> None:
    demanding = replace(POLICY, min_speedup=1e6)
    with HostDevice() as device:
        report = run_benchmark(
            served.spec, "declared", engines, served.exported.graph(), gate_rows, demanding, QUICK, device, store
        )
    assert {result.engine for result in report.passed} == {"onnxruntime:fp32", "openvino:fp32"}


def test_an_engine_that_cannot_run_here_has_not_passed(
    served: SimpleNamespace, engines: EngineSet, gate_rows: RowSample, store: ArtifactStore
) -> None:
    """TensorRT for RTX is installed, and there is nothing to run it on; the other was built elsewhere."""
    fp32 = engines.engines["onnxruntime:fp32"]
    with store.draft("engine", ["r"]) as draft:
        names = {}
        for file in (replace(fp32, backend="tensorrt_rtx"), replace(fp32, backend="openvino", backend_version="0")):
            path = draft.folder / f"{file.backend}.bin"
            path.write_bytes(fp32.path.read_bytes())
            replace(file, path=path).write_sidecar()
            names[file.key] = path.name
        path = draft.folder / fp32.path.name
        path.write_bytes(fp32.path.read_bytes())
        replace(fp32, path=path).write_sidecar()
        draft.metadata = {
            "model": "flights",
            "device_class": cpu_class(),
            "engines": {fp32.key: path.name, **names},
            "not_built": {},
        }
    with HostDevice() as device:
        report = run_benchmark(
            served.spec,
            "declared",
            EngineSet(draft.finished()),
            served.exported.graph(),
            gate_rows,
            POLICY,
            QUICK,
            device,
            store,
        )
    assert [result.engine for result in report.passed] == [fp32.key]
    for result in report.results[1:]:
        assert result.verdict.reasons[0].startswith("not run here: ")
        assert (result.value, result.speedup, result.measurements, result.probes) == (None, None, (), ())


@pytest.mark.parametrize("labels", [np.ones(101), np.full(101, np.nan)], ids=["one class", "no label"])
def test_rows_on_which_the_metric_says_nothing_are_an_error(
    served: SimpleNamespace, engines: EngineSet, gate_rows: RowSample, store: ArtifactStore, labels: Any
) -> None:
    with HostDevice() as device, pytest.raises(GateError, match="says nothing"):
        run_benchmark(
            served.spec,
            "declared",
            engines,
            served.exported.graph(),
            replace(gate_rows, labels=labels),
            POLICY,
            QUICK,
            device,
            store,
        )


def test_a_report_comes_back_from_the_store_as_it_was(
    served: SimpleNamespace, engines: EngineSet, report: BenchmarkReport
) -> None:
    found = served.store.find("benchmark", benchmark_recipe("declared", engines, "gate rows", POLICY, OBJECTIVE))
    assert found is not None
    again = BenchmarkReport(found)
    assert again.results == report.results
    assert (again.policy, again.reference, again.device_class) == (POLICY, 1.0, cpu_class())
    assert (again.objective, again.trials) == (OBJECTIVE, report.trials) and again.trials
    assert (again.engine_set, again.gate_set, again.declaration) == (engines.digest, "gate rows", "declared")


def test_the_table_has_one_row_an_engine_and_says_why_one_was_refused(report: BenchmarkReport) -> None:
    rows = {row["engine"]: row for row in table_rows(report)}
    assert len(rows) == 6
    assert rows["onnxruntime:fp32"]["gate"] == "passed"
    assert rows[f"onnxruntime:{BAD}"]["gate"].startswith("refused: auc")
    assert rows["onnxruntime:fp32"]["auc"] == 1.0


def test_a_report_names_the_machine_and_neither_host_user_nor_path(report: BenchmarkReport) -> None:
    environment = describe_environment()
    assert {"cpu", "instruction_sets", "cores", "packages", "python"} <= environment.keys()
    assert environment["packages"]["onnxruntime"]
    text = json.dumps(dict(report.artifact.metadata))
    for private in (socket.gethostname(), str(Path.home()), str(report.artifact.folder)):
        assert private not in text
    assert getpass.getuser() not in json.dumps(environment).split('"')


def test_a_measurement_counts_every_batch_and_orders_its_percentiles(engines: EngineSet, flights: Any) -> None:
    settings = [Setting("onnxruntime:fp32", 4, 2, 1), Setting("openvino:fp32", 8, 1, 2)]
    with HostDevice() as device:
        measured = measure(
            engines.engines, settings, device, RowSample(flights.rows(5), None, ""), rounds=2, round_s=0.02
        )
    assert [one.setting for one in measured] == settings
    for one in measured:
        assert one.rows_per_s > 0
        assert 0 < one.p50_ms <= one.p90_ms <= one.p99_ms
        assert one.batches >= one.rounds * one.setting.streams


@pytest.mark.parametrize(
    ("cores", "layouts"),
    [
        (1, [(1, 1)]),
        (2, [(1, 2), (2, 1)]),
        (6, [(1, 6), (2, 3), (4, 1), (6, 1)]),
        (8, [(1, 8), (2, 4), (4, 2), (8, 1)]),
    ],
)
def test_the_sweep_shares_out_the_cores_that_the_quota_allows(
    engines: EngineSet, monkeypatch: pytest.MonkeyPatch, cores: int, layouts: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(report_module, "usable_cores", lambda: cores)
    settings = QUICK.settings(engines.engines["onnxruntime:fp32"])
    assert [(one.batch, one.streams, one.threads) for one in settings] == [
        (batch, *layout) for batch in (1, 8) for layout in layouts
    ]


def test_the_choice_is_tried_end_to_end_with_every_number_of_slots_and_decode_workers(report: BenchmarkReport) -> None:
    (setting,) = {one.setting for one in report.trials}
    assert setting in {m.setting for result in report.passed for m in result.measurements}
    assert [(one.slots, one.decode_workers) for one in report.trials] == [
        (slots * setting.streams, workers) for slots in (2, 3) for workers in powers_of_two(usable_cores())
    ]
    assert all(one.rows_per_s > 0 and one.cpu_s_per_row > 0 for one in report.trials)
    assert [row["slots"] for row in trial_rows(report)] == [one.slots for one in report.trials]


def test_a_third_slot_is_tried_only_where_the_memory_bound_has_room_for_it(
    engines: EngineSet, flights: Any, tmp_path: Path
) -> None:
    flights.write_day(tmp_path, DAY, 20)
    readers = Feed(flights.source(tmp_path), (DAY,)).open()
    file = engines.engines["onnxruntime:fp32"]
    row_mib = sum(spec.nbytes(1) for spec in (*file.inputs, *file.outputs)) / 2**20
    measured = Measurement(Setting(file.key, 8, 1, 1), 1e4, 1, 1, 1, 10, 1, 1e-4, memory_mib=10.0)
    for room, slots in ((7.9, {2}), (8.1, {2, 3})):
        objective = Objective(max_memory_mib=10.0 + room * row_mib)
        with HostDevice() as device:
            trials = run_trials(file, measured, objective, device, readers, rounds=1, trial_s=0.001)
        assert {one.slots for one in trials} == slots


def test_a_setting_that_does_not_fit_in_memory_is_left_out_and_an_engine_without_one_is_refused(
    served: SimpleNamespace, engines: EngineSet, gate_rows: RowSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_little_room(files: Any, settings: Any, *given: Any, **more: Any) -> list[Measurement]:
        if any(one.batch > 1 or one.engine.startswith("openvino") for one in settings):
            raise RuntimeError("std::bad_alloc")
        return measure(files, settings, *given, **more)

    monkeypatch.setattr(report_module, "measure", with_little_room)
    with HostDevice() as device:
        report = run_benchmark(
            served.spec,
            "declared",
            engines,
            served.exported.graph(),
            gate_rows,
            POLICY,
            replace(QUICK, trial_rounds=0),
            device,
            served.store,
        )
    fits, does_not = (next(r for r in report.results if r.engine == f"{b}:fp32") for b in ("onnxruntime", "openvino"))
    assert fits.verdict.passed and {one.setting.batch for one in fits.tried} == {1}
    assert not does_not.verdict.passed and not does_not.tried and "has no memory for it" in does_not.verdict.reasons[0]


def test_a_trial_is_as_long_as_the_whole_executor_needs_for_it_and_alike_for_all_layouts(
    engines: EngineSet, flights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine alone may be far quicker than what feeds it."""
    counts: list[int] = []

    def few_batches(executor: Any, readers: Any, count: int) -> Any:
        counts.append(count)
        return some_batches(executor, readers, min(count, 8))

    monkeypatch.setattr(trial_module, "some_batches", few_batches)
    flights.write_day(tmp_path, DAY, 20)
    readers = Feed(flights.source(tmp_path), (DAY,)).open()
    file = engines.engines["onnxruntime:fp32"]
    measured = Measurement(Setting(file.key, 1, 1, 1), 1e12, 1, 1, 1, 10, 1, 1e-9, memory_mib=10.0)
    with HostDevice() as device:
        trials = run_trials(file, measured, Objective(), device, readers, rounds=2, trial_s=0.5)
    warm_ups, runs = counts[::2], counts[1::2]
    assert set(warm_ups) == {4} and len(runs) == 2 * len(trials) > 2
    assert len(set(runs)) == 1 and 4 < runs[0] < 1e7


@pytest.mark.parametrize("why", ["no room for all at once", "one engine fails then"])
def test_what_fails_in_the_rounds_costs_no_other_engine_its_results(
    served: SimpleNamespace,
    engines: EngineSet,
    gate_rows: RowSample,
    store: ArtifactStore,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    def measured(files: Any, settings: Any, *given: Any, rounds: int, **more: Any) -> list[Measurement]:
        if why == "no room for all at once" and len(settings) > 1:
            raise RuntimeError("std::bad_alloc")
        if why == "one engine fails then" and rounds > 1 and any(one.engine == "openvino:fp32" for one in settings):
            raise RuntimeError("no such kernel, now and then")
        return measure(files, settings, *given, rounds=rounds, **more)

    monkeypatch.setattr(report_module, "measure", measured)
    sweep = replace(QUICK, rounds=2)
    with HostDevice() as device:
        report = run_benchmark(
            served.spec, "declared", engines, served.exported.graph(), gate_rows, POLICY, sweep, device, store
        )
    without = {result.engine for result in report.results if not result.measurements}
    runnable = {key for key, file in engines.engines.items() if get_backend(file.backend).runs_here() is None}
    if why == "one engine fails then":
        assert without & runnable == {"openvino:fp32"}
        (failed,) = (result for result in report.results if result.engine == "openvino:fp32")
        assert failed.verdict.reasons == ("failed here: RuntimeError: no such kernel, now and then",)
    else:
        assert not without & runnable
    assert "onnxruntime:fp32" in {result.engine for result in report.passed}


@pytest.mark.parametrize("error", [OSError("stale handle"), DatasetError("gone", stage="read")])
def test_a_trial_that_fails_costs_none_of_what_was_measured(
    served: SimpleNamespace,
    engines: EngineSet,
    gate_rows: RowSample,
    store: ArtifactStore,
    flights: Any,
    tmp_path: Path,
    error: Exception,
) -> None:
    flights.write_day(tmp_path, DAY, 20)
    source = flights.source(tmp_path)

    def parts(shard: Any) -> Any:
        raise error

    feed: Any = Feed(SimpleNamespace(inputs=source.inputs, partition=source.partition, parts=parts), (DAY,))
    with HostDevice() as device:
        report = run_benchmark(
            served.spec, "declared", engines, served.exported.graph(), gate_rows, POLICY,
            replace(QUICK, trial_rounds=1), device, store, Objective(), feed,
        )  # fmt: skip
    assert report.passed and not report.trials
    assert str(error) in report.artifact.metadata["trials_failed"]


@pytest.mark.parametrize(("count", "taken"), [(3, ["a", "c", "e"]), (8, ["a", "b", "c", "d", "e", "f", "a", "b"])])
def test_a_trial_takes_batches_from_all_over_its_shards(count: int, taken: list[str]) -> None:
    executor: Any = SimpleNamespace(batches=lambda shard, reader: iter(reader))
    assert list(some_batches(executor, ["abcd", "ef"], count)) == taken  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("probed_p99", "bound", "measured_batches"),
    [(4.0, 5.0, [8, 4]), (9.0, 5.0, [4]), (9.0, 0.5, [1])],
    ids=["quick in the probe only", "too late in the probe, too", "nothing is quick enough"],
)
def test_the_fastest_that_keep_the_bounds_are_measured_until_one_keeps_them_in_the_longer_rounds_too(
    probed_p99: float,
    bound: float,
    measured_batches: list[int],
    served: SimpleNamespace,
    engines: EngineSet,
    gate_rows: RowSample,
    store: ArtifactStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(files: Any, settings: Any, device: Any, rows: Any, *, rounds: int, round_s: float) -> Any:
        """The larger the batch the faster and the later."""
        p99 = {1: 1.0, 4: 4.0, 8: probed_p99 if rounds == 1 else 9.0}
        return [Measurement(one, 100.0 * one.batch, 1, 1, p99[one.batch], 9, rounds, 1e-3, 1.0) for one in settings]

    monkeypatch.setattr(report_module, "measure", measured)
    monkeypatch.setattr(report_module, "usable_cores", lambda: 1)
    sweep, objective = replace(QUICK, batches=(1, 4, 8), finalists=1, rounds=5), Objective(max_p99_batch_ms=bound)
    with HostDevice() as device:
        report = run_benchmark(
            served.spec,
            "declared",
            engines,
            served.exported.graph(),
            gate_rows,
            POLICY,
            sweep,
            device,
            store,
            objective,
        )
    assert all([m.setting.batch for m in result.measurements] == measured_batches for result in report.results)
    assert {row["batch"]: row["exceeds"] is None for row in frontier_rows(report)} == {
        1: bound > 1,
        4: bound > 4,
        8: False,
    }


def test_a_measurement_tells_the_memory_that_a_loaded_engine_takes_and_its_cpu_time(
    make_graph: Any, store: ArtifactStore, tmp_path: Path
) -> None:
    width, batch = 512, 4096  # 8 MiB a tensor
    inputs, outputs = (TensorSpec("x", "float32", (width,)),), (TensorSpec("y", "float32", (width,)),)
    weights = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32)
    path = make_graph(
        tmp_path / "wide.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": weights}, inputs, outputs
    )
    exported = export_model(ModelSpec("wide", "1", OnnxSource(str(path)), inputs, ("y",), max_batch=batch), store)
    built = build_engines("wide", [exported.graph()], ["onnxruntime"], cpu_class(), store).engines
    rows = {"x": np.zeros((8, width), np.float32)}
    found = []
    for rows_each in (batch, 64, batch):  # memory that one engine freed must not hide what the next one takes
        with HostDevice() as device:
            settings = [Setting("onnxruntime:fp32", rows_each, 1, 1)]
            (one,) = measure(built, settings, device, RowSample(rows, None, ""), rounds=1, round_s=0.02)
        assert 0 < one.cpu_s_per_row < 1
        found.append(one.memory_mib)
    slots_mib = 4 * 8  # an input and an output in each of two slots
    assert found[0] == pytest.approx(found[2], abs=2) and slots_mib < found[0] < 2 * slots_mib
    assert found[1] < 8


def test_an_engine_that_raises_costs_only_itself(
    served: SimpleNamespace, engines: EngineSet, gate_rows: RowSample, store: ArtifactStore, monkeypatch: Any
) -> None:
    from gpu_runtime.backends.openvino_backend import OpenVinoContext

    def broken(self: Any, inputs: Any, outputs: Any, stream: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(OpenVinoContext, "enqueue", broken)
    with HostDevice() as device:
        report = run_benchmark(
            served.spec, "declared", engines, served.exported.graph(), gate_rows, POLICY, QUICK, device, store
        )
    assert {result.engine.partition(":")[0] for result in report.passed} == {"onnxruntime"}
    reasons = [r.verdict.reasons[0] for r in report.results if r.engine.startswith("openvino")]
    assert all(reason.startswith("failed here: RuntimeError: no such kernel") for reason in reasons)
