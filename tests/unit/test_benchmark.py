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

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.engine_set import EngineSet, build_engines
from gpu_runtime.benchmark.environment import describe_environment
from gpu_runtime.benchmark.measure import Setting, measure
from gpu_runtime.benchmark.report import (
    BenchmarkReport,
    Sweep,
    benchmark_recipe,
    best_rate,
    run_benchmark,
    run_rows,
    table_rows,
)
from gpu_runtime.datasets.sample import RowSample
from gpu_runtime.device.host import HostDevice, cpu_class
from gpu_runtime.errors import GateError
from gpu_runtime.export.onnx_export import export_model
from gpu_runtime.quality.gate import GatePolicy
from gpu_runtime.quantize.calibration import Calibration
from gpu_runtime.quantize.int8 import Int8Recipe, quantize
from gpu_runtime.specs import Graph

POLICY = GatePolicy("auc", "probability", max_drop=0.02, min_speedup=0.0)
QUICK = Sweep(batches=(1, 8), rounds=1, round_s=0.02, probe_s=0.005)
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
def report(served: SimpleNamespace, engines: EngineSet, gate_rows: RowSample) -> BenchmarkReport:
    with HostDevice() as device:
        return run_benchmark(
            served.spec, "declared", engines, served.exported.graph(), gate_rows, POLICY, QUICK, device, served.store
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
    found = served.store.find("benchmark", benchmark_recipe("declared", engines, "gate rows", POLICY))
    assert found is not None
    again = BenchmarkReport(found)
    assert again.results == report.results
    assert (again.policy, again.reference, again.device_class) == (POLICY, 1.0, cpu_class())
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
        measured = measure(engines.engines, settings, device, flights.rows(5), rounds=2, round_s=0.02)
    assert [one.setting for one in measured] == settings
    for one in measured:
        assert one.rows_per_s > 0
        assert 0 < one.p50_ms <= one.p90_ms <= one.p99_ms
        assert one.batches >= one.rounds * one.setting.streams


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
