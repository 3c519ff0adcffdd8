"""Predictions: a Delta table, one partition a day, each day published by one transaction.

A day's publication is a number in the table's own state, not only in the log: each commit carries a transaction
action (`day/<day>` → number), which outlives log clean-up and compaction. Quarantine and run reports carry the number.

deltalake's own conflict checking lets two *first* publications of a partition both succeed (seen with 1.6.6).
So commits never retry by themselves: on a conflict the day's publication is compared with the one read at
the start. Changed means another run won; unchanged means another day was committed, and we try again.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpu_runtime.artifacts import file_digest
from gpu_runtime.errors import PublicationConflictError, SpecError
from gpu_runtime.predictions.quarantine import append_quarantine, on_day, quarantine_schema, read_quarantine
from gpu_runtime.predictions.receipts import Receipt, ReceiptStore
from gpu_runtime.specs import TensorSpec, digest_of

_ATTEMPTS = 20
_ROWS_PER_GROUP = 65_536


@dataclass(frozen=True)
class PredictionSchema:
    """The declared columns of a model's predictions.

    Each output tensor becomes a column of its name (a list for a row of shape `[k]`). `class_names` maps an
    index output to its names and adds a text column beside it.
    """

    outputs: tuple[TensorSpec, ...]
    class_names: Mapping[str, tuple[str, ...]]

    def fields(self) -> list[Any]:
        """Arrow fields of a shard's file, in order; the partition column `date` is not in the file."""
        import pyarrow as pa

        fields = [
            pa.field("row_key", pa.string()),
            pa.field("source_file", pa.string()),
            pa.field("source_position", pa.int64()),
        ]
        for spec in self.outputs:
            value = pa.from_numpy_dtype(spec.numpy_dtype)
            fields.append(pa.field(spec.name, value if not spec.shape else pa.list_(value)))
            if spec.name in self.class_names:
                fields.append(pa.field(label_column(spec.name), pa.list_(pa.string()) if spec.shape else pa.string()))
        return [*fields, pa.field("engine_digest", pa.string()), pa.field("run_id", pa.string())]

    def arrow(self) -> Any:
        import pyarrow as pa

        return pa.schema([pa.field("date", pa.date32()), *self.fields()])

    @property
    def digest(self) -> str:
        return digest_of([[f.name, str(f.type)] for f in self.fields()] + [self.class_names])


def label_column(output: str) -> str:
    """`top_index` → `top_label`."""
    return output.removesuffix("_index") + "_label"


