"""One shard's file: the declared columns, and the writer that fills them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_runtime.datasets.partition import ORIGIN, repeated
from gpu_runtime.errors import SpecError
from gpu_runtime.predictions.storage import FileWriter, Folder
from gpu_runtime.specs import TensorSpec, digest_of

_ROWS_PER_GROUP = 65_536
_NBYTES_PER_GROUP = 128 << 20
"""Of outputs: a group is held in memory until it is written, and a list's offsets have 31 bits."""
_BUFFER_NBYTES = 1 << 20
_PROVENANCE = ("model_digest", "engine_digest", "run_id")
_REPEATED = ("source_file", *_PROVENANCE)


@dataclass(frozen=True)
class Provenance:
    """What made a row: the exported model, the engine built from it, the run. Each row carries all three."""

    model_digest: str
    engine_digest: str
    run_id: str


@dataclass(frozen=True)
class PredictionSchema:
    """The declared columns of a model's predictions.

    Each output tensor becomes a column of its name (a list for a row of shape `[k]`). `class_names` maps an
    index output to its names and adds a text column beside it. Raises `SpecError` unless the output's declared range
    has a name for each index: rows outside the range are quarantined before they get here.
    """

    outputs: tuple[TensorSpec, ...]
    class_names: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        columns = Counter(["date", *(field.name.casefold() for field in self.fields())])  # as Delta compares them
        if twice := [name for name, count in columns.items() if count > 1]:
            raise SpecError(
                "two columns of the predictions have one name",
                stage="score",
                item=twice[0],
                expected="names other than " + ", ".join(("date", *ORIGIN, *_PROVENANCE)) + ", in any case",
                next_step="give the output another name in defs.yaml",
            )
        declared = {spec.name: spec for spec in self.outputs}
        for name, names in self.class_names.items():
            spec = declared.get(name)
            whole = spec is not None and spec.numpy_dtype.kind in "iu"
            if not (spec and whole and spec.minimum == 0 and spec.maximum == len(names) - 1):
                raise SpecError(
                    "the class names do not fit the output's range",
                    stage="score",
                    item=name,
                    expected=f"a whole number, 0 … {len(names) - 1}, one for each of {len(names)} names",
                    got=f"{spec.dtype}, {spec.minimum} … {spec.maximum}"
                    if spec
                    else f"no such output among {', '.join(declared)}",
                    next_step="give `class_names` a file with one line for each class, or declare the output's range "
                    "under `output_ranges`",
                )

    def fields(self) -> list[Any]:
        """Arrow fields of a shard's file, in order; the partition column `date` is not in the file."""
        import pyarrow as pa

        fields = [
            pa.field("row_key", pa.string()),
            pa.field("source_file", pa.string()),
            pa.field("source_position", pa.int64()),
        ]
        for spec in self.outputs:
            value = pa.from_numpy_dtype(_stored(spec))
            fields.append(pa.field(spec.name, value if not spec.shape else pa.list_(value)))
            if spec.name in self.class_names:
                fields.append(pa.field(label_column(spec.name), pa.list_(pa.string()) if spec.shape else pa.string()))
        return [*fields, *(pa.field(name, pa.string()) for name in _PROVENANCE)]

    def arrow(self) -> Any:
        import pyarrow as pa

        return pa.schema([pa.field("date", pa.date32()), *self.fields()])

    @property
    def digest(self) -> str:
        return digest_of([[f.name, str(f.type)] for f in self.fields()] + [self.class_names])


def shard_file(day: str, shard: int, attempt: str) -> str:
    """The file's name, relative to the table."""
    return f"date={day}/part-{shard:06}-{attempt}.parquet"


def label_column(output: str) -> str:
    """`top_index` → `top_label`."""
    return output.removesuffix("_index") + "_label"


