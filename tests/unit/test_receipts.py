"""Receipts: a shard counts as done only if everything it was made from is the same and its file is whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_runtime.artifacts import file_digest
from gpu_runtime.datasets.partition import FileFingerprint, ShardTask
from gpu_runtime.predictions.receipts import QuarantinedRow, Receipt, ReceiptStore, day_key, resume_key
from gpu_runtime.predictions.storage import Folder

DAY = "2026-03-01"
SHARD = ShardTask(DAY, 3, "/somewhere", (FileFingerprint("a.parquet", 10, 123),), 11, (0, 2))


@pytest.fixture
def receipts(tmp_path: Path) -> ReceiptStore:
    return ReceiptStore(Folder(tmp_path / "receipts"), Folder(tmp_path / "table"))


@pytest.fixture
def receipt(receipts: ReceiptStore, tmp_path: Path) -> Receipt:
    """Written, with its data file."""
    file = tmp_path / "table" / "date" / "part.parquet"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"rows" * 10)
    rotten = QuarantinedRow("key-1", "a.parquet", 7, "input", "column 'a' is null", "ValueError")
    made = Receipt(DAY, 3, "key", "run", "date/part.parquet", 40, file_digest(file), 11, 10, (rotten,))
    receipts.write(made)
    return made


def test_a_receipt_comes_back_as_it_was(receipts: ReceiptStore, receipt: Receipt) -> None:
    assert receipts.find(DAY, 3, "key") == receipt


@pytest.mark.parametrize("asked", [(DAY, 3, "other key"), ("2026-03-02", 3, "key")])
def test_another_key_or_day_finds_nothing(receipts: ReceiptStore, receipt: Receipt, asked: Any) -> None:
    assert receipts.find(*asked) is None


@pytest.mark.parametrize("content", [None, b"rows" * 9, b"sowr" + b"rows" * 9])
def test_a_missing_or_damaged_data_file_is_not_done(
    receipts: ReceiptStore, receipt: Receipt, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "table" / receipt.file
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    assert receipts.find(DAY, 3, "key") is None


@pytest.mark.parametrize("content", ["", '{"day": "2026', "{}", "[]", '{"day": "2026-03-01", "quarantined": []}'])
def test_a_receipt_that_cannot_be_read_is_none(
    receipts: ReceiptStore, receipt: Receipt, tmp_path: Path, content: str
) -> None:
    (tmp_path / "receipts" / DAY / "key.json").write_text(content)
    assert receipts.find(DAY, 3, "key") is None


@pytest.mark.parametrize("change", [{"rows": 9}, {"rows_in": "11"}, {"nbytes": "40"}, {"quarantined": []}])
def test_a_receipt_whose_counts_do_not_add_up_is_none(
    receipts: ReceiptStore, receipt: Receipt, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "receipts" / DAY / "key.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert receipts.find(DAY, 3, "key") is None


def test_a_shard_is_found_wherever_it_is_in_the_day_now(receipts: ReceiptStore, receipt: Receipt) -> None:
    assert receipts.find(DAY, 7, "key") == replace(receipt, shard=7)


def test_receipts_whose_file_is_gone_can_be_removed(receipts: ReceiptStore, receipt: Receipt) -> None:
    receipts.write(replace(receipt, resume_key="void", file="date/gone.parquet"))
    assert receipts.remove_void() == [f"{DAY}/void.json"]
    assert receipts.find(DAY, 3, "key") == receipt


@pytest.mark.parametrize(
    ("shard", "scoring", "schema"),
    [
        (replace(SHARD, files=(FileFingerprint("a.parquet", 11, 123),)), "scoring", "schema"),
        (replace(SHARD, files=(FileFingerprint("a.parquet", 10, 124),)), "scoring", "schema"),
        (replace(SHARD, files=(FileFingerprint("b.parquet", 10, 123),)), "scoring", "schema"),
        (replace(SHARD, span=(0, 3)), "scoring", "schema"),
        (replace(SHARD, reading="other columns"), "scoring", "schema"),
        (SHARD, "other engine", "schema"),
        (SHARD, "scoring", "other schema"),
    ],
)
def test_any_change_of_files_scoring_or_schema_is_another_key(shard: ShardTask, scoring: str, schema: str) -> None:
    assert resume_key(shard, scoring, schema) != resume_key(SHARD, "scoring", "schema")


def test_where_the_files_lie_does_not_matter() -> None:
    moved = replace(SHARD, folder="/elsewhere")
    assert resume_key(moved, "scoring", "schema") == resume_key(SHARD, "scoring", "schema")


@pytest.mark.parametrize(
    ("shards", "scoring", "schema"),
    [
        ([SHARD, replace(SHARD, index=4)], "scoring", "schema"),
        ([replace(SHARD, span=(0, 3))], "scoring", "schema"),
        ([], "scoring", "schema"),
        ([SHARD], "other engine", "schema"),
        ([SHARD], "scoring", "other schema"),
    ],
)
def test_a_days_key_is_that_of_all_its_shards(shards: list[ShardTask], scoring: str, schema: str) -> None:
    assert day_key(shards, scoring, schema) != day_key([SHARD], "scoring", "schema")
    assert day_key(shards, scoring, schema) == day_key(shards, scoring, schema)


def test_an_empty_days_key_depends_on_engine_and_schema() -> None:
    assert len({day_key([], *of) for of in (("a", "b"), ("x", "b"), ("a", "x"))}) == 3


def test_rows_that_the_engine_failed_on_are_known_and_still_done(receipts: ReceiptStore, receipt: Receipt) -> None:
    """Whether such a shard is tried again is for scoring to say."""
    failed = replace(receipt.quarantined[0], stage="engine", reason="the engine failed on this row")
    written = replace(receipt, rows_in=12, quarantined=(*receipt.quarantined, failed))
    receipts.write(written)
    assert receipts.find(DAY, 3, "key") == written
    assert written.failed_in("engine") and not receipt.failed_in("engine")


def test_a_withdrawn_shard_is_not_done_and_the_others_are(receipts: ReceiptStore, receipt: Receipt) -> None:
    other = replace(receipt, shard=4, resume_key="other")
    receipts.write(other)
    receipts.withdraw([receipt, replace(receipt, shard=5, resume_key="never written")])
    assert receipts.find(DAY, 3, "key") is None
    assert receipts.find(DAY, 4, "other") == other
