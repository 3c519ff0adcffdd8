"""BenchmarkReport: what each engine is worth and how fast it is, with the gate's verdict inside."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.artifacts import Artifact, ArtifactStore
from gpu_runtime.backends.engine_set import EngineSet
from gpu_runtime.backends.onnxruntime_backend import ReferenceSession
from gpu_runtime.backends.protocol import EngineFile, EngineOptions
from gpu_runtime.backends.registry import get_backend
from gpu_runtime.benchmark.environment import describe_environment
from gpu_runtime.benchmark.measure import Measurement, Setting, measure
from gpu_runtime.benchmark.objective import Objective, frontier
from gpu_runtime.benchmark.trial import Feed, Trial, powers_of_two, run_trials
from gpu_runtime.datasets.batching import Batching, choose_lengths
from gpu_runtime.datasets.sample import RowSample
from gpu_runtime.device.host import usable_cores
from gpu_runtime.device.protocol import Device, DeviceClass
from gpu_runtime.errors import GateError, InferenceError, SpecError
from gpu_runtime.executor.failures import is_out_of_memory
from gpu_runtime.executor.slots import allocate_slot
from gpu_runtime.quality.gate import GatePolicy, Verdict, judge_accuracy, judge_speed
from gpu_runtime.specs import Graph, ModelSpec, digest_of

KIND = "benchmark"
_LENGTHS = 32
"""What rows that differ in length are padded to: so many lengths, chosen for the gate's rows."""


_NO_MEMORY = "the device has no memory for it at any setting of the sweep"
_GATE_ELEMENTS = 4096
"""Rows × length that the gate gives an engine at once, where rows differ in length."""

_NEAR = 2.0
"""Times the bound: a probe's p99 is the slowest of a few batches, and one pause of the machine doubles it."""


