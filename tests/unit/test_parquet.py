"""Parquet days: a bad file is an error that names it, a bad row is a hole that names its column."""

from __future__ import annotations

import datetime
import itertools
import os
import struct
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpu_runtime.datasets import parquet
from gpu_runtime.datasets.parquet import ParquetReader, ParquetSource
from gpu_runtime.datasets.partition import RowFailure, check_unchanged, numpy_rows, place_keys
from gpu_runtime.errors import DatasetError, SpecError
from gpu_runtime.specs import TensorSpec

DAY = "2026-03-01"
SECRET = 424242.5


def read(source: ParquetSource, day: str = DAY) -> tuple[dict[str, Any], list[RowFailure], Any]:
    return numpy_rows(source, source.partition(day).shards[0])


def day_of(root: Path, table: dict[str, Any], file: str = "part-0.parquet") -> Path:
    path = root / DAY / file
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path)
    return path


def refusal(source: ParquetSource) -> DatasetError:
    with pytest.raises(DatasetError) as caught:
        read(source)
    return caught.value


def broken_text(*cells: bytes) -> Any:
    """A text column whose cells are bytes that nobody checked."""
    ends = np.cumsum([0, *map(len, cells)]).astype(np.int32)
    return pa.Array.from_buffers(pa.string(), len(cells), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(cells))])


def one_column(root: Path, spec: TensorSpec, values: Any) -> tuple[Any, dict[int, str]]:
    """The column read as `spec`, and row → reason."""
    day_of(root, {"v": values})
    rows, failures, _ = read(ParquetSource(str(root), (spec,), {spec.name: ("v",)}))
    return rows[spec.name], {failure.row: failure.reason for failure in failures}


FLOAT, INT, BYTE = (TensorSpec("v", dtype) for dtype in ("float32", "int64", "uint8"))


# Good days


def test_columns_become_inputs(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 20)
    rows, failures, reader = read(flights.source(tmp_path))
    expected = flights.rows(20)
    np.testing.assert_array_equal(rows["numbers"], expected["numbers"])
    np.testing.assert_array_equal(rows["carrier"], expected["carrier"])
    assert failures == []
    assert reader.labels().tolist() == (expected["numbers"][:, 0] > 0).tolist()


def test_the_order_of_columns_and_extra_ones_do_not_matter(flights: Any, tmp_path: Path) -> None:
    path = flights.write_day(tmp_path, DAY, 20)
    table = pq.read_table(path).append_column("zz", pa.array(["extra"] * 20))
    pq.write_table(table.select(sorted(table.column_names, reverse=True)), path)
    rows, failures, _ = read(flights.source(tmp_path))
    np.testing.assert_array_equal(rows["numbers"], flights.rows(20)["numbers"])
    assert failures == []


def test_row_groups_and_files_become_shards_in_order(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 25, seed=1, file="b.parquet", group=10)
    flights.write_day(tmp_path, DAY, 5, seed=0, file="a.parquet")
    source = flights.source(tmp_path, rows_per_shard=10)
    shards = source.partition(DAY).shards
    assert [(s.index, s.files[0].path, s.span) for s in shards] == [
        (0, "a.parquet", (0, 1)),
        (1, "b.parquet", (0, 1)),
        (2, "b.parquet", (1, 2)),
        (3, "b.parquet", (2, 3)),
    ]
    last, _, reader = numpy_rows(source, shards[3])
    np.testing.assert_array_equal(last["numbers"], flights.rows(25, seed=1)["numbers"][20:])
    assert reader.origins(4, 5).to_pylist() == [
        {"row_key": "flight-1-24", "source_file": "b.parquet", "source_position": 24}
    ]


@pytest.mark.parametrize("row_key", ["id", None])
def test_the_origins_of_a_batch_are_those_of_its_rows(flights: Any, tmp_path: Path, row_key: str | None) -> None:
    flights.write_day(tmp_path, DAY, 25, group=10, id=[None if i == 14 else f"flight-{i}" for i in range(25)])
    source = flights.source(tmp_path, rows_per_shard=10, row_key=row_key)
    reader = source.open(source.partition(DAY).shards[1])
    places = range(13, 18)
    expected = [f"part-0.parquet#{i}" if i == 14 or row_key is None else f"flight-{i}" for i in places]
    assert list(reader.origins(3, 8).to_pydict().values()) == [expected, ["part-0.parquet"] * 5, list(places)]


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 3), (9_998, 10_002), (19_999, 30_001), (10**9 - 2, 10**9 + 2)])
def test_a_row_without_a_key_is_known_by_its_place(start: int, stop: int) -> None:
    keys = place_keys("é/part 0.parquet", start, stop)
    keys.validate(full=True)
    assert keys.to_pylist() == [f"é/part 0.parquet#{position}" for position in range(start, stop)]


@pytest.mark.parametrize("group", [1, 3, 4, 7, 23])
def test_a_shard_is_read_in_parts_of_whole_size_whatever_its_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 4)
    carriers = pa.array([["x", "y"][i % 2] for i in range(23)]).dictionary_encode()
    path = day_of(tmp_path, {})
    pq.write_table(pa.table({"v": np.arange(23), "c": carriers}), path, row_group_size=group)
    columns = {"v": ("v",), "w": ("c",)}
    inputs = (INT, TensorSpec("w", "int64"))
    source = ParquetSource(str(tmp_path), inputs, columns, vocabularies={"c": ("x", "y")}, rows_per_shard=10)
    for shard in source.partition(DAY).shards:
        whole, _, of_all = numpy_rows(source, shard)
        parts = list(source.parts(shard))
        assert [part.rows for part in parts[:-1]] == [4] * (len(parts) - 1) and 1 <= parts[-1].rows <= 4
        origins = [origin for part in parts for origin in part.origins(0, part.rows).to_pylist()]
        assert origins == of_all.origins(0, shard.rows).to_pylist()
        start = 0
        for part in parts:
            staging = {spec.name: np.zeros(part.rows, np.int64) for spec in inputs}
            assert [piece() for piece in part.pieces(0, part.rows, staging)] == [[]]
            for name, rows in staging.items():
                np.testing.assert_array_equal(rows, whole[name][start : start + part.rows])
            start += part.rows


