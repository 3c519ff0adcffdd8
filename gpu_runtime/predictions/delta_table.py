"""Predictions: a Delta table, one partition a day, each day published by one transaction.

A day's publication is a number in the table's own state, not only in the log: each commit carries a transaction
action (`day/<day>` → number), which outlives log clean-up and compaction. Quarantine and run reports carry the number.

deltalake's own conflict checking lets two *first* publications of a partition both succeed (seen with 1.6.6).
So commits never retry by themselves: on a conflict the day's publication is compared with the one read at
the start. Changed means another run won; unchanged means another day was committed, and we try again.

Each attempt that ever publishes, or is taken for dead, has a transaction entry of its own (`attempt/<id>` → the
publication's number, or 0), made by the same commit. So an attempt has either published or can never publish, and
whoever cleans up knows which. All files of a publication carry its attempt's id: what a dead attempt that never
published left behind was never part of any version of the table.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpu_runtime.errors import PublicationConflictError, SpecError
from gpu_runtime.faults import FaultPlan, around, no_faults
from gpu_runtime.predictions.attempts import Attempt, AttemptTicket, DeadAttempt, check_alive, taken_for_dead
from gpu_runtime.predictions.quarantine import append_quarantine, on_day, quarantine_schema, read_quarantine
from gpu_runtime.predictions.receipts import Receipt, ReceiptStore
from gpu_runtime.predictions.shard_file import PredictionSchema, Provenance, ShardWriter, shard_file
from gpu_runtime.predictions.storage import COMMIT_TRIES, Folder, append_rows, delete_rows, open_table
from gpu_runtime.specs import TensorSpec

_NO_DAY = "0001-01-01"
_TAKEN_FOR_DEAD = 0
_COPIES_AT_ONCE = 8


@dataclass(frozen=True)
class DayRecord:
    """What is written beside a day's publication: made by whom, of what, and how many rows.

    `day_key` is the resume key of the whole day: a run that comes to the same key has nothing to score.
    """

    day_key: str
    provenance: Provenance
    rows_in: int
    scored: int
    quarantined: int
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Publication:
    """A day's publication in force."""

    number: str
    record: DayRecord


