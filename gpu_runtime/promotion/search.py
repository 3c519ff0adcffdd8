"""Which of the engines that passed the gate serves, and at which setting."""

from __future__ import annotations

from gpu_runtime.benchmark.measure import Measurement
from gpu_runtime.benchmark.objective import Objective, in_words, layout_in_words
from gpu_runtime.benchmark.report import BenchmarkReport, EngineResult
from gpu_runtime.benchmark.trial import Trial, best_trial

_SHOWN = 5
"""Of the frontier, in a sentence; the benchmark has the whole table."""


def choose(report: BenchmarkReport) -> tuple[EngineResult, Measurement] | None:
    """The setting that serves the report's objective best, of any engine that passed. None when nothing passed, or
    nothing keeps the objective's bounds."""
    engine_of = {m.setting: result for result in report.passed for m in result.measurements}
    best = report.objective.choose([m for result in report.passed for m in result.measurements])
    return None if best is None else (engine_of[best.setting], best)


def chosen_trial(report: BenchmarkReport, chosen: Measurement) -> Trial | None:
    """How that setting is best fed; None where it was not tried."""
    return best_trial([one for one in report.trials if one.setting == chosen.setting], report.objective)


def nearest(report: BenchmarkReport) -> tuple[Measurement, dict[str, float]] | None:
    """Of the engines that passed, the setting that exceeds the bounds least, and by which factors. None when nothing
    passed."""
    tried = [(m, report.objective.excess(m)) for result in report.passed for m in result.tried]
    return min(tried, key=lambda one: max(one[1].values(), default=1.0), default=None)


def explain(report: BenchmarkReport, chosen: EngineResult, best: Measurement) -> str:
    """For a person: why this engine serves, what holds it back, and what else there was."""
    objective, trial = report.objective, chosen_trial(report, best)
    refused = [r for r in report.results if r.value is not None and not r.verdict.passed]
    aim = "is the fastest" if objective.optimize == "rows_per_s" else "takes the least CPU time a row"
    text = (
        f"{chosen.engine} keeps {report.policy.metric} {chosen.value:.4f} (FP32 {report.reference:.4f}, "
        f"at most {report.policy.max_drop:g} lost) and {aim} of {len(report.passed)} engines that passed"
        f"{', inside the bounds' if objective.bounds else ''} (among figures within 3 %, the one of the lowest p99): "
        f"{best.rows_per_s:,.0f} rows/s at {layout_in_words(best.setting)}"
    )
    if baseline := report.fp32_rows_per_s:
        text += f", {best.rows_per_s / baseline:.2f} × the best FP32 engine"
    if trial:
        text += (
            f"; end to end {trial.rows_per_s:,.0f} rows/s with {trial.slots} slots and "
            f"{trial.decode_workers} decode workers"
        )
    if refused:
        text += "; refused: " + ", ".join(f"{r.engine} ({', '.join(r.verdict.reasons)})" for r in refused)
    sentences = [text, _binding(report, best), *_lateness(objective, trial.rows_per_s if trial else best.rows_per_s)]
    return ". ".join(sentence for sentence in [*sentences, _frontier(report)] if sentence) + "."


def _binding(report: BenchmarkReport, best: Measurement) -> str:
    objective, tried = report.objective, [m for result in report.passed for m in result.tried]
    if not objective.bounds and objective.required_rows_per_s is None:
        return ""
    return objective.binding(tried, best) or "No bound of the objective holds it back"


def _lateness(objective: Objective, rows_per_s: float) -> list[str]:
    if objective.rows_per_day is None or objective.finish_within_s is None or objective.in_time(rows_per_s):
        return []
    takes_s = objective.rows_per_day / rows_per_s
    return [
        f"It misses finish_by by {_duration(takes_s - objective.finish_within_s)}: {objective.rows_per_day:,} rows "
        f"take {_duration(takes_s)} at {rows_per_s:,.0f} rows/s, and there are "
        f"{_duration(objective.finish_within_s)}, which needs {objective.required_rows_per_s:,.0f} rows/s"
    ]


def _frontier(report: BenchmarkReport) -> str:
    """What a faster, a quicker or a leaner choice would be."""
    best = report.frontier
    shown = [
        f"{in_words(one.setting)} {one.rows_per_s:,.0f} rows/s, p99 {one.p99_ms:.3g} ms"
        + ("" if one.memory_mib is None else f", {one.memory_mib:,.0f} MiB")
        for one in best[:_SHOWN]
    ]
    more = f"; and {len(best) - _SHOWN} more" if len(best) > _SHOWN else ""
    return f"No other setting equals these in speed, p99 and memory at once: {'; '.join(shown)}{more}" if shown else ""


def _duration(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 3600
        else f"{seconds / 60:.1f} min"
        if seconds >= 60
        else f"{seconds:.1f} s"
    )