class PredictionTable:
    """One model's tables: `<root>/predictions`, `<root>/quarantine`, `<root>/runs`, and its receipts."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.predictions = self.root / "predictions"
        self.quarantine = self.root / "quarantine"
        self.runs = self.root / "runs"
        self.receipts = ReceiptStore(self.root / "receipts", self.predictions)

    def current_publication(self, day: str) -> str | None:
        """The id of the day's publication in force; None for a day never published."""
        from deltalake import DeltaTable

        if not DeltaTable.is_deltatable(str(self.predictions)):
            return None
        return _publication(DeltaTable(self.predictions), day)

    def create(self, schema: PredictionSchema) -> None:
        """Make the tables where they do not exist. Safe for many writers at once, before any of them commits."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        wanted = {
            self.predictions: schema.arrow(),
            self.quarantine: quarantine_schema(),
            self.runs: _run_schema(),
        }
        for path, fields in wanted.items():
            for attempt in range(_ATTEMPTS):
                if DeltaTable.is_deltatable(str(path)):
                    break
                try:
                    DeltaTable.create(path, fields, mode="error", partition_by=["date"])
                except DeltaError:  # somebody else is creating it: look again
                    if attempt == _ATTEMPTS - 1:
                        raise

    def shard_writer(self, schema: PredictionSchema, day: str, shard: int, engine_digest: str, run_id: str) -> Any:
        return ShardWriter(self.predictions, schema, day, shard, engine_digest, run_id)

    def publish(
        self,
        schema: PredictionSchema,
        day: str,
        receipts: Sequence[Receipt],
        run_id: str,
        report: Mapping[str, Any],
        previous: str | None,
    ) -> str:
        """Replace the day by the receipts' files, in one transaction; returns the publication id.

        `previous` is `current_publication(day)` as read before the first shard. Quarantined rows and the run
        report are written first, under the new id; nobody counts them unless the day's commit names it.
        Raises `PublicationConflictError` when another run published the day meanwhile. Columns that the table
        lacks are added to it; one that it holds with another type raises `SpecError`.
        """
        from deltalake import CommitProperties, DeltaTable
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction, RemoveAction, Transaction

        self.create(schema)
        table = DeltaTable(self.predictions)
        active = _files(table, day)
        files = [(receipt.file, receipt.rows) for receipt in receipts if receipt.rows]
        rows = [row for receipt in receipts for row in receipt.quarantined]
        if previous is not None and previous == _publication(table, day) and active == {file for file, _ in files}:
            held = self.read_quarantine(day)
            if sorted(zip(held["row_key"], held["reason"], strict=True)) == sorted((r.row_key, r.reason) for r in rows):
                return previous  # the very files and the very quarantine that are published: nothing to replace
        # One commit may not both add and remove a path, so a file that is active already comes in under a new name.
        renewed = {file: self._renewed(file) for file, _ in files if file in active}
        files = [(renewed.get(file, file), count) for file, count in files]
        publication = str(new_publication())
        if rows:
            append_quarantine(self.quarantine, day, publication, run_id, rows)
        self._append_run(day, publication, run_id, report)
        files = files or [(self._write_empty(schema, day), 0)]
        actions: list[AddAction | RemoveAction] = [
            AddAction(
                file,
                (self.predictions / file).stat().st_size,
                {"date": day},
                int(time.time() * 1000),
                True,
                json.dumps({"numRecords": count}),
            )
            for file, count in files
        ]
        for _ in range(_ATTEMPTS):
            if (found := _publication(table, day)) != previous:
                raise PublicationConflictError(
                    "another run published the day meanwhile",
                    stage="publish",
                    item=day,
                    expected=f"publication {previous}",
                    got=str(found),
                    next_step="look at the day; run it again if the other run was the wrong one",
                )
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
                            "run_id": run_id,
                            "rows": str(sum(count for _, count in files)),
                            "quarantined": str(len(rows)),
                        },
                        app_transactions=[Transaction(app_id=_app_id(day), version=int(publication))],
                        max_commit_retries=0,
                    ),
                )
            except CommitFailedError:
                table = DeltaTable(self.predictions)
            else:
                for receipt in receipts:
                    if receipt.file in renewed:  # the old name may be cleaned away from now on
                        self.receipts.write(replace(receipt, file=renewed[receipt.file]))
                return publication
        raise PublicationConflictError(
            f"other days were committed {_ATTEMPTS} times while this one tried",
            stage="publish",
            item=day,
            next_step="run the day again; its shards are kept",
        )

    def read_day(self, day: str) -> Any:
        """The day's predictions as a pandas frame."""
        from deltalake import DeltaTable

        return DeltaTable(self.predictions).to_pandas(filters=[on_day(day)])

    def count_day(self, day: str) -> tuple[int, int]:
        """Rows in the day's published files, and rows its publication has in quarantine: counted, not recalled."""
        import pyarrow.parquet as pq
        from deltalake import DeltaTable

        uris = DeltaTable(self.predictions).file_uris(file_pruning_predicate=[("date", "=", day)])
        return sum(pq.read_metadata(uri).num_rows for uri in uris), len(self.read_quarantine(day))

    def read_quarantine(self, day: str) -> Any:
        """The rows quarantined by the day's publication in force, as a pandas frame."""
        return read_quarantine(self.quarantine, day, self.current_publication(day) or "")

    def read_run(self, day: str) -> Mapping[str, Any] | None:
        """The run report of the day's publication in force."""
        from deltalake import DeltaTable

        publication = self.current_publication(day)
        if publication is None:
            return None
        found = DeltaTable(self.runs).to_pandas(filters=[on_day(day), ("publication", "=", publication)])
        report: Mapping[str, Any] = json.loads(found["report"].iloc[0])
        return report

    def _append_run(self, day: str, publication: str, run_id: str, report: Mapping[str, Any]) -> None:
        import pyarrow as pa
        from deltalake import write_deltalake

        row = [[datetime.date.fromisoformat(day)], [publication], [run_id], [json.dumps(report)]]
        write_deltalake(self.runs, pa.table(row, schema=_run_schema()), mode="append", partition_by=["date"])

    def _write_empty(self, schema: PredictionSchema, day: str) -> str:
        """A typed file without rows: a day without rows is a partition all the same."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        name = f"date={day}/empty-{uuid.uuid4().hex}.parquet"
        path = self.predictions / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.schema(schema.fields()).empty_table(), path)
        return name

    def _renewed(self, file: str) -> str:
        """The same bytes under another name, in the same folder."""
        renewed = f"{file.rpartition('-')[0]}-{uuid.uuid4().hex}.parquet"
        os.link(self.predictions / file, self.predictions / renewed)
        return renewed


def _run_schema() -> Any:
    import pyarrow as pa

    text = ("publication", "run_id", "report")
    return pa.schema([pa.field("date", pa.date32()), *(pa.field(name, pa.string()) for name in text)])


def new_publication() -> int:
    """A publication's number: later ones are larger, and no two writers draw the same one."""
    return (time.time_ns() >> 16 << 16) | secrets.randbits(16)


