"""A day's inputs as ordered shards, and the seam through which any format is read."""

from __future__ import annotations

import datetime
import errno
import functools
import os
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu_runtime.datasets.ragged import tokenizer_digest
from gpu_runtime.errors import DatasetError
from gpu_runtime.specs import TensorSpec, digest_of


@dataclass(frozen=True)
class FileFingerprint:
    """Tells whether a file is still the one that was scored. `path` is relative to the day's folder."""

    path: str
    nbytes: int
    modified_ns: int

    @staticmethod
    def of(path: Path, folder: Path, *, found: os.stat_result | None = None) -> FileFingerprint:
        found = found or stat_of(path) or path.lstat()  # a link to nothing, or to itself: a file that cannot be read
        name = str(path).removeprefix(f"{folder}/")  # `relative_to` would cost as much as the stat
        return FileFingerprint(name, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class ShardTask:
    """The unit of work: many small files, or a part of one file. Plain values, so it can be sent.

    `span` is that part, as a half-open range of what the format is cut by (row groups, rows); None for whole files.
    `reading` is the digest of how the source turns files into rows: the same bytes read in another way are another
    shard.
    """

    day: str
    index: int
    folder: str
    files: tuple[FileFingerprint, ...]
    rows: int
    span: tuple[int, int] | None = None
    reading: str = ""

    @cached_property  # of a thousand files, and asked for several times
    def fingerprint(self) -> str:
        return digest_of({"files": self.files, "span": self.span, "reading": self.reading})


@dataclass(frozen=True)
class DatasetPartition:
    """One day's inputs. Two partitions of equal digest hold the same files."""

    day: str
    shards: tuple[ShardTask, ...]

    @property
    def digest(self) -> str:
        return digest_of([(shard.index, shard.fingerprint) for shard in self.shards])

    @property
    def files(self) -> int:
        return len({file.path for shard in self.shards for file in shard.files})

    @property
    def nbytes(self) -> int:
        return sum({file.path: file.nbytes for shard in self.shards for file in shard.files}.values())


@dataclass(frozen=True)
class CountedFile:
    """A file of which it is known how a shard may cut it: half-open ranges of what the format is cut by, and the rows
    in each. No shard holds two ranges of one file."""

    fingerprint: FileFingerprint
    spans: tuple[tuple[tuple[int, int], int], ...]

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.spans)


def packed(
    day: str, folder: Path, reading: str, files: Iterable[CountedFile], most_rows: int, most_files: int
) -> DatasetPartition:
    """The day's shards, in the order of its files: each span is one, but files next to each other that are one span
    each share a shard of `most_rows` rows and `most_files` files at most. A shard costs a data file, a receipt and a
    few writes that wait for the disk: a thousand small files could not afford one each.

    A file of several spans has more than `most_rows` rows; one without a span is in no shard.
    """
    packs: list[list[CountedFile]] = []
    rows = 0  # in the last pack
    for file in files:
        if not file.spans:
            continue
        if not packs or len(packs[-1]) == most_files or rows + file.rows > most_rows:
            packs.append([])
            rows = 0
        packs[-1].append(file)
        rows += file.rows
    shards: list[ShardTask] = []
    for pack in packs:
        together = tuple(file.fingerprint for file in pack)
        spans = pack[0].spans if len(pack) == 1 else [(None, sum(file.rows for file in pack))]
        for span, count in spans:
            shards.append(ShardTask(day, len(shards), str(folder), together, count, span, reading))
    return DatasetPartition(day, tuple(shards))


@dataclass(frozen=True)
class RowFailure:
    """A row that cannot be scored. `row` counts from the batch's first; `reason` never holds a cell's value."""

    row: int
    stage: str
    reason: str
    exception: str


ORIGIN = ("row_key", "source_file", "source_position")
"""Columns that say where a row came from."""

Piece = Callable[[], list[RowFailure]]
"""Fills some rows of a batch and returns those it could not; pieces of one batch may run in parallel."""


