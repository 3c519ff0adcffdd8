"""Arrays in `.npy` files as the model's input: `<root>/<day>/*.npy`, their first axis the rows."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.datasets.npy import NpyFile, open_npy
from gpu_runtime.datasets.partition import (
    CountedFile,
    DatasetPartition,
    FileFingerprint,
    Piece,
    Places,
    RowFailure,
    ShardTask,
    as_text,
    day_files,
    day_folder,
    keys_of,
    origins_of,
    packed,
    reading_of,
)
from gpu_runtime.datasets.workers import side_by_side
from gpu_runtime.errors import DatasetError, SpecError
from gpu_runtime.specs import TensorSpec

_PACK_NBYTES = 16 << 20


@dataclass(frozen=True)
class ArrayFolderSource:
    """Each file holds rows of the one input, as `[rows, *shape]` in its dtype. Files are mapped, never read whole; on
    a device that shares the host's memory the engine takes a full batch from where it lies in the file. A file that is
    cut short at that very moment ends the process, as any mapped file does; the next run goes on.

    The row key is the file's name and the row's position in it, `part-0.npy#17`. `rows_per_shard` cuts large files.
    Small ones share a shard, up to `files_per_shard` of them and 16 MiB, and are copied into one array.
    """

    root: str
    inputs: tuple[TensorSpec, ...]
    rows_per_shard: int = 100_000
    files_per_shard: int = 1_000

    def __post_init__(self) -> None:
        if len(self.inputs) != 1:
            raise SpecError(
                "arrays fill one input",
                stage="dataset",
                item=", ".join(spec.name for spec in self.inputs),
                expected="one input",
                got=f"{len(self.inputs)} inputs",
            )

    def partition(self, day: str) -> DatasetPartition:
        folder, reading = day_folder(Path(self.root), day), reading_of(self)
        paths = day_files(folder, (".npy",), hidden=(".", "_"))
        files = side_by_side(partial(self._counted, folder), paths, "list")
        row_nbytes = max(1, self.inputs[0].numpy_dtype.itemsize * math.prod(self.inputs[0].shape))
        most_rows = min(self.rows_per_shard, _PACK_NBYTES // row_nbytes)
        return packed(day, folder, reading, files, most_rows, self.files_per_shard)

    def _counted(self, folder: Path, path: Path) -> CountedFile:
        fingerprint = FileFingerprint.of(path, folder)
        with self._opened(path, f"{folder.name}/{as_text(fingerprint.path)}") as file:
            rows = file.header.shape[0]
        firsts = range(0, rows, self.rows_per_shard)
        lasts = [min(first + self.rows_per_shard, rows) for first in firsts]
        spans = [((first, last), last - first) for first, last in zip(firsts, lasts, strict=True)]
        return CountedFile(fingerprint, tuple(spans))

    def open(self, shard: ShardTask) -> ArrayReader:
        (spec,), files = self.inputs, [as_text(file.path) for file in shard.files]
        if shard.span is not None:
            mapped = self._map(Path(shard.folder) / shard.files[0].path, f"{shard.day}/{files[0]}")
            whole = partial(_check_whole, mapped, f"{shard.day}/{files[0]}")
            values = np.asarray(mapped)[slice(*shard.span)]
            return ArrayReader(spec, values, Places(files, [len(values)], shard.span[0]), whole)

        def read(file: FileFingerprint) -> npt.NDArray[Any]:
            with self._opened(Path(shard.folder) / file.path, item := f"{shard.day}/{as_text(file.path)}") as opened:
                try:
                    return opened.read()
                except EOFError as error:
                    raise _shorter(item, opened.header.whole, opened.nbytes_now()) from error

        arrays = side_by_side(read, shard.files, "read")
        return ArrayReader(spec, np.concatenate(arrays), Places(files, [len(array) for array in arrays]))

    def parts(self, shard: ShardTask) -> Iterator[ArrayReader]:
        yield self.open(shard)

    def _map(self, path: Path, item: str) -> np.memmap[Any, Any]:
        """The file's array, mapped; private, so that no engine can write to the file."""
        with self._opened(path, item) as file:
            return file.mapped()

    @contextlib.contextmanager
    def _opened(self, path: Path, item: str) -> Iterator[NpyFile]:
        """Raises `DatasetError` unless the file holds what was declared, and nothing else."""
        (spec,) = self.inputs
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open_npy(path))
            except Exception as error:  # OSError and ValueError, but a damaged header raises what it likes
                kind = type(error).__name__
                raise _unusable("not a readable .npy file", item, f"an array {_kind_of(spec)}", kind) from error
            header = file.header
            if header.dtype != spec.numpy_dtype or header.shape[1:] != spec.shape or not header.shape:
                got = f"{header.dtype} {list(header.shape)}"
                raise _unusable("the file holds another array", item, f"an array {_kind_of(spec)}", got)
            if header.fortran:
                raise _unusable("the file's rows do not lie one behind the other", item, "C order", "Fortran order")
            if file.nbytes != header.whole:  # rows were appended, or the header counts too few: some would be lost
                sizes = f"{header.whole} bytes", f"{file.nbytes} bytes"
                raise _unusable("the file does not end where its array ends", item, *sizes)
            yield file


class ArrayReader:
    """Rows that lie one behind the other: a mapped part of one file, or small files in memory. `check` raises if the
    rows may no longer be touched."""

    lengths = order = None

    def __init__(
        self, spec: TensorSpec, values: npt.NDArray[Any], places: Places, check: Callable[[], None] = lambda: None
    ) -> None:
        self._spec, self._values, self._places, self._check = spec, values, places, check

    @property
    def rows(self) -> int:
        return len(self._values)

    def origins(self, start: int, stop: int) -> Any:
        files, positions = self._places.of(start, stop)
        return origins_of(keys_of(files, positions), files, positions)

    def labels(self) -> None:
        return None

    def view(self, start: int, stop: int) -> Mapping[str, npt.NDArray[Any]] | None:
        # A header of odd length leaves numbers where no engine may read them.
        return {self._spec.name: self._rows(start, stop)} if self._values.flags.aligned else None

    def _rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        self._check()
        return self._values[start:stop]

    def pieces(self, start: int, stop: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[Piece]:
        def copy() -> list[RowFailure]:
            staging[self._spec.name][:] = self._rows(start, stop)
            return []

        return [copy] if stop > start else []


def _check_whole(mapped: np.memmap[Any, Any], item: str) -> None:
    """Touching what is gone would end the process."""
    expected, nbytes = mapped.offset + mapped.nbytes, _file_of(mapped).size()
    if nbytes < expected:
        raise _shorter(item, expected, nbytes)


def _shorter(item: str, expected: int, nbytes: int) -> DatasetError:
    return _unusable("the file got shorter while it was read", item, f"{expected} bytes", f"{nbytes} bytes")


def _file_of(mapped: np.memmap[Any, Any]) -> mmap.mmap:
    """The very file that is mapped, whatever has taken its name since."""
    assert isinstance(mapped.base, mmap.mmap)
    return mapped.base


def _kind_of(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.batch_shape(0))}".replace("[0", "[rows")


def _unusable(what: str, item: str, expected: str, got: str) -> DatasetError:
    return DatasetError(
        what, stage="dataset", item=item, expected=expected, got=got, next_step="land the file again, as declared"
    )
