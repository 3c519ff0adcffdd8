"""What a person must know before trusting an asset: parity, the gate, and that no row got lost."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import dagster as dg

from gpu_runtime.benchmark.report import BenchmarkReport
from gpu_runtime.export.parity import ParityReport
from gpu_runtime.scoring import Predictions
from inference_dags.metadata import Metadata, table
from inference_dags.pipeline import Pipeline

_DAY_CHECKS = {
    "row_accounting": (True, "Rows read = rows in the published table + rows in quarantine."),
    "quarantined_fraction": (True, "No more rows in quarantine than the model allows."),
    "finite_outputs": (True, "No published score is NaN or infinite."),
    "output_drift": (False, "The outputs are distributed as on the last day published before; else a warning."),
}
"""Name → (whether it stops what is downstream, what it says)."""


def parity_spec(key: dg.AssetKey) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        "parity", asset=key, blocking=True, description="The ONNX graph gives the model's own numbers."
    )


def parity_result(parity: ParityReport) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        check_name="parity",
        passed=parity.max_difference <= parity.tolerance,
        metadata={"max_difference": parity.max_difference, "tolerance": parity.tolerance, "rows": parity.rows},
    )


def gate_spec(key: dg.AssetKey) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        "gate",
        asset=key,
        blocking=True,
        description="At least one engine built for this device keeps its accuracy and speed.",
    )


def gate_result(report: BenchmarkReport) -> dg.AssetCheckResult:
    refused = {r.engine: "; ".join(r.verdict.reasons) for r in report.results if not r.verdict.passed}
    return dg.AssetCheckResult(
        check_name="gate",
        passed=bool(report.passed),
        metadata={"passed": [r.engine for r in report.passed], "refused": refused},
    )


def day_specs(pipeline: Pipeline) -> list[dg.AssetCheckSpec]:
    """The checks of a day's predictions; each day has results of its own."""
    key = pipeline.key("predictions")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)  # partitioned checks are new in Dagster
        return [
            dg.AssetCheckSpec(name, asset=key, blocking=blocking, description=text, partitions_def=pipeline.partitions)
            for name, (blocking, text) in _DAY_CHECKS.items()
        ]


def day_results(pipeline: Pipeline, day: Predictions) -> list[dg.AssetCheckResult]:
    """One result for each of `day_specs`."""
    fraction = day.quarantined / day.rows_in if day.rows_in else 0.0
    allowed = pipeline.scoring.max_quarantined_fraction
    non_finite, drift = day.review.non_finite, day.review.drift
    drifted = sorted(name for name, one in drift.items() if one.beyond(pipeline.max_drift))
    return [
        dg.AssetCheckResult(
            check_name="row_accounting",
            passed=day.accounted,
            metadata={
                "rows_in": day.rows_in,
                "published": day.published,
                "quarantined": day.published_quarantined,
            },
        ),
        dg.AssetCheckResult(
            check_name="quarantined_fraction",
            passed=fraction <= allowed,
            metadata={"fraction": fraction, "allowed": allowed, "quarantined": day.quarantined},
        ),
        dg.AssetCheckResult(
            check_name="finite_outputs",
            passed=not any(non_finite.values()),
            metadata={"rows_with_values_not_finite": dict(non_finite)},
        ),
        dg.AssetCheckResult(
            check_name="output_drift",
            passed=not drifted,
            severity=dg.AssetCheckSeverity.WARN,
            metadata={
                "compared_with": day.review.compared_with or "no earlier day",
                "limit": pipeline.max_drift,
                "drifted": drifted,
                **{f"distance of {name}": one.distance for name, one in drift.items()},  # numbers of their own: plotted
                "distances": table(
                    [
                        {"output": name, "distance": round(one.distance, 4), "by chance": round(one.chance, 4)}
                        for name, one in drift.items()
                    ]
                ),
            },
        ),
    ]


def all_days(results: Mapping[str, Sequence[dg.AssetCheckResult]]) -> list[dg.AssetCheckResult]:
    """What a run over several days says of each check as a whole; `results` are each day's."""
    found = []
    for name in _DAY_CHECKS:
        days = {day: one for day, of_day in results.items() for one in of_day if one.check_name == name}
        failed = [day for day, one in days.items() if not one.passed]
        severity = next(one.severity for one in days.values())
        metadata: Metadata = {"days": len(days), "failed": failed}
        found.append(dg.AssetCheckResult(check_name=name, passed=not failed, severity=severity, metadata=metadata))
    return found
