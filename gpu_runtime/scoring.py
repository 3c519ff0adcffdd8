"""Score a day: shards → receipts → one publication."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.protocol import Engine, EngineOptions
from gpu_runtime.backends.registry import get_backend
from gpu_runtime.datasets.partition import DatasetPartition, ShardReader, ShardTask, Source, check_unchanged
from gpu_runtime.device.protocol import Device
from gpu_runtime.errors import DeviceError, InferenceError, TooManyQuarantinedError
from gpu_runtime.executor.pipeline import Batch, ScoredBatch, StreamExecutor
from gpu_runtime.executor.stage_clock import RunStats
from gpu_runtime.predictions.delta_table import PredictionSchema, PredictionTable, ShardWriter
from gpu_runtime.predictions.receipts import QuarantinedRow, Receipt, resume_key
from gpu_runtime.promotion.plan import ServingPlan
from gpu_runtime.specs import to_plain


@dataclass(frozen=True)
class ScoringPolicy:
    """`max_quarantined_fraction`: a day with a larger share of quarantined rows is not published."""

    max_quarantined_fraction: float = 0.05


@dataclass(frozen=True)
class Predictions:
    """One published day. `rows_in` rows were read; `published` and `published_quarantined` were counted in the
    tables afterwards. `stats` is None when every shard had a receipt."""

    day: str
    publication: str
    rows_in: int
    scored: int
    quarantined: int
    published: int
    published_quarantined: int
    shards: int
    resumed_shards: int
    stats: RunStats | None
    report: Mapping[str, Any]

    @property
    def accounted(self) -> bool:
        """Every row read is either published or in quarantine."""
        return self.rows_in == self.published + self.published_quarantined


@dataclass
class _OpenShard:
    task: ShardTask
    reader: ShardReader
    writer: ShardWriter
    quarantined: list[QuarantinedRow] = field(default_factory=list)


class Scorer:
    """The promoted engine, loaded once, with its executor: scores any number of shards and days."""

    def __init__(self, plan: ServingPlan, store: ArtifactStore, device: Device) -> None:
        self.plan, self._store, self._device = plan, store, device
        self._stack = contextlib.ExitStack()
        self._executor: StreamExecutor | None = None

    @property
    def executor(self) -> StreamExecutor:
        """The engine is loaded, and memory allocated, by the first use."""
        if self._executor is None:
            file = self.plan.engine_file(self._store)
            options = EngineOptions(self.plan.streams, self.plan.threads)
            engine: Engine = get_backend(file.backend).load(file, self._device, options)
            self._stack.enter_context(engine)
            self._executor = self._stack.enter_context(
                StreamExecutor(engine, self._device, batch=self.plan.batch, decode_workers=self.plan.decode_workers)
            )
        return self._executor

    def close(self) -> None:
        self._executor = None
        self._stack.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def score_shard(
        self, task: ShardTask, source: Source, schema: PredictionSchema, table: PredictionTable, run_id: str
    ) -> Receipt:
        """Score one shard and leave its file and its receipt: the unit of work, whoever calls it."""
        return self.score_shards([task], source, schema, table, run_id)[0][0]

    def score_shards(
        self,
        tasks: Sequence[ShardTask],
        source: Source,
        schema: PredictionSchema,
        table: PredictionTable,
        run_id: str,
    ) -> tuple[list[Receipt], RunStats]:
        """Score shards one after another without draining the ring between them. Receipts in the tasks' order."""
        opened: dict[int, _OpenShard] = {}
        receipts: list[Receipt] = []

        def batches() -> Iterator[Batch]:
            with ThreadPoolExecutor(1, thread_name_prefix="open") as opener:
                coming = [opener.submit(source.open, task) for task in tasks[:1]]
                for number, task in enumerate(tasks):
                    reader = coming.pop().result()
                    # The next shard is opened while this one is scored; one ahead bounds the memory.
                    coming += [opener.submit(source.open, following) for following in tasks[number + 1 : number + 2]]
                    writer = table.shard_writer(schema, task.day, task.index, self.plan.engine_digest, run_id)
                    opened[number] = _OpenShard(task, reader, writer)
                    yield from self.executor.batches(number, reader)

        def close_until(number: int) -> None:
            """Shards before `number` have got all their batches: write their receipts."""
            while len(receipts) < number:
                number_closed = len(receipts)
                receipts.append(self._close_shard(opened[number_closed], schema, table, run_id))
                del opened[number_closed]

        def write(scored: ScoredBatch) -> None:
            batch = scored.batch
            close_until(batch.shard)
            self._write(opened[batch.shard], scored)
            if batch.stop == batch.reader.rows:
                close_until(batch.shard + 1)

        try:
            stats = self.executor.run(batches(), write)
            close_until(len(tasks))
        except BaseException:
            for shard in opened.values():
                shard.writer.abandon()
            raise
        return receipts, stats

    def _write(self, shard: _OpenShard, scored: ScoredBatch) -> None:
        failed = {failure.row for failure in scored.failures}
        start, stop = scored.batch.start, scored.batch.stop
        for failure in scored.failures:
            origin = shard.reader.origin(start + failure.row)
            shard.quarantined.append(
                QuarantinedRow(
                    origin.key, origin.file, origin.position, failure.stage, failure.reason, failure.exception
                )
            )
        keys, files, positions = shard.reader.origins(start, stop)
        outputs = scored.outputs
        if failed:
            kept = [row for row in range(stop - start) if row not in failed]
            keys, files = [keys[row] for row in kept], [files[row] for row in kept]
            positions = [positions[row] for row in kept]
            outputs = {name: values[kept] for name, values in outputs.items()}
        if keys:
            shard.writer.append(keys, files, positions, outputs)

    def _close_shard(self, shard: _OpenShard, schema: PredictionSchema, table: PredictionTable, run_id: str) -> Receipt:
        check_unchanged(shard.task)
        nbytes, sha256 = shard.writer.finish()
        receipt = Receipt(
            day=shard.task.day,
            shard=shard.task.index,
            resume_key=resume_key(shard.task, self.plan.scoring_key, schema.digest),
            run_id=run_id,
            file=shard.writer.file,
            nbytes=nbytes,
            sha256=sha256,
            rows_in=shard.reader.rows,
            rows=shard.writer.rows,
            quarantined=tuple(shard.quarantined),
        )
        table.receipts.write(receipt)
        return receipt


