"""Score a day: shards → receipts → one publication."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.protocol import Engine, EngineOptions
from gpu_runtime.backends.registry import get_backend
from gpu_runtime.datasets.partition import DatasetPartition, ShardReader, ShardTask, Source, check_unchanged
from gpu_runtime.datasets.workers import WorkerPool
from gpu_runtime.device.protocol import Device
from gpu_runtime.errors import (
    DatasetError,
    DeviceError,
    EngineMismatchError,
    InferenceError,
    SpecError,
    StalledError,
    TooManyQuarantinedError,
)
from gpu_runtime.executor.pipeline import Batch, ScoredBatch, StreamExecutor
from gpu_runtime.executor.stage_clock import RunStats
from gpu_runtime.executor.watch import Watch, leave_behind
from gpu_runtime.faults import FaultPlan, around, no_faults
from gpu_runtime.predictions.attempts import AttemptTicket
from gpu_runtime.predictions.delta_table import DayRecord, PredictionTable
from gpu_runtime.predictions.receipts import QuarantinedRow, Receipt, day_key, resume_key
from gpu_runtime.predictions.shard_file import PredictionSchema, Provenance, ShardWriter
from gpu_runtime.promotion.plan import ServingPlan
from gpu_runtime.promotion.store import CeilingStore
from gpu_runtime.quality.drift import OutputReview, drift
from gpu_runtime.specs import to_plain

_REVIEWED_DAYS = 7
"""How far back a day with something to compare is looked for."""

_REVIEWED_VALUES, _REVIEWED_ROWS = 100_000, 1_000
"""Of each output so many values are enough for a distribution, but never fewer rows; a day may have any number."""


@dataclass(frozen=True)
class ScoringPolicy:
    """`max_quarantined_fraction`: a day with a larger share of quarantined rows is not published.
    `stage_timeout_s`: a piece of work that takes longer ends the run: a shard being opened, a batch decoded, computed
    or written, a receipt looked up, the day listed, published, cleaned up after or read back.
    `price_per_hour`: what an hour of this machine costs, in any currency; then each run says what its rows cost.
    """

    max_quarantined_fraction: float = 0.05
    stage_timeout_s: float = 600.0
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("max_quarantined_fraction", 0 <= self.max_quarantined_fraction <= 1, "a fraction, 0 … 1"),
            ("stage_timeout_s", self.stage_timeout_s > 0, "seconds above 0"),
            ("price_per_hour", self.price_per_hour is None or self.price_per_hour >= 0, "a price, 0 or above"),
        ):
            if not fits:
                raise SpecError(
                    "cannot be used", stage="scoring", item=name, expected=expected, got=str(getattr(self, name))
                )


@dataclass(frozen=True)
class Predictions:
    """One published day. `rows_in` rows were read; `published` and `published_quarantined` were counted in the
    tables afterwards. `reused`: the day was published already, of the same inputs, engine and schema, and nothing was
    scored. `stats` is None when no row was. `left_behind`: why dead runs' leftovers could not be removed; the day's
    next run tries again."""

    day: str
    publication: str
    day_key: str
    rows_in: int
    scored: int
    quarantined: int
    published: int
    published_quarantined: int
    shards: int
    resumed_shards: int
    reused: bool
    stats: RunStats | None
    report: Mapping[str, Any]
    review: OutputReview
    left_behind: str | None = None

    @property
    def accounted(self) -> bool:
        """Every row read is either published or in quarantine."""
        return self.scored == self.published and self.rows_in == self.published + self.published_quarantined


@dataclass
class _OpenShard:
    number: int
    task: ShardTask
    writer: ShardWriter
    read: int = 0
    quarantined: list[QuarantinedRow] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Rows."""
        return self.writer.rows + len(self.quarantined)

    def check_rows(self) -> None:
        """Raises `DatasetError` unless its file is the one that was cut into shards, and every row of it was done."""
        check_unchanged(self.task)
        if not self.task.rows == self.read == self.done:
            raise DatasetError(
                "the shard does not have the rows that were counted when the day was cut",
                stage="dataset",
                item=f"{self.task.day}, shard {self.task.index}",
                expected=f"{self.task.rows} rows",
                got=f"{self.read} read, {self.writer.rows} scored, {len(self.quarantined)} quarantined",
                next_step="run the day again once its files are complete",
            )