def test_a_part_is_read_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 1_000)
    path = day_of(tmp_path, {})
    pq.write_table(pa.table({"v": np.arange(2_000)}), path, row_group_size=1_000, compression="none")
    chunk = pq.read_metadata(path).row_group(1).column(0)
    with path.open("r+b") as file:  # the second group's first page
        file.seek(chunk.dictionary_page_offset)
        file.write(bytes(8))
    source = ParquetSource(str(tmp_path), (INT,), {"v": ("v",)})
    parts = source.parts(source.partition(DAY).shards[0])
    assert next(parts).rows == 1_000
    with pytest.raises(DatasetError, match="columns cannot be read"):
        next(parts)


@pytest.mark.parametrize("promised", [3, 4, 6, 9])
def test_pages_of_other_rows_than_promised_are_an_error_before_the_last_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promised: int
) -> None:
    monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 4)
    day_of(tmp_path, {"v": np.arange(7)})
    source = ParquetSource(str(tmp_path), (INT,), {"v": ("v",)})
    (shard,) = source.partition(DAY).shards
    monkeypatch.setattr(parquet, "_rows_in", lambda _, groups: promised if groups else 0)
    seen = 0
    with pytest.raises(DatasetError, match="columns cannot be read"):
        for part in source.parts(shard):
            seen += part.rows
    assert seen < promised


def test_small_row_groups_share_a_shard(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 25, group=5)
    shards = flights.source(tmp_path, rows_per_shard=10).partition(DAY).shards
    assert [shard.span for shard in shards] == [(0, 2), (2, 4), (4, 5)]


def test_part_of_a_shard_can_be_read(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 20, a=[None if i == 12 else 0.5 for i in range(20)])
    source = flights.source(tmp_path)
    reader = source.open(source.partition(DAY).shards[0])
    staging = {"numbers": np.zeros((5, 4), np.float32), "carrier": np.zeros(5, np.int32)}
    failures = [failure for piece in reader.pieces(10, 15, staging) for failure in piece()]
    np.testing.assert_array_equal(staging["carrier"], flights.rows(20)["carrier"][10:15])
    assert [failure.row for failure in failures] == [2], "counted from the batch's first row"


def test_a_row_without_a_key_column_or_value_is_named_by_its_position(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 3, id=["x", None, "z"])
    keys = [read(flights.source(tmp_path, row_key=key))[2].origins(0, 3)["row_key"].to_pylist() for key in ("id", None)]
    assert keys == [["x", "part-0.parquet#1", "z"], [f"part-0.parquet#{i}" for i in range(3)]]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["x", "x", "y"], ["x", "x", "y"]),
        ([7, None, 8], ["7", "part-0.parquet#1", "8"]),
        (pa.array(["x", None, "y"]).dictionary_encode(), ["x", "part-0.parquet#1", "y"]),
        (pa.nulls(3), [f"part-0.parquet#{i}" for i in range(3)]),
        (broken_text(b"x", b"\xff\xfe", b"y"), ["x", "part-0.parquet#1", "y"]),
        (pa.array([0, 2**60, 1], pa.timestamp("us")), ["1970-01-01 00:00:00", "part-0.parquet#1", None]),
    ],
    ids=["twice", "numbers", "dictionary", "nulls", "no UTF-8", "after the year 9999"],
)
def test_a_key_that_is_null_or_unspeakable_is_replaced_by_the_position(
    flights: Any, tmp_path: Path, keys: Any, expected: list[str | None]
) -> None:
    flights.write_day(tmp_path, DAY, 3, id=keys)
    _, failures, reader = read(flights.source(tmp_path))
    found, _, positions = reader.origins(0, 3).to_pydict().values()
    assert [key for key, wanted in zip(found, expected, strict=True) if wanted] == [key for key in expected if key]
    assert (positions, reader.origins(0, 3)["row_key"].to_pylist(), failures) == ([0, 1, 2], found, [])


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (pa.array([1, 0, None]).dictionary_encode(), [1.0, 0.0, np.nan]),
        (pa.array([True, False, None]), [1.0, 0.0, np.nan]),
        (pa.nulls(3), [np.nan] * 3),
        (pa.array([2**53 + 1, 2**63 - 1, 1]), [2.0**53, 2.0**63, 1.0]),
    ],
    ids=["dictionary", "booleans", "nulls", "large"],
)
def test_labels_of_any_number_type_become_floats(flights: Any, tmp_path: Path, labels: Any, expected: Any) -> None:
    flights.write_day(tmp_path, DAY, 3, late=labels)
    np.testing.assert_array_equal(read(flights.source(tmp_path))[2].labels(), expected)


def test_rows_without_a_label_have_nan(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 3, late=[1, None, 0])
    np.testing.assert_array_equal(read(flights.source(tmp_path))[2].labels(), [1.0, np.nan, 0.0])
    assert read(flights.source(tmp_path, label=None))[2].labels() is None


@pytest.mark.parametrize("encode", [pa.array, lambda array: array.dictionary_encode()], ids=["plain", "dictionary"])
@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.int64(), pa.uint16(), pa.float16(), pa.float32(), pa.float64(), pa.bool_()], ids=str
)
@pytest.mark.parametrize("spec", [FLOAT, INT, BYTE, TensorSpec("v", "bool"), TensorSpec("v", "float16")], ids=str)
def test_any_number_fits_any_input(tmp_path: Path, spec: TensorSpec, kind: Any, encode: Any) -> None:
    values, reasons = one_column(tmp_path, spec, encode(pa.array([0, None, 1], pa.int64()).cast(kind)))
    assert values.tolist() == [0, 0, 1]
    assert reasons == {1: "column 'v' is null"}


