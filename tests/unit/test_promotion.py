"""Promotion: a plan comes only from a passed gate, and its number is given once."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu_runtime.artifacts import Artifact
from gpu_runtime.benchmark.measure import Measurement, Setting
from gpu_runtime.benchmark.objective import Objective, frontier
from gpu_runtime.benchmark.report import BenchmarkReport, EngineResult
from gpu_runtime.benchmark.trial import Trial
from gpu_runtime.device.host import HostDevice, usable_cores
from gpu_runtime.device.protocol import DeviceClass
from gpu_runtime.errors import GateError, PlanError, SpecError
from gpu_runtime.promotion.plan import ServingPlan, choose_plan
from gpu_runtime.promotion.store import PromotionStore
from gpu_runtime.quality.gate import GatePolicy, Verdict
from gpu_runtime.scoring import Scorer, ScoringPolicy
from gpu_runtime.specs import to_plain

POLICY = GatePolicy("auc", "probability", 0.01)
CPU, OTHER = DeviceClass("cpu", "x86_64", ("avx2",)), DeviceClass("cpu", "x86_64", ("avx512f",))
PASSED = Verdict(True)


def measurement(
    engine: str,
    rows_per_s: float,
    p99_ms: float = 1.0,
    batch: int = 8,
    cpu_s_per_row: float = 1e-3,
    memory_mib: float | None = 50.0,
) -> Measurement:
    return Measurement(Setting(engine, batch, 1, 2), rows_per_s, 0.5, 0.8, p99_ms, 100, 5, cpu_s_per_row, memory_mib)


def result(engine: str, rows_per_s: float, verdict: Verdict = PASSED, **changes: Any) -> EngineResult:
    made = EngineResult(
        engine, f"digest of {engine}", "fp32", 10, 0.9, 1.0, verdict, (measurement(engine, rows_per_s),), ()
    )
    return replace(made, **changes)


def report_of(
    *results: EngineResult,
    objective: Objective = Objective(),  # noqa: B008, a frozen value
    trials: tuple[Trial, ...] = (),
) -> BenchmarkReport:
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
        "objective": objective,
        "trials": trials,
    }
    return BenchmarkReport(Artifact("benchmark", "report digest", Path(), {}, to_plain(metadata)))


def plan_of(*results: EngineResult) -> ServingPlan:
    return choose(report_of(*(results or (result("a:fp32", 100.0),))))


def plan_for(objective: Objective, *settings: Measurement, trials: tuple[Trial, ...] = ()) -> ServingPlan:
    """Of one engine that passed, measured at these settings."""
    made = report_of(result("a:fp32", 0.0, measurements=settings), objective=objective, trials=trials)
    return choose(made, objective=objective)


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


BY_BATCH = (
    measurement("a:fp32", 500.0, p99_ms=2.0, batch=1, cpu_s_per_row=4e-3, memory_mib=20.0),
    measurement("a:fp32", 900.0, p99_ms=9.0, batch=8, cpu_s_per_row=2e-3, memory_mib=40.0),
    measurement("a:fp32", 1170.0, p99_ms=80.0, batch=32, cpu_s_per_row=3e-3, memory_mib=160.0),
)
"""The larger the batch the faster, the later and the larger; the middle one takes the least CPU time."""


@pytest.mark.parametrize(
    ("bounds", "batch", "held_back"),
    [
        ({}, 32, None),
        ({"max_p99_batch_ms": 100.0, "max_memory_mib": 200.0}, 32, "No bound of the objective holds it back"),
        (
            {"max_p99_batch_ms": 50.0},
            8,
            "max_p99_batch_ms = 50 holds back a:fp32 at batch 32 × 1 streams × 2 threads, "
            "which would give 1.30 × the rows/s",
        ),
        ({"max_memory_mib": 100.0}, 8, "max_memory_mib = 100 holds back a:fp32 at batch 32"),
        ({"max_memory_mib": 30.0, "max_p99_batch_ms": 50.0}, 1, "max_memory_mib = 30 holds back a:fp32 at batch 8"),
        (
            {"max_memory_mib": 50.0, "max_p99_batch_ms": 10.0},
            8,
            "max_p99_batch_ms = 10 with max_memory_mib = 50 holds back a:fp32 at batch 32",
        ),
    ],
    ids=["none", "kept by all", "p99", "memory", "both, one binds", "both bind"],
)
def test_the_fastest_setting_inside_the_bounds_serves_and_what_holds_it_back_is_named(
    bounds: dict[str, float], batch: int, held_back: str | None
) -> None:
    plan = plan_for(Objective(**bounds), *BY_BATCH)  # type: ignore[arg-type]
    assert (plan.batch, plan.objective) == (batch, Objective(**bounds))  # type: ignore[arg-type]
    assert (held_back or "hold") in plan.reason if held_back else "hold" not in plan.reason


def test_a_setting_that_was_only_probed_is_named_as_held_back_and_never_serves() -> None:
    objective = Objective(max_p99_batch_ms=50.0)
    probed = result("a:fp32", 0.0, measurements=BY_BATCH[:1], probes=BY_BATCH)
    plan = choose(report_of(probed, objective=objective), objective=objective)
    assert plan.batch == 1
    assert "max_p99_batch_ms = 50 holds back a:fp32 at batch 32" in plan.reason


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ({"max_p99_batch_ms": 1.0}, ("a:fp32 at batch 1 ", "p99 2 ms", "raise max_p99_batch_ms,")),
        ({"max_memory_mib": 10.0}, ("a:fp32 at batch 1 ", "20 MiB", "raise max_memory_mib,")),
        ({"max_p99_batch_ms": 4.0, "max_memory_mib": 19.0}, ("a:fp32 at batch 1 ", "raise max_memory_mib,")),
    ],
    ids=["p99", "memory", "only the one that is exceeded"],
)
def test_bounds_that_nothing_keeps_promote_nothing_and_name_the_nearest(
    tmp_path: Path, bounds: dict[str, float], told: tuple[str, ...]
) -> None:
    promotions = PromotionStore(tmp_path)
    before = promotions.promote(plan_of())
    with pytest.raises(GateError, match="no setting keeps the objective's bounds") as caught:
        promotions.promote(plan_for(Objective(**bounds), *BY_BATCH))  # type: ignore[arg-type]
    for text in (*told, *(f"{name} = {bound:g}" for name, bound in bounds.items()), "the plan in force stays"):
        assert text in str(caught.value)
    assert promotions.current("flights", CPU) == before


def test_memory_that_the_system_does_not_tell_keeps_no_bound() -> None:
    unknown = replace(BY_BATCH[0], memory_mib=None)
    with pytest.raises(GateError, match="memory unknown"):
        plan_for(Objective(max_memory_mib=1e6), unknown)
    assert plan_for(Objective(max_p99_batch_ms=5.0), unknown).batch == 1


def test_the_least_cost_is_the_least_cpu_time_of_what_finishes_in_time() -> None:
    plan = plan_for(Objective("cost"), *BY_BATCH)
    assert plan.batch == 8
    assert "takes the least CPU time a row" in plan.reason
    hurried = plan_for(Objective("cost", rows_per_day=3_600_000, finish_within_s=3600), *BY_BATCH)
    assert hurried.batch == 32
    assert "finish_by holds back a:fp32 at batch 8 × 1 streams × 2 threads, which would take 0.67 × the CPU time" in (
        hurried.reason
    )


@pytest.mark.parametrize("optimize", ["rows_per_s", "cost"])
def test_when_no_setting_finishes_in_time_the_fastest_serves_and_says_by_how_much_it_is_late(optimize: Any) -> None:
    objective = Objective(optimize, rows_per_day=1170 * 3600 * 3, finish_within_s=2 * 3600)
    plan = plan_for(objective, *BY_BATCH)
    assert plan.batch == 32
    assert "misses finish_by by 1.0 h: 12,636,000 rows take 3.0 h at 1,170 rows/s, and there are 2.0 h" in plan.reason
    assert "misses finish_by" not in plan_for(replace(objective, finish_within_s=3 * 3600), *BY_BATCH).reason


def test_whether_it_is_late_is_told_by_the_whole_executor_where_that_was_tried() -> None:
    objective = Objective(rows_per_day=1000, finish_within_s=1)
    trial = Trial(BY_BATCH[2].setting, 2, 1, 500.0, 2e-3, 3)
    assert "misses finish_by" not in plan_for(objective, *BY_BATCH).reason
    assert "misses finish_by by 1.0 s" in plan_for(objective, *BY_BATCH, trials=(trial,)).reason


def test_the_plan_takes_the_fewest_slots_and_decode_workers_that_are_as_good_as_the_best() -> None:
    def trial(slots: int, workers: int, rows_per_s: float, cpu_s_per_row: float = 1e-3) -> Trial:
        return Trial(BY_BATCH[2].setting, slots, workers, rows_per_s, cpu_s_per_row, 3)

    trials = (trial(2, 1, 400.0), trial(2, 2, 980.0, 2e-3), trial(3, 1, 500.0), trial(3, 2, 1000.0, 2e-3))
    plan = plan_for(Objective(), *BY_BATCH, trials=trials)
    assert (plan.slots, plan.decode_workers) == (2, 2)
    assert "end to end 980 rows/s with 2 slots and 2 decode workers" in plan.reason
    plain = plan_for(Objective(), *BY_BATCH, trials=(trial(3, 1, 2000.0), *trials))
    assert (plain.slots, plain.decode_workers) == (3, 1)
    untried = plan_for(Objective(), *BY_BATCH)
    assert (untried.slots, untried.decode_workers) == (None, usable_cores())
    assert plan_for(Objective(max_memory_mib=1e6), *BY_BATCH).slots == 2  # the memory was measured with two a stream


def test_a_frontier_holds_what_nothing_else_equals_and_nothing_more() -> None:
    rng = np.random.default_rng(0)
    points = [
        measurement("a:fp32", *map(float, rng.integers(1, 30, 2)), batch=i, memory_mib=float(rng.integers(1, 30)))
        for i in range(200)
    ]

    def beats(one: Measurement, other: Measurement) -> bool:
        mine, yours = ((m.rows_per_s, -m.p99_ms, -(m.memory_mib or 0.0)) for m in (one, other))
        return mine != yours and all(a >= b for a, b in zip(mine, yours, strict=True))

    kept = frontier(points)
    assert 1 < len(kept) < len(points)
    assert not any(beats(point, one) for one in kept for point in points)
    goods = {(m.rows_per_s, m.p99_ms, m.memory_mib) for m in kept}
    assert len(goods) == len(kept)
    for point in points:
        assert (point.rows_per_s, point.p99_ms, point.memory_mib) in goods or any(beats(one, point) for one in kept)
    assert [m.rows_per_s for m in kept] == sorted((m.rows_per_s for m in kept), reverse=True)


def test_the_reason_shows_the_frontier_of_engines_that_passed() -> None:
    dominated = measurement("a:fp32", 400.0, p99_ms=3.0, batch=2)
    refused = result("c:int8", 9000.0, Verdict(False, ("auc 0.5000 is below 0.8900",)))
    reason = choose(report_of(result("a:fp32", 0.0, measurements=(*BY_BATCH, dominated)), refused)).reason
    assert "a:fp32 at batch 1 × 1 streams × 2 threads 500 rows/s, p99 2 ms, 20 MiB" in reason
    assert "batch 2 " not in reason and "9,000" not in reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimize": "fastest"},
        {"max_p99_batch_ms": 0.0},
        {"max_memory_mib": -1.0},
        {"max_memory_mib": float("nan")},
        {"rows_per_day": 0, "finish_within_s": 60.0},
        {"rows_per_day": 10},
        {"finish_within_s": 60.0},
    ],
    ids=str,
)
def test_an_objective_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"\[objective\]"):
        Objective(**wrong)


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
    measured_again = replace(measured_again, objective=Objective(max_memory_mib=1e3))
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
        {"slots": 3},
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
    plan = replace(plan_of(), slots=6, objective=Objective("cost", 5.0, 100.0, 10, 60.0))
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


@pytest.mark.parametrize("slots", [2, 5])
def test_the_plans_slots_are_the_executors(served: SimpleNamespace, slots: int) -> None:
    plan = replace(served.plan, slots=slots)
    with HostDevice() as device, Scorer(plan, served.store, device, ScoringPolicy()) as scorer:
        assert len(scorer.executor._slots) == slots


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
        ("objective", {"objective": Objective(max_p99_batch_ms=5.0)}),
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


def test_a_plan_of_an_earlier_release_is_read() -> None:
    plain = to_plain(plan_of())
    for name in ("lengths", "objective", "slots"):
        del plain[name]
    assert ServingPlan.from_plain(plain) == replace(plan_of(), slots=None)


def test_what_keeps_no_bound_is_tried_from_the_nearest() -> None:
    objective = Objective(max_p99_batch_ms=10)
    found = [measurement("a", 300, 90, 32), measurement("a", 200, 30, 8), measurement("a", 50, 12, 1)]
    assert [one.setting.batch for one in objective.ranked(found)] == [1, 8, 32]


def test_a_bound_is_a_number() -> None:
    with pytest.raises(SpecError, match="max_p99_batch_ms"):
        Objective(max_p99_batch_ms=float("inf"))
