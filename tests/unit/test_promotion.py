"""Promotion: a plan comes only from a passed gate, and its number is given once."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_runtime.artifacts import Artifact
from gpu_runtime.benchmark.measure import Measurement, Setting
from gpu_runtime.benchmark.report import BenchmarkReport, EngineResult
from gpu_runtime.device.protocol import DeviceClass
from gpu_runtime.errors import GateError, PlanError
from gpu_runtime.promotion.plan import ServingPlan, choose_plan
from gpu_runtime.promotion.store import PromotionStore
from gpu_runtime.quality.gate import GatePolicy, Verdict
from gpu_runtime.specs import to_plain

POLICY = GatePolicy("auc", "probability", 0.01)
CPU, OTHER = DeviceClass("cpu", "x86_64", ("avx2",)), DeviceClass("cpu", "x86_64", ("avx512f",))
PASSED = Verdict(True)


def measurement(engine: str, rows_per_s: float, p99_ms: float = 1.0, batch: int = 8) -> Measurement:
    return Measurement(Setting(engine, batch, 1, 2), rows_per_s, 0.5, 0.8, p99_ms, 100, 5)


def result(engine: str, rows_per_s: float, verdict: Verdict = PASSED, **changes: Any) -> EngineResult:
    made = EngineResult(
        engine, f"digest of {engine}", "fp32", 10, 0.9, 1.0, verdict, (measurement(engine, rows_per_s),), ()
    )
    return replace(made, **changes)


def report_of(*results: EngineResult) -> BenchmarkReport:
    metadata = {
        "model": "flights",
        "version": "1",
        "declaration": "declared",
        "model_digest": "model digest",
        "device_class": CPU,
        "policy": POLICY,
        "reference": 0.9,
        "engine_set": "engine set",
        "gate_set": "gate set",
        "results": results,
    }
    return BenchmarkReport(Artifact("benchmark", "report digest", Path(), {}, to_plain(metadata)))


def plan_of(*results: EngineResult) -> ServingPlan:
    return choose(report_of(*(results or (result("a:fp32", 100.0),))))


def choose(report: BenchmarkReport, **other: Any) -> ServingPlan:
    asked: dict[str, Any] = {
        "declaration": "declared",
        "engine_set": "engine set",
        "gate_set": "gate set",
        "policy": POLICY,
        "device_class": CPU,
    }
    return choose_plan(report, **{**asked, **other})


# Choosing


def test_the_fastest_engine_that_passed_serves() -> None:
    refused = result("c:int8", 900.0, Verdict(False, ("auc 0.5000 is below 0.8900",)))
    plan = plan_of(result("a:fp32", 100.0), result("b:int8", 300.0), refused)
    assert (plan.engine, plan.engine_digest) == ("b:int8", "digest of b:int8")
    assert (plan.batch, plan.streams, plan.threads, plan.engine_rows_per_s) == (8, 1, 2, 300.0)
    assert plan.model_digest == "model digest"
    assert "c:int8 (auc 0.5000 is below 0.8900)" in plan.reason


def test_among_settings_as_good_as_equal_the_quicker_answer_wins() -> None:
    settings = (
        measurement("a:fp32", 1000.0, p99_ms=9.0, batch=32),
        measurement("a:fp32", 980.0, p99_ms=2.0, batch=8),
        measurement("a:fp32", 900.0, p99_ms=0.1, batch=1),
    )
    assert plan_of(result("a:fp32", 0.0, measurements=settings)).batch == 8


def test_without_a_passed_gate_there_is_no_plan_and_every_refusal_is_told() -> None:
    refused = [
        result("a:fp32", 1.0, Verdict(False, ("auc 0.1000 is below 0.8900",))),
        result("b:int8", 1.0, Verdict(False, ("not run here: no GPU",)), measurements=(), value=None),
    ]
    with pytest.raises(GateError) as caught:
        plan_of(*refused)
    for reason in ("a:fp32: auc 0.1000 is below 0.8900", "b:int8: not run here: no GPU"):
        assert reason in str(caught.value)


def test_a_refusal_leaves_the_plan_in_force(tmp_path: Path) -> None:
    promotions = PromotionStore(tmp_path)
    before = promotions.promote(plan_of())
    with pytest.raises(GateError):
        promotions.promote(plan_of(result("a:fp32", 1.0, Verdict(False, ("too slow",)))))
    assert promotions.current("flights", CPU) == before


# Promoting


def test_an_unchanged_plan_keeps_its_number_and_digest(tmp_path: Path) -> None:
    promotions = PromotionStore(tmp_path)
    first = promotions.promote(plan_of())
    measured_again = replace(first.plan, report="another report", engine_rows_per_s=101.0, reason="measured again")
    assert measured_again.digest == first.plan.digest
    assert promotions.promote(measured_again).number == first.number == 1
    assert len(promotions.history("flights", CPU)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 16},
        {"streams": 2},
        {"threads": 4},
        {"decode_workers": 99},
        {"engine_digest": "rebuilt"},
        {"engine": "b:int8"},
        {"model_version": "2"},
        {"gate_set": "other rows"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_plan_is_appended(tmp_path: Path, change: dict[str, Any]) -> None:
    promotions = PromotionStore(tmp_path)
    promotions.promote(plan_of())
    second = promotions.promote(replace(plan_of(), **change))
    assert second.number == 2
    assert promotions.current("flights", CPU) == second


def test_rolling_back_appends_the_old_plan(tmp_path: Path) -> None:
    promotions = PromotionStore(tmp_path)
    old = promotions.promote(plan_of()).plan
    promotions.promote(replace(old, batch=16))
    assert promotions.promote(old).number == 3
    assert [p.plan.batch for p in promotions.history("flights", CPU)] == [8, 16, 8]


def test_a_plan_comes_back_from_the_store_as_it_was(tmp_path: Path) -> None:
    plan = plan_of()
    PromotionStore(tmp_path).promote(plan)
    found = PromotionStore(tmp_path).current("flights", CPU).plan
    assert (found, found.digest, found.scoring_key) == (plan, plan.digest, plan.scoring_key)


def test_models_and_device_classes_have_plans_of_their_own(tmp_path: Path) -> None:
    promotions = PromotionStore(tmp_path)
    plans = [plan_of(), replace(plan_of(), model="photos"), replace(plan_of(), device_class=OTHER)]
    assert [promotions.promote(plan).number for plan in plans] == [1, 1, 1]
    for plan in plans:
        assert promotions.current(plan.model, plan.device_class).plan == plan


def test_without_a_plan_the_error_names_the_next_step(tmp_path: Path) -> None:
    promotions = PromotionStore(tmp_path)
    promotions.promote(replace(plan_of(), device_class=OTHER))
    with pytest.raises(PlanError, match="materialize flights/benchmark and flights/serving_plan"):
        promotions.current("flights", CPU)


def test_promoters_at_the_same_time_get_numbers_of_their_own(tmp_path: Path) -> None:
    together = threading.Barrier(8)
    promoted = []

    def promote(batch: int) -> None:
        together.wait()
        promoted.append(PromotionStore(tmp_path).promote(replace(plan_of(), batch=batch)))

    threads = [threading.Thread(target=promote, args=(batch,)) for batch in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(p.number for p in promoted) == list(range(1, 9))
    history = PromotionStore(tmp_path).history("flights", CPU)
    assert [(p.number, p.plan.batch) for p in history] == sorted((p.number, p.plan.batch) for p in promoted)
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == [f"{n:06}.json" for n in range(1, 9)]


# Serving


def test_the_promoted_engine_is_handed_out_verified(served: SimpleNamespace) -> None:
    assert served.plan.engine_file(served.store).digest == served.plan.engine_digest


@pytest.mark.parametrize("change", [{"engine_digest": "another build"}, {"engine": "openvino:fp32"}])
def test_an_engine_that_was_not_gated_is_never_handed_out(served: SimpleNamespace, change: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="not in its engine set"):
        replace(served.plan, **change).engine_file(served.store)


@pytest.mark.parametrize(
    ("change", "same"),
    [({"batch": 1, "streams": 9}, True), ({"engine_digest": "other"}, False), ({"model_version": "2"}, False)],
)
def test_only_what_changes_a_score_changes_the_scoring_key(change: dict[str, Any], same: bool) -> None:
    assert (replace(plan_of(), **change).scoring_key == plan_of().scoring_key) is same


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("declaration", {"declaration": "with other columns"}),
        ("engine set", {"engine_set": "built since"}),
        ("set of gate rows", {"gate_set": "other rows"}),
        ("gate", {"policy": replace(POLICY, min_value=0.99)}),
        ("class of device", {"device_class": OTHER}),
    ],
)
def test_a_report_of_something_else_promotes_nothing(what: str, other: dict[str, Any]) -> None:
    with pytest.raises(GateError, match=f"the benchmark is of another {what}.*materialize flights/benchmark"):
        choose(report_of(result("a:fp32", 100.0)), **other)


def test_a_plan_serves_only_the_declaration_that_passed_the_gate() -> None:
    plan = plan_of()
    plan.check_declaration("declared")
    with pytest.raises(PlanError, match="declaration changed since the gate"):
        plan.check_declaration("columns in another order")


def test_the_scoring_key_changes_with_the_device_and_the_declaration_and_not_with_the_batch() -> None:
    plan = plan_of()
    assert replace(plan, batch=64, streams=2).scoring_key == plan.scoring_key
    for changed in (replace(plan, device_class=OTHER), replace(plan, declaration="another")):
        assert changed.scoring_key != plan.scoring_key