class PredictionTable:
    """One model's tables, `predictions`, `quarantine` and `runs`, with its receipts and attempts beside them.

    `root` is a local folder or an object store's URI with its `options` (see `storage.Folder`). `lease_s`: a run
    that gave no sign of life for so long is dead, and its leftovers are removed.
    """

    def __init__(
        self,
        root: str | Path,
        options: Mapping[str, str] | None = None,
        *,
        lease_s: float = 600.0,
        faults: FaultPlan = no_faults,
    ) -> None:
        self.root = Folder(root, options)
        self.predictions = self.root.folder("predictions")
        self.quarantine = self.root.folder("quarantine")
        self.runs = self.root.folder("runs")
        self.receipts = ReceiptStore(self.root.folder("receipts"), self.predictions)
        self._attempts = self.root.folder("attempts")
        self._lease_s, self._faults = lease_s, faults

    def attempt(self, day: str, run_id: str) -> Attempt:
        """This run's work on the day, from its first look at it until it is published."""
        return Attempt(self._attempts, day, run_id, self._lease_s)

    def current_publication(self, day: str) -> str | None:
        """The number of the day's publication in force; None for a day never published."""
        table = open_table(self.predictions)
        return None if table is None else _publication(table, day)

    def published(self, day: str) -> Publication | None:
        """The day's publication in force with its record; None for a day never published."""
        number = self.current_publication(day)
        if number is None:
            return None
        runs = open_table(self.runs)
        found = None if runs is None else runs.to_pandas(filters=[on_day(day), ("publication", "=", number)])
        if found is None or found.empty or "day_key" not in found:
            # Somebody emptied the table of runs, or it is of an older kind. Nothing is known of the day: it is scored
            # again.
            return Publication(number, DayRecord("", Provenance("", "", ""), 0, 0, 0, {}))
        row = found.iloc[0]
        provenance = Provenance(row["model_digest"], row["engine_digest"], row["run_id"])
        counts = (int(row["rows_in"]), int(row["scored"]), int(row["quarantined"]))
        return Publication(number, DayRecord(row["day_key"], provenance, *counts, json.loads(row["report"])))

    def days(self) -> Sequence[str]:
        """Every published day, in order."""
        table = open_table(self.predictions)
        return [] if table is None else sorted({str(one["date"]) for one in table.partitions() if one["date"]})

    def create(self, schema: PredictionSchema) -> None:
        """Make the tables where they do not exist. Safe for many writers at once, before any of them commits."""
        from deltalake import CommitProperties, DeltaTable
        from deltalake.exceptions import DeltaError

        wanted = {
            self.predictions: schema.arrow(),
            self.quarantine: quarantine_schema(),
            self.runs: _run_schema(),
        }
        for folder, fields in wanted.items():
            if open_table(folder) is not None:
                continue
            try:
                DeltaTable.create(
                    folder.uri,
                    fields,
                    mode="error",
                    partition_by=["date"],
                    # Whoever opens the table reads its log back to the last checkpoint, file by file.
                    configuration={"delta.checkpointInterval": "10"},
                    storage_options=folder.options,
                    # A creation that retries puts its columns on top of a table that others already write to.
                    commit_properties=CommitProperties(max_commit_retries=0),
                )
            except DeltaError:
                if open_table(folder) is None:  # else somebody else created it
                    raise

    def shard_writer(
        self, schema: PredictionSchema, shard: int, attempt: AttemptTicket, provenance: Provenance
    ) -> ShardWriter:
        """For one shard's rows. Raises `PublicationConflictError` when the attempt was taken for dead."""
        check_alive(attempt, self._attempts)
        return ShardWriter(self.predictions, schema, attempt.day, shard, attempt.id, provenance)

    def resume(self, attempt: AttemptTicket, shard: int, key: str) -> Receipt | None:
        """The receipt of that resume key, its file made this attempt's own: whoever cleans up after the run that
        wrote it takes nothing away from this one."""
        found = self.receipts.find(attempt.day, shard, key)
        try:
            return found and self._adopt(attempt, found)
        except PublicationConflictError:
            return None  # it went just now

    def publish(
        self,
        schema: PredictionSchema,
        attempt: Attempt,
        receipts: Sequence[Receipt],
        record: DayRecord,
        previous: str | None,
    ) -> str:
        """Replace the day by the receipts' files, in one transaction; returns the publication's number.

        `previous` is `current_publication(day)` as read before the first shard. Quarantined rows and the day's
        record are written first, under the new number; nobody counts them unless the day's commit names it.
        Raises `PublicationConflictError` when another run published the day meanwhile, or took this one for dead.
        Columns that the table lacks are added to it; one that it holds with another type raises `SpecError`.
        """
        self.create(schema)
        day, publication = attempt.day, str(new_publication())
        attempt.note_publication(publication)
        table = open_table(self.predictions)
        with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
            receipts = list(pool.map(partial(self._adopt, attempt.ticket), receipts))
        files = [(one.file, one.nbytes, one.rows) for one in receipts]
        rows = [row for receipt in receipts for row in receipt.quarantined]
        try:
            with around(self._faults, "quarantine"):
                if rows:
                    append_quarantine(self.quarantine, day, publication, record.provenance.run_id, rows)
                self._append_record(day, publication, record)
            files = files or [self._write_empty(schema, attempt)]
            with around(self._faults, "commit"):
                self._commit(table, schema, attempt, files, publication, record, previous)
        except PublicationConflictError:
            with contextlib.suppress(Exception):  # the conflict is what has to be told
                self._delete_rows([(day, publication)])  # whoever took this attempt for dead may have looked before
            raise
        return publication

    def _adopt(self, attempt: AttemptTicket, receipt: Receipt) -> Receipt:
        """An earlier attempt's file under a name of this one's, and a receipt that says so. One commit may not both
        add and remove a path; and the old file may be cleaned away or vacuumed at any time."""
        own = shard_file(receipt.day, receipt.shard, attempt.id)
        if receipt.file == own:
            return receipt
        try:
            self.predictions.copy(receipt.file, own)
        except FileNotFoundError:
            raise PublicationConflictError(
                "another run removed the file of a shard that was finished before",
                stage="publish",
                item=receipt.file,
                next_step="run the day again; only such shards are scored anew",
            ) from None
        adopted = replace(receipt, file=own)
        self.receipts.write(adopted)
        return adopted

    def _commit(
        self,
        table: Any,
        schema: PredictionSchema,
        attempt: Attempt,
        files: Sequence[tuple[str, int, int]],
        publication: str,
        record: DayRecord,
        previous: str | None,
    ) -> None:
        from deltalake import CommitProperties
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction, RemoveAction, Transaction

        day, now_ms = attempt.day, int(time.time() * 1000)
        actions: list[AddAction | RemoveAction] = [
            AddAction(file, nbytes, {"date": day}, now_ms, True, json.dumps({"numRecords": rows}))
            for file, nbytes, rows in files
        ]
        for _ in range(COMMIT_TRIES):
            entered = table.transaction_version(_attempt_app(attempt.id))
            if entered == int(publication):
                return  # the commit before was stored, though it seemed to fail
            if entered is not None:
                raise taken_for_dead(attempt.ticket)
            if (found := _publication(table, day)) != previous:
                raise PublicationConflictError(
                    "another run published the day meanwhile",
                    stage="publish",
                    item=day,
                    expected=f"publication {previous}",
                    got=str(found),
                    next_step="look at the day; run it again if the other run was the wrong one",
                )
            attempt.check_wanted()
            try:
                table.create_write_transaction(
                    actions,
                    mode="overwrite",
                    schema=_widened(table, schema, day),
                    partition_by=["date"],
                    partition_filters=[("date", "=", day)],
                    commit_properties=CommitProperties(
                        custom_metadata={
                            "publication": publication,
                            "run_id": record.provenance.run_id,
                            "rows": str(record.scored),
                            "quarantined": str(record.quarantined),
                        },
                        app_transactions=[
                            Transaction(app_id=_day_app(day), version=int(publication)),
                            Transaction(app_id=_attempt_app(attempt.id), version=int(publication)),
                        ],
                        max_commit_retries=0,
                    ),
                )
            except Exception as error:
                table = open_table(self.predictions)
                stored = table.transaction_version(_attempt_app(attempt.id)) is not None
                if not stored and not isinstance(error, CommitFailedError):
                    raise
            else:
                return
        raise PublicationConflictError(
            f"other days were committed {COMMIT_TRIES} times while this one tried",
            stage="publish",
            item=day,
            next_step="run the day again; its shards are kept",
        )

    def clean_up(self, attempt: Attempt) -> Sequence[str]:
        """Remove what dead runs left behind, at any day; returns the names of the files removed.

        That is files which no version of the table has named, and quarantined rows and records of publications
        that were never committed. Superseded files stay for readers of older versions, until `vacuum`; files of runs
        that live are never touched, and neither are those of finished shards until their own day is published. If it
        fails, the day is published all the same, and its next run makes up for it.
        """
        removed: list[str] = []
        with around(self._faults, "clean-up"):
            dead = attempt.dead_ones()
            if not dead:
                return removed
            table = self._enter_as_dead(dead)
            published = {one.id: table.transaction_version(_attempt_app(one.id)) for one in dead}
            finished = {day: self.receipts.files(day) for day in {one.day for one in dead} - {attempt.day}}
            for one in dead:
                if published[one.id] == _TAKEN_FOR_DEAD:
                    removed += self.predictions.sweep(f"date={one.day}", one.id, finished.get(one.day, ()))
            lost = [(one.day, n) for one in dead for n in one.publications if int(n) != published[one.id]]
            self._delete_rows(lost)
            for one in dead:
                left = any(one.id in file for file in finished.get(one.day, ()))
                if left and published[one.id] == _TAKEN_FOR_DEAD:
                    attempt.keep_in_mind(one)
                else:
                    attempt.forget(one)
        return removed

    def _delete_rows(self, publications: Sequence[tuple[str, str]]) -> None:
        """Remove what was written under these days' publications, beside the predictions."""
        if publications:
            days, numbers = (
                ", ".join(f"'{value}'" for value in sorted(set(both))) for both in zip(*publications, strict=True)
            )
            for rows in (self.quarantine, self.runs):
                delete_rows(rows, f"date IN ({days}) AND publication IN ({numbers})")

    def _enter_as_dead(self, dead: Sequence[DeadAttempt]) -> Any:
        """The table as it is once each of the attempts has an entry. From then on none of them can publish: one that
        only slept finds the entry, for no commit is made on a version older than it."""
        from deltalake import CommitProperties
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import Transaction

        for _ in range(COMMIT_TRIES):
            table = open_table(self.predictions)
            apps = [
                app for app in map(_attempt_app, (one.id for one in dead)) if table.transaction_version(app) is None
            ]
            if not apps:
                return table
            with contextlib.suppress(CommitFailedError):
                table.create_write_transaction(
                    [],
                    mode="append",
                    schema=table.schema(),
                    partition_by=["date"],
                    commit_properties=CommitProperties(
                        app_transactions=[Transaction(app_id=app, version=_TAKEN_FOR_DEAD) for app in apps],
                        max_commit_retries=0,
                    ),
                )
        raise PublicationConflictError(
            f"others committed {COMMIT_TRIES} times meanwhile",
            stage="clean-up",
            next_step="nothing: the next run cleans up",
        )

    def vacuum(self, retention_hours: int = 168) -> Sequence[str]:
        """Remove files that the tables have not used for so long, superseded days among them; returns their names,
        relative to the root.

        Readers of versions older than that end with an error. A run must not last longer than that. Dead runs'
        leftovers go, too, and receipts whose file is gone.
        """
        removed: list[str] = []
        with self.attempt(_NO_DAY, "vacuum") as attempt:
            if open_table(self.predictions) is not None:
                removed += [f"predictions/{name}" for name in self.clean_up(attempt)]
        for folder in (self.predictions, self.quarantine, self.runs):
            table = open_table(folder)
            if table is not None:
                gone = table.vacuum(retention_hours, dry_run=False, enforce_retention_duration=False, full=True)
                removed += [f"{folder.uri.removeprefix(self.root.uri + '/')}/{name}" for name in gone]
        removed += [f"receipts/{name}" for name in self.receipts.remove_void()]
        return removed + list(self.root.sweep_unfinished(retention_hours * 3600))

    def read_day(self, day: str) -> Any:
        """The day's predictions as a pandas frame."""
        return open_table(self.predictions).to_pandas(filters=[on_day(day)])

    def sample_outputs(
        self, day: str, outputs: Sequence[TensorSpec], rows: int
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """About `rows` of the day's published rows, evenly spread: output → `[n, *shape]`; and, for each float
        output, how many of all rows hold a value that is not finite. Reads batch by batch."""
        names = [spec.name for spec in outputs]
        dataset = open_table(self.predictions).to_pyarrow_dataset(file_pruning_predicate=[("date", "=", day)])
        kept: dict[str, list[Any]] = {name: [] for name in names}
        non_finite = {spec.name: 0 for spec in outputs if spec.numpy_dtype.kind == "f"}
        step, seen = max(1, dataset.count_rows() // max(1, rows)), 0
        for batch in dataset.to_batches(columns=names):
            for spec in outputs:
                column = batch.column(spec.name)
                wide = math.prod(spec.shape)
                if column.null_count or (spec.shape and len(column.flatten()) != wide * batch.num_rows):
                    continue  # the day was published before the model had this output, or had it so
                flat = (column.flatten() if spec.shape else column).to_numpy(zero_copy_only=False)
                values = flat.reshape(batch.num_rows, math.prod(spec.shape))
                if spec.name in non_finite:
                    non_finite[spec.name] += int((~np.isfinite(values).all(axis=1)).sum())
                kept[spec.name].append(values[-seen % step :: step])
            seen += batch.num_rows
        return {name: np.concatenate(parts) if parts else np.empty((0, 1)) for name, parts in kept.items()}, non_finite

    def holds(self, day: str, record: DayRecord) -> bool:
        """Whether the table still has what the record says: as many rows, all by that engine. A table that somebody
        restored or deleted from keeps the day's number, and loses its rows."""
        import pyarrow as pa
        import pyarrow.compute as pc

        found = open_table(self.predictions).to_pyarrow_dataset(file_pruning_predicate=[("date", "=", day)])
        try:
            engines = found.to_table(columns=["engine_digest"]).column("engine_digest")
        except (OSError, pa.ArrowException):  # a file of it is lost, or cannot be read any more
            return False
        same = set(pc.unique(engines).to_pylist()) <= {record.provenance.engine_digest}
        return same and len(engines) == record.scored and len(self.read_quarantine(day)) == record.quarantined

    def count_day(self, day: str) -> tuple[int, int]:
        """Rows in the day's published files, and rows its publication has in quarantine: counted, not recalled."""
        table = open_table(self.predictions)  # one version for both: another run may replace the day at any time
        files = table.to_pyarrow_dataset(file_pruning_predicate=[("date", "=", day)])
        return files.count_rows(), len(read_quarantine(self.quarantine, day, _publication(table, day) or ""))

    def read_quarantine(self, day: str) -> Any:
        """The rows quarantined by the day's publication in force, as a pandas frame."""
        return read_quarantine(self.quarantine, day, self.current_publication(day) or "")

    def read_run(self, day: str) -> Mapping[str, Any] | None:
        """The run report of the day's publication in force."""
        published = self.published(day)
        return None if published is None else published.record.report

    def _append_record(self, day: str, publication: str, record: DayRecord) -> None:
        import pyarrow as pa

        row = {
            "date": datetime.date.fromisoformat(day),
            "publication": publication,
            "day_key": record.day_key,
            **vars(record.provenance),
            "rows_in": record.rows_in,
            "scored": record.scored,
            "quarantined": record.quarantined,
            "report": json.dumps(record.report),
        }
        rows = pa.Table.from_pylist([row], schema=_run_schema())
        append_rows(self.runs, rows, [on_day(day), ("publication", "=", publication)])

    def _write_empty(self, schema: PredictionSchema, attempt: Attempt) -> tuple[str, int, int]:
        """A typed file without rows: a day without rows is a partition all the same."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        name = f"date={attempt.day}/empty-{attempt.id}.parquet"
        file = self.predictions.writer(name)
        pq.write_table(pa.schema(schema.fields()).empty_table(), file)
        return name, file.commit()[0], 0


def _run_schema() -> Any:
    import pyarrow as pa

    text = ("publication", "day_key", "model_digest", "engine_digest", "run_id")
    return pa.schema(
        [
            pa.field("date", pa.date32()),
            *(pa.field(name, pa.string()) for name in text),
            *(pa.field(name, pa.int64()) for name in ("rows_in", "scored", "quarantined")),
            pa.field("report", pa.string()),
        ]
    )


def new_publication() -> int:
    """A publication's number: later ones are larger, and no two writers draw the same one."""
    return (time.time_ns() >> 16 << 16) | secrets.randbits(16)


def _day_app(day: str) -> str:
    return f"day/{day}"


def _attempt_app(attempt: str) -> str:
    return f"attempt/{attempt}"


def _publication(table: Any, day: str) -> str | None:
    version = table.transaction_version(_day_app(day))
    return None if version is None else str(version)


def _widened(table: Any, schema: PredictionSchema, day: str) -> Any:
    """The table's columns and behind them the declared ones that it lacks; others would be lost in silence."""
    from deltalake import Schema

    held = {field.name: field.type for field in table.schema().fields}
    declared = Schema.from_arrow(schema.arrow()).fields
    changed = [field for field in declared if held.get(field.name, field.type) != field.type]
    if changed:
        raise SpecError(
            "the table holds a column of this name with another type",
            stage="publish",
            item=f"{day}, {changed[0].name!r}",
            expected=str(held[changed[0].name]),
            got=str(changed[0].type),
            next_step="give the output another name, or move the old table away; the day's shards are kept",
        )
    added = [field for field in declared if field.name not in held]
    return Schema([*table.schema().fields, *added]) if added else table.schema()