@pytest.mark.parametrize(
    ("spec", "kind", "values"),
    [
        (FLOAT, pa.int64(), [2**53 + 1, 2**62 + 2**38 + 1, -(2**63)]),
        (FLOAT, pa.uint64(), [2**64 - 1, 2**63 + 2**39 + 1, 1]),
        (TensorSpec("v", "float16"), pa.int32(), [2049, 65504, -65504]),
        (FLOAT, pa.float64(), [0.1, 1e-46, 3.4028234e38]),
    ],
    ids=str,
)
def test_a_number_becomes_the_nearest_float(tmp_path: Path, spec: TensorSpec, kind: Any, values: list[Any]) -> None:
    made, reasons = one_column(tmp_path, spec, pa.array(values, kind))
    assert reasons == {}
    for row, value in zip(made, values, strict=True):
        with np.errstate(over="ignore"):
            neighbours = [np.nextafter(row, row.dtype.type(way)) for way in (-np.inf, np.inf)]
        off = abs(Fraction(float(row)) - Fraction(value))
        assert all(off <= abs(Fraction(float(n)) - Fraction(value)) for n in neighbours if np.isfinite(n))


@pytest.mark.parametrize(
    "carriers",
    [
        pa.array(["UA", "AA", None]).dictionary_encode(),
        pa.array(["UA", "AA", None], pa.large_string()),
        pa.array(["UA", "AA", None], pa.string_view()),
        pa.array(["UA", "AA", None], pa.large_string()).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
def test_text_of_any_kind_is_text(flights: Any, tmp_path: Path, carriers: Any) -> None:
    flights.write_day(tmp_path, DAY, 3, carrier=carriers)
    rows, failures, _ = read(flights.source(tmp_path))
    assert rows["carrier"].tolist()[:2] == [2, 0]
    assert [(f.row, f.reason) for f in failures] == [(2, "column 'carrier' is null")]


def test_empty_row_groups_between_others_hide_no_row(flights: Any, tmp_path: Path) -> None:
    whole = flights.table(30)
    (tmp_path / DAY).mkdir()
    with pq.ParquetWriter(tmp_path / DAY / "a.parquet", whole.schema) as writer:
        for start, stop in ((0, 0), (0, 10), (10, 10), (10, 10), (10, 30), (30, 30)):
            writer.write_table(whole.slice(start, stop - start))
    for rows_per_shard in (1, 15, 1000):
        source = flights.source(tmp_path, rows_per_shard=rows_per_shard)
        readers = [(numpy_rows(source, shard)) for shard in source.partition(DAY).shards]
        np.testing.assert_array_equal(
            np.concatenate([r["numbers"] for r, _, _ in readers]), flights.rows(30)["numbers"]
        )
        keys = [key for _, _, reader in readers for key in reader.origins(0, reader.rows)["row_key"].to_pylist()]
        assert keys == [f"flight-0-{i}" for i in range(30)]


def test_columns_that_nobody_needs_may_be_of_any_kind(flights: Any, tmp_path: Path) -> None:
    path = flights.write_day(tmp_path, DAY, 3, list=[[1], [2], None], struct=[{"a": 1}] * 3)
    table = pq.read_table(path)
    pq.write_table(
        table.append_column("twice", pa.array([1, 2, 3])).append_column("twice", pa.array(["x", "y", "z"])), path
    )
    rows, failures, _ = read(flights.source(tmp_path))
    np.testing.assert_array_equal(rows["numbers"], flights.rows(3)["numbers"])
    assert failures == []


def test_a_file_is_known_by_its_suffix_in_any_case_and_a_folder_is_none(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 3, file="table.parquet/part-0.PARQUET")
    flights.write_day(tmp_path, DAY, 3, file="table.parquet/_metadata.parquet")
    flights.write_day(tmp_path, DAY, 3, file="table.parquet/.part-1.parquet")
    assert [s.files[0].path for s in flights.source(tmp_path).partition(DAY).shards] == ["table.parquet/part-0.PARQUET"]


# Many small files


def small_days(flights: Any, root: Path, count: int = 7, rows: int = 3, **changes: Any) -> list[Path]:
    return [flights.write_day(root, DAY, rows, seed=i, file=f"part-{i}.parquet", **changes) for i in range(count)]


@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc of size 1 failed")])
def test_no_file_is_to_blame_for_a_lack_of_memory(
    flights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: MemoryError
) -> None:
    def fail(*given: Any) -> Any:
        raise error

    flights.write_day(tmp_path, DAY, 5)
    source = flights.source(tmp_path)
    (shard,) = source.partition(DAY).shards
    monkeypatch.setattr(parquet, "_without_dictionaries", fail)
    with pytest.raises(MemoryError):
        list(source.parts(shard))
    with pytest.raises(MemoryError):
        source.open(shard)


def test_small_files_share_a_shard_and_large_ones_do_not(flights: Any, tmp_path: Path) -> None:
    small_days(flights, tmp_path)
    flights.write_day(tmp_path, DAY, 25, file="part-4.parquet", group=10)

    def cut(**settings: Any) -> list[tuple[str, int, Any]]:
        shards = flights.source(tmp_path, **settings).partition(DAY).shards
        assert [shard.index for shard in shards] == list(range(len(shards)))
        return [("".join(f.path[5] for f in shard.files), shard.rows, shard.span) for shard in shards]

    large = [("4", 10, (0, 1)), ("4", 10, (1, 2)), ("4", 5, (2, 3))]
    assert cut(rows_per_shard=10) == [("012", 9, None), ("3", 3, (0, 1)), *large, ("56", 6, None)]
    assert cut(rows_per_shard=10, files_per_shard=2) == [("01", 6, None), ("23", 6, None), *large, ("56", 6, None)]
    assert cut() == [("0123456", 43, None)]
    # Five numbers and a category of up to 8 and 32 bytes, and a key: 96 bytes a row.
    # A large file is read in parts: its size needs no bound.
    assert cut(nbytes_per_shard=960) == [("012", 9, None), ("3", 3, (0, 1)), ("4", 25, (0, 3)), ("56", 6, None)]


@pytest.mark.parametrize("row_key", ["id", None])
def test_a_row_of_a_shared_shard_keeps_its_file_and_its_position_in_it(
    flights: Any, tmp_path: Path, row_key: str | None
) -> None:
    small_days(flights, tmp_path, rows=4)
    source = flights.source(tmp_path, row_key=row_key)
    (shard,) = source.partition(DAY).shards
    rows, failures, reader = numpy_rows(source, shard)
    expected = [flights.rows(4, seed=i) for i in range(7)]
    for name in rows:
        np.testing.assert_array_equal(rows[name], np.concatenate([one[name] for one in expected]))
    assert failures == []
    np.testing.assert_array_equal(reader.labels(), rows["numbers"][:, 0] > 0)
    for start, stop in ((0, 28), (0, 4), (2, 9), (3, 4), (24, 28), (5, 5)):
        places = [divmod(row, 4) for row in range(start, stop)]
        assert reader.origins(start, stop).to_pylist() == [
            {
                "row_key": f"flight-{file}-{row}" if row_key else f"part-{file}.parquet#{row}",
                "source_file": f"part-{file}.parquet",
                "source_position": row,
            }
            for file, row in places
        ]


def test_a_bad_row_of_a_shared_shard_is_found_in_its_batch(flights: Any, tmp_path: Path) -> None:
    small_days(flights, tmp_path)
    flights.write_day(tmp_path, DAY, 3, file="part-2.parquet", a=[0.5, None, 0.5])
    source = flights.source(tmp_path)
    reader = source.open(source.partition(DAY).shards[0])
    staging = {"numbers": np.zeros((5, 4), np.float32), "carrier": np.zeros(5, np.int32)}
    (failure,) = [failure for piece in reader.pieces(4, 9, staging) for failure in piece()]
    assert (failure.row, failure.reason) == (3, "column 'a' is null")
    assert reader.origins(7, 8).to_pylist()[0]["source_file"] == "part-2.parquet"


def test_files_of_unlike_types_share_a_shard_and_not_their_types(tmp_path: Path) -> None:
    """As float64, the only type that both would fit, the large integer would be another one."""
    large = 2**62 + 2**38 + 1
    day_of(tmp_path, {"v": pa.array([large, 1], pa.int64()), "y": [1, 2]}, "a.parquet")
    day_of(tmp_path, {"y": [3, 4, 5], "v": pa.array([0.5, None, np.nan], pa.float64())}, "b.parquet")
    day_of(tmp_path, {"v": pa.nulls(1), "y": [6]}, "c.parquet")
    day_of(tmp_path, {"v": pa.array([7, large], pa.int64()), "y": [7, 8]}, "d.parquet")
    source = ParquetSource(str(tmp_path), (FLOAT,), {"v": ("v",)}, label="y")
    (shard,) = source.partition(DAY).shards
    rows, failures, reader = numpy_rows(source, shard)
    (nearest,) = np.asarray([large]).astype(np.float32).tolist()
    assert rows["v"].tolist() == [nearest, 1, 0.5, 0, 0, 0, 7, nearest]
    reasons = {3: "column 'v' is null", 4: "column 'v' is not finite", 5: "column 'v' is null"}
    assert {failure.row: failure.reason for failure in failures} == reasons
    assert reader.labels().tolist() == list(range(1, 9))
    files = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("c", 0), ("d", 0), ("d", 1)]
    assert reader.origins(0, 8)["row_key"].to_pylist() == [f"{name}.parquet#{position}" for name, position in files]
    assert reader.origins(1, 3)["row_key"].to_pylist() == ["a.parquet#1", "b.parquet#0"]
    assert reader.view(0, 8) is None


def test_a_plain_column_of_small_files_is_handed_on_as_one(tmp_path: Path) -> None:
    for i in range(5):
        day_of(tmp_path, {"v": np.arange(4 * i, 4 * i + 4).astype(np.float32)}, f"{i}.parquet")
    source = ParquetSource(str(tmp_path), (FLOAT,), {"v": ("v",)})
    seen = source.open(source.partition(DAY).shards[0]).view(3, 18)
    assert seen is not None and seen["v"].tolist() == list(range(3, 18))


@pytest.mark.parametrize("bad", [0, 3, 150])
def test_a_damaged_file_among_many_is_named(flights: Any, tmp_path: Path, bad: int) -> None:
    """And the first, if there are several."""
    paths = [flights.write_day(tmp_path, DAY, 1, file=f"part-{i:03}.parquet") for i in range(151)]
    source = flights.source(tmp_path)
    shard = source.partition(DAY).shards[0]
    assert len(shard.files) == 151
    for path in {paths[bad], paths[150]}:
        flights.write_day(tmp_path, DAY, 1, file=path.name, b=None)
    with pytest.raises(DatasetError, match="the column 'b' is missing") as caught:
        source.open(shard)
    assert caught.value.item == f"{DAY}/part-{bad:03}.parquet"
    for path in {paths[bad], paths[150]}:
        path.write_bytes(path.read_bytes()[:-4])
    for refused in (lambda: source.open(shard), lambda: source.partition(DAY)):
        with pytest.raises(DatasetError) as caught:
            refused()
        assert caught.value.item == f"{DAY}/part-{bad:03}.parquet"


def test_each_file_of_a_shared_shard_counts_for_its_fingerprint(flights: Any, tmp_path: Path) -> None:
    small_days(flights, tmp_path)
    source = flights.source(tmp_path)
    before = source.partition(DAY)
    assert (before.files, len(before.shards)) == (7, 1) and source.partition(DAY).digest == before.digest
    flights.write_day(tmp_path, DAY, 3, seed=9, file="part-5.parquet")
    assert source.partition(DAY).shards[0].fingerprint != before.shards[0].fingerprint
    with pytest.raises(DatasetError, match="changed while") as caught:
        check_unchanged(before.shards[0])
    assert caught.value.item == f"{DAY}/part-5.parquet"


# Columns that are handed on as they lie


def view_of(root: Path, spec: TensorSpec, values: Any, start: int, stop: int, **settings: Any) -> Any:
    day_of(root, {"v": values})
    source = ParquetSource(str(root), (spec,), {spec.name: ("v",)}, **settings)
    return source.open(source.partition(DAY).shards[0]).view(start, stop)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "uint8", "int8", "int32", "int64"])
