"""What a dataset looks like, as it is declared in configuration, and the source that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gpu_runtime.datasets.array_folder import ArrayFolderSource
from gpu_runtime.datasets.image_folder import ImageFolderSource
from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.datasets.partition import Source, reading_of
from gpu_runtime.specs import ModelSpec, TensorSpec, digest_of


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset with one folder a day under `<data root>/<name>/`. The fields are those of its source."""

    name: str
    format: Literal["parquet", "images", "arrays"]
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    vocabularies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    row_key: str | None = None
    label: str | None = None
    crop_fraction: float = 0.875

    def source(self, data_root: Path, inputs: tuple[TensorSpec, ...]) -> Source:
        root = str(data_root / self.name)
        if self.format == "arrays":
            return ArrayFolderSource(root, inputs)
        if self.format == "images":
            return ImageFolderSource(root, inputs, self.crop_fraction)
        return ParquetSource(root, inputs, self.columns, self.vocabularies, self.row_key, self.label)


def declaration_of(model: ModelSpec, source: Source) -> str:
    """Digest of the model's spec and of how its rows are read: what a gate's verdict holds for."""
    return digest_of({"model": model.digest, "reading": reading_of(source)})
