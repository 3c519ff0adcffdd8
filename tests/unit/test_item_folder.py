"""Arrays of unequal length, one a file: each is a row with its own values, and a bad file costs its row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.datasets.declaration import DatasetSpec
from gpu_runtime.datasets.item_folder import ItemFolderSource
from gpu_runtime.datasets.partition import numpy_rows
from gpu_runtime.errors import SpecError
from gpu_runtime.specs import ModelSpec, OnnxSource, TensorSpec

DAY = "2026-03-01"
VOLUME = TensorSpec("volume", "int16", (2, -1, 3), minimum=-10)
MASK = TensorSpec("mask", "float32", (-1,), mask=True)


def volume(slices: int, value: int) -> Any:
    return np.full((2, slices, 3), value, np.int16)


def land(root: Path, files: dict[str, Any]) -> ItemFolderSource:
    for name, content in files.items():
        path = root / DAY / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            np.save(path, content)
    return ItemFolderSource(str(root), (VOLUME, MASK), 8)


def test_each_file_is_a_row_padded_along_its_own_dimension(tmp_path: Path) -> None:
    source = land(tmp_path, {"a.npy": volume(2, 7), "b/c.npy": volume(5, 8), "d.npy": volume(2, 9)})
    (shard,) = source.partition(DAY).shards
    rows, failures, reader = numpy_rows(source, shard)
    assert failures == [] and reader.lengths is not None and reader.lengths.tolist() == [5, 2, 2]
    assert rows["volume"].shape == (3, 2, 5, 3) and rows["mask"].shape == (3, 5)
    for row, (value, slices) in enumerate([(8, 5), (7, 2), (9, 2)]):
        assert (rows["volume"][row, :, :slices] == value).all() and (rows["volume"][row, :, slices:] == 0).all()
        assert rows["mask"][row].tolist() == [1.0] * slices + [0.0] * (5 - slices)
    assert reader.origins(0, 3)["row_key"].to_pylist() == ["b/c.npy", "a.npy", "d.npy"]
    assert reader.order is not None and reader.order.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a readable .npy file"),
        (b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i2'}", "not a readable .npy file"),
        (volume(9, 1), "longer than 8"),
        (volume(0, 1), "is empty"),
        (volume(2, 1).astype(np.int32), "another array than int16 [2, -1, 3]"),
        (volume(2, 1)[0], "another array than int16"),
        (volume(2, 1)[:, :, :2], "another array than int16"),
    ],
)
def test_a_bad_file_costs_its_row_alone(tmp_path: Path, content: Any, reason: str) -> None:
    source = land(tmp_path, {"a.npy": volume(2, 7), "bad.npy": content, "c.npy": volume(3, 9)})
    (shard,) = source.partition(DAY).shards
    rows, failures, reader = numpy_rows(source, shard)
    assert [reader.origins(one.row, one.row + 1)["row_key"].to_pylist() for one in failures] == [["bad.npy"]]
    assert reason in failures[0].reason
    assert (rows["volume"] >= -10).all() and set(rows["volume"].max(axis=(1, 2, 3)).tolist()) == {0, 7, 9}


def test_files_are_packed_into_shards(tmp_path: Path) -> None:
    land(tmp_path, {f"{n}.npy": volume(1 + n, n) for n in range(5)})
    source = ItemFolderSource(str(tmp_path), (VOLUME, MASK), 8, files_per_shard=2)
    assert [[file.path for file in shard.files] for shard in source.partition(DAY).shards] == [
        ["0.npy", "1.npy"], ["2.npy", "3.npy"], ["4.npy"],
    ]  # fmt: skip


def test_arrays_of_unequal_length_are_declared_by_the_models_shape(tmp_path: Path) -> None:
    model = ModelSpec("m", "1", OnnxSource("m.onnx"), (VOLUME, MASK), ("y",), max_length=8)
    for key, value in {"columns": {"x": ("a",)}, "tokenizer": "t.json", "truncate": True, "crop_fraction": 0.5}.items():
        with pytest.raises(SpecError, match=f"dataset.{key}: datasets of format arrays do not read it"):
            DatasetSpec("scans", "arrays", **{key: value})  # type: ignore[arg-type]
    assert DatasetSpec("scans", "arrays").source(tmp_path, model) == ItemFolderSource(
        str(tmp_path / "scans"), (VOLUME, MASK), 8
    )
    with pytest.raises(SpecError, match="fill one input"):
        ItemFolderSource("days", (VOLUME, TensorSpec("age", "float32")), 8)
