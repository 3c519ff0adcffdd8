"""ServingPlan: the engine and the settings that score production days on one class of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.engine_set import KIND as ENGINE_KIND
from gpu_runtime.backends.engine_set import EngineSet
from gpu_runtime.backends.protocol import EngineFile
from gpu_runtime.benchmark.objective import Objective, in_words
from gpu_runtime.benchmark.report import BenchmarkReport
from gpu_runtime.device.host import usable_cores
from gpu_runtime.device.protocol import DeviceClass
from gpu_runtime.errors import GateError, PlanError
from gpu_runtime.promotion.search import choose, chosen_trial, explain, nearest
from gpu_runtime.quality.gate import GatePolicy
from gpu_runtime.specs import digest_of


@dataclass(frozen=True)
class ServingPlan:
    """What was promoted, and the evidence.

    The first group of fields is the plan's identity: a new benchmark that leads to the same choice gives the
    same `digest`. `model_digest` is the exported FP32 graph's. `slots`: batches on their way at once; as many as the
    executor takes by itself, where they were not tried. `engine_rows_per_s` is the engine alone, at these settings,
    when it was measured. `objective` is what they were chosen for.
    """

    model: str
    model_version: str
    declaration: str
    device_class: DeviceClass
    engine: str
    engine_set: str
    engine_digest: str
    model_digest: str
    batch: int
    streams: int
    threads: int
    decode_workers: int
    gate_set: str
    slots: int | None = field(default=None, kw_only=True)

    report: str
    reason: str
    engine_rows_per_s: float
    value: float
    reference: float
    objective: Objective = field(default_factory=Objective)

    lengths: tuple[int, ...] = ()
    """What rows that differ in length are padded to; `batch` counts elements then."""

    @property
    def digest(self) -> str:
        evidence = {"report", "reason", "engine_rows_per_s", "value", "reference", "objective"}
        return digest_of({name: value for name, value in vars(self).items() if name not in evidence})

    @property
    def scoring_key(self) -> str:
        """Digest of everything in the plan that changes a score; batch and streams do not. A day is scored by one
        class of device, so its class is part of it."""
        return digest_of(
            {
                "model": self.model,
                "version": self.model_version,
                "declaration": self.declaration,
                "graph": self.model_digest,
                "engine": self.engine_digest,
                "device_class": self.device_class,
            }
        )

    def check_declaration(self, declaration: str) -> None:
        """Raise `PlanError` unless the model and the reading of its rows are still those that passed the gate."""
        if declaration != self.declaration:
            raise PlanError(
                "the model's or its inputs' declaration changed since the gate",
                stage="serving plan",
                item=self.model,
                expected=f"declaration {self.declaration[:12]}",
                got=declaration[:12],
                next_step=f"materialize {self.model}/onnx_model … {self.model}/serving_plan with the new declaration",
            )

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> ServingPlan:
        given = {
            "device_class": DeviceClass.from_plain(plain["device_class"]),
            "objective": Objective(**plain.get("objective", {})),
            "lengths": tuple(plain.get("lengths", ())),
        }
        return ServingPlan(**{**plain, **given})

    def engine_file(self, store: ArtifactStore) -> EngineFile:
        """The promoted engine from the store, its bytes verified."""
        engines = EngineSet(store.get(ENGINE_KIND, self.engine_set)).engines
        file = engines.get(self.engine)
        if file is None or file.digest != self.engine_digest:
            raise PlanError(
                "the plan's engine is not in its engine set",
                stage="serving plan",
                item=f"{self.model}: {self.engine}",
                expected=f"digest {self.engine_digest[:12]}",
                got="nothing" if file is None else file.digest[:12],
                next_step="materialize engine, benchmark and serving_plan again",
            )
        return file


def choose_plan(
    report: BenchmarkReport,
    *,
    declaration: str,
    engine_set: str,
    gate_set: str,
    policy: GatePolicy,
    device_class: DeviceClass,
    objective: Objective = Objective(),  # noqa: B008, a frozen value
) -> ServingPlan:
    """The plan the report allows, by the verdicts inside it.

    Raises `GateError` when the report is of another declaration, engine set, gate, device or objective than is asked
    for; with every refusal, when no engine passed; and when no setting keeps the objective's bounds.
    """
    model = str(report.artifact.metadata["model"])
    for what, wanted, got in (
        ("declaration of the model and its inputs", declaration, report.declaration),
        ("engine set", engine_set, report.engine_set),
        ("gate", policy, report.policy),
        ("set of gate rows", gate_set, report.gate_set),
        ("class of device", device_class, report.device_class),
        ("objective", objective, report.objective),
    ):
        if wanted != got:
            raise GateError(
                f"the benchmark is of another {what}",
                stage="serving plan",
                item=model,
                expected=_short(wanted),
                got=_short(got),
                next_step=f"materialize {model}/benchmark on this machine, then {model}/serving_plan",
            )
    if not report.passed:
        raise GateError(
            "no engine passed the gate",
            stage="serving plan",
            item=model,
            expected=f"{policy.metric} within {policy.max_drop:g} of {report.reference:.4f}"
            + (f" and at least {policy.min_value:g}" if policy.min_value is not None else ""),
            got="; ".join(f"{r.engine}: {', '.join(r.verdict.reasons)}" for r in report.results),
            next_step="the plan in force stays; change the INT8 recipes or the gate and materialize again",
        )
    chosen = choose(report)
    if chosen is None:
        raise _no_setting(report, model)
    result, best = chosen
    trial = chosen_trial(report, best)
    assert result.value is not None
    # As many as the memory was measured with, where that counts; else what the executor takes by itself.
    untried = None if objective.max_memory_mib is None else 2 * best.setting.streams
    return ServingPlan(
        model=model,
        model_version=str(report.artifact.metadata["version"]),
        declaration=report.declaration,
        device_class=report.device_class,
        engine=result.engine,
        engine_set=report.engine_set,
        engine_digest=result.engine_digest,
        model_digest=report.model_digest,
        batch=best.setting.batch,
        streams=best.setting.streams,
        threads=best.setting.threads,
        slots=trial.slots if trial else untried,
        decode_workers=trial.decode_workers if trial else usable_cores(),
        gate_set=report.gate_set,
        report=report.digest,
        reason=explain(report, result, best),
        engine_rows_per_s=best.rows_per_s,
        value=result.value,
        reference=report.reference,
        objective=objective,
        lengths=best.setting.lengths,
    )


def _no_setting(report: BenchmarkReport, model: str) -> GateError:
    """Of a report in which engines passed, and none of their settings keeps the bounds."""
    found, objective = nearest(report), report.objective
    assert found is not None
    closest, excess = found
    memory = "memory unknown on this system" if closest.memory_mib is None else f"{closest.memory_mib:,.0f} MiB"
    return GateError(
        "no setting keeps the objective's bounds",
        stage="serving plan",
        item=model,
        expected=" and ".join(f"{name} = {bound:g}" for name, bound in objective.bounds.items()),
        got=f"{in_words(closest.setting)} as the nearest: p99 {closest.p99_ms:.3g} ms, {memory}; beyond "
        + " and ".join(excess),
        next_step=f"the plan in force stays; raise {' and '.join(excess)}, or try other "
        "`batches` under `benchmark`, and materialize benchmark and serving_plan again",
    )


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