@dataclass(frozen=True)
class Destination:
    """Where one attempt at a day leaves its shards. Can be sent to other processes: they join the attempt, whose
    own process keeps it alive."""

    table: PredictionTable
    schema: PredictionSchema
    attempt: AttemptTicket


class Scorer:
    """The promoted engine, loaded once, with its executor: scores any number of shards and days."""

    def __init__(
        self,
        plan: ServingPlan,
        store: ArtifactStore,
        device: Device,
        policy: ScoringPolicy,
        faults: FaultPlan = no_faults,
    ) -> None:
        self.plan, self.policy = plan, policy
        self._store, self._device, self._faults = store, device, faults
        self._ceilings = CeilingStore(store.root)
        self._stack = contextlib.ExitStack()
        self._closed = False
        self._executor: StreamExecutor | None = None

    @property
    def executor(self) -> StreamExecutor:
        """The engine is loaded, and memory allocated, by the first use."""
        if self._executor is None:
            plan = self.plan
            file = plan.engine_file(self._store)
            with contextlib.ExitStack() as opened:
                options = EngineOptions(plan.streams, plan.threads)
                engine: Engine = opened.enter_context(get_backend(file.backend).load(file, self._device, options))
                fits = self._ceilings.find(plan.engine_digest, plan.device_class)
                executor = opened.enter_context(
                    StreamExecutor(
                        engine,
                        self._device,
                        batch=min(plan.batch, fits or plan.batch),
                        lengths=plan.lengths,
                        slots=plan.slots,
                        decode_workers=plan.decode_workers,
                        stage_timeout_s=self.policy.stage_timeout_s,
                        ceiling_lowered=lambda rows: self._ceilings.lower(plan.engine_digest, plan.device_class, rows),
                        faults=self._faults,
                    )
                )
                if self._closed:  # loading hung, and nobody waits for it any more
                    raise DeviceError("its scorer was closed meanwhile", stage="load", item=file.key)
                self._stack.enter_context(opened.pop_all())
            self._executor = executor
        return self._executor

    def close(self) -> None:
        self._closed, self._executor = True, None
        self._stack.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def watch(self, day: str) -> Watch:
        """For the work on that day which is not the executor's."""
        return Watch(f"{self.plan.model} {day}", self.policy.stage_timeout_s)

    def score_shards(
        self,
        tasks: Sequence[ShardTask],
        source: Source,
        to: Destination,
        *,
        max_quarantined_fraction: float = 1.0,
        force: bool = False,
    ) -> tuple[list[Receipt], int, RunStats | None]:
        """`score_shard` for several shards, without draining the ring between them.

        Receipts come in the tasks' order; then how many of them were there before, and statistics of what was scored
        now, None if nothing was.
        Raises `TooManyQuarantinedError` as soon as a larger share of the tasks' rows is in quarantine.
        """
        watch, receipts = self.watch(to.attempt.day), dict[int, Receipt]()
        for task in () if force else tasks:
            if found := watch("look-up", partial(self._find, task, to)):
                receipts[task.index] = found
        allowance = _Allowance(watch.item, max_quarantined_fraction, sum(task.rows for task in tasks))
        pending = [task for task in tasks if task.index not in receipts]
        try:
            for receipt in receipts.values():
                allowance.take(receipt.quarantined)
            stats = self._run(pending, source, to, receipts, allowance, watch) if pending else None
        except (TooManyQuarantinedError, DeviceError):
            # The engine or its device may be to blame: these rows are tried again. Bad input stays bad.
            again = [one for one in receipts.values() if one.failed_in("engine") or one.failed_in("output")]
            watch("look-up", lambda: to.table.receipts.withdraw(again))
            raise
        return [receipts[task.index] for task in tasks], len(tasks) - len(pending), stats

    def _find(self, task: ShardTask, to: Destination) -> Receipt | None:
        return to.table.resume(to.attempt, task.index, self._key(task, to))

    def _key(self, task: ShardTask, to: Destination) -> str:
        return resume_key(task, self.plan.scoring_key, to.schema.digest)

    def _run(
        self,
        tasks: Sequence[ShardTask],
        source: Source,
        to: Destination,
        receipts: dict[int, Receipt],
        allowance: _Allowance,
        watch: Watch,
    ) -> RunStats:
        """Score `tasks` and add each one's receipt to `receipts` as it is finished."""
        provenance = Provenance(self.plan.model_digest, self.plan.engine_digest, to.attempt.run_id)
        opened, overfull = deque[_OpenShard](), list[int]()
        pool, reading = WorkerPool(1, "open"), list[Future[tuple[int, ShardReader] | None]]()
        parts = ((number, part) for number, task in enumerate(tasks) for part in source.parts(task))

        def read_part() -> tuple[int, ShardReader] | None:
            with around(self._faults, "read"):
                return next(parts, None)

        def batches() -> Iterator[Batch]:
            # The next part is read while this one is scored; one ahead bounds the memory.
            shard = None
            reading.append(pool.submit(read_part))
            while (found := reading[0].result()) is not None:  # it stays there as long as it is waited for
                reading[:] = [pool.submit(read_part)]
                number, part = found
                if shard is None or shard.number != number:
                    task = tasks[number]
                    writer = to.table.shard_writer(to.schema, task.index, to.attempt, provenance)
                    opened.append(shard := _OpenShard(number, task, writer))
                shard.read += part.rows
                if shard.read > shard.task.rows:  # it counted as complete with the last of those that it should have
                    overfull.append(shard.task.index)
                    shard.check_rows()
                yield from executor.batches(number, part)
                del found, part  # nor does a shard's last part stay while the next is waited for

        def close_before(number: int) -> None:
            """Shards before `number` have got all their batches, those without a row included."""
            while opened and opened[0].number < number:
                shard = opened.popleft()
                receipts[shard.task.index] = self._close_shard(shard, to)

        def write(scored: ScoredBatch) -> None:
            batch = scored.batch
            close_before(batch.shard)
            with around(self._faults, "write"):
                allowance.take(_write_rows(opened[0], scored))
            if opened[0].done == opened[0].task.rows:
                close_before(batch.shard + 1)

        executor = watch("load", lambda: self.executor)
        try:
            stats = executor.run(batches(), write, watch.item)
            watch("write", lambda: close_before(len(tasks)))
        except DatasetError:
            wrong = [receipts.pop(index) for index in overfull if index in receipts]
            watch("look-up", lambda: to.table.receipts.withdraw(wrong))
            raise
        finally:
            pool.submit(parts.close)  # after what it is at, and there: a file's end may hang as its reading does
            pool.close(wait=False)
            for part in reading:
                if not part.cancel() and not part.done():
                    ended = threading.Event()  # `part.done` would keep what was read
                    part.add_done_callback(lambda _, ended=ended: ended.set())  # type: ignore[misc]
                    leave_behind(ended.is_set)
        return stats

    def _close_shard(self, shard: _OpenShard, to: Destination) -> Receipt:
        shard.check_rows()
        with around(self._faults, "data file"):
            nbytes, sha256 = shard.writer.finish()
        receipt = Receipt(
            day=shard.task.day,
            shard=shard.task.index,
            resume_key=self._key(shard.task, to),
            run_id=to.attempt.run_id,
            file=shard.writer.file,
            nbytes=nbytes,
            sha256=sha256,
            rows_in=shard.read,
            rows=shard.writer.rows,
            quarantined=tuple(shard.quarantined),
        )
        with around(self._faults, "receipt"):
            to.table.receipts.write(receipt)
        return receipt


