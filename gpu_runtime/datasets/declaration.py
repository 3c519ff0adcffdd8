"""What a dataset looks like, as it is declared in configuration, and the source that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gpu_runtime.datasets.array_folder import ArrayFolderSource
from gpu_runtime.datasets.image_folder import ImageFolderSource
from gpu_runtime.datasets.item_folder import ItemFolderSource
from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.datasets.partition import Source, reading_of
from gpu_runtime.specs import ModelSpec, digest_of

_ROWS_PER_SHARD, _ROWS_OF_LENGTH_PER_SHARD = 1_000_000, 100_000
"""Rows that differ in length, and their results, are held until their shard is done: they are scored out of order."""


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
    tokenizer: str | None = None
    truncate: bool = False

    def source(self, data_root: Path, model: ModelSpec) -> Source:
        """Where the model's inputs come from."""
        root, inputs = str(data_root / self.name), model.inputs
        if self.format == "arrays":
            return (
                ItemFolderSource(root, inputs, model.max_length)
                if model.max_length
                else ArrayFolderSource(root, inputs)
            )
        if self.format == "images":
            return ImageFolderSource(root, inputs, self.crop_fraction)
        return ParquetSource(
            root,
            inputs,
            self.columns,
            self.vocabularies,
            self.row_key,
            self.label,
            rows_per_shard=_ROWS_PER_SHARD if model.max_length is None else _ROWS_OF_LENGTH_PER_SHARD,
            tokenizer=self.tokenizer,
            max_length=model.max_length,
            truncate=self.truncate,
        )


def declaration_of(model: ModelSpec, source: Source) -> str:
    """Digest of the model's spec and of how its rows are read: what a gate's verdict holds for."""
    return digest_of({"model": model.digest, "reading": reading_of(source)})