@dataclass(frozen=True)
class Sweep:
    """What is tried: every batch size with 1, 2, 4 … streams up to the cores, which they share out as threads. Where
    rows differ in length it is `budgets` instead, each the most elements (rows × length) of a batch, and what one row
    of the longest takes, if that is more; of budgets that cut rows alike, one. Each setting gets one short round of
    `probe_s`; of each engine those that serve the objective best, `finalists` many, are then measured against each
    other in interleaved rounds of `round_s`. The best of all is tried end to end, `trial_rounds` times `trial_s` for
    each number of slots and decode workers; never, if `trial_rounds` is 0."""

    batches: tuple[int, ...] = (1, 8, 32)
    budgets: tuple[int, ...] = (512, 1024, 2048, 4096)
    finalists: int = 2
    rounds: int = 5
    round_s: float = 0.2
    probe_s: float = 0.05
    trial_rounds: int = 3
    trial_s: float = 0.5

    def __post_init__(self) -> None:
        for name in ("batches", "budgets"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 1:
                expected, got = "numbers of 1 and above", str(sizes)
                raise SpecError("cannot be tried", stage="benchmark", item=name, expected=expected, got=got)

    def settings(self, engine: EngineFile, lengths: tuple[int, ...] = ()) -> list[Setting]:
        cores, longest = usable_cores(), lengths[-1] if lengths else 1
        tried = (*self.budgets, max(longest, *self.budgets)) if lengths else self.batches
        allowed = (min(batch, engine.max_batch * longest) for batch in tried)
        # Budgets below twice the shortest length, for instance, all make every row a batch of its own.
        different = {Batching(batch, engine.max_batch, lengths).shapes: batch for batch in allowed}
        return [
            Setting(engine.key, batch, streams, cores // streams, lengths)
            for batch in different.values()
            for streams in sorted({*powers_of_two(cores), cores})  # of six cores, four streams leave two idle
        ]


@dataclass(frozen=True)
class EngineResult:
    """One engine's line. `value` is the gate's metric on this device. `measurements` are its finalists, from
    interleaved rounds; `probes` the whole sweep, one short round each. Both are empty where it cannot run."""

    engine: str
    engine_digest: str
    precision: str
    nbytes: int
    value: float | None
    speedup: float | None
    verdict: Verdict
    measurements: tuple[Measurement, ...]
    probes: tuple[Measurement, ...]

    @property
    def tried(self) -> list[Measurement]:
        """Every setting once: as it was measured where it was a finalist, else as its probe found it."""
        measured = {one.setting for one in self.measurements}
        return [*self.measurements, *(probe for probe in self.probes if probe.setting not in measured)]

    @property
    def best(self) -> Measurement | None:
        return max(self.measurements, key=lambda m: m.rows_per_s, default=None)


@dataclass(frozen=True)
class BenchmarkReport:
    artifact: Artifact

    @property
    def digest(self) -> str:
        return self.artifact.digest

    @property
    def device_class(self) -> DeviceClass:
        return DeviceClass.from_plain(self.artifact.metadata["device_class"])

    @property
    def results(self) -> list[EngineResult]:
        """In the order of the engine set. Engines that did not run here have no passed verdict."""
        return [
            EngineResult(
                **{k: entry[k] for k in ("engine", "engine_digest", "precision", "nbytes", "value", "speedup")},
                verdict=Verdict(entry["verdict"]["passed"], tuple(entry["verdict"]["reasons"])),
                measurements=_measurements(entry["measurements"]),
                probes=_measurements(entry["probes"]),
            )
            for entry in self.artifact.metadata["results"]
        ]

    @property
    def reference(self) -> float:
        """The metric of the FP32 graph in the reference runtime."""
        return float(self.artifact.metadata["reference"])

    @property
    def fp32_rows_per_s(self) -> float | None:
        """The fastest FP32 engine's rate in this run: what every speed-up is relative to."""
        rates = [m.rows_per_s for result in self.results if result.precision == "fp32" for m in result.measurements]
        return max(rates, default=None)

    @property
    def policy(self) -> GatePolicy:
        return GatePolicy(**self.artifact.metadata["policy"])

    @property
    def objective(self) -> Objective:
        """What the finalists and the trials were chosen for."""
        return Objective(**self.artifact.metadata.get("objective", {}))

    @property
    def trials(self) -> list[Trial]:
        """The objective's choice end to end; empty where nothing was fed to it."""
        return [
            Trial(**{**one, "setting": Setting(**one["setting"])}) for one in self.artifact.metadata.get("trials", [])
        ]

    @property
    def frontier(self) -> list[Measurement]:
        """Of the engines that passed: the settings that no other one equals in rows/s, p99 and memory at once."""
        return frontier([one for result in self.passed for one in result.tried])

    @property
    def declaration(self) -> str:
        """Digest of the model and of how its rows are read, as declared when this was measured."""
        return str(self.artifact.metadata["declaration"])

    @property
    def model_digest(self) -> str:
        """Digest of the exported FP32 graph that every engine was judged against."""
        return str(self.artifact.metadata["model_digest"])

    @property
    def engine_set(self) -> str:
        """Content digest of the engine set that was measured."""
        return str(self.artifact.metadata["engine_set"])

    @property
    def gate_set(self) -> str:
        """Digest of the rows the gate looked at."""
        return str(self.artifact.metadata["gate_set"])

    @property
    def passed(self) -> list[EngineResult]:
        """Engines that may serve, fastest first."""
        good = [result for result in self.results if result.verdict.passed and result.best]
        return sorted(good, key=lambda result: -result.best.rows_per_s if result.best else 0.0)


def benchmark_recipe(
    declaration: str, engines: EngineSet, gate_set: str, policy: GatePolicy, objective: Objective
) -> str:
    """Under which a report is found again: the declaration, the engines, the rows and the gate they were judged by,
    and what their settings were searched for."""
    return digest_of(
        {
            "declaration": declaration,
            "engines": engines.digest,
            "gate_set": gate_set,
            "policy": policy,
            "objective": objective,
        }
    )


def run_benchmark(
    spec: ModelSpec,
    declaration: str,
    engines: EngineSet,
    reference_graph: Graph,
    gate_rows: RowSample,
    policy: GatePolicy,
    sweep: Sweep,
    device: Device,
    store: ArtifactStore,
    objective: Objective = Objective(),  # noqa: B008, a frozen value
    feed: Feed | None = None,
) -> BenchmarkReport:
    """Judge every engine's accuracy on this device, time those that keep it, judge their speed; then run the
    objective's choice end to end on what `feed` reads, to find the slots and decode workers it needs.

    `declaration` is the digest of the model and of how its rows are read (`declaration_of`): a plan that comes out
    of this report serves that declaration and no other.
    Never reused from an earlier run: whoever materializes a benchmark wants it measured.
    """
    policy.check_output(reference_graph.outputs)
    reference = _reference_outputs(reference_graph, gate_rows, policy.output)
    base = policy.measure(reference, reference, gate_rows.labels)
    if not np.isfinite(base):
        raise GateError(
            "the metric says nothing on these rows",
            stage="benchmark",
            item=f"{spec.name}: {policy.metric}",
            expected="rows with labels of both kinds",
            got=f"{gate_rows.rows} rows",
            next_step="name other gate partitions",
        )
    values: dict[str, float] = {}
    verdicts: dict[str, Verdict] = {}
    for key, file in engines.engines.items():
        if reason := get_backend(file.backend).runs_here():
            verdicts[key] = Verdict(False, (f"not run here: {reason}",))
            continue
        try:
            got = run_rows(file, device, gate_rows, policy.output)
        except InferenceError as error:
            verdicts[key] = Verdict(False, (f"not run here: {error}",))
            continue
        except Exception as error:  # one engine that fails must not cost the others their report
            verdicts[key] = Verdict(False, (f"failed here: {type(error).__name__}: {error}",))
            continue
        values[key] = policy.measure(got, reference, gate_rows.labels)
        verdicts[key] = judge_accuracy(policy, values[key], base)
    # A refused engine never serves; it is timed all the same, so that the table shows what it would have bought.
    runnable = [file for key, file in engines.engines.items() if key in values]
    probes, measured, failed = _sweep(runnable, sweep, objective, device, gate_rows)
    verdicts |= {key: Verdict(False, (failed.get(key, _NO_MEMORY),)) for key, found in probes.items() if not found}
    baseline = max(
        (m.rows_per_s for k, ms in measured.items() if engines.engines[k].precision == "fp32" for m in ms),
        default=float("nan"),
    )
    results = []
    for key, file in engines.engines.items():
        found = measured.get(key, [])
        speedup = max((m.rows_per_s for m in found), default=float("nan")) / baseline
        verdict = verdicts[key]
        if verdict.passed:
            verdict = judge_speed(policy, file.precision, speedup)
        results.append(
            EngineResult(
                key,
                file.digest,
                file.precision,
                file.nbytes,
                _finite_or_none(values.get(key)),
                speedup if np.isfinite(speedup) else None,
                verdict,
                tuple(found),
                tuple(probes.get(key, ())),
            )
        )
    chosen = objective.choose([m for result in results if result.verdict.passed for m in result.measurements])
    trials, trials_failed = list[Trial](), None
    if feed is not None and chosen is not None and sweep.trial_rounds:
        file, timing = engines.engines[chosen.setting.engine], (sweep.trial_rounds, sweep.trial_s)
        try:
            trials = run_trials(file, chosen, objective, device, feed.open(), *timing)
        except Exception as error:  # whatever it is, all that was measured stands without them
            trials_failed = str(error) if isinstance(error, InferenceError) else f"{type(error).__name__}: {error}"
    with store.draft(KIND, [benchmark_recipe(declaration, engines, gate_rows.digest, policy, objective)]) as draft:
        draft.metadata = {
            "model": spec.name,
            "version": spec.version,
            "declaration": declaration,
            "model_digest": reference_graph.digest,
            "engine_set": engines.digest,
            "device_class": device.device_class,
            "environment": describe_environment(),
            "policy": policy,
            "objective": objective,
            "gate_set": gate_rows.digest,
            "gate_rows": gate_rows.rows,
            "reference": base,
            "results": results,
            "trials": trials,
            "trials_failed": trials_failed,
            "not_built": engines.not_built,
        }
    return BenchmarkReport(draft.finished())


def _sweep(
    files: Sequence[EngineFile], sweep: Sweep, objective: Objective, device: Device, rows: RowSample
) -> tuple[dict[str, list[Measurement]], dict[str, list[Measurement]], dict[str, str]]:
    """Probe every setting of every engine, then hold the best of each against each other.

    A probe is short, and what just keeps a bound in it may not in the longer rounds, or the other way round: then the
    engine's next ones that came near it follow, until one does. A setting that does not fit in the device's memory is
    left out. An engine that fails otherwise has no probes, but a reason: rows longer than the gate's may do that.
    """
    engines = {file.key: file for file in files}
    probes: dict[str, list[Measurement]] = {file.key: [] for file in files}
    failed: dict[str, str] = {}
    for file in files:
        for setting in sweep.settings(file, _lengths(file, rows)):
            try:  # one at a time: a sweep of a large model must not hold all its copies in memory
                probes[file.key] += measure(engines, [setting], device, rows, rounds=1, round_s=sweep.probe_s)
            except Exception as error:
                if not is_out_of_memory(error):
                    probes[file.key], failed[file.key] = [], f"failed here: {type(error).__name__}: {error}"
                    break
    waiting = {key: objective.ranked(found) for key, found in probes.items()}
    measured: dict[str, list[Measurement]] = {key: [] for key in probes}

    def finalists(key: str) -> list[Measurement]:
        taken, waiting[key] = waiting[key][: sweep.finalists], waiting[key][sweep.finalists :]
        return taken

    turn = [probe for key in probes for probe in finalists(key)]
    while turn:
        found, broken = _in_rounds(engines, [probe.setting for probe in turn], sweep, device, rows)
        failed |= broken
        for key in broken:
            probes[key], measured[key], waiting[key] = [], [], []
        for one in found:
            if one.setting.engine not in failed:
                measured[one.setting.engine].append(_with_most_memory(one, probes[one.setting.engine]))
        turn = [
            probe
            for key in probes
            if not any(objective.keeps(one) for one in measured[key])
            for probe in finalists(key)
            if max(objective.excess(probe).values(), default=0.0) <= _NEAR
        ]
    return probes, measured, failed


def _in_rounds(
    engines: Mapping[str, EngineFile], settings: Sequence[Setting], sweep: Sweep, device: Device, rows: RowSample
) -> tuple[list[Measurement], dict[str, str]]:
    """Measured in turns; and which engines failed, and why. If one of them cannot, or there is no room for all at once,
    each is measured by itself: one engine's failure must not cost the others their results."""

    def together(chosen: Sequence[Setting]) -> list[Measurement]:
        return measure(engines, chosen, device, rows, rounds=sweep.rounds, round_s=sweep.round_s)

    with contextlib.suppress(Exception):
        return together(settings), {}
    found, failed = list[Measurement](), dict[str, str]()
    for setting in settings:
        try:
            found += together([setting])
        except Exception as error:
            if not is_out_of_memory(error):
                failed[setting.engine] = f"failed here: {type(error).__name__}: {error}"
    return found, failed


def _with_most_memory(one: Measurement, probes: Sequence[Measurement]) -> Measurement:
    """A library keeps memory of an engine that was closed, and a second one of its kind seems to take less."""
    seen = [m.memory_mib for m in (one, *probes) if m.setting == one.setting and m.memory_mib is not None]
    return replace(one, memory_mib=max(seen, default=None))


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _measurements(plain: Sequence[Mapping[str, Any]]) -> tuple[Measurement, ...]:
    return tuple(Measurement(**{**m, "setting": Setting(**m["setting"])}) for m in plain)


def _lengths(file: EngineFile, sample: RowSample) -> tuple[int, ...]:
    """What rows are padded to; nothing where all are alike."""
    if sample.lengths is None:
        return ()
    assert file.max_length is not None
    return choose_lengths(sample.lengths, file.max_length, _LENGTHS)


def run_rows(file: EngineFile, device: Device, sample: RowSample, output: str) -> npt.NDArray[Any]:
    """One output of every row of `sample`, by the built engine on `device`, in padded batches."""
    batch = min(file.max_batch, 32 if sample.rows < 4096 else 1024)
    made: list[npt.NDArray[Any]] = []
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(get_backend(file.backend).load(file, device, EngineOptions(1, usable_cores())))
        stream = device.stream()
        stack.callback(stream.close)
        batching = Batching(_GATE_ELEMENTS if file.max_length else batch, batch, _lengths(file, sample))
        slot = allocate_slot(file, device, batching.shapes, engine.create_context(), stream)
        for start, stop, length in batching.cut(sample.rows, sample.lengths):
            rows, count, shape = sample.part(start, stop, length), stop - start, batching.shape(length)
            for tensor in slot.inputs:
                staged = tensor.rows(length)
                staged[:count] = rows[tensor.spec.name]
                staged[count : shape.rows] = rows[tensor.spec.name][:1]
                device.copy_in(tensor.staging, tensor.buffer, tensor.staging.nbytes, stream)
            slot.enqueue(device, shape)
            for tensor in slot.outputs:
                device.copy_out(tensor.buffer, tensor.staging, tensor.staging.nbytes, stream)
            stream.record(slot.copied_out)
            slot.copied_out.synchronize()
            made.append(slot.results[output][:count].copy())
    return np.concatenate(made)


def _reference_outputs(graph: Graph, sample: RowSample, output: str) -> npt.NDArray[Any]:
    run = ReferenceSession(graph.path)
    return np.concatenate([run(rows)[output] for rows in sample.batches(min(graph.max_batch, 256))])


def best_rate(results: Sequence[EngineResult], precision: str, backend: str | None = None) -> float | None:
    """Rows per second of the fastest engine of that precision (and backend) that passed the gate."""
    rates = [
        result.best.rows_per_s
        for result in results
        if result.best
        and result.verdict.passed
        and result.precision == precision
        and (backend is None or result.engine.startswith(f"{backend}:"))
    ]
    return max(rates, default=None)


def table_rows(report: BenchmarkReport) -> list[dict[str, Any]]:
    """One plain row an engine: what a person compares."""
    rows: list[dict[str, Any]] = []
    for result in report.results:
        best = result.best
        rows.append(
            {
                "engine": result.engine,
                "precision": result.precision,
                report.policy.metric: None if result.value is None else round(result.value, 4),
                "batch": best.setting.batch if best else None,
                "streams": best.setting.streams if best else None,
                "threads": best.setting.threads if best else None,
                "p50_ms": round(best.p50_ms, 3) if best else None,
                "p99_ms": round(best.p99_ms, 3) if best else None,
                "rows_per_s": round(best.rows_per_s, 1) if best else None,
                **(_resources(best) if best else {"memory_mib": None, "cpu_s_per_million_rows": None}),
                "speedup": None if result.speedup is None else round(result.speedup, 2),
                "size_kb": round(result.nbytes / 1024),
                "gate": _verdict_in_words(result),
            }
        )
    return rows


def frontier_rows(report: BenchmarkReport) -> list[dict[str, Any]]:
    """One plain row for each setting that no other one equals, fastest first; `rounds` is 1 where it was only
    probed. `exceeds` names the bounds of the objective that it does not keep."""
    return [
        {
            "engine": one.setting.engine,
            "batch": one.setting.batch,
            "streams": one.setting.streams,
            "threads": one.setting.threads,
            "rows_per_s": round(one.rows_per_s, 1),
            "p50_ms": round(one.p50_ms, 3),
            "p90_ms": round(one.p90_ms, 3),
            "p99_ms": round(one.p99_ms, 3),
            **_resources(one),
            "rounds": one.rounds,
            "exceeds": ", ".join(report.objective.excess(one)) or None,
        }
        for one in report.frontier
    ]


def trial_rows(report: BenchmarkReport) -> list[dict[str, Any]]:
    """One plain row for each way in which the chosen setting was fed."""
    return [
        {
            "slots": one.slots,
            "decode_workers": one.decode_workers,
            "rows_per_s": round(one.rows_per_s, 1),
            "cpu_s_per_million_rows": round(one.cpu_s_per_row * 1e6, 2),
        }
        for one in report.trials
    ]


def _resources(one: Measurement) -> dict[str, Any]:
    return {
        "memory_mib": None if one.memory_mib is None else round(one.memory_mib, 1),
        "cpu_s_per_million_rows": round(one.cpu_s_per_row * 1e6, 2),
    }


def _verdict_in_words(result: EngineResult) -> str:
    if result.verdict.passed:
        return "passed"
    reasons = "; ".join(result.verdict.reasons)
    return f"refused: {reasons}" if result.measurements else reasons
