"""What a person must know before trusting an asset: parity, the gate, and that no row got lost."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from gpu_runtime.benchmark.report import BenchmarkReport
from gpu_runtime.export.parity import ParityReport
from gpu_runtime.scoring import Predictions


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


def accounting_spec(key: dg.AssetKey) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        "row_accounting",
        asset=key,
        blocking=True,
        description="Rows read = rows in the published table + rows in quarantine, for every day of the run.",
    )


def accounting_result(days: Sequence[Predictions]) -> dg.AssetCheckResult:
    wrong = [day.day for day in days if not day.accounted]
    return dg.AssetCheckResult(
        check_name="row_accounting",
        passed=not wrong,
        metadata={
            "days": len(days),
            "rows_in": sum(day.rows_in for day in days),
            "published": sum(day.published for day in days),
            "quarantined": sum(day.published_quarantined for day in days),
            "days_with_a_difference": wrong,
        },
    )