def test_a_plain_column_of_a_scalar_input_is_handed_on_as_it_lies(
    tmp_path: Path, dtype: Any, shape: tuple[int, ...]
) -> None:
    values = np.arange(20).astype(dtype)
    day_of(tmp_path, {"v": values})
    source = ParquetSource(str(tmp_path), (TensorSpec("v", dtype, shape, 0, 19),), {"v": ("v",)})
    reader = source.open(source.partition(DAY).shards[0])
    seen, all_of_it = reader.view(5, 9), reader.view(0, 20)
    assert seen is not None and all_of_it is not None
    assert (seen["v"].dtype, seen["v"].shape) == (np.dtype(dtype), (4, *shape))
    np.testing.assert_array_equal(seen["v"].reshape(-1), values[5:9])
    assert np.shares_memory(seen["v"], all_of_it["v"]) and seen["v"].flags.c_contiguous


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (FLOAT, pa.array([1.0, None, 2.0], pa.float32())),
        (FLOAT, pa.array([1.0, 2.0, 3.0], pa.float64())),
        (FLOAT, pa.array([1, 2, 3], pa.int32())),
        (FLOAT, pa.array([1.0, 2.0, 3.0], pa.float16())),
        (TensorSpec("v", "float16"), pa.array([1.0, 2.0, 3.0], pa.float16())),
        (TensorSpec("v", "int32"), pa.array([1, 2, 3], pa.int64())),
        (BYTE, pa.array([1, 2, 3], pa.int8())),
        (TensorSpec("v", "bool"), pa.array([True, False, True])),
        (TensorSpec("v", "bool"), pa.array([1, 0, 1], pa.uint8())),
        (FLOAT, pa.nulls(3)),
    ],
    ids=str,
)
def test_a_column_that_is_not_what_the_engine_takes_is_filled_in(tmp_path: Path, spec: TensorSpec, values: Any) -> None:
    assert view_of(tmp_path, spec, values, 0, 3) is None


