"""Image files as model inputs: `<root>/<day>/**/*.jpg`, one row a file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from gpu_runtime.datasets.decode import decode_image, open_decoders
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
from gpu_runtime.errors import RowError, SpecError
from gpu_runtime.specs import TensorSpec

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@dataclass(frozen=True)
class ImageFolderSource:
    """Each image becomes one uint8 row `[H, W, 3]` (RGB): its centre square, `crop_fraction` of the shorter
    side, resized. The row key is the path relative to the day's folder."""

    root: str
    inputs: tuple[TensorSpec, ...]
    crop_fraction: float = 0.875
    files_per_shard: int = 1_000

    def __post_init__(self) -> None:
        shape = self.inputs[0].shape if len(self.inputs) == 1 else ()
        if len(shape) != 3 or shape[2] != 3 or self.inputs[0].dtype != "uint8" or self.inputs[0].has_length:
            raise SpecError(
                "images fill one input",
                stage="dataset",
                item=", ".join(spec.name for spec in self.inputs),
                expected="one uint8 input of shape [H, W, 3]",
                got=", ".join(f"{spec.dtype} {spec.shape}" for spec in self.inputs),
            )

    def partition(self, day: str) -> DatasetPartition:
        folder = day_folder(Path(self.root), day)
        files = [FileFingerprint.of(path, folder) for path in day_files(folder, _SUFFIXES, hidden=(".", "_temporary"))]
        step, reading = self.files_per_shard, reading_of(self)
        shards = [tuple(files[start : start + step]) for start in range(0, len(files), step)]
        return DatasetPartition(
            day,
            tuple(
                ShardTask(day, index, str(folder), shard, len(shard), reading=reading)
                for index, shard in enumerate(shards)
            ),
        )

    def open(self, shard: ShardTask) -> ImageReader:
        # Pillow warns of damaged metadata by the file and of large pictures: a line for each rotten row of a night.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        open_decoders()  # each on one thread: as many pictures are decoded at once as there are workers
        return ImageReader(self, shard)

    def parts(self, shard: ShardTask) -> Iterator[ImageReader]:
        yield self.open(shard)


class ImageReader:
    lengths = order = None

    def __init__(self, source: ImageFolderSource, shard: ShardTask) -> None:
        self._source, self._shard = source, shard

    @property
    def rows(self) -> int:
        return len(self._shard.files)

    def origins(self, start: int, stop: int) -> Any:
        paths = [as_text(file.path) for file in self._shard.files[start:stop]]
        return origins_of(paths, paths, [0] * len(paths))

    def view(self, start: int, stop: int) -> None:
        return None

    def labels(self) -> None:
        return None

    def pieces(self, start: int, stop: int, staging: Mapping[str, npt.NDArray[Any]]) -> list[Piece]:
        # One file a piece: images vary so much in size that larger pieces would leave workers idle.
        rows = staging[self._source.inputs[0].name]
        return [lambda i=i: self._decode(i, i - start, rows) for i in range(start, stop)]  # type: ignore[misc]

    def _decode(self, index: int, row: int, rows: npt.NDArray[Any]) -> list[RowFailure]:
        path = Path(self._shard.folder) / self._shard.files[index].path
        try:
            decode_image(path, rows[row], self._source.crop_fraction)
        except RowError as error:
            rows[row] = 0
            cause = error.__cause__ or error
            return [RowFailure(row, error.stage, error.reason, type(cause).__name__)]
        return []