def score_shard(task: ShardTask, scorer: Scorer, source: Source, to: Destination) -> Receipt:
    """Score one shard and leave its file and then its receipt: the unit of work, whoever calls it.

    A shard that has a receipt of the same resume key is not opened again. Whether too many rows are in quarantine is
    a question to the whole day, and asked when that is published.
    """
    return scorer.score_shards([task], source, to)[0][0]


class _Allowance:
    """How many rows may still go to quarantine."""

    def __init__(self, item: str, fraction: float, rows: int) -> None:
        self._item, self._fraction, self._rows = item, fraction, rows
        self._reasons: Counter[str] = Counter()
        self._example: dict[str, str] = {}

    def take(self, quarantined: Sequence[QuarantinedRow]) -> None:
        """Raises `TooManyQuarantinedError` when there are more of them than the day may have."""
        for row in quarantined:
            self._reasons[row.reason] += 1
            self._example.setdefault(row.reason, row.source_file)
        taken = self._reasons.total()
        if quarantined and taken / self._rows > self._fraction:
            most = [f"{reason} ({n} rows, as in {self._example[reason]})" for reason, n in self._reasons.most_common(3)]
            raise TooManyQuarantinedError(
                "too many rows cannot be scored; nothing was published",
                stage="score",
                item=self._item,
                expected=f"at most {self._fraction:.1%} of {self._rows} rows quarantined",
                got=f"{taken} ({taken / self._rows:.1%}) so far; most often: {'; '.join(most)}",
                next_step="repair the day's input, or raise max_quarantined_fraction, and run again",
            )


