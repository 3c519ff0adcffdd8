"""Parquet days: a bad file is an error that names it, a bad row is a hole that names its column."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.datasets.partition import RowFailure, check_unchanged, numpy_rows
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
    assert [(s.index, s.files[0].path, s.row_groups) for s in shards] == [
        (0, "a.parquet", (0, 1)),
        (1, "b.parquet", (0, 1)),
        (2, "b.parquet", (1, 2)),
        (3, "b.parquet", (2, 3)),
    ]
    last, _, reader = numpy_rows(source, shards[3])
    np.testing.assert_array_equal(last["numbers"], flights.rows(25, seed=1)["numbers"][20:])
    origin = reader.origin(4)
    assert (origin.key, origin.file, origin.position) == ("flight-1-24", "b.parquet", 24)


@pytest.mark.parametrize("row_key", ["id", None])
def test_the_origins_of_a_batch_are_those_of_its_rows(flights: Any, tmp_path: Path, row_key: str | None) -> None:
    flights.write_day(tmp_path, DAY, 25, group=10, id=[None if i == 14 else f"flight-{i}" for i in range(25)])
    source = flights.source(tmp_path, rows_per_shard=10, row_key=row_key)
    reader = source.open(source.partition(DAY).shards[1])
    keys, files, positions = reader.origins(3, 8)
    assert [tuple(origin) for origin in zip(keys, files, positions, strict=True)] == [
        (o.key, o.file, o.position) for o in map(reader.origin, range(3, 8))
    ]


def test_small_row_groups_share_a_shard(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 25, group=5)
    shards = flights.source(tmp_path, rows_per_shard=10).partition(DAY).shards
    assert [shard.row_groups for shard in shards] == [(0, 2), (2, 4), (4, 5)]


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
    keys = [[read(flights.source(tmp_path, row_key=key))[2].origin(i).key for i in range(3)] for key in ("id", None)]
    assert keys == [["x", "part-0.parquet#1", "z"], [f"part-0.parquet#{i}" for i in range(3)]]


def test_rows_without_a_label_have_nan(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 3, late=[1, None, 0])
    np.testing.assert_array_equal(read(flights.source(tmp_path))[2].labels(), [1.0, np.nan, 0.0])
    assert read(flights.source(tmp_path, label=None))[2].labels() is None


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.uint16(), pa.float16(), pa.float64(), pa.bool_()])
def test_any_number_fits_a_float_input(tmp_path: Path, kind: Any) -> None:
    values, reasons = one_column(tmp_path, FLOAT, pa.array([0, 1, 1], pa.int64()).cast(kind))
    assert values.tolist() == [0.0, 1.0, 1.0]
    assert reasons == {}


def test_a_dictionary_of_text_is_text(flights: Any, tmp_path: Path) -> None:
    flights.write_day(tmp_path, DAY, 3, carrier=pa.array(["UA", "AA", None]).dictionary_encode())
    rows, failures, _ = read(flights.source(tmp_path))
    assert rows["carrier"].tolist()[:2] == [2, 0]
    assert [(f.row, f.reason) for f in failures] == [(2, "column 'carrier' is null")]


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
    ],
    ids=str,
)
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
    with pytest.raises(DatasetError, match="column 'b' is missing") as caught:
        read(flights.source(tmp_path))
    assert caught.value.item == f"{DAY}/part-0.parquet"


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
    "change",
    [
        {"b": ["1.5", "2.5"]},
        {"b": [Decimal("1.5"), Decimal("2.5")]},
        {"b": [datetime.date(2026, 1, 1)] * 2},
        {"b": [[1.0], [2.0]]},
        {"carrier": [0, 1]},
    ],
    ids=lambda change: next(iter(change)) + " " + type(next(iter(change.values()))[0]).__name__,
)
def test_a_column_of_another_type_is_an_error(flights: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    flights.write_day(tmp_path, DAY, 2, **change)
    with pytest.raises(DatasetError, match=f"column '{next(iter(change))}' has another type"):
        read(flights.source(tmp_path))


def test_a_file_that_is_no_parquet_is_an_error(flights: Any, tmp_path: Path) -> None:
    path = flights.write_day(tmp_path, DAY, 3)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DatasetError, match="not a readable Parquet file"):
        flights.source(tmp_path).partition(DAY)


def test_a_file_with_damaged_pages_is_an_error(flights: Any, tmp_path: Path) -> None:
    path = flights.write_day(tmp_path, DAY, 500)
    data = bytearray(path.read_bytes())
    data[4:2000] = b"\xff" * 1996
    path.write_bytes(data)
    with pytest.raises(DatasetError, match="cannot be read"):
        read(flights.source(tmp_path))


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
