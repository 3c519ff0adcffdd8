"""A process that publishes days as it is told: one JSON line in, one or more out.

It stops at the named point, says so, and goes on when it reads a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import numpy as np

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.datasets.partition import origins_of
from gpu_runtime.device.host import HostDevice, cpu_class
from gpu_runtime.errors import InferenceError
from gpu_runtime.faults import FaultPlan
from gpu_runtime.predictions.delta_table import DayRecord, PredictionTable
from gpu_runtime.predictions.receipts import QuarantinedRow, Receipt
from gpu_runtime.predictions.shard_file import PredictionSchema, Provenance
from gpu_runtime.promotion.store import PromotionStore
from gpu_runtime.scoring import Scorer, ScoringPolicy, score_partition
from gpu_runtime.specs import TensorSpec

SCHEMA = PredictionSchema((TensorSpec("score", "float32"),), {})
REAL = deltalake.CommitProperties
COMMITS: dict[str, Callable[..., Any]] = {
    "as they are": REAL,
    "retried": lambda **named: REAL(**{**named, "max_commit_retries": None}),
    "plain": lambda **named: REAL(),
}
"""What becomes of the commits' properties: left alone, with deltalake's own retries, or all at their defaults."""


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def stop_at(point: str | None) -> FaultPlan:
    """Waits at the point the first time it is reached."""
    reached: list[str] = []

    def plan(now: str) -> None:
        if now == point and not reached:
            reached.append(now)
            say(at=point)
            sys.stdin.readline()

    return plan


def create(table: PredictionTable, **unused: Any) -> str:
    say(at="before create")
    sys.stdin.readline()
    table.create(SCHEMA)
    return "created"


def publish(table: PredictionTable, day: str, run: str, rows: int, rotten: int, commits: str = "as they are") -> str:
    """One shard of `rows` rows, with `rotten` in quarantine. `commits`: a key of `COMMITS`."""
    deltalake.CommitProperties = COMMITS[commits]  # type: ignore[misc, assignment]
    table.create(SCHEMA)
    provenance = Provenance("model", "engine", run)
    with table.attempt(day, run) as attempt:
        previous = table.current_publication(day)
        writer = table.shard_writer(SCHEMA, 0, attempt.ticket, provenance)
        keys = [f"{run}-{row}" for row in range(rows)]
        writer.append(origins_of(keys, "a.parquet", range(rows)), {"score": np.zeros(rows)})
        nbytes, sha256 = writer.finish()
        lost = tuple(
            QuarantinedRow(f"{run}-x", "a.parquet", row, "input", "null", "ValueError") for row in range(rotten)
        )
        receipt = Receipt(day, 0, run, run, writer.file, nbytes, sha256, rows + rotten, rows, lost)
        table.receipts.write(receipt)
        record = DayRecord(run, provenance, rows + rotten, rows, rotten, {})
        number = table.publish(SCHEMA, attempt, [receipt], record, previous)
        table.clean_up(attempt)
    return number


def score(table: PredictionTable, day: str, run: str, store: str, data: str) -> str:
    """The whole of a run, with an engine."""
    promotions = PromotionStore(Path(store))
    plan = promotions.current("model", cpu_class()).plan
    source = ParquetSource(
        data, inputs=(TensorSpec("x", "float32", (2,)),), columns={"x": ("a", "b")}, row_key="id", rows_per_shard=10
    )
    with HostDevice() as device, Scorer(plan, ArtifactStore(store), device, ScoringPolicy(1.0)) as scorer:
        made = score_partition(scorer, source.partition(day), source, SCHEMA, table, run)
    assert made.accounted, made
    return made.publication


def main() -> None:
    for line in sys.stdin:
        told = json.loads(line)
        do = {"create": create, "publish": publish, "score": score}[told.pop("do")]
        table = PredictionTable(told.pop("root"), told.pop("options"), faults=stop_at(told.pop("stop", None)))
        try:
            say(ok=do(table, **told))
        except InferenceError as error:
            say(error=type(error).__name__, text=str(error))
        except Exception as error:
            say(error=type(error).__name__, text=repr(error))


main()