def _write_rows(shard: _OpenShard, scored: ScoredBatch) -> list[QuarantinedRow]:
    """Add a batch's rows to its shard; returns those that go to quarantine instead."""
    failed = {failure.row for failure in scored.failures}
    start, stop = scored.batch.start, scored.batch.stop
    reader, outputs = scored.batch.reader, scored.outputs
    origins, places = reader.origins(start, stop), None if reader.order is None else reader.order[start:stop]
    quarantined = [
        QuarantinedRow(
            **origins.slice(one.row, 1).to_pylist()[0],
            stage=one.stage,
            reason=sys.intern(one.reason),  # it is kept until the day is published: once for all rows
            exception=one.exception,
        )
        for one in scored.failures
    ]
    if failed:
        kept = np.asarray([row for row in range(stop - start) if row not in failed], np.int64)
        origins, outputs = origins.take(kept), {name: values[kept] for name, values in outputs.items()}
        places = None if places is None else places[kept]
    if origins.num_rows:
        shard.writer.append(origins, outputs, places)
    shard.quarantined.extend(quarantined)
    return quarantined


def score_partition(
    scorer: Scorer,
    partition: DatasetPartition,
    source: Source,
    schema: PredictionSchema,
    table: PredictionTable,
    run_id: str,
    *,
    force: bool = False,
) -> Predictions:
    """Score what has no receipt yet and publish the day; a day that is published already, of the same resume key, is
    not scored again. `force` scores every row anew.

    Raises `TooManyQuarantinedError` and publishes nothing when too large a share of the rows was quarantined. An error
    that comes after the commit says that the day is published.
    """
    day, plan, watch = partition.day, scorer.plan, scorer.watch(partition.day)
    key = day_key(partition.shards, plan.scoring_key, schema.digest)
    with contextlib.ExitStack() as stack:
        attempt = table.attempt(day, run_id)
        stack.push(attempt)  # first: it ends even if its beginning hangs, and comes to pass when nobody waits for it
        watch("look-up", attempt.__enter__)
        before = watch("look-up", partial(table.published, day))
        if reused := (
            before is not None
            and before.record.day_key == key
            and not force
            and watch("look-up", partial(table.holds, day, before.record))
        ):
            number, record, stats, resumed = before.number, before.record, None, len(partition.shards)
        else:
            receipts, resumed, stats = scorer.score_shards(
                partition.shards,
                source,
                Destination(table, schema, attempt.ticket),
                max_quarantined_fraction=scorer.policy.max_quarantined_fraction,
                force=force,
            )
            quarantined = sum(len(receipt.quarantined) for receipt in receipts)
            scored = sum(receipt.rows for receipt in receipts)
            record = DayRecord(
                day_key=key,
                provenance=Provenance(plan.model_digest, plan.engine_digest, run_id),
                rows_in=sum(receipt.rows_in for receipt in receipts),
                scored=scored,
                quarantined=quarantined,
                report=run_report(
                    plan, partition, scored, quarantined, resumed, stats, run_id, scorer.policy.price_per_hour
                )
                | {"scored_by_runs": sorted({receipt.run_id for receipt in receipts})}
                | ({} if stats is None else {"batch": scorer.executor.batch, "plan_batch": plan.batch}),
            )
            previous = before.number if before else None
            number = watch("publish", partial(table.publish, schema, attempt, receipts, record, previous))
        left_behind = None
        try:
            watch("clean-up", partial(table.clean_up, attempt))
        except StalledError as error:
            raise _published_all_the_same(day, number, error) from error
        except Exception as error:
            left_behind = type(error).__name__
    try:
        published, published_quarantined = watch("check", partial(table.count_day, day))
        review = watch("check", partial(review_outputs, table, schema, day))
    except Exception as error:
        raise _published_all_the_same(day, number, error) from error
    return Predictions(
        day=day,
        publication=number,
        day_key=key,
        rows_in=record.rows_in,
        scored=record.scored,
        quarantined=record.quarantined,
        published=published,
        published_quarantined=published_quarantined,
        shards=len(partition.shards),
        resumed_shards=resumed,
        reused=reused,
        stats=stats,
        report=record.report,
        review=review,
        left_behind=left_behind,
    )