def _app_id(day: str) -> str:
    return f"day/{day}"


def _publication(table: Any, day: str) -> str | None:
    version = table.transaction_version(_app_id(day))
    return None if version is None else str(version)


def _files(table: Any, day: str) -> set[str]:
    """The day's data files as the table holds them now, relative to it; an empty day's file does not count."""
    uris = table.file_uris(file_pruning_predicate=[("date", "=", day)])
    return {f"date={day}/{Path(uri).name}" for uri in uris if not Path(uri).name.startswith("empty-")}


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


class ShardWriter:
    """Collects one shard's scored rows and writes them as one Parquet file, then its receipt's facts.

    The file's name carries an attempt id, so a dead run's file is never mistaken for this one's.
    """

    def __init__(
        self, table: Path, schema: PredictionSchema, day: str, shard: int, engine_digest: str, run_id: str
    ) -> None:
        self._table, self._schema = table, schema
        self._engine_digest, self._run_id = engine_digest, run_id
        self.file = f"date={day}/part-{shard:06}-{uuid.uuid4().hex}.parquet"
        self.rows = 0
        self._writer: Any = None
        self._pending: list[Any] = []
        self._pending_rows = 0

    def append(
        self, keys: Sequence[str], files: Sequence[str], positions: Sequence[int], outputs: Mapping[str, Any]
    ) -> None:
        """Add rows; `outputs` (`[n, *shape]`) are copied."""
        import pyarrow as pa

        count = len(keys)
        arrays: list[Any] = [
            pa.array(keys, pa.string()),
            pa.array(files, pa.string()),
            pa.array(positions, pa.int64()),
        ]
        for spec in self._schema.outputs:
            values = np.array(outputs[spec.name], spec.numpy_dtype, copy=True)
            arrays.append(_column(values, pa.array(values.ravel())))
            names = self._schema.class_names.get(spec.name)
            if names is not None:
                _check_names(spec, values, names)
                arrays.append(_column(values, pa.array(np.asarray(names, object)[values.ravel()], pa.string())))
        arrays += [pa.array([self._engine_digest] * count), pa.array([self._run_id] * count)]
        self._pending.append(pa.RecordBatch.from_arrays(arrays, schema=pa.schema(self._schema.fields())))
        self._pending_rows += count
        self.rows += count
        if self._pending_rows >= _ROWS_PER_GROUP:
            self._flush()

    def abandon(self) -> None:
        """Close and remove a file that will not be finished."""
        if self._writer is not None:
            self._writer.close()
        (self._table / self.file).unlink(missing_ok=True)

    def finish(self) -> tuple[int, str]:
        """Complete the file on disk; returns its size and SHA-256."""
        self._flush()
        self._writer.close()
        path = self._table / self.file
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return path.stat().st_size, file_digest(path)

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema(self._schema.fields())
        if self._writer is None:
            path = self._table / self.file
            path.parent.mkdir(parents=True, exist_ok=True)
            # Scores hardly ever repeat: a dictionary would only cost time. Keys of a run always do.
            self._writer = pq.ParquetWriter(path, schema, use_dictionary=["source_file", "engine_digest", "run_id"])
        if self._pending:
            self._writer.write_table(pa.Table.from_batches(self._pending, schema))
        self._pending, self._pending_rows = [], 0


def _check_names(spec: TensorSpec, values: Any, names: Sequence[str]) -> None:
    if values.size and not 0 <= values.min() <= values.max() < len(names):
        raise SpecError(
            "an output is no position in its class names",
            stage="publish",
            item=spec.name,
            expected=f"0 … {len(names) - 1}",
            got=f"{values.min()} … {values.max()}",
            next_step="give `class_names` a file with one line for each class",
        )


def _column(values: Any, flat: Any) -> Any:
    """`flat` as it is for scalar rows, as lists of k for rows `[k]`."""
    import pyarrow as pa

    if values.ndim == 1:
        return flat
    count, width = values.shape[0], int(np.prod(values.shape[1:]))
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * width), flat)