def test_a_batch_that_breaks_its_range_is_filled_in_so_that_its_column_is_named(tmp_path: Path) -> None:
    spec = TensorSpec("v", "float32", (), -1.0, 1.0)
    for bad in (np.nan, np.inf, 1.5, -1.5):
        values = np.asarray([0.5, 0.5, bad, 0.5], np.float32)
        assert view_of(tmp_path, spec, values, 0, 4) is None and view_of(tmp_path, spec, values, 0, 2) is not None
    ids = pa.array([0, 9, 10, 3], pa.int32())
    assert view_of(tmp_path, TensorSpec("v", "int32", (), 0, 9), ids, 1, 3) is None


def test_columns_of_one_type_are_handed_on_side_by_side(tmp_path: Path) -> None:
    columns = {name: np.arange(6, dtype=np.float32) + 10 * place for place, name in enumerate("abc")}
    day_of(tmp_path, columns)
    source = ParquetSource(str(tmp_path), (TensorSpec("v", "float32", (3,), 0, 24),), {"v": ("c", "a", "b")})
    reader = source.open(source.partition(DAY).shards[0])
    seen = reader.view(2, 5)
    assert seen is not None and seen["v"].flags.c_contiguous
    np.testing.assert_array_equal(seen["v"], np.stack([columns[name][2:5] for name in "cab"], axis=1))
    assert reader.view(2, 6) is None, "its last row breaks the range, and has to be told from the others"


def test_ids_of_a_vocabulary_and_columns_of_several_types_are_filled_in(flights: Any, tmp_path: Path) -> None:
    assert view_of(tmp_path, INT, ["x", "y"], 0, 2, vocabularies={"v": ("x", "y")}) is None
    flights.write_day(tmp_path, "2026-03-02", 3)
    source = flights.source(tmp_path)
    assert source.open(source.partition("2026-03-02").shards[0]).view(0, 3) is None
    day_of(tmp_path, {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float64)})
    two = ParquetSource(str(tmp_path), (FLOAT, TensorSpec("w", "float32")), {"v": ("a",), "w": ("b",)})
    assert two.open(two.partition(DAY).shards[0]).view(0, 3) is None, "all inputs of a batch, or none"