class ShardReader(Protocol):
    """One opened shard; rows are numbered from 0 in the shard's order, or longest first where they differ in length."""

    @property
    def rows(self) -> int: ...

    @property
    def lengths(self) -> npt.NDArray[np.int64] | None:
        """`[rows]`, longest first; None where all rows are alike."""

    @property
    def order(self) -> npt.NDArray[np.int64] | None:
        """Row i here is row `order[i]` of the shard; None where that is the same."""

    def origins(self, start: int, stop: int) -> Any:
        """Where rows `start … stop` came from, as `origins_of` makes it."""

    def pieces(self, start: int, stop: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[Piece]:
        """The work that fills rows `start … stop` into `staging` (input name → `[stop − start, *shape]`)."""

    def view(self, start: int, stop: int) -> Mapping[str, npt.NDArray[Any]] | None:
        """Rows `start … stop` as they lie in memory (input name → `[stop − start, *shape]`, C order), where that is
        what the engine takes; None where `pieces` has to fill them in."""

    def labels(self) -> npt.NDArray[Any] | None:
        """One label a row as float64, NaN where there is none; None when the source declares no label."""


class Source(Protocol):
    """A dataset with one folder a day: `<root>/<day>/`."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    def partition(self, day: str) -> DatasetPartition:
        """Raises `DatasetError` when the day's folder does not exist; an empty folder is an empty day."""

    def open(self, shard: ShardTask) -> ShardReader:
        """Raises `DatasetError` when a file as a whole is not what was declared."""

    def parts(self, shard: ShardTask) -> Iterator[ShardReader]:
        """The shard's rows in order, in as many readers as it takes to hold few of them at once, but at least one.

        Each is opened when it is asked for, and raises what `open` raises.
        """


def origins_of(keys: Any, files: Any, positions: Any) -> Any:
    """An Arrow record batch: the rows' keys, their files relative to the day's folder (one name for all, or one each,
    which may be a dictionary array), and their positions in those files."""
    import pyarrow as pa

    keys = keys if isinstance(keys, pa.Array) else pa.array(keys, pa.string())
    if isinstance(files, str):
        files = repeated(files, len(keys))
    elif not isinstance(files, pa.DictionaryArray):
        files = pa.array(files, pa.string()).dictionary_encode()
    return pa.record_batch([keys, files, pa.array(positions, pa.int64())], list(ORIGIN))


class Places:
    """The file that each row of a shard lies in, and its position there, for files whose rows follow each other.

    `files` are their names, `rows` how many of each there are. Of a single file they may begin at row `offset`. In
    another `order`, row i is row `order[i]` of them.
    """

    def __init__(
        self, files: Sequence[str], rows: Sequence[int], offset: int = 0, order: npt.NDArray[np.int64] | None = None
    ) -> None:
        import pyarrow as pa

        self._names = pa.array([as_text(file) for file in files], pa.string())
        self._starts, self._offset, self._order = np.cumsum([0, *rows[:-1]]), offset, order

    def of(self, start: int, stop: int) -> tuple[Any, npt.NDArray[np.int64]]:
        """Of rows `start … stop`: the names as a dictionary array, and the positions."""
        import pyarrow as pa

        if self._order is None and len(self._names) == 1:
            one = pa.DictionaryArray.from_arrays(np.zeros(stop - start, np.int32), self._names)
            return one, np.arange(self._offset + start, self._offset + stop)
        rows = np.arange(start, stop) if self._order is None else self._order[start:stop]
        file = np.searchsorted(self._starts, rows, side="right") - 1
        first, last = (int(file.min()), int(file.max())) if len(file) else (0, 0)
        names = self._names.slice(first, last + 1 - first)
        positions = rows - self._starts[file] + self._offset
        return pa.DictionaryArray.from_arrays((file - first).astype(np.int32), names), positions


def keys_of(files: Any, positions: npt.NDArray[np.int64]) -> Any:
    """The key of a row that has none: `<file>#<position>`, as an Arrow array. `files` is a dictionary array."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if len(files.dictionary) != 1:
        return pc.binary_join_element_wise(files.dictionary_decode(), pa.array(positions).cast(pa.string()), "#")
    name = files.dictionary[0]
    if len(positions) and (np.diff(positions) == 1).all():
        return place_keys(name.as_py(), int(positions[0]), int(positions[-1]) + 1)
    return pc.binary_join_element_wise(name, pa.array(positions).cast(pa.string()), "#")


def place_keys(file: str, start: int, stop: int) -> Any:
    """The keys of rows that have none of their own, `<file>#<position>` for positions `start … stop`, as an Arrow
    array."""
    import pyarrow as pa
    import pyarrow.compute as pc

    runs = [pa.array([], pa.string())]
    while start < stop:
        head, first = divmod(start, 10_000)
        count = min(stop, (head + 1) * 10_000) - start
        if head:  # all keys of the run are equally long and differ in the last digits alone: joining texts is slow
            text = f"{file}#{head}".encode()
            width = len(text) + 4
            data = bytearray((text + bytes(4)) * count)
            np.ndarray(count, "V4", data, len(text), width)[:] = _four_digits()[first : first + count]
            ends = np.arange(count + 1, dtype=np.int32) * width
            runs.append(pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(data)))
        else:
            positions = pa.array(np.arange(start, start + count)).cast(pa.string())
            runs.append(pc.binary_join_element_wise(file, positions, "#"))
        start += count
    return pa.concat_arrays(runs)


@functools.cache
def _four_digits() -> npt.NDArray[Any]:
    """`0000` … `9999`."""
    return np.array([b"%04d" % number for number in range(10_000)]).view("V4")


def as_text(path: str) -> str:
    """A name whose bytes are no UTF-8, as text that a table can hold."""
    return path.encode("utf-8", "backslashreplace").decode()


def repeated(value: str, count: int) -> Any:
    """A text column of one value, as Arrow keeps it in the least space."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), pa.array([value], pa.string()))


def reading_of(source: Any) -> str:
    """Digest of a source's settings, but for where its files lie and how they are cut into shards."""
    place = {"root", "rows_per_shard", "files_per_shard", "nbytes_per_shard"}
    settings = {name: value for name, value in vars(source).items() if name not in place}
    if tokenizer := settings.get("tokenizer"):
        settings["tokenizer"] = tokenizer_digest(tokenizer)
    return digest_of(settings)


def stat_of(path: Path) -> os.stat_result | None:
    """Of what is there; None where nothing can be reached. (`Path.exists` raises where a folder is locked.)"""
    try:
        return path.stat()
    except OSError:
        return None


def is_special(found: os.stat_result | None) -> bool:
    """A pipe, a socket or a device, which would be waited for; or a folder."""
    return found is not None and not stat.S_ISREG(found.st_mode)


def day_folder(root: Path, day: str) -> Path:
    """`<root>/<day>`, which must exist."""
    try:
        datetime.date.fromisoformat(day)
    except ValueError as error:
        raise DatasetError("not a day", stage="dataset", item=repr(day), expected="YYYY-MM-DD") from error
    folder = root / day
    if not folder.is_dir():
        raise DatasetError(
            "the day has no folder",
            stage="dataset",
            item=day,
            expected=f"the folder {folder}",
            got="nothing there",
            next_step="land the day's data first; a day without rows is an empty folder",
        )
    return folder


def day_files(folder: Path, suffixes: Container[str], hidden: tuple[str, ...]) -> list[Path]:
    """The day's files, in order, through links to other folders too. Whatever lies under a name that starts with one
    of `hidden` is left out: other tools keep what they have not finished there.

    Raises `DatasetError` when there are files and none has one of the suffixes, or a folder cannot be read: neither
    is an empty day.
    """
    seen = sorted(_files_below(folder, hidden), key=lambda path: path.parts)  # as paths are compared, only faster
    for path in seen:
        if path.suffix.lower() not in suffixes and path.is_symlink() and stat_of(path) is None:
            raise DatasetError(
                "a link of the day leads nowhere, or where this user may not go",
                stage="dataset",
                item=as_text(f"{folder.name}/{path.relative_to(folder).as_posix()}"),
                expected="what it links to; it may be a folder of files",
                next_step="bring it back, give this user the right to read it, or remove the link",
            )
    files = [path for path in seen if path.suffix.lower() in suffixes]
    if seen and not files:
        raise DatasetError(
            "the day has files, and none that is read",
            stage="dataset",
            item=folder.name,
            expected=str(suffixes),
            got=f"{len(seen)} others, the first {as_text(seen[0].name)}",
            next_step="land the day in the declared format; a day without rows is an empty folder",
        )
    return files


def _files_below(folder: Path, hidden: tuple[str, ...]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DatasetError(
            "a folder of the day cannot be read",
            stage="dataset",
            item=as_text(str(error.filename)),
            expected="a folder that this user may list and enter",
            got=type(error).__name__,
            next_step="give this user the right to read it; a day without rows is an empty folder",
        ) from error

    known, top = set[str](), os.path.realpath(folder)
    for root, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        here = os.path.realpath(root)
        above = here != top and os.path.commonpath([here, top]) == here
        if above or here in known:  # a link to a folder above it, or a second one to the same folder
            folders.clear()
            continue
        known.add(here)
        if not os.access(root, os.X_OK):
            refuse(PermissionError(errno.EACCES, "may not be entered", root))
        folders[:] = sorted(name for name in folders if not name.startswith(hidden))
        parent = Path(root)
        yield from (parent / name for name in files if not name.startswith(hidden))


def check_unchanged(shard: ShardTask) -> None:
    """The shard's files are still those that were fingerprinted, or `DatasetError`."""
    folder = Path(shard.folder)
    for expected in shard.files:
        path = folder / expected.path
        try:
            found = FileFingerprint.of(path, folder)
        except OSError:
            found = None
        if found != expected:
            raise DatasetError(
                "the file changed while the day was being scored",
                stage="dataset",
                item=f"{shard.day}/{expected.path}",
                expected=f"{expected.nbytes} bytes, as fingerprinted",
                got="no file" if found is None else f"{found.nbytes} bytes, another modification time",
                next_step="run the day again once its files are complete",
            )


def read_rows(
    inputs: Sequence[TensorSpec],
    reader: ShardReader,
    start: int,
    stop: int,
    apply: Callable[..., Iterable[list[RowFailure]]] = map,
) -> tuple[dict[str, npt.NDArray[Any]], list[RowFailure]]:
    """Rows `start … stop` in memory, for calibration and gates: inputs `[rows, *shape]`, and failures, which count from
    `start`. Rows that differ in length are padded to the longest of them.

    `apply` is `map`, or a pool's, to fill pieces in parallel.
    """
    length = None if reader.lengths is None else int(reader.lengths[start:stop].max(initial=1))
    rows = {spec.name: np.zeros(spec.batch_shape(stop - start, length), spec.numpy_dtype) for spec in inputs}
    made = apply(lambda piece: piece(), reader.pieces(start, stop, rows))
    return rows, [failure for piece in made for failure in piece]


def numpy_rows(source: Source, shard: ShardTask) -> tuple[dict[str, npt.NDArray[Any]], list[RowFailure], ShardReader]:
    """A whole shard in memory, to look at: inputs `[rows, *shape]`, failures, the reader."""
    reader = source.open(shard)
    return *read_rows(source.inputs, reader, 0, reader.rows), reader