def _published_all_the_same(day: str, number: str, error: Exception) -> InferenceError:
    stalled = isinstance(error, StalledError)
    return (StalledError if stalled else InferenceError)(
        f"the day is published (publication {number}), but {'its storage hangs' if stalled else 'cannot be read back'}",
        stage="check",
        item=day,
        got=str(error) if stalled else type(error).__name__,
        next_step="run the day again, which scores nothing; if files of the table are lost, run it with `force`",
    )


def review_outputs(table: PredictionTable, schema: PredictionSchema, day: str) -> OutputReview:
    """What was published for the day, read back and compared with the last day before it that has rows to compare."""
    widest = max(math.prod(spec.shape) for spec in schema.outputs)
    rows = max(_REVIEWED_ROWS, _REVIEWED_VALUES // widest)
    current, non_finite = _finite_outputs(table, schema, day, rows)
    earlier_days = sorted((other for other in table.days() if other < day), reverse=True)
    for earlier in earlier_days[:_REVIEWED_DAYS] if current else ():
        reference, _ = _finite_outputs(table, schema, earlier, rows)
        if shared := [name for name in current if name in reference]:
            return OutputReview(non_finite, earlier, {name: drift(reference[name], current[name]) for name in shared})
    return OutputReview(non_finite)


def _finite_outputs(
    table: PredictionTable, schema: PredictionSchema, day: str, rows: int
) -> tuple[dict[str, Any], Mapping[str, int]]:
    """A sample of the outputs that have finite rows; and how many rows of each are not."""
    sample, non_finite = table.sample_outputs(day, schema.outputs, rows)
    finite = {name: values[np.isfinite(values).all(axis=1)] for name, values in sample.items()}
    return {name: values for name, values in finite.items() if len(values)}, non_finite


def run_report(
    plan: ServingPlan,
    partition: DatasetPartition,
    scored: int,
    quarantined: int,
    resumed_shards: int,
    stats: RunStats | None,
    run_id: str,
    price_per_hour: float | None = None,
) -> dict[str, Any]:
    """What the run did, how close it came to its bounds and what it cost, as JSON types.

    Rates, latencies and cost are of the rows that this run scored, from the first shard's opening to the last write.
    """
    report: dict[str, Any] = {
        "run_id": run_id,
        "day": partition.day,
        "inputs": partition.digest,
        "model": plan.model,
        "model_version": plan.model_version,
        "engine": plan.engine,
        "model_digest": plan.model_digest,
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
            "padded_elements": stats.padded_elements,
            "padding": stats.padding,
            "latency_p50_ms": stats.latency_p50_ms,
            "latency_p90_ms": stats.latency_p90_ms,
            "latency_p99_ms": stats.latency_p99_ms,
            "peak_memory_mib": stats.peak_memory_mib,
            "cost_per_million_rows": None
            if price_per_hour is None
            else price_per_hour / 3600 * stats.wall_s / stats.rows * 1e6,
            "run": to_plain(stats),
        }
    return report


def score_days(
    days: Iterable[str],
    scorer: Scorer,
    source: Source,
    schema: PredictionSchema,
    table: PredictionTable,
    run_id: str,
    *,
    force: bool = False,
) -> Iterator[tuple[str, Predictions | InferenceError]]:
    """Score days one by one, each published as it finishes; a bad day does not cost the good ones.

    A failed device, an engine that does not fit it or a stage that hangs ends the range with that day: the next would
    meet the same device.
    """
    for day in days:
        outcome: Predictions | InferenceError
        try:
            partition = scorer.watch(day)("list", partial(source.partition, day))
            outcome = score_partition(scorer, partition, source, schema, table, run_id, force=force)
        except (DeviceError, EngineMismatchError, StalledError) as error:
            yield day, error
            return
        except InferenceError as error:
            outcome = error
        except Exception as error:  # whatever a library raised belongs to this day alone
            outcome = InferenceError("failed unexpectedly", stage="score", item=day, got=type(error).__name__)
            outcome.__cause__ = error
        if isinstance(outcome, InferenceError):
            _let_go(outcome)
        yield day, outcome


def _let_go(error: BaseException | None) -> None:
    """Clear what an error's frames hold, parts of the day among it: it is kept as long as the range takes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
