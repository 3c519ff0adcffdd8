"""Arrays of unequal length as the model's input: `<root>/<day>/**/*.npy`, one row a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.datasets.batching import longest_first
from gpu_runtime.datasets.npy import Header, open_npy
from gpu_runtime.datasets.partition import (
    DatasetPartition,
    FileFingerprint,
    Piece,
    RowFailure,
    ShardTask,
    as_text,
    day_files,
    day_folder,
    origins_of,
    reading_of,
)
from gpu_runtime.errors import SpecError
from gpu_runtime.specs import LENGTH, TensorSpec


@dataclass(frozen=True)
class ItemFolderSource:
    """Each file holds one row of the one input that differs in length, in its dtype: `[*shape]`, where the dimension
    `-1` may be 1 … `max_length`. A file that is anything else is a row that is quarantined. The row key is the path
    relative to the day's folder."""

    root: str
    inputs: tuple[TensorSpec, ...]
    max_length: int
    files_per_shard: int = 1_000

    def __post_init__(self) -> None:
        if [spec.has_length for spec in self.inputs if not spec.mask] != [True]:
            raise SpecError(
                "arrays of unequal length fill one input",
                stage="dataset",
                item=", ".join(spec.name for spec in self.inputs),
                expected="one input with a dimension -1, beside its mask",
                got=", ".join(str(spec.shape) for spec in self.inputs),
            )

    @property
    def values(self) -> TensorSpec:
        """The input that the files fill."""
        return next(spec for spec in self.inputs if not spec.mask)

    def partition(self, day: str) -> DatasetPartition:
        folder, reading, step = day_folder(Path(self.root), day), reading_of(self), self.files_per_shard
        files = [FileFingerprint.of(path, folder) for path in day_files(folder, (".npy",), hidden=(".", "_"))]
        packs = [tuple(files[start : start + step]) for start in range(0, len(files), step)]
        tasks = (
            ShardTask(day, number, str(folder), pack, len(pack), reading=reading) for number, pack in enumerate(packs)
        )
        return DatasetPartition(day, tuple(tasks))

    def open(self, shard: ShardTask) -> ItemReader:
        return ItemReader(self, shard)

    def parts(self, shard: ShardTask) -> Iterator[ItemReader]:
        yield self.open(shard)


class ItemReader:
    """A shard's files, longest first. Their headers are read when it is opened, their values with each batch."""

    def __init__(self, source: ItemFolderSource, shard: ShardTask) -> None:
        self._source, self._folder = source, Path(shard.folder)
        self._axis = source.values.shape.index(LENGTH)
        found = np.asarray([self._length_of(self._folder / file.path) for file in shard.files], np.int64)
        self.order = longest_first(found)
        self.lengths = found[self.order]
        self._files = [shard.files[row].path for row in self.order]

    @property
    def rows(self) -> int:
        return len(self._files)

    def origins(self, start: int, stop: int) -> Any:
        paths = [as_text(path) for path in self._files[start:stop]]
        return origins_of(paths, paths, [0] * len(paths))

    def labels(self) -> None:
        return None

    def view(self, start: int, stop: int) -> None:
        return None

    def pieces(self, start: int, stop: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[Piece]:
        return [lambda row=row: self._fill(row, row - start, staging) for row in range(start, stop)]  # type: ignore[misc]

    def _fill(self, row: int, place: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[RowFailure]:
        spec, failure = self._source.values, list[RowFailure]()
        for one in self._source.inputs:
            staging[one.name][place] = 0 if one.mask else one.filler
        part = (slice(None),) * self._axis + (slice(int(self.lengths[row])),)
        try:
            with open_npy(self._folder / self._files[row]) as file:
                if reason := self._refusal(file.header):
                    failure = [RowFailure(place, "input", reason, "ValueError")]
                else:
                    staging[spec.name][place][part] = file.read()
        except Exception as error:  # OSError and ValueError, but a damaged header raises what it likes
            failure = [RowFailure(place, "input", "the file is not a readable .npy file", type(error).__name__)]
        for one in self._source.inputs:
            if one.mask:
                staging[one.name][place, : self.lengths[row]] = 1
        return failure

    def _refusal(self, array: Header) -> str | None:
        """Why the array is no row of the input."""
        spec, longest = self._source.values, self._source.max_length
        fits = len(array.shape) == len(spec.shape) and all(
            n in (LENGTH, m) for n, m in zip(spec.shape, array.shape, strict=True)
        )
        if array.dtype != spec.numpy_dtype or not fits:
            return f"the file holds another array than {spec.dtype} {list(spec.shape)}"
        if not 1 <= array.shape[self._axis] <= longest:
            return f"the file holds an array that is empty, or longer than {longest}"
        return None

    def _length_of(self, path: Path) -> int:
        """1 for a file that is no row: it is said so when its batch is read."""
        try:
            with open_npy(path) as file:
                return 1 if self._refusal(file.header) else file.header.shape[self._axis]
        except Exception:
            return 1
