"""Arrays in `.npy` files as the model's input: `<root>/<day>/*.npy`, their first axis the rows."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.datasets.partition import (
    DatasetPartition,
    FileFingerprint,
    Piece,
    RowFailure,
    ShardTask,
    as_text,
    day_files,
    day_folder,
    is_special,
    origins_of,
    reading_of,
)
from gpu_runtime.errors import DatasetError, SpecError
from gpu_runtime.specs import TensorSpec


@dataclass(frozen=True)
class ArrayFolderSource:
    """Each file holds rows of the one input, as `[rows, *shape]` in its dtype. Files are mapped, never read whole; on
    a device that shares the host's memory the engine takes a full batch from where it lies in the file. A file that is
    cut short at that very moment ends the process, as any mapped file does; the next run goes on.

    The row key is the file's name and the row's position in it, `part-0.npy#17`. `rows_per_shard` cuts large files.
    """

    root: str
    inputs: tuple[TensorSpec, ...]
    rows_per_shard: int = 100_000

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
        shards: list[ShardTask] = []
        for path in day_files(folder, (".npy",), hidden=(".", "_")):
            fingerprint = FileFingerprint.of(path, folder)
            rows = len(self._map(path, f"{day}/{as_text(fingerprint.path)}"))
            for first in range(0, rows, self.rows_per_shard):
                last = min(first + self.rows_per_shard, rows)
                task = ShardTask(day, len(shards), str(folder), (fingerprint,), last - first, (first, last), reading)
                shards.append(task)
        return DatasetPartition(day, tuple(shards))

    def open(self, shard: ShardTask) -> ArrayReader:
        file = shard.files[0].path
        assert shard.span is not None
        mapped = self._map(Path(shard.folder) / file, f"{shard.day}/{as_text(file)}")
        return ArrayReader(self.inputs[0], mapped, shard.span, shard.day, as_text(file))

    def _map(self, path: Path, item: str) -> np.memmap[Any, Any]:
        """The file's array, mapped. Raises `DatasetError` unless it is what was declared."""
        (spec,) = self.inputs
        try:
            if is_special(path):
                raise OSError("not a regular file")
            with np.errstate(over="ignore"):  # of a header that counts more than there can be
                found = np.lib.format.open_memmap(path, mode="c")  # private: no engine can write to the file
        except Exception as error:  # OSError and ValueError, but a damaged header raises what it likes
            kind = type(error).__name__
            raise _unusable("not a readable .npy file", item, f"an array {_kind_of(spec)}", kind) from error
        if found.dtype != spec.numpy_dtype or found.shape[1:] != spec.shape or found.ndim != 1 + len(spec.shape):
            got = f"{found.dtype} {list(found.shape)}"
            raise _unusable("the file holds another array", item, f"an array {_kind_of(spec)}", got)
        if not found.flags.c_contiguous:
            raise _unusable("the file's rows do not lie one behind the other", item, "C order", "Fortran order")
        whole, nbytes = found.offset + found.nbytes, _file_of(found).size()
        if nbytes != whole:  # rows were appended, or the header counts too few: those behind would be left out
            raise _unusable("the file does not end where its array ends", item, f"{whole} bytes", f"{nbytes} bytes")
        return found


class ArrayReader:
    """A mapped part of one file."""

    lengths = order = None

    def __init__(
        self, spec: TensorSpec, mapped: np.memmap[Any, Any], span: tuple[int, int], day: str, file: str
    ) -> None:
        self._spec, self._values, self._offset = spec, np.asarray(mapped)[slice(*span)], span[0]
        self._day, self._file = day, file
        self._opened, self._nbytes = _file_of(mapped), mapped.offset + mapped.nbytes

    @property
    def rows(self) -> int:
        return len(self._values)

    def origins(self, start: int, stop: int) -> Any:
        positions = range(self._offset + start, self._offset + stop)
        return origins_of([f"{self._file}#{position}" for position in positions], self._file, positions)

    def labels(self) -> None:
        return None

    def view(self, start: int, stop: int) -> Mapping[str, npt.NDArray[Any]] | None:
        # A header of odd length leaves numbers where no engine may read them.
        return {self._spec.name: self._rows(start, stop)} if self._values.flags.aligned else None

    def _rows(self, start: int, stop: int) -> npt.NDArray[Any]:
        nbytes = self._opened.size()
        if nbytes < self._nbytes:  # touching what is gone would end the process
            item = f"{self._day}/{self._file}"
            raise _unusable("the file got shorter while it was read", item, f"{self._nbytes} bytes", f"{nbytes} bytes")
        return self._values[start:stop]

    def pieces(self, start: int, stop: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[Piece]:
        def copy() -> list[RowFailure]:
            staging[self._spec.name][:] = self._rows(start, stop)
            return []

        return [copy] if stop > start else []


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