class ShardWriter:
    """Collects one shard's scored rows and writes them as one Parquet file, then its receipt's facts.

    The file appears when it is finished. Its name carries the attempt's id, so that a dead run's file is never
    mistaken for a live one's.
    """

    def __init__(
        self, table: Folder, schema: PredictionSchema, day: str, shard: int, attempt: str, provenance: Provenance
    ) -> None:
        self._table, self._schema, self._provenance = table, schema, provenance
        self.file = shard_file(day, shard, attempt)
        self.rows = 0
        self._arrow = _in_memory(schema)
        row_nbytes = sum(_stored(spec).itemsize * math.prod(spec.shape) for spec in schema.outputs)
        self._rows_per_group = max(1, min(_ROWS_PER_GROUP, _NBYTES_PER_GROUP // max(1, row_nbytes)))
        self._file: FileWriter | None = None
        self._buffer: Any = None
        self._writer: Any = None
        self._origins: list[Any] = []
        self._outputs: dict[str, list[Any]] = {spec.name: [] for spec in schema.outputs}
        self._pending_rows = 0
        self._places: list[Any] = []

    def append(self, origins: Any, outputs: Mapping[str, Any], places: Any = None) -> None:
        """Add rows: where they came from (`origins_of`), and `outputs` (`[n, *shape]`), which are copied. `places`
        (`[n]`) says which row of the file each is to be, where they come in another order; all are held until then."""
        self._origins.append(origins)
        for spec in self._schema.outputs:
            self._outputs[spec.name].append(np.array(outputs[spec.name], _stored(spec), copy=True))
        self._pending_rows += origins.num_rows
        self.rows += origins.num_rows
        if places is not None:
            self._places.append(places)
        elif self._pending_rows >= self._rows_per_group:
            self._flush()

    def finish(self) -> tuple[int, str]:
        """Put the complete file in place; returns its size and SHA-256."""
        self._flush()
        assert self._file is not None
        self._writer.close()
        self._buffer.close()
        return self._file.commit()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._writer is None:
            self._file = self._table.writer(self.file)
            # Pages are small: handed on one by one, each would wait for the interpreter.
            self._buffer = pa.output_stream(self._file, buffer_size=_BUFFER_NBYTES)
            self._writer = pq.ParquetWriter(
                self._buffer,
                self._arrow,
                store_schema=False,  # whoever reads the file sees plain text
                # Scores hardly ever repeat: a dictionary would only cost time.
                use_dictionary=list(_REPEATED),
                column_encoding={"source_position": "DELTA_BINARY_PACKED"},  # each is one more than the last
                # Nobody looks for rows by columns that hold one value throughout.
                write_statistics=[name for name in self._arrow.names if name not in _PROVENANCE],
                write_batch_size=_ROWS_PER_GROUP,
            )
        if not self._pending_rows:
            return
        origins = pa.Table.from_batches(self._origins)
        outputs = {name: np.concatenate(parts) for name, parts in self._outputs.items()}
        order = np.argsort(np.concatenate(self._places)) if self._places else None
        for start in range(0, self._pending_rows, self._rows_per_group):
            rows = slice(start, start + self._rows_per_group)
            if order is None:
                self._write_group(origins[rows], {name: values[rows] for name, values in outputs.items()})
            else:
                some = order[rows]
                self._write_group(origins.take(some), {name: values[some] for name, values in outputs.items()})
        for parts in (self._origins, self._places, *self._outputs.values()):
            parts.clear()
        self._pending_rows = 0

    def _write_group(self, origins: Any, outputs: Mapping[str, Any]) -> None:
        import pyarrow as pa

        columns: list[Any] = list(origins.columns)
        for name, values in outputs.items():
            columns.append(_column(values, pa.array(values.ravel())))
            class_names = self._schema.class_names.get(name)
            if class_names is not None:
                columns.append(_column(values, pa.array(class_names, pa.string()).take(pa.array(values.ravel()))))
        columns += [repeated(getattr(self._provenance, name), len(origins)) for name in _PROVENANCE]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._arrow), len(origins))


def _stored(spec: TensorSpec) -> np.dtype[Any]:
    """What the output's numbers are kept as: Delta has neither unsigned nor half-precision columns."""
    kept = {"uint8": "int16", "uint16": "int32", "uint32": "int64", "float16": "float32"}
    return np.dtype(kept.get(spec.dtype, spec.dtype))


def _in_memory(schema: PredictionSchema) -> Any:
    """The file's columns as they are collected: those that repeat themselves as dictionaries, and none with nulls,
    whose absence would be written down for each row."""
    import pyarrow as pa

    repeats = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [pa.field(f.name, repeats if f.name in _REPEATED else f.type, nullable=False) for f in schema.fields()]
    )


def _column(values: Any, flat: Any) -> Any:
    """`flat` as it is for scalar rows, as lists of k for rows `[k]`."""
    import pyarrow as pa

    if values.ndim == 1:
        return flat
    count, width = values.shape[0], int(np.prod(values.shape[1:]))
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * width), flat)
