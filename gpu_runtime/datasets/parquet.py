"""Columns of Parquet files as model inputs: `<root>/<day>/*.parquet`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.datasets.partition import (
    DatasetPartition,
    FileFingerprint,
    Piece,
    RowFailure,
    RowOrigin,
    ShardTask,
    day_folder,
    reading_of,
)
from gpu_runtime.errors import DatasetError, SpecError
from gpu_runtime.specs import TensorSpec


@dataclass(frozen=True)
class ParquetSource:
    """How columns become inputs.

    `columns` maps each input to its columns: one for a scalar row, k for a row of shape `[k]`.
    `vocabularies` maps a text column to its known values; the id is the position.
    A null, a value that is not finite, an unknown category and a value outside the input's declared range
    each quarantine their row. `rows_per_shard` bounds what one shard holds in memory.
    """

    root: str
    inputs: tuple[TensorSpec, ...]
    columns: Mapping[str, tuple[str, ...]]
    vocabularies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    row_key: str | None = None
    label: str | None = None
    rows_per_shard: int = 1_000_000

    def __post_init__(self) -> None:
        for spec in self.inputs:
            columns = self.columns.get(spec.name, ())
            width = 1 if spec.shape == () else spec.shape[0] if len(spec.shape) == 1 else -1
            if len(columns) != width:
                raise SpecError(
                    "its columns do not fill its shape",
                    stage="dataset",
                    item=spec.name,
                    expected=f"{width} columns for a row of shape {spec.shape}",
                    got=f"{len(columns)} columns",
                )

    def partition(self, day: str) -> DatasetPartition:
        import pyarrow.parquet as pq

        folder = day_folder(Path(self.root), day)
        shards: list[ShardTask] = []
        reading = reading_of(self)
        for path in sorted(p for p in folder.rglob("*.parquet") if not p.name.startswith((".", "_"))):
            fingerprint = FileFingerprint.of(path, folder)
            try:
                metadata = pq.read_metadata(path)
            except Exception as error:
                raise DatasetError(
                    f"not a readable Parquet file: {error}",
                    stage="dataset",
                    item=f"{day}/{fingerprint.path}",
                    next_step="land the file again",
                ) from error
            for groups in _row_group_ranges(metadata, self.rows_per_shard):
                shards.append(ShardTask(day, len(shards), str(folder), (fingerprint,), groups, reading))
        return DatasetPartition(day, tuple(shards))

    def open(self, shard: ShardTask) -> ParquetReader:
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = shard.files[0].path
        path = Path(shard.folder) / file
        try:
            with pq.ParquetFile(path) as parquet:
                self._check_columns(parquet.schema_arrow, f"{shard.day}/{file}")
                assert shard.row_groups is not None
                first, last = shard.row_groups
                offset = sum(parquet.metadata.row_group(g).num_rows for g in range(first))
                table = parquet.read_row_groups(list(range(first, last)), columns=self._needed())
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(
                "the file's columns cannot be read",
                stage="dataset",
                item=f"{shard.day}/{file}",
                expected="a whole Parquet file",
                got=type(error).__name__,
                next_step="land the file again",
            ) from error
        return ParquetReader(self, table.combine_chunks(), shard, offset)

    def _needed(self) -> list[str]:
        """Every column that scoring reads, once. The label is none of them: it mostly comes later than the day."""
        needed = [c for columns in self.columns.values() for c in columns]
        return list(dict.fromkeys([*needed, *([self.row_key] if self.row_key else [])]))

    def _check_columns(self, schema: Any, item: str) -> None:
        for column in self._needed():
            if column not in schema.names:
                raise DatasetError(
                    f"column {column!r} is missing",
                    stage="dataset",
                    item=item,
                    expected=", ".join(self._needed()),
                    got=", ".join(sorted(schema.names)),
                    next_step="land the file with its declared columns, or change `columns` in defs.yaml",
                )
            self._check_type(column, schema.field(column).type, item)

    def _check_type(self, column: str, found: Any, item: str) -> None:
        import pyarrow.types as types

        if column == self.row_key:
            return
        value = found.value_type if types.is_dictionary(found) else found
        if column in self.vocabularies:
            fits, expected = types.is_string(value) or types.is_large_string(value), "text"
        else:
            fits = types.is_integer(value) or types.is_floating(value) or types.is_boolean(value)
            expected = "a number"
        # A column without a single value may come as the null type: its rows are quarantined, one by one.
        if not (fits or types.is_null(value)):
            raise DatasetError(
                f"column {column!r} has another type",
                stage="dataset",
                item=item,
                expected=expected,
                got=str(found),
                next_step="land the file with its declared types",
            )


def _row_group_ranges(metadata: Any, rows_per_shard: int) -> list[tuple[int, int]]:
    ranges, first, rows = [], 0, 0
    for group in range(metadata.num_row_groups):
        rows += metadata.row_group(group).num_rows
        if rows >= rows_per_shard or group == metadata.num_row_groups - 1:
            ranges.append((first, group + 1))
            first, rows = group + 1, 0
    return ranges


class ParquetReader:
    """A shard's columns as numpy arrays; converted and checked once, when the shard is opened."""

    def __init__(self, source: ParquetSource, table: Any, shard: ShardTask, offset: int) -> None:
        self._source, self._shard, self._offset = source, shard, offset
        self._file = shard.files[0].path
        self._keys = table.column(source.row_key) if source.row_key else None
        self._table = table
        self._columns = {c: table.column(c) for columns in source.columns.values() for c in columns}

    @property
    def rows(self) -> int:
        return int(self._table.num_rows)

    def origin(self, row: int) -> RowOrigin:
        position = self._offset + row
        key = None if self._keys is None else self._keys[row].as_py()
        return RowOrigin(f"{self._file}#{position}" if key is None else str(key), self._file, position)

    def origins(self, start: int, stop: int) -> tuple[list[str], list[str], list[int]]:
        positions = list(range(self._offset + start, self._offset + stop))
        found = [None] * len(positions) if self._keys is None else self._keys.slice(start, stop - start).to_pylist()
        keys = [f"{self._file}#{p}" if key is None else str(key) for key, p in zip(found, positions, strict=True)]
        return keys, [self._file] * len(keys), positions

    def labels(self) -> npt.NDArray[Any] | None:
        label = self._source.label
        if label is None:
            return None
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetFile(Path(self._shard.folder) / self._file) as parquet:
            if label not in parquet.schema_arrow.names:
                raise DatasetError(
                    f"the label column {label!r} is missing",
                    stage="dataset",
                    item=f"{self._shard.day}/{self._file}",
                    expected=label,
                    got=", ".join(sorted(parquet.schema_arrow.names)),
                    next_step="name days for the gate whose labels have arrived",
                )
            self._source._check_type(label, parquet.schema_arrow.field(label).type, f"{self._shard.day}/{self._file}")
            assert self._shard.row_groups is not None
            column = parquet.read_row_groups(list(range(*self._shard.row_groups)), columns=[label]).column(label)
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    def pieces(self, start: int, stop: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[Piece]:
        return [lambda: self._fill(start, stop, staging)] if stop > start else []

    def _fill(self, start: int, stop: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[RowFailure]:
        reasons: dict[int, str] = {}
        for spec in self._source.inputs:
            target = staging[spec.name].reshape(stop - start, -1)
            for place, column in enumerate(self._source.columns[spec.name]):
                values, bad, reason = self._values(column, start, stop)
                for row in np.flatnonzero(bad):
                    reasons.setdefault(int(row), reason(int(row)))
                outside = np.zeros(stop - start, bool)
                if spec.minimum is not None:
                    outside |= values < spec.minimum
                if spec.maximum is not None:
                    outside |= values > spec.maximum
                if spec.numpy_dtype.kind in "iu":
                    limits = np.iinfo(spec.numpy_dtype)
                    outside |= (values < limits.min) | (values != np.floor(values))
                    # As a float, int64's maximum rounds up to a number that it cannot hold.
                    outside |= values > limits.max if values.dtype.kind in "iu" else values >= float(limits.max) + 1
                outside &= ~bad
                for row in np.flatnonzero(outside):
                    reasons.setdefault(int(row), f"column {column!r} is outside its declared range or type")
                with np.errstate(over="ignore"):
                    target[:, place] = np.where(bad | outside, 0, values).astype(spec.numpy_dtype)
                if spec.numpy_dtype.kind == "f":
                    for row in np.flatnonzero(~np.isfinite(target[:, place])):
                        reasons.setdefault(int(row), f"column {column!r} does not fit {spec.dtype}")
        return [RowFailure(row, "input", reason, "ValueError") for row, reason in sorted(reasons.items())]

    def _values(self, column: str, start: int, stop: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_], Any]:
        """The column's rows as numbers, which of them are bad, and a function that says why a row is."""
        import pyarrow as pa
        import pyarrow.compute as pc

        chunk = self._columns[column].slice(start, stop - start)
        null = chunk.is_null().to_numpy(zero_copy_only=False).astype(bool)
        vocabulary = self._source.vocabularies.get(column)
        if vocabulary is not None:
            text = chunk.cast(pa.string())
            ids = pc.index_in(text, value_set=pa.array(vocabulary, pa.string()))
            values = pc.fill_null(ids, -1).to_numpy(zero_copy_only=False)
            bad = values < 0
        else:
            if pa.types.is_null(chunk.type) or pa.types.is_boolean(chunk.type):
                chunk = chunk.cast(pa.int64())
            values = np.asarray(pc.fill_null(chunk, 0).to_numpy(zero_copy_only=False))
            bad = null | (~np.isfinite(values) if values.dtype.kind == "f" else False)

        def reason(row: int) -> str:
            if null[row]:
                return f"column {column!r} is null"
            return f"column {column!r} " + ("holds an unknown category" if vocabulary is not None else "is not finite")

        return values, bad, reason
