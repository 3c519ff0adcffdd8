"""Samples: seeded, from every shard, rows and labels in step, and none that cannot be scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.datasets import sample
from gpu_runtime.datasets.parquet import ParquetReader
from gpu_runtime.datasets.sample import sample_digest, sample_rows
from gpu_runtime.errors import DatasetError

DAYS = ["2026-03-01", "2026-03-02"]


@pytest.fixture
def root(flights: Any, tmp_path: Path) -> Path:
    for seed, day in enumerate(DAYS):
        flights.write_day(tmp_path, day, 100, seed=seed, group=20)
    return tmp_path


def test_a_sample_is_the_same_for_the_same_seed(flights: Any, root: Path) -> None:
    source = flights.source(root)
    first, again, other = (sample_rows(source, DAYS, 30, seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first.inputs["numbers"], again.inputs["numbers"])
    assert first.digest == again.digest
    assert not np.array_equal(first.inputs["numbers"], other.inputs["numbers"])
    assert first.digest != other.digest


def test_a_sample_is_spread_over_the_days(flights: Any, root: Path) -> None:
    sample = sample_rows(flights.source(root, rows_per_shard=20), DAYS, 30, 0)
    taken = {tuple(row) for row in sample.inputs["numbers"].tolist()}
    assert sample.rows == len(taken) == 30
    for seed in range(2):
        numbers = flights.rows(100, seed)["numbers"].tolist()
        for start in range(0, 100, 20):
            assert len(taken & {tuple(row) for row in numbers[start : start + 20]}) == 3


def test_labels_stay_with_their_rows(flights: Any, root: Path) -> None:
    sample = sample_rows(flights.source(root), DAYS, 60, 0, labelled=True)
    assert sample.labels is not None
    np.testing.assert_array_equal(sample.labels, sample.inputs["numbers"][:, 0] > 0)


def test_a_source_without_labels_gives_none(flights: Any, root: Path) -> None:
    assert sample_rows(flights.source(root, label=None), DAYS, 60, 0, labelled=True).labels is None


def test_rows_that_cannot_be_read_are_left_out(flights: Any, root: Path) -> None:
    flights.write_day(root, DAYS[0], 100, a=[None if i % 2 else 5.0 for i in range(100)])
    sample = sample_rows(flights.source(root), DAYS[:1], 1000, 0)
    assert sample.rows == 50
    assert set(sample.inputs["numbers"][:, 0].tolist()) == {5.0}


def test_a_file_without_rows_costs_nothing(flights: Any, root: Path) -> None:
    flights.write_day(root, DAYS[0], 0, file="a.parquet")
    assert sample_rows(flights.source(root), DAYS, 30, 0).rows == 30


def test_days_without_a_usable_row_are_an_error_that_names_them(flights: Any, root: Path) -> None:
    flights.write_day(root, DAYS[0], 3, a=[None] * 3)
    with pytest.raises(DatasetError, match="no usable row") as caught:
        sample_rows(flights.source(root), DAYS[:1], 30, 0)
    assert caught.value.item == DAYS[0]


def test_the_digest_is_known_before_a_row_is_read_and_changes_with_the_files(flights: Any, root: Path) -> None:
    source = flights.source(root)
    before = sample_digest(source, DAYS, 30, 0)
    assert sample_rows(source, DAYS, 30, 0).digest == before
    flights.write_day(root, DAYS[1], 101, seed=1)
    assert sample_digest(source, DAYS, 30, 0) != before


def test_the_digest_changes_with_the_way_of_reading(flights: Any, root: Path) -> None:
    ways: list[dict[str, Any]] = [{}, {"label": None}, {"vocabularies": {"carrier": ("UA", "DL", "AA")}}]
    assert len({sample_digest(flights.source(root, **way), DAYS, 30, 0) for way in ways}) == 3


def test_batches_hold_every_row_once_in_order(flights: Any, root: Path) -> None:
    sample = sample_rows(flights.source(root), DAYS, 30, 0)
    parts = list(sample.batches(8))
    assert [len(part["numbers"]) for part in parts] == [8, 8, 8, 6]
    np.testing.assert_array_equal(np.concatenate([p["carrier"] for p in parts]), sample.inputs["carrier"])


@pytest.mark.parametrize("labelled", [True, False])
def test_a_shard_too_large_for_memory_is_read_as_far_as_it_is_drawn(
    flights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labelled: bool
) -> None:
    bad = [None if row % 3 == 0 else float(row) for row in range(60)]
    flights.write_day(tmp_path, DAYS[0], 60, a=bad)
    source, read = flights.source(tmp_path), list[tuple[int, int]]()
    pieces = ParquetReader.pieces

    def counted(reader: ParquetReader, start: int, stop: int, staging: Any) -> Any:
        read.append((start, stop))
        return pieces(reader, start, stop, staging)

    monkeypatch.setattr(ParquetReader, "pieces", counted)
    monkeypatch.setattr(sample, "_WHOLE_NBYTES", 100)
    drawn = sample_rows(source, DAYS[:1], 10, 0, labelled=labelled)
    rows = [int(value) for value in drawn.inputs["numbers"][:, 0]]
    assert drawn.rows == len(set(rows)) == 10 and rows == sorted(rows) and all(row % 3 for row in rows)
    assert all(stop == start + 1 for start, stop in read) and len(read) < 40
    assert (drawn.labels is not None) is labelled
    assert sample_rows(source, DAYS[:1], 99, 0).rows == 40
