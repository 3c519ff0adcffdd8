"""This project's own entrant: the engine, the executor and the table as production uses them, gate left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Case, Run, Setting
from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.engine_set import KIND, EngineSet
from gpu_runtime.datasets.partition import Source
from gpu_runtime.device.host import HostDevice, usable_cores
from gpu_runtime.predictions.delta_table import PredictionTable
from gpu_runtime.predictions.shard_file import PredictionSchema
from gpu_runtime.promotion.plan import ServingPlan
from gpu_runtime.scoring import Scorer, ScoringPolicy, score_partition

DAY = "2026-01-01"


@contextmanager
def scoring(case: Case, setting: Setting, source: Source) -> Iterator[Run]:
    """`setting`: backend, batch, streams, threads (for each stream), perhaps slots; and lengths, where rows differ in
    one."""
    store = ArtifactStore(case["store"])
    engines = EngineSet(store.get(KIND, case["engine_set"]))
    file = engines.engines[case["engine_keys"][setting["backend"]]]
    plan = ServingPlan(
        model="benchmark",
        model_version="1",
        declaration="benchmark",
        device_class=file.device_class,
        engine=file.key,
        engine_set=engines.digest,
        engine_digest=file.digest,
        model_digest=file.graph_digest,
        batch=setting["batch"],
        streams=setting["streams"],
        threads=setting["threads"],
        decode_workers=usable_cores(),
        gate_set="",
        report="",
        reason="benchmark",
        engine_rows_per_s=1.0,
        value=1.0,
        reference=1.0,
        lengths=tuple(setting.get("lengths", ())),
        slots=setting.get("slots"),
    )
    outputs = tuple(dataclasses.replace(spec, minimum=None, maximum=None) for spec in file.outputs)
    with HostDevice() as device, Scorer(plan, store, device, ScoringPolicy()) as scorer:
        assert scorer.executor  # loaded now, not in the first run

        def run(out: Path) -> None:
            day, table = source.partition(DAY), PredictionTable(out / "table")
            found = score_partition(scorer, day, source, PredictionSchema(outputs, {}), table, "benchmark")
            if found.scored != case["rows"] or not found.accounted:
                raise RuntimeError(f"{found.scored} of {case['rows']} rows scored")

        yield run
