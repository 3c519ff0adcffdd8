"""Columns of Parquet files as model inputs: `<root>/<day>/*.parquet`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.datasets.batching import longest_first
from gpu_runtime.datasets.partition import (
    CountedFile,
    DatasetPartition,
    FileFingerprint,
    Piece,
    Places,
    RowFailure,
    ShardReader,
    ShardTask,
    as_text,
    day_files,
    day_folder,
    is_special,
    keys_of,
    origins_of,
    packed,
    reading_of,
    stat_of,
)
from gpu_runtime.datasets.ragged import RaggedRows, lists_of, open_tokenizer, tokens_of
from gpu_runtime.datasets.workers import side_by_side
from gpu_runtime.errors import DatasetError, SpecError
from gpu_runtime.specs import LENGTH, TensorSpec

_NUMBER_NBYTES, _TEXT_NBYTES = 8, 32
"""What a cell may take in memory, the text of a category or a key as a rule."""

_BUFFER_NBYTES = 1 << 20
_ROWS_AT_ONCE = 131_072
"""Enough to decode quickly; a multiple of most batch sizes, so that hardly a batch has to be padded."""
_RAGGED_ROWS_AT_ONCE = 16_384
"""Enough to find neighbours of about the same length for each of them."""


@dataclass(frozen=True)
class ParquetSource:
    """How columns become inputs.

    `columns` maps each input to its columns: one for a scalar row, k for a row of shape `[k]`.
    `vocabularies` maps a text column to its known values; the id is the position.
    Rows may differ in the length of one input `[-1]`: its column holds lists, or text that the file `tokenizer` (a
    tokenizer.json) turns into ids. A row longer than `max_length` is quarantined, a text cut instead with `truncate`;
    the mask, if the model takes one, is no column.
    A null, a value that is not finite, an unknown category and a value outside the input's declared range
    each quarantine their row.

    A large file is cut between its row groups into shards of `rows_per_shard` rows at most, and read in parts, one
    ahead of what is scored. Small files share a shard of so many rows, fewer if its columns are so many that they
    could take more than `nbytes_per_shard` in memory, and of `files_per_shard` files, which are read whole.
    """

    root: str
    inputs: tuple[TensorSpec, ...]
    columns: Mapping[str, tuple[str, ...]]
    vocabularies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    row_key: str | None = None
    label: str | None = None
    rows_per_shard: int = 1_000_000
    tokenizer: str | None = None
    max_length: int | None = None
    truncate: bool = False
    files_per_shard: int = 1_000
    nbytes_per_shard: int = 128 << 20

    def __post_init__(self) -> None:
        differ = [spec for spec in self.inputs if spec.has_length and not spec.mask]
        fits = len(differ) <= 1 and all(spec.shape == (LENGTH,) for spec in differ)
        if (
            not fits
            or bool(differ) != bool(self.max_length)
            or (self.tokenizer and not differ)
            or (self.truncate and not self.tokenizer)
        ):
            raise SpecError(
                "not an input whose rows differ in length",
                stage="dataset",
                item=", ".join(spec.name for spec in differ) or "tokenizer",
                expected="one input of shape [-1] beside its mask, and max_length; `truncate` with a `tokenizer` only",
                got=f"{', '.join(str(spec.shape) for spec in differ) or 'none'}, max_length {self.max_length}",
            )
        for spec in self.inputs:
            if spec.mask:
                continue
            columns = self.columns.get(spec.name, ())
            width = 1 if spec.shape in ((), (LENGTH,)) else spec.shape[0] if len(spec.shape) == 1 else -1
            if len(columns) != width:
                raise SpecError(
                    "its columns do not fill its shape",
                    stage="dataset",
                    item=spec.name,
                    expected=f"{width} columns for a row of shape {spec.shape}",
                    got=f"{len(columns)} columns",
                )

    def partition(self, day: str) -> DatasetPartition:
        import pyarrow.dataset as ds
        import pyarrow.fs as fs

        folder, reading = day_folder(Path(self.root), day), reading_of(self)
        paths = day_files(folder, (".parquet",), hidden=(".", "_"))
        # Of all ways to a footer the one that costs least, and it leaves the interpreter's lock free meanwhile.
        fragment_of = partial(ds.ParquetFileFormat().make_fragment, filesystem=fs.LocalFileSystem())
        files = side_by_side(partial(_counted, folder, self.rows_per_shard, fragment_of), paths, "list")
        # Rows are sorted by their length within a file: of several files, whose columns may be of unlike types, not.
        most_rows, most_files = max(1, self._rows_that_fit), self.files_per_shard if self._lists is None else 1
        return packed(day, folder, reading, files, min(self.rows_per_shard, most_rows), most_files)

    @property
    def _needed(self) -> list[str]:
        """Every column that scoring reads, once. The label is none of them: it mostly comes later than the day."""
        columns = [c for columns in self.columns.values() for c in columns]
        return list(dict.fromkeys([*columns, *([self.row_key] if self.row_key else [])]))

    @property
    def _rows_that_fit(self) -> int:
        """In `nbytes_per_shard`."""
        numbers = {c for columns in self.columns.values() for c in columns} - self.vocabularies.keys()
        row_nbytes = sum(_NUMBER_NBYTES if column in numbers else _TEXT_NBYTES for column in self._needed)
        return self.nbytes_per_shard // max(1, row_nbytes)

    @property
    def _lists(self) -> TensorSpec | None:
        """The input whose rows differ in length."""
        return next((spec for spec in self.inputs if spec.has_length and not spec.mask), None)

    def tokenizer_for(self, shard: ShardTask) -> Any:
        """Raises `DatasetError` if it is not the one that the day was cut for."""
        if self.tokenizer is None:
            return None
        opened = open_tokenizer(self.tokenizer, self.max_length or 1, self.truncate)
        if shard.reading and reading_of(self) != shard.reading:  # asked for later: it may be replaced at any time
            raise DatasetError(
                "the tokenizer changed while the day was being scored",
                stage="dataset",
                item=f"{shard.day}, shard {shard.index}",
                expected="the file that was there when the day was cut",
                got=Path(self.tokenizer).name,
                next_step="run the day again; a model that takes other ids has to be exported again",
            )
        return opened

    def ragged(self, table: Any, tokenizer: Any) -> RaggedRows | None:
        """The rows of the input that differ in length, in the table's order."""
        import pyarrow as pa

        if self._lists is None:
            return None
        (name,), longest = self.columns[self._lists.name], self.max_length or 1
        column = table.column(name).combine_chunks()
        if tokenizer is None:
            if pa.types.is_null(column.type):
                column = column.cast(pa.list_(pa.int64()))
            return lists_of(column, self._lists, longest, name)
        return tokens_of(_values_of(column), tokenizer, self._lists, longest, name)

    def without_ragged(self, table: Any) -> Any:
        """Once its rows are made, nobody reads the column that they came from."""
        assert self._lists is not None
        (name,) = self.columns[self._lists.name]
        return table if name == self.row_key else table.drop_columns([name])

    @property
    def input_columns(self) -> set[str]:
        return {column for columns in self.columns.values() for column in columns}

    def open(self, shard: ShardTask) -> ShardReader:
        tokenizer = self.tokenizer_for(shard)
        tables, offset = self._read(shard, self._needed, _LAND_COLUMNS)
        readers, first = list[ParquetReader](), 0
        # Columns of unlike types are not joined: no value may depend on what another file holds.
        for _, alike in itertools.groupby(tables, key=lambda table: table.schema):
            some = list(alike)
            part = replace(shard, files=shard.files[first : first + len(some)])
            readers.append(ParquetReader(self, some, part, offset, tokenizer=tokenizer))
            first += len(some)
        return readers[0] if len(readers) == 1 else _Joined(readers)

    def parts(self, shard: ShardTask) -> Iterator[ShardReader]:
        import pyarrow as pa

        if len(shard.files) > 1 or not shard.rows:
            yield self.open(shard)
            return
        check = _Checked(partial(self._check_columns, columns=self._needed, next_step=_LAND_COLUMNS))
        tokenizer = self.tokenizer_for(shard)
        # As it is read, not all of the shard's bytes at once, which pyarrow would hold beside what they become.
        little = {"pre_buffer": False, "buffer_size": _BUFFER_NBYTES}
        with _opened(shard, shard.files[0], check, little) as (parquet, groups, offset):
            at_once = self._rows_at_once(parquet, groups)
            batches = parquet.iter_batches(at_once, groups, self._needed)
            first, stop, held, count = 0, _rows_in(parquet, groups), list[Any](), 0
            for batch in batches:
                held.append(_without_dictionaries(pa.Table.from_batches([batch])))
                count += batch.num_rows
                last = first + count >= stop
                if last and (first + count > stop or next(batches, None) is not None):
                    raise ValueError(_OTHER_ROWS)
                if last or count >= at_once:  # a column of categories makes a batch end where its group does
                    yield ParquetReader(self, [pa.concat_tables(held)], shard, offset, first, tokenizer)
                    first, held, count = first + count, [], 0
            if first != stop:
                raise ValueError(_OTHER_ROWS)

    def _rows_at_once(self, parquet: Any, groups: range) -> int:
        """How many rows make a part: where they differ in length, the footer tells how much memory they take."""
        if self._lists is None:
            return max(1, min(_ROWS_AT_ONCE, self._rows_that_fit))
        # Of all columns: asked for one column's, the library ends the process where a footer is damaged.
        found = [parquet.metadata.row_group(group) for group in groups]
        most: int = max([1, *(group.total_byte_size // max(1, group.num_rows) for group in found)])
        return max(1, min(_RAGGED_ROWS_AT_ONCE, self.nbytes_per_shard // most))

    def read_labels(self, shard: ShardTask, label: str) -> npt.NDArray[Any]:
        import pyarrow as pa

        tables, _ = self._read(shard, [label], "name days for the gate whose labels have arrived")
        # Unsafe: a safe cast would refuse, and quote, an integer above 2^53.
        columns = [table.column(label).cast(pa.float64(), safe=False) for table in tables]
        return np.concatenate([column.to_numpy(zero_copy_only=False) for column in columns])

    def _read(self, shard: ShardTask, columns: list[str], next_step: str) -> tuple[list[Any], int]:
        """The shard's rows of `columns`, a table for each file, and the position in its file of the first. No
        dictionary is left."""
        check = _Checked(partial(self._check_columns, columns=columns, next_step=next_step))

        def read(file: FileFingerprint) -> tuple[Any, int]:
            with _opened(shard, file, check) as (parquet, groups, offset):
                table = parquet.read_row_groups(groups, columns=columns, use_threads=len(shard.files) == 1)
                if table.num_rows != _rows_in(parquet, groups):
                    raise ValueError(_OTHER_ROWS)
                return _without_dictionaries(table), offset

        found = side_by_side(read, shard.files, "read")
        return [table for table, _ in found], found[0][1]

    def _check_columns(self, schema: Any, item: str, *, columns: list[str], next_step: str) -> None:
        for column in columns:
            name = f"label column {column!r}" if columns == [self.label] else f"column {column!r}"
            if schema.names.count(column) != 1:
                raise DatasetError(
                    f"the {name} is {'ambiguous' if column in schema.names else 'missing'}",
                    stage="dataset",
                    item=item,
                    expected="one column each of " + ", ".join(columns),
                    got=", ".join(sorted(schema.names)) or "no column",
                    next_step=next_step,
                )
            found = schema.field(column).type
            expected = self._expected_of(column, found)
            if expected is not None:
                raise DatasetError(
                    f"the {name} has another type",
                    stage="dataset",
                    item=item,
                    expected=expected,
                    got=str(found),
                    next_step="land the file with its declared types",
                )

    def _expected_of(self, column: str, found: Any) -> str | None:
        """What the column should be, if `found` is not it."""
        import pyarrow.types as types

        value = found.value_type if types.is_dictionary(found) else found
        if self._lists is not None and column in self.columns[self._lists.name] and self.tokenizer is None:
            lists = types.is_list(value) or types.is_large_list(value) or types.is_fixed_size_list(value)
            empty = types.is_null(value) or (lists and types.is_null(value.value_type))
            return None if empty or (lists and _is_number(value.value_type)) else "a list of numbers"
        if types.is_null(value):  # without a single value: its rows are quarantined, one by one
            return None
        if column in self.vocabularies or (self._lists is not None and column in self.columns[self._lists.name]):
            text = types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
            return None if text else "text"
        if column == self.row_key and not any(column in columns for columns in self.columns.values()):
            return "one value a row" if types.is_nested(value) else None
        return None if _is_number(value) else "a number"


def _is_number(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


_OTHER_ROWS = "the pages do not hold the rows that the footer promises"
_LAND_COLUMNS = "land the file with its declared columns, or change `columns`"


class _Checked:
    """A check of a file's schema, which is not done again for the same one: as a rule all files have the same."""

    def __init__(self, check: Callable[[Any, str], None]) -> None:
        self._check, self._good = check, None

    def __call__(self, schema: Any, item: str) -> None:
        if schema != self._good:
            self._check(schema, item)
            self._good = schema


@contextmanager
def _opened(
    shard: ShardTask, file: FileFingerprint, check: _Checked, reading: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[Any, range, int]]:
    """One of the shard's files, its row groups, and the position in the file of its first row. Whatever the file makes
    the block raise is raised as `DatasetError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    item = f"{shard.day}/{file.path}"
    try:
        # Checksums are verified where the writer left some; without, flipped bytes are other numbers.
        with (
            pa.OSFile(f"{shard.folder}/{file.path}") as opened,
            pq.ParquetFile(opened, page_checksum_verification=True, **reading) as parquet,
        ):
            check(parquet.schema_arrow, item)
            first, last = shard.span or (0, parquet.num_row_groups)
            yield parquet, range(first, last), _rows_in(parquet, range(first))
    except (DatasetError, MemoryError):  # of which no file is to blame
        raise
    except Exception as error:  # OSError and ArrowInvalid, but a damaged footer raises what it likes
        raise _unreadable("the file's columns cannot be read", item, error) from error


def _rows_in(parquet: Any, groups: range) -> int:
    """As the footer says."""
    return sum(parquet.metadata.row_group(group).num_rows for group in groups)


def _unreadable(what: str, item: str, error: Exception | None) -> DatasetError:
    # The library's own text stays in the cause: it may quote what it could not read.
    return DatasetError(
        what,
        stage="dataset",
        item=as_text(item),
        expected="a whole Parquet file",
        got=None if error is None else type(error).__name__,
        next_step="land the file again",
    )


def _counted(folder: Path, most_rows: int, fragment_of: Callable[[str], Any], path: Path) -> CountedFile:
    """What the footer says of the file's rows. Raises `DatasetError` if it is none, or its row groups do not add up."""
    found = stat_of(path)
    if is_special(found):
        raise _unreadable("not a regular file", f"{folder.name}/{path.relative_to(folder)}", None)
    try:
        fingerprint = FileFingerprint.of(path, folder, found=found)
        return CountedFile(fingerprint, _row_group_ranges(fragment_of(str(path)).metadata, most_rows))
    except Exception as error:  # OSError and ArrowInvalid, but a damaged footer raises what it likes
        raise _unreadable("not a readable Parquet file", f"{folder.name}/{path.relative_to(folder)}", error) from error


def _row_group_ranges(metadata: Any, rows_per_shard: int) -> tuple[tuple[tuple[int, int], int], ...]:
    """Half-open ranges of row groups that cover every row of the file, and how many rows each holds."""
    counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    if metadata.num_rows != sum(counts):
        raise ValueError("the row groups do not hold the rows that the footer promises")
    ranges: list[tuple[tuple[int, int], int]] = []
    first, rows = 0, 0
    for group, count in enumerate(counts):
        if rows and rows + count > rows_per_shard:
            ranges.append(((first, group), rows))
            first, rows = group, 0
        rows += count
    return (*ranges, ((first, len(counts)), rows)) if counts else ()


def _without_dictionaries(table: Any) -> Any:
    import pyarrow as pa

    for index, column in enumerate(table.columns):
        if pa.types.is_dictionary(column.type):  # the cast checks its ids, which nothing else does
            table = table.set_column(index, table.schema.names[index], column.cast(column.type.value_type))
    return table


class ParquetReader:
    """The columns of a shard or of a part of it, of the declared kinds; their values are checked batch by batch.

    `tables` hold a file each, with columns of the same types. `offset` is the position in its file of the shard's first
    row, `first` the row of the shard that a part begins with. Where rows differ in length they are in another `order`:
    row i is row `order[i]` of the shard. `tokenizer` is the source's, if it has one.
    """

    def __init__(
        self,
        source: ParquetSource,
        tables: Sequence[Any],
        shard: ShardTask,
        offset: int,
        first: int = 0,
        tokenizer: Any = None,
    ) -> None:
        import pyarrow as pa

        self._source, self._shard = source, shard
        table = pa.concat_tables(tables).combine_chunks()
        self._count: int = table.num_rows
        self.order: npt.NDArray[np.int64] | None = None
        self.lengths: npt.NDArray[np.int64] | None = None
        self._ragged = source.ragged(table, tokenizer)
        if self._ragged is not None:
            order = longest_first(self._ragged.lengths)
            table, self._ragged = source.without_ragged(table), self._ragged.take(order)
            table = table.take(order).combine_chunks() if table.num_columns else table
            self.lengths, self.order = self._ragged.lengths, order + first
        rows = [one.num_rows for one in tables]
        names, of_part = [file.path for file in shard.files], 0 if self.order is not None else first
        self._places = Places(names, rows, offset + of_part, self.order)
        self._keys = table.column(source.row_key).combine_chunks() if source.row_key else None
        self._plain_keys = self._keys is not None and _is_plain(self._keys)
        self._columns = {c: table.column(c) for c in table.column_names if c in source.input_columns}
        self._arrays = {c: _as_array(column) for c, column in self._columns.items() if c not in source.vocabularies}
        self._alike = {spec.name: self._all_of(spec) for spec in source.inputs}

    @property
    def rows(self) -> int:
        return self._count

    def origins(self, start: int, stop: int) -> Any:
        files, positions = self._places.of(start, stop)
        return origins_of(self._keys_of(start, stop, files, positions), files, positions)

    def _keys_of(self, start: int, stop: int, files: Any, positions: npt.NDArray[np.int64]) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc

        if self._keys is None:
            return keys_of(files, positions)
        keys = self._keys.slice(start, stop - start)
        if not self._plain_keys:
            found = _values_of(keys)
            keys = pa.array([None if key is None else str(key) for key in found], pa.string())
        keys = pa.chunked_array([keys.cast(pa.string())]).combine_chunks()
        return pc.coalesce(keys, keys_of(files, positions)) if keys.null_count else keys

    def view(self, start: int, stop: int) -> Mapping[str, npt.NDArray[Any]] | None:
        found = {}
        for spec in self._source.inputs:
            columns = self._alike[spec.name]
            if columns is None:
                return None
            part = columns.slice(start, stop - start)
            # In one call: column by column would let go of the interpreter, and wait for it, once for each.
            values = part.column(0) if part.num_columns == 1 else part.to_tensor(row_major=True)
            values = values.to_numpy().reshape(spec.batch_shape(stop - start))
            if not spec.holds(values):  # `pieces` says of each row which column is to blame
                return None
            found[spec.name] = values
        return found

    def labels(self) -> npt.NDArray[Any] | None:
        if self._source.label is None:
            return None
        labels = self._source.read_labels(self._shard, self._source.label)
        return labels if self.order is None else labels[self.order]

    def pieces(self, start: int, stop: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[Piece]:
        return [lambda: self._fill(start, stop, staging)] if stop > start else []

    def _all_of(self, spec: TensorSpec) -> Any:
        """The input's columns as a record batch, if they hold nothing but numbers of its own type."""
        import pyarrow as pa

        names = () if spec.has_length else self._source.columns[spec.name]
        arrays = [self._arrays.get(name) for name in names]
        if not names or any(array is None or array.dtype != spec.numpy_dtype for array in arrays):
            return None
        return pa.record_batch([self._columns[name].chunk(0) for name in names], [str(i) for i in range(len(names))])

    def _fill(self, start: int, stop: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[RowFailure]:
        reasons: dict[int, str] = {}
        for spec in self._source.inputs:
            target = staging[spec.name].reshape(stop - start, -1)
            if self._ragged is not None and spec.mask:
                target[:] = self._ragged.mask(start, stop, target.shape[1])
                continue
            if self._ragged is not None and spec.has_length:
                for place, why in self._ragged.fill(start, stop, target, spec.filler).items():
                    reasons.setdefault(place, why)
                continue
            if self._copy(spec, start, stop, target):
                continue
            for place, column in enumerate(self._source.columns[spec.name]):
                values, bad, reason = self._values(column, start, stop)
                for row in np.flatnonzero(bad):
                    reasons.setdefault(int(row), reason(int(row)))
                outside = spec.outside(values) & ~bad
                for row in np.flatnonzero(outside):
                    reasons.setdefault(int(row), f"column {column!r} is outside its declared range or type")
                with np.errstate(over="ignore"):
                    target[:, place] = np.where(bad | outside, 0, values).astype(spec.numpy_dtype)
                if spec.numpy_dtype.kind == "f":
                    for row in np.flatnonzero(~np.isfinite(target[:, place])):
                        reasons.setdefault(int(row), f"column {column!r} does not fit {spec.dtype}")
                        target[row, place] = 0
        return [RowFailure(row, "input", reason, "ValueError") for row, reason in sorted(reasons.items())]

    def _copy(self, spec: TensorSpec, start: int, stop: int, target: npt.NDArray[Any]) -> bool:
        """Fill `target` from columns that hold plain numbers only; False when a row of it has to be looked at."""
        arrays = [self._arrays.get(column) for column in self._source.columns[spec.name]]
        if any(array is None or not _fits(array.dtype, spec) for array in arrays):
            return False
        with np.errstate(over="ignore"):  # becomes infinite, which the range does not hold
            for place, array in enumerate(arrays):
                target[:, place] = array[start:stop]  # type: ignore[index]
        return spec.holds(target)

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
            elif pa.types.is_float16(chunk.type):  # in which most limits overflow
                chunk = chunk.cast(pa.float32())
            values = np.asarray(pc.fill_null(chunk, 0).to_numpy(zero_copy_only=False))
            bad = null | (~np.isfinite(values) if values.dtype.kind == "f" else False)

        def reason(row: int) -> str:
            if null[row]:
                return f"column {column!r} is null"
            return f"column {column!r} " + ("holds an unknown category" if vocabulary is not None else "is not finite")

        return values, bad, reason


class _Joined:
    """Readers of one shard's files, one after the other; their rows are alike."""

    lengths = order = None

    def __init__(self, readers: Sequence[ParquetReader]) -> None:
        self._readers = readers
        self._starts = [0, *itertools.accumulate(reader.rows for reader in readers)]

    @property
    def rows(self) -> int:
        return self._starts[-1]

    def _parts(self, start: int, stop: int) -> list[tuple[ParquetReader, int, int, int]]:
        """The readers that rows `start … stop` are in, which rows of each, and where these begin in the batch."""
        found = []
        for reader, (first, end) in zip(self._readers, itertools.pairwise(self._starts), strict=True):
            low, high = max(start, first), min(stop, end)
            if low < high:
                found.append((reader, low - first, high - first, low - start))
        return found

    def origins(self, start: int, stop: int) -> Any:
        import pyarrow as pa

        return pa.concat_batches([reader.origins(low, high) for reader, low, high, _ in self._parts(start, stop)])

    def view(self, start: int, stop: int) -> Mapping[str, npt.NDArray[Any]] | None:
        (reader, low, high, _), *others = self._parts(start, stop)
        return None if others else reader.view(low, high)

    def labels(self) -> npt.NDArray[Any] | None:
        found = [labels for reader in self._readers if (labels := reader.labels()) is not None]
        return np.concatenate(found) if found else None

    def pieces(self, start: int, stop: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[Piece]:
        return [
            partial(_fill_part, piece, at)
            for reader, low, high, at in self._parts(start, stop)
            for piece in reader.pieces(low, high, {n: rows[at : at + high - low] for n, rows in staging.items()})
        ]


def _fill_part(piece: Piece, at: int) -> list[RowFailure]:
    return [replace(failure, row=failure.row + at) for failure in piece()]


def _is_plain(keys: Any) -> bool:
    """Whether Arrow and Python write these keys alike, and all of them are text that a table can hold."""
    import pyarrow as pa
    import pyarrow.types as types

    if types.is_integer(keys.type):
        return True
    if not (types.is_string(keys.type) or types.is_large_string(keys.type)):
        return False
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _as_array(column: Any) -> npt.NDArray[Any] | None:
    """A column of numbers without a null, as it lies in memory; None for any other."""
    import pyarrow.types as types

    number = types.is_integer(column.type) or types.is_float32(column.type) or types.is_float64(column.type)
    if not number or column.null_count or column.num_chunks != 1:
        return None
    return column.chunk(0).to_numpy(zero_copy_only=True)  # type: ignore[no-any-return]


def _fits(found: np.dtype[Any], spec: TensorSpec) -> bool:
    """Whether a cast keeps what a number says. One that rounds will do where there is no range to be on the edge of."""
    ranged = spec.minimum is not None or spec.maximum is not None
    return np.can_cast(found, spec.numpy_dtype, "safe") or (spec.numpy_dtype.kind == "f" and not ranged)


def _values_of(column: Any) -> list[Any]:
    """The column's cells; None for a null, and for what Python cannot hold: text that is no UTF-8, the year 10000."""
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except Exception:  # ValueError and OverflowError, but an unknown time zone is a KeyError
        if len(column) == 1:
            return [None]
        half = len(column) // 2
        return _values_of(column.slice(0, half)) + _values_of(column.slice(half))
