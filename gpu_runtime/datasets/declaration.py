"""What a dataset looks like, as it is declared in configuration, and the source that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gpu_runtime.datasets.array_folder import ArrayFolderSource
from gpu_runtime.datasets.image_folder import ImageFolderSource
from gpu_runtime.datasets.item_folder import ItemFolderSource
from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.datasets.partition import Source, reading_of
from gpu_runtime.errors import SpecError
from gpu_runtime.specs import ModelSpec, digest_of

_ROWS_OF_LENGTH = 100_000
"""In a shard. Rows that differ in length are scored out of order, and their results held until the shard is done."""


_READ: Mapping[str, frozenset[str]] = {
    "parquet": frozenset({"columns", "vocabularies", "row_key", "label", "tokenizer", "truncate"}),
    "images": frozenset({"crop_fraction"}),
    "arrays": frozenset(),
}
"""Format → the keys that it reads beside those which all formats do."""


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset with one folder a day under `<data root>/<name>/`. The fields are those of its source.

    `rows_per_shard`: the most that a run which dies has to score again; without it, what suits the format.
    """

    name: str
    format: Literal["parquet", "images", "arrays"]
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    vocabularies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    row_key: str | None = None
    label: str | None = None
    crop_fraction: float = 0.875
    tokenizer: str | None = None
    truncate: bool = False
    rows_per_shard: int | None = None

    def __post_init__(self) -> None:
        read = _READ[self.format]
        for one in fields(self):
            given = getattr(self, one.name)
            if one.name in {name for names in _READ.values() for name in names} - read and given != _default(one):
                raise SpecError(
                    f"datasets of format {self.format} do not read it",
                    stage="defs.yaml",
                    item=f"dataset.{one.name}",
                    expected=", ".join(sorted(read)) or "none of a format's own keys",
                    got=one.name,
                    next_step="leave it out, or name another format",
                )

    def source(self, data_root: Path, model: ModelSpec) -> Source:
        """Where the model's inputs come from."""
        root, inputs, longest = str(data_root / self.name), model.inputs, model.max_length
        rows = {} if self.rows_per_shard is None else {"rows_per_shard": self.rows_per_shard}
        if self.format == "arrays" and longest is not None:
            return ItemFolderSource(root, inputs, longest, *rows.values())
        if self.format == "arrays":
            return ArrayFolderSource(root, inputs, **rows)
        if self.format == "images":
            return ImageFolderSource(root, inputs, self.crop_fraction, *rows.values())
        if longest is not None:
            rows.setdefault("rows_per_shard", _ROWS_OF_LENGTH)
        return ParquetSource(
            root,
            inputs,
            self.columns,
            self.vocabularies,
            self.row_key,
            self.label,
            tokenizer=self.tokenizer,
            max_length=longest,
            truncate=self.truncate,
            **rows,
        )


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def declaration_of(model: ModelSpec, source: Source) -> str:
    """Digest of the model's spec and of how its rows are read: what a gate's verdict holds for."""
    return digest_of({"model": model.digest, "reading": reading_of(source)})
