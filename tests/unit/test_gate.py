"""The gate: what an engine must keep, and that nothing undefined ever passes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gpu_runtime.errors import GateError, SpecError
from gpu_runtime.quality.gate import GatePolicy, judge_accuracy, judge_speed
from gpu_runtime.specs import TensorSpec

AUC = GatePolicy("auc", "probability", 0.01)
LABELS = np.asarray([0.0, 0.0, 1.0, 1.0])
SCORES = np.asarray([0.1, 0.2, 0.8, 0.9], np.float32)


@pytest.mark.parametrize(
    "settings", [{"max_drop": -0.1}, {"max_drop": 1.0}, {"max_drop": math.nan}, {"min_speedup": -1}]
)
def test_a_policy_that_gates_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        GatePolicy(**{"metric": "auc", "output": "probability", "max_drop": 0.01, **settings})


@pytest.mark.parametrize(
    ("value", "passed"), [(0.95, True), (0.9401, True), (0.9399, False), (0.0, False), (1.0, True)]
)
def test_an_engine_may_lose_at_most_max_drop(value: float, passed: bool) -> None:
    verdict = judge_accuracy(AUC, value, reference=0.95)
    assert verdict.passed is passed
    assert bool(verdict.reasons) is not passed


@pytest.mark.parametrize(("value", "passed"), [(0.7, True), (0.6999, False)])
def test_a_badly_trained_model_does_not_serve_in_any_precision(value: float, passed: bool) -> None:
    policy = GatePolicy("auc", "probability", 0.01, min_value=0.7)
    assert judge_accuracy(policy, value, reference=value).passed is passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_never_passes(value: float) -> None:
    assert not judge_accuracy(AUC, value, reference=0.95).passed


def test_a_refusal_names_the_metric_the_value_and_the_floor() -> None:
    assert judge_accuracy(AUC, 0.9, 0.95).reasons == ("auc 0.9000 is below 0.9400",)


@pytest.mark.parametrize(
    ("precision", "speedup", "passed"),
    [
        ("int8", 1.5, True),
        ("int8", 1.19, False),
        ("int8", math.nan, False),
        ("fp32", 0.5, True),
        ("fp32", math.nan, True),
    ],
)
def test_reduced_precision_must_be_faster_and_fp32_need_not(precision: Any, speedup: float, passed: bool) -> None:
    policy = GatePolicy("auc", "probability", 0.01, min_speedup=1.2)
    assert judge_speed(policy, precision, speedup).passed is passed


def test_rows_without_a_label_do_not_count() -> None:
    labels = np.asarray([*LABELS, np.nan])
    scores = np.asarray([*SCORES, 0.5], np.float32)
    assert AUC.measure(scores, scores, labels) == 1.0


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_worth_nothing(row: int, value: float) -> None:
    spoiled = SCORES.copy()
    spoiled[row] = value
    assert not judge_accuracy(AUC, AUC.measure(spoiled, SCORES, LABELS), 1.0).passed


def test_rows_that_fp32_cannot_score_either_do_not_count() -> None:
    reference = np.asarray([*SCORES, np.nan], np.float32)
    labels = np.asarray([*LABELS, 0.0])
    assert AUC.measure(reference, reference, labels) == 1.0


@pytest.mark.parametrize("metric", ["auc", "top1"])
def test_rows_of_which_none_has_a_label_say_nothing(metric: Any) -> None:
    policy = GatePolicy(metric, "probability", 0.01)
    assert math.isnan(policy.measure(SCORES, SCORES, np.full(4, np.nan)))


def test_a_metric_that_needs_labels_says_so() -> None:
    with pytest.raises(GateError, match="declare `label`"):
        AUC.measure(SCORES, SCORES, None)


def test_agreement_needs_no_labels() -> None:
    policy = GatePolicy("agreement", "top_index", 0.01)
    assert policy.measure(np.asarray([[1], [2]]), np.asarray([[1], [3]]), None) == 0.5


def test_cosine_leaves_out_what_fp32_cannot_give_and_refuses_what_only_the_engine_cannot() -> None:
    policy, spoiled = GatePolicy("cosine", "vector", 0.01), np.asarray([[1.0, 0.0], [np.nan, 1.0]])
    whole = np.asarray([[2.0, 0.0], [0.0, 1.0]])
    assert policy.measure(whole, spoiled, None) == 1.0 and not policy.needs_labels
    assert math.isnan(policy.measure(spoiled, whole, None))


def test_top1_compares_with_labels() -> None:
    policy = GatePolicy("top1", "top_index", 0.01)
    got = np.asarray([[1, 0], [2, 0]])
    assert policy.measure(got, got, np.asarray([1.0, 3.0])) == 0.5


@pytest.mark.parametrize(
    ("metric", "spec"),
    [
        ("auc", TensorSpec("y", "float32", (2,))),
        ("auc", TensorSpec("y", "int32")),
        ("top1", TensorSpec("y", "float32", (10,))),
        ("agreement", TensorSpec("y", "float32")),
        ("agreement", TensorSpec("other", "int32", (5,))),
        ("cosine", TensorSpec("y", "float32", (1,))),
        ("cosine", TensorSpec("y", "int32", (8,))),
    ],
)
def test_a_metric_that_cannot_read_its_output_is_refused(metric: Any, spec: TensorSpec) -> None:
    with pytest.raises(GateError, match="cannot read this output"):
        GatePolicy(metric, "y", 0.01).check_output([spec])


@pytest.mark.parametrize(
    ("metric", "spec"),
    [
        ("auc", TensorSpec("y", "float32")),
        ("auc", TensorSpec("y", "float32", (1,))),
        ("top1", TensorSpec("y", "int32", (5,))),
        ("agreement", TensorSpec("y", "int64")),
        ("cosine", TensorSpec("y", "float32", (384,))),
    ],
)
def test_a_metric_takes_the_output_it_is_made_for(metric: Any, spec: TensorSpec) -> None:
    GatePolicy(metric, "y", 0.01).check_output([spec])


def test_an_engine_that_fails_only_on_rows_without_a_label_is_refused_too() -> None:
    labels = np.array([0.0, 1.0, np.nan, np.nan])
    reference = np.array([0.1, 0.9, 0.5, 0.5])
    got = np.array([0.1, 0.9, np.nan, 0.5])
    assert np.isnan(GatePolicy("auc", "y", 0.01).measure(got, reference, labels))