def score_partition(
    scorer: Scorer,
    partition: DatasetPartition,
    source: Source,
    schema: PredictionSchema,
    table: PredictionTable,
    policy: ScoringPolicy,
    run_id: str,
) -> Predictions:
    """Score what has no receipt yet and publish the day.

    Raises `TooManyQuarantinedError` and publishes nothing when too large a share of the rows was quarantined.
    """
    table.create(schema)
    previous = table.current_publication(partition.day)
    plan = scorer.plan
    found = {
        shard.index: table.receipts.find(partition.day, shard.index, resume_key(shard, plan.scoring_key, schema.digest))
        for shard in partition.shards
    }
    receipts = {index: receipt for index, receipt in found.items() if receipt is not None}
    pending = [shard for shard in partition.shards if shard.index not in receipts]
    stats: RunStats | None = None
    if pending:
        made, stats = scorer.score_shards(pending, source, schema, table, run_id)
        receipts |= {receipt.shard: receipt for receipt in made}
    ordered = [receipts[shard.index] for shard in partition.shards]
    scored = sum(receipt.rows for receipt in ordered)
    rows = [row for receipt in ordered for row in receipt.quarantined]
    rows_in = sum(receipt.rows_in for receipt in ordered)
    if rows_in and len(rows) / rows_in > policy.max_quarantined_fraction:
        raise TooManyQuarantinedError(
            "too many rows cannot be scored; nothing was published",
            stage="score",
            item=f"{plan.model} {partition.day}",
            expected=f"at most {policy.max_quarantined_fraction:.1%} of {rows_in} rows quarantined",
            got=f"{len(rows)} ({len(rows) / rows_in:.1%}); most often: {_most_frequent(rows)}",
            next_step="repair the day's input, or raise max_quarantined_fraction",
        )
    report = run_report(plan, partition, scored, len(rows), len(partition.shards) - len(pending), stats, run_id)
    publication = table.publish(schema, partition.day, ordered, run_id, report, previous)
    published, published_quarantined = table.count_day(partition.day)
    return Predictions(
        day=partition.day,
        publication=publication,
        rows_in=rows_in,
        scored=scored,
        quarantined=len(rows),
        published=published,
        published_quarantined=published_quarantined,
        shards=len(partition.shards),
        resumed_shards=len(partition.shards) - len(pending),
        stats=stats,
        report=report,
    )


def run_report(
    plan: ServingPlan,
    partition: DatasetPartition,
    scored: int,
    quarantined: int,
    resumed_shards: int,
    stats: RunStats | None,
    run_id: str,
) -> dict[str, Any]:
    """What the run did and how close it came to its bounds, as JSON types."""
    report: dict[str, Any] = {
        "run_id": run_id,
        "day": partition.day,
        "inputs": partition.digest,
        "model": plan.model,
        "model_version": plan.model_version,
        "engine": plan.engine,
        "engine_digest": plan.engine_digest,
        "plan": plan.digest,
        "rows_in": scored + quarantined,
        "scored": scored,
        "quarantined": quarantined,
        "shards": len(partition.shards),
        "resumed_shards": resumed_shards,
    }
    if stats is not None and stats.rows:
        report |= {
            "rows_per_s": stats.rows_per_s,
            "engine_rows_per_s": plan.engine_rows_per_s,
            "of_engine_only": stats.rows_per_s / plan.engine_rows_per_s,
            "of_shared_cpu_bound": stats.efficiency,
            "bottleneck": stats.bottleneck,
            "relief": stats.relief,
            "padded_rows": stats.padded_rows,
            "run": to_plain(stats),
        }
    return report


def score_days(
    days: Iterable[str],
    scorer: Scorer,
    source: Source,
    schema: PredictionSchema,
    table: PredictionTable,
    policy: ScoringPolicy,
    run_id: str,
) -> Iterator[tuple[str, Predictions | InferenceError]]:
    """Score days one by one, each published as it finishes; a bad day does not cost the good ones.

    A failed device ends the range with `DeviceError`: the next day would meet the same device.
    """
    for day in days:
        outcome: Predictions | InferenceError
        try:
            outcome = score_partition(scorer, source.partition(day), source, schema, table, policy, run_id)
        except DeviceError:
            raise
        except InferenceError as error:
            outcome = error
        except Exception as error:  # whatever a library raised belongs to this day alone
            outcome = InferenceError("failed unexpectedly", stage="score", item=day, got=type(error).__name__)
            outcome.__cause__ = error
        yield day, outcome


def _most_frequent(rows: Sequence[QuarantinedRow]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.reason] = counts.get(row.reason, 0) + 1
    reason = max(counts, key=lambda r: counts[r])
    return f"{reason} ({counts[reason]} rows)"