# Bad rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"b": [1.0, None, 2.0]}, "column 'b' is null"),
        ({"b": [1.0, float("nan"), 2.0]}, "column 'b' is not finite"),
        ({"d": [1.0, float("inf"), 2.0]}, "column 'd' is not finite"),
        ({"d": [1.0, -float("inf"), 2.0]}, "column 'd' is not finite"),
        ({"a": [1.0, 1e39, 2.0]}, "column 'a' does not fit float32"),
        ({"a": [1.0, -1e300, 2.0]}, "column 'a' does not fit float32"),
        ({"carrier": ["AA", "ZZ-SECRET", "UA"]}, "column 'carrier' holds an unknown category"),
        ({"carrier": ["AA", "", "UA"]}, "column 'carrier' holds an unknown category"),
        ({"carrier": ["AA", None, "UA"]}, "column 'carrier' is null"),
        ({"carrier": broken_text(b"AA", b"\xff\xfe", b"UA")}, "column 'carrier' holds an unknown category"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_value_costs_its_row_and_names_its_column(
    flights: Any, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    flights.write_day(tmp_path, DAY, 3, **change)
    _, failures, _ = read(flights.source(tmp_path))
    assert [(failure.row, failure.stage, failure.reason) for failure in failures] == [(1, "input", reason)]


def test_a_row_with_several_bad_values_is_one_failure(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 2, a=[None, 1.0], b=[None, 1.0], carrier=["ZZ", "AA"])
    _, failures, _ = read(flights.source(tmp_path))
    assert [failure.row for failure in failures] == [0]


def test_a_reason_never_holds_the_value(tmp_path: Path) -> None:
    spec = TensorSpec("v", "int32", (), 0, 10)
    _, reasons = one_column(tmp_path, spec, [SECRET, 3.0, SECRET + 0.5])
    assert reasons.keys() == {0, 2}
    assert not any("4242" in reason for reason in reasons.values())


@pytest.mark.parametrize(
    ("spec", "values", "bad"),
    [
        (TensorSpec("v", "int32", (), 0, 10), [-1, 0, 10, 11], [0, 3]),
        (TensorSpec("v", "float32", (), -1.0, 1.0), [-1.5, -1.0, 1.0, 1.5], [0, 3]),
        (BYTE, [-1, 0, 255, 256], [0, 3]),
        (BYTE, [-0.5, 0.0, 255.0, 255.5], [0, 3]),
        (INT, [0.5, 1.0], [0]),
        (INT, [2.0**63, 2.0**62], [0]),
        (INT, [-(2.0**63), -(2.0**64)], [1]),
        (INT, pa.array([2**64 - 1, 2**63 - 1], pa.uint64()), [0]),
        (INT, pa.array([2**63 - 1, -(2**63)], pa.int64()), []),
        (TensorSpec("v", "int32"), [2**31, 2**31 - 1, -(2**31), -(2**31) - 1], [0, 3]),
        (TensorSpec("v", "int32"), [2**53 + 1, -(2**63), 2**31 - 1], [0, 1]),
        (TensorSpec("v", "int32"), pa.array([2**64 - 1, 2**31, 2**31 - 1], pa.uint64()), [0, 1]),
        (TensorSpec("v", "int32"), pa.array([0.5, 65504.0, 1.0], pa.float16()), [0]),
        (TensorSpec("v", "bool"), [0, 1, 2, -1], [2, 3]),
        (TensorSpec("v", "bool"), [0.0, 1.0, 0.5], [2]),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error")
def test_a_number_outside_its_range_or_type_never_reaches_the_device(
    tmp_path: Path, spec: TensorSpec, values: Any, bad: list[int]
) -> None:
    made, reasons = one_column(tmp_path, spec, values)
    assert reasons == dict.fromkeys(bad, "column 'v' is outside its declared range or type")
    kept = [row for row in range(len(values)) if row not in bad]
    given = pa.array(values).to_pylist()
    assert [int(made[row]) for row in kept if spec.dtype != "float32"] == [
        int(given[row]) for row in kept if spec.dtype != "float32"
    ]
    assert all(made[row] == 0 for row in bad), "an id outside the table must not stay in the batch"


def test_a_value_too_large_for_its_float_does_not_stay_in_the_batch(tmp_path: Path) -> None:
    made, reasons = one_column(tmp_path, TensorSpec("v", "float16"), [65504.0, 65520.0, -1e6])
    assert made.tolist() == [65504.0, 0.0, 0.0]
    assert reasons == dict.fromkeys((1, 2), "column 'v' does not fit float16")


@pytest.mark.filterwarnings("error")
def test_an_overflow_quarantines_its_row_alone(tmp_path: Path) -> None:
    """Also where the whole batch is copied first, and only looked at by row because of what became infinite."""
    made, reasons = one_column(tmp_path, FLOAT, [1.5, 1e39, -1e300, 3.4028234e38, 2.5])
    assert made.tolist() == [1.5, 0.0, 0.0, float(np.float32(3.4028234e38)), 2.5]
    assert reasons == dict.fromkeys((1, 2), "column 'v' does not fit float32")


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.int64(), pa.uint8()], ids=str)
def test_a_batch_of_plain_columns_is_not_looked_at_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    columns = {"a": pa.array([1, 2, 3], kind), "b": pa.array([4, 5, 6], kind)}
    monkeypatch.setattr(ParquetReader, "_values", None)
    day_of(tmp_path, columns)
    rows, failures, _ = read(ParquetSource(str(tmp_path), (TensorSpec("v", "float32", (2,)),), {"v": ("a", "b")}))
    assert (rows["v"].tolist(), failures) == ([[1, 4], [2, 5], [3, 6]], [])


@pytest.mark.parametrize("spoilt", ["a", "b"])
def test_the_column_that_is_to_blame_is_named_among_those_of_its_input(tmp_path: Path, spoilt: str) -> None:
    columns = {"a": pa.array([1, 2, 3], pa.int64()), "b": pa.array([4, 5, 6], pa.int64())}
    columns[spoilt] = pa.array([1, 2**31, 3], pa.int64())
    day_of(tmp_path, columns)
    source = ParquetSource(str(tmp_path), (TensorSpec("v", "int32", (2,)),), {"v": ("a", "b")})
    rows, failures, _ = read(source)
    reason = f"column '{spoilt}' is outside its declared range or type"
    assert failures == [RowFailure(1, "input", reason, "ValueError")]
    assert rows["v"][[0, 2]].tolist() == [[1, columns["b"][0].as_py()], [3, columns["b"][2].as_py()]]


@pytest.mark.parametrize("kind", [pa.null(), pa.float64(), pa.int32(), pa.bool_()])
def test_a_column_of_nulls_quarantines_every_row(tmp_path: Path, kind: Any) -> None:
    _, reasons = one_column(tmp_path, FLOAT, pa.array([None, None], kind))
    assert reasons == {0: "column 'v' is null", 1: "column 'v' is null"}


@pytest.mark.parametrize("kind", [pa.null(), pa.string()])
def test_a_text_column_of_nulls_quarantines_every_row(flights: Any, tmp_path: Path, kind: Any) -> None:
    flights.write_day(tmp_path, DAY, 2, carrier=pa.array([None, None], kind))
    _, failures, _ = read(flights.source(tmp_path))
    assert [failure.reason for failure in failures] == ["column 'carrier' is null"] * 2


# Bad files and days


def test_a_missing_column_is_named_with_its_file(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 3, b=None)
    error = refusal(flights.source(tmp_path))
    assert (error.item, error.what) == (f"{DAY}/part-0.parquet", "the column 'b' is missing")
    assert (error.expected, error.got) == ("one column each of a, b, c, d, carrier, id", "a, c, carrier, d, id, late")


def test_a_file_without_columns_is_an_error(flights: Any, tmp_path: Path) -> None:
    day_of(tmp_path, {"v": [1]})
    pq.write_table(pq.read_table(tmp_path / DAY).select([]), tmp_path / DAY / "part-0.parquet")
    assert refusal(flights.source(tmp_path)).got == "no column"


def test_the_key_must_be_there_too(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 3, id=None)
    with pytest.raises(DatasetError, match="column 'id' is missing"):
        read(flights.source(tmp_path))


def test_a_day_whose_labels_have_not_come_can_be_scored_but_not_judged(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 3, late=None)
    source = flights.source(tmp_path)
    reader = source.open(source.partition(DAY).shards[0])
    assert reader.rows == 3
    with pytest.raises(DatasetError, match="label column 'late' is missing"):
        reader.labels()


def test_a_label_that_is_no_number_is_an_error(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 2, late=["yes", "no"])
    source = flights.source(tmp_path)
    with pytest.raises(DatasetError, match="column 'late' has another type"):
        source.open(source.partition(DAY).shards[0]).labels()


@pytest.mark.parametrize(
    ("column", "values", "expected", "got"),
    [
        ("b", ["1.5", "2.5"], "a number", "string"),
        ("b", pa.array(["1.5", "2.5"]).dictionary_encode(), "a number", "dictionary"),
        ("b", [Decimal("1.5"), Decimal("2.5")], "a number", "decimal128"),
        ("b", [datetime.date(2026, 1, 1)] * 2, "a number", "date32"),
        ("b", pa.array([1, 2], pa.timestamp("us")), "a number", "timestamp"),
        ("b", pa.array([1, 2], pa.duration("us")), "a number", "duration"),
        ("b", [b"1", b"2"], "a number", "binary"),
        ("b", [[1.0], [2.0]], "a number", "list"),
        ("b", [{"x": 1.0}, {"x": 2.0}], "a number", "struct"),
        ("carrier", [0, 1], "text", "int64"),
        ("carrier", [b"AA", b"UA"], "text", "binary"),
        ("carrier", [["AA"], ["UA"]], "text", "list"),
        ("id", [["x"], ["y"]], "one value a row", "list"),
        ("id", [{"x": 1}, {"x": 2}], "one value a row", "struct"),
    ],
    ids=str,
)
def test_a_column_of_another_type_is_an_error(
    flights: Any, tmp_path: Path, column: str, values: Any, expected: str, got: str
) -> None:
    flights.write_day(tmp_path, DAY, 2, **{column: values})
    error = refusal(flights.source(tmp_path))
    assert f"column {column!r} has another type" in error.what
    assert (error.item, error.expected) == (f"{DAY}/part-0.parquet", expected)
    assert error.got is not None and error.got.startswith(got)


def test_a_key_that_is_an_input_too_must_be_a_number(tmp_path: Path) -> None:
    day_of(tmp_path, {"v": ["1", "2"]})
    assert refusal(ParquetSource(str(tmp_path), (FLOAT,), {"v": ("v",)}, row_key="v")).expected == "a number"


@pytest.mark.parametrize("column", ["b", "id", "late"])
def test_a_column_that_stands_twice_in_a_file_is_an_error(flights: Any, tmp_path: Path, column: str) -> None:
    path = flights.write_day(tmp_path, DAY, 3)
    table = pq.read_table(path)
    pq.write_table(table.append_column(column, table.column(column)), path)
    source = flights.source(tmp_path)
    with pytest.raises(DatasetError, match=f"column '{column}' is ambiguous") as caught:
        read(source)[2].labels()
    assert caught.value.item == f"{DAY}/part-0.parquet"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"<html>SECRET</html>" * 9,
        lambda data: data[:-4],
        lambda data: data[: len(data) // 2],
        lambda data: data[: len(data) // 2] + data[-400:],
        lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1",
        lambda data: data[:-200] + bytes(192) + data[-8:],
    ],
    ids=["empty", "page", "no end", "half", "no middle", "endless footer", "footer of zeros"],
)
def test_a_file_that_is_no_whole_parquet_is_an_error(flights: Any, tmp_path: Path, damage: Any) -> None:
    path = flights.write_day(tmp_path, DAY, 300)
    path.write_bytes(damage(path.read_bytes()))
    error = refusal(flights.source(tmp_path))
    assert (error.item, error.expected) == (f"{DAY}/part-0.parquet", "a whole Parquet file")
    assert "SECRET" not in str(error)


def test_a_link_to_nowhere_is_an_error(flights: Any, tmp_path: Path) -> None:
    (tmp_path / DAY).mkdir()
    (tmp_path / DAY / os.fsdecode(b"caf\xe9.parquet")).symlink_to("gone")
    error = refusal(flights.source(tmp_path))
    assert error.item == rf"{DAY}/caf\udce9.parquet"


def test_a_file_with_damaged_pages_is_an_error(flights: Any, tmp_path: Path) -> None:
    path = flights.write_day(tmp_path, DAY, 500)
    data = bytearray(path.read_bytes())
    data[4:2000] = b"\xff" * 1996
    path.write_bytes(data)
    with pytest.raises(DatasetError, match="cannot be read"):
        read(flights.source(tmp_path))


def test_a_flipped_bit_under_a_checksum_is_an_error(tmp_path: Path) -> None:
    path = day_of(tmp_path, {"v": [1.0]})
    table = pa.table({"v": np.full(100, 1.5)})
    pq.write_table(table, path, write_page_checksum=True, use_dictionary=False, compression="NONE")
    data = bytearray(path.read_bytes())
    data[data.index(struct.pack("<d", 1.5) * 9)] ^= 1
    path.write_bytes(data)
    assert "cannot be read" in str(refusal(ParquetSource(str(tmp_path), (FLOAT,), {"v": ("v",)})))


def test_a_footer_that_counts_other_rows_is_an_error(tmp_path: Path) -> None:
    """Every count in the footer, first the file's and last its row group's, says 1000 or, as a lie, 1001."""
    path = day_of(tmp_path, {"v": np.arange(1000.0), "k": np.arange(1000)})
    source = ParquetSource(str(tmp_path), (FLOAT,), {"v": ("v",)}, row_key="k")
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = [i for i in range(footer, len(data) - 8) if data[i : i + 2] == b"\xd0\x0f"]
    assert len(places) >= 4
    for lies in itertools.product([False, True], repeat=len(places)):
        lying = bytearray(data)
        for place in itertools.compress(places, lies):
            lying[place : place + 2] = b"\xd2\x0f"
        path.write_bytes(lying)
        try:
            rows, failures, reader = read(source)
        except DatasetError:
            continue
        assert not lies[0] and not lies[-1]
        assert (rows["v"].tolist(), failures, reader.rows) == (list(range(1000)), [], 1000)


@pytest.mark.parametrize("column", ["b", "carrier", "id", "late"])
def test_a_cell_beyond_its_dictionary_is_an_error(flights: Any, tmp_path: Path, column: str) -> None:
    text = pa.array(["AA", "UA", "AA"] * 500 + ["DL"]).dictionary_encode()
    path = flights.write_day(
        tmp_path, DAY, 1501, **{column: text if column in ("carrier", "id") else [1, 2, 1] * 500 + [3]}
    )
    table = pq.read_table(path)
    pq.write_table(table, path, compression="NONE", use_dictionary=[column])
    data = bytearray(path.read_bytes())
    ids = data.index(b"\x04\x41\x10" * 20)  # the ids 0, 1, 0 over and over, at two bits each
    data[ids + 6] = 0xFF
    path.write_bytes(data)
    source = flights.source(tmp_path)
    with pytest.raises(DatasetError, match="cannot be read"):
        read(source)[2].labels()


def test_a_file_that_vanished_is_an_error(flights: Any, tmp_path: Path) -> None:
    path = flights.write_day(tmp_path, DAY, 3)
    source = flights.source(tmp_path)
    shard = source.partition(DAY).shards[0]
    path.unlink()
    with pytest.raises(DatasetError):
        source.open(shard)


def test_a_file_that_changed_while_it_was_scored_is_an_error(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 3)
    shard = flights.source(tmp_path).partition(DAY).shards[0]
    check_unchanged(shard)
    flights.write_day(tmp_path, DAY, 4)
    with pytest.raises(DatasetError, match="changed while"):
        check_unchanged(shard)


def test_a_day_without_a_folder_is_an_error_that_says_what_an_empty_day_is(flights: Any, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="a day without rows is an empty folder"):
        flights.source(tmp_path).partition(DAY)


def test_a_day_that_is_no_date_is_an_error(flights: Any, tmp_path: Path) -> None:
    (tmp_path / "..").mkdir(exist_ok=True)
    with pytest.raises(DatasetError, match="not a day"):
        flights.source(tmp_path).partition("../elsewhere")


def test_an_empty_folder_is_an_empty_day(flights: Any, tmp_path: Path) -> None:
    (tmp_path / DAY).mkdir()
    assert flights.source(tmp_path).partition(DAY).shards == ()


def test_a_file_without_rows_is_read_as_such(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 0)
    for shard in flights.source(tmp_path).partition(DAY).shards:
        rows, failures, _ = numpy_rows(flights.source(tmp_path), shard)
        assert (rows["numbers"].shape, failures) == ((0, 4), [])


def test_a_partition_knows_its_files_and_changes_with_them(flights: Any, tmp_path: Path) -> None:
    paths = [flights.write_day(tmp_path, DAY, 20, file=f"{name}.parquet", group=10) for name in "ab"]
    source = flights.source(tmp_path, rows_per_shard=10)
    before = source.partition(DAY)
    assert len(before.shards) == 4
    assert (before.files, before.nbytes) == (2, sum(path.stat().st_size for path in paths))
    assert source.partition(DAY).digest == before.digest
    flights.write_day(tmp_path, DAY, 20, seed=1, file="b.parquet", group=10)
    assert source.partition(DAY).digest != before.digest


def test_columns_that_do_not_fill_the_input_are_refused(flights: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="4 columns"):
        flights.source(tmp_path, columns={"numbers": ("a", "b"), "carrier": ("carrier",)})


def test_what_other_tools_have_not_finished_is_left_out(tmp_path: Path, flights: Any) -> None:
    for folder in ("_temporary/0", ".staging"):
        flights.write_day(tmp_path, f"{DAY}/{folder}", 5)
    flights.write_day(tmp_path, DAY, 3)
    assert [shard.rows for shard in flights.source(tmp_path).partition(DAY).shards] == [3]


def test_a_day_in_another_format_is_no_empty_day(tmp_path: Path, flights: Any) -> None:
    (tmp_path / DAY).mkdir(parents=True)
    (tmp_path / DAY / "rows.csv").write_text("a\n1\n")
    with pytest.raises(DatasetError, match=r"has files, and none that is read.*the first rows\.csv"):
        flights.source(tmp_path).partition(DAY)
    (tmp_path / DAY / "rows.csv").rename(tmp_path / DAY / "_SUCCESS")
    assert flights.source(tmp_path).partition(DAY).shards == ()


def test_no_shard_is_larger_than_asked_unless_a_row_group_is(tmp_path: Path, flights: Any) -> None:
    import pyarrow.parquet as pq

    flights.write_day(tmp_path, DAY, 1)
    with pq.ParquetWriter(tmp_path / DAY / "part-0.parquet", flights.table(1).schema) as writer:
        for count in (9, 100, 5, 5, 1):
            writer.write_table(flights.table(count))
    assert [shard.rows for shard in flights.source(tmp_path, rows_per_shard=10).partition(DAY).shards] == [
        9,
        100,
        10,
        1,
    ]


def test_a_pipe_among_the_files_is_named_and_not_waited_for(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 5)
    os.mkfifo(tmp_path / DAY / "pipe.parquet")
    with pytest.raises(DatasetError, match=r"pipe.parquet: not a regular file"):
        flights.source(tmp_path).partition(DAY)


@pytest.mark.parametrize(
    ("cell", "column"),
    [(1 + 1e-9, pa.float64()), (-1e-60, pa.float64()), (16_777_217, pa.int64())],
    ids=["a little above", "a little below", "more than float32 tells apart"],
)
@pytest.mark.parametrize("neighbour", ["good", "bad"])
def test_whether_a_row_is_good_does_not_depend_on_its_neighbours(
    tmp_path: Path, cell: float, column: pa.DataType, neighbour: str
) -> None:
    """The batch is another in every run; the cell lies outside the range by less than the input's type tells."""
    spec = TensorSpec("x", "float32", (), 0, 16_777_216 if column == pa.int64() else 1)
    (tmp_path / DAY).mkdir()
    pq.write_table(
        pa.table({"x": pa.array([cell, 100_000_000 if neighbour == "bad" else 1], column)}),
        tmp_path / DAY / "a.parquet",
    )
    source = ParquetSource(str(tmp_path), (spec,), {"x": ("x",)})
    failures = numpy_rows(source, source.partition(DAY).shards[0])[1]
    assert [failure.row for failure in failures] == ([0, 1] if neighbour == "bad" else [0])
