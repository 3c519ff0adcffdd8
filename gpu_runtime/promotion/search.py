"""Which of the engines that passed the gate serves, and at which setting."""

from __future__ import annotations

from gpu_runtime.benchmark.measure import Measurement
from gpu_runtime.benchmark.report import BenchmarkReport, EngineResult

_CLOSE = 0.97
"""Rates this near the best are within what two runs of one setting differ by."""


def fastest(report: BenchmarkReport) -> tuple[EngineResult, Measurement] | None:
    """The fastest setting of any engine that passed; among settings as good as equal, the one with the
    lowest p99 latency. None when nothing passed."""
    candidates = [(result, m) for result in report.results if result.verdict.passed for m in result.measurements]
    if not candidates:
        return None
    top = max(m.rows_per_s for _, m in candidates)
    close = [(result, m) for result, m in candidates if m.rows_per_s >= _CLOSE * top]
    return min(close, key=lambda candidate: candidate[1].p99_ms)


def explain(report: BenchmarkReport, chosen: EngineResult, setting: Measurement) -> str:
    """One sentence for a person: why this engine serves."""
    refused = [r for r in report.results if r.value is not None and not r.verdict.passed]
    text = (
        f"{chosen.engine} keeps {report.policy.metric} {chosen.value:.4f} (FP32 {report.reference:.4f}, "
        f"at most {report.policy.max_drop:g} lost) and is the fastest of {len(report.passed)} engines that passed "
        f"(among rates within 3 %, the one of the lowest p99): "
        f"{setting.rows_per_s:,.0f} rows/s at batch {setting.setting.batch} × {setting.setting.streams} streams"
    )
    baseline = report.fp32_rows_per_s
    if baseline:
        text += f", {setting.rows_per_s / baseline:.2f} × the best FP32 engine"
    if refused:
        text += "; refused: " + ", ".join(f"{r.engine} ({', '.join(r.verdict.reasons)})" for r in refused)
    return text + "."
