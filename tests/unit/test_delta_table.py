"""The predictions table: a day appears whole or not at all, and no day is published twice at once."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deltalake import DeltaTable

from gpu_runtime.errors import PublicationConflictError, SpecError
from gpu_runtime.predictions.delta_table import PredictionSchema, PredictionTable, label_column
from gpu_runtime.predictions.receipts import QuarantinedRow, Receipt
from gpu_runtime.specs import TensorSpec

MONDAY, TUESDAY = "2026-03-02", "2026-03-03"
SCHEMA = PredictionSchema((TensorSpec("score", "float32"),), {})
TOP = PredictionSchema(
    (TensorSpec("top_index", "int32", (2,)), TensorSpec("top_score", "float32", (2,))),
    {"top_index": ("cat", "dog", "owl")},
)
ROTTEN = QuarantinedRow("key-x", "a.parquet", 9, "input", "column 'a' is null", "ValueError")


def receipt_of(
    table: PredictionTable,
    day: str,
    scores: list[float],
    *,
    shard: int = 0,
    rotten: tuple[QuarantinedRow, ...] = (),
    schema: PredictionSchema = SCHEMA,
    outputs: Mapping[str, Any] | None = None,
) -> Receipt:
    """A shard's file as scoring leaves it, and its receipt."""
    count = len(scores)
    writer = table.shard_writer(schema, day, shard, "engine", "run")
    if count:
        keys = [f"key-{shard}-{i}" for i in range(count)]
        writer.append(keys, ["a.parquet"] * count, list(range(count)), outputs or {"score": np.asarray(scores)})
    nbytes, sha256 = writer.finish()
    return Receipt(day, shard, "key", "run", writer.file, nbytes, sha256, count + len(rotten), count, rotten)


def publish(
    table: PredictionTable,
    day: str,
    *receipts: Receipt,
    previous: str | None = None,
    schema: PredictionSchema = SCHEMA,
    report: Mapping[str, Any] | None = None,
) -> str:
    return table.publish(schema, day, receipts, "run", report or {}, previous)


def scores_of(table: PredictionTable, day: str) -> list[float]:
    return sorted(table.read_day(day)["score"].tolist())


@pytest.fixture
def table(tmp_path: Path) -> PredictionTable:
    return PredictionTable(tmp_path / "table")


class Interrupted(PredictionTable):
    """Somebody else does something after this publisher has read the table and before it commits."""

    def __init__(self, root: Path, meanwhile: Callable[[], Any]) -> None:
        super().__init__(root)
        self._meanwhile = meanwhile

    def _append_run(self, *args: Any) -> None:
        super()._append_run(*args)
        self._meanwhile()


# Publishing


def test_a_published_day_holds_the_rows_of_all_its_shards(table: PredictionTable) -> None:
    receipts = [receipt_of(table, MONDAY, [0.25, 0.5]), receipt_of(table, MONDAY, [0.75], shard=1)]
    publication = publish(table, MONDAY, *receipts)
    frame = table.read_day(MONDAY).sort_values("row_key")
    assert frame["row_key"].tolist() == ["key-0-0", "key-0-1", "key-1-0"]
    assert frame["score"].tolist() == [0.25, 0.5, 0.75]
    assert frame["source_position"].tolist() == [0, 1, 0]
    assert set(frame["date"]) == {datetime.date(2026, 3, 2)}
    assert set(frame["engine_digest"]) == {"engine"}
    assert table.current_publication(MONDAY) == publication
    assert table.count_day(MONDAY) == (3, 0)


def test_replacing_a_day_leaves_the_other_days(table: PredictionTable) -> None:
    first = publish(table, MONDAY, receipt_of(table, MONDAY, [0.5]))
    publish(table, TUESDAY, receipt_of(table, TUESDAY, [0.125]))
    second = publish(table, MONDAY, receipt_of(table, MONDAY, [0.75, 1.0]), previous=first)
    assert scores_of(table, MONDAY) == [0.75, 1.0]
    assert scores_of(table, TUESDAY) == [0.125]
    assert table.current_publication(MONDAY) == second != first


def test_an_older_reader_is_not_disturbed(table: PredictionTable) -> None:
    first = publish(table, MONDAY, receipt_of(table, MONDAY, [0.5]))
    reader = DeltaTable(table.predictions)
    publish(table, MONDAY, receipt_of(table, MONDAY, [0.75]), previous=first)
    assert reader.to_pandas()["score"].tolist() == [0.5]


def test_an_empty_day_is_an_empty_typed_partition_with_a_publication(table: PredictionTable) -> None:
    publication = publish(table, MONDAY, report={"rows_in": 0})
    assert table.current_publication(MONDAY) == publication
    assert table.count_day(MONDAY) == (0, 0)
    frame = table.read_day(MONDAY)
    assert (len(frame), frame["score"].dtype) == (0, np.float32)
    assert table.read_run(MONDAY) == {"rows_in": 0}


def test_a_day_published_with_rows_can_become_empty(table: PredictionTable) -> None:
    first = publish(table, MONDAY, receipt_of(table, MONDAY, [0.5]))
    publish(table, MONDAY, previous=first)
    assert table.count_day(MONDAY) == (0, 0)


def test_a_shard_without_a_scored_row_is_published_with_the_rest(table: PredictionTable) -> None:
    receipts = [receipt_of(table, MONDAY, [], rotten=(ROTTEN,)), receipt_of(table, MONDAY, [0.5], shard=1)]
    publish(table, MONDAY, *receipts)
    assert table.count_day(MONDAY) == (1, 1)


def test_a_file_that_no_publication_names_is_not_read(table: PredictionTable) -> None:
    receipt_of(table, MONDAY, [9.0], shard=7)  # left behind by a run that died
    publish(table, MONDAY, receipt_of(table, MONDAY, [0.5]))
    assert scores_of(table, MONDAY) == [0.5]


def test_a_day_never_published_has_no_publication_and_no_run(table: PredictionTable) -> None:
    assert (table.current_publication(MONDAY), table.read_run(MONDAY)) == (None, None)
    publish(table, TUESDAY)
    assert (table.current_publication(MONDAY), table.read_run(MONDAY)) == (None, None)


def test_the_run_report_is_that_of_the_publication_in_force(table: PredictionTable) -> None:
    first = publish(table, MONDAY, report={"run": 1})
    publish(table, MONDAY, receipt_of(table, MONDAY, [0.5]), previous=first, report={"run": 2})
    publish(table, TUESDAY, report={"run": 3})
    assert table.read_run(MONDAY) == {"run": 2}


# Conflicts


def test_a_day_published_since_it_was_read_is_a_conflict_and_stays(table: PredictionTable) -> None:
    first = publish(table, MONDAY, receipt_of(table, MONDAY, [0.5]))
    for stale in (None, "another"):
        with pytest.raises(PublicationConflictError):
            publish(table, MONDAY, receipt_of(table, MONDAY, [0.75]), previous=stale)
    assert scores_of(table, MONDAY) == [0.5]
    assert table.current_publication(MONDAY) == first


@pytest.mark.parametrize("exists", [False, True], ids=["first publication", "replacement"])
def test_two_publications_of_a_day_at_once_never_both_succeed(table: PredictionTable, exists: bool) -> None:
    publish(table, TUESDAY, receipt_of(table, TUESDAY, [0.125]))
    first = publish(table, MONDAY, receipt_of(table, MONDAY, [0.25])) if exists else None
    other = PredictionTable(table.root)
    slow = Interrupted(table.root, lambda: publish(other, MONDAY, receipt_of(other, MONDAY, [0.5]), previous=first))
    with pytest.raises(PublicationConflictError):
        publish(slow, MONDAY, receipt_of(slow, MONDAY, [0.75]), previous=first)
    assert scores_of(table, MONDAY) == [0.5]
    assert scores_of(table, TUESDAY) == [0.125]


def test_another_days_commit_in_between_is_no_conflict(table: PredictionTable) -> None:
    publish(table, MONDAY, receipt_of(table, MONDAY, [0.25]))
    other = PredictionTable(table.root)
    slow = Interrupted(table.root, lambda: publish(other, TUESDAY, receipt_of(other, TUESDAY, [0.5])))
    publish(slow, MONDAY, receipt_of(slow, MONDAY, [0.75]), previous=table.current_publication(MONDAY))
    assert scores_of(table, MONDAY) == [0.75]
    assert scores_of(table, TUESDAY) == [0.5]


# Quarantine


def test_quarantined_rows_are_those_of_the_publication_in_force(table: PredictionTable) -> None:
    first = publish(table, MONDAY, receipt_of(table, MONDAY, [0.5], rotten=(ROTTEN,)))
    frame = table.read_quarantine(MONDAY)
    assert frame[["row_key", "source_file", "source_position", "stage", "reason"]].values.tolist() == [
        ["key-x", "a.parquet", 9, "input", "column 'a' is null"]
    ]
    publish(table, TUESDAY, receipt_of(table, TUESDAY, [0.5], rotten=(ROTTEN, ROTTEN)))
    publish(table, MONDAY, receipt_of(table, MONDAY, [0.5, 0.75]), previous=first)
    assert len(table.read_quarantine(MONDAY)) == 0
    assert table.count_day(TUESDAY) == (1, 2)


def test_the_quarantine_of_a_publication_that_failed_does_not_count(table: PredictionTable) -> None:
    publish(table, MONDAY, receipt_of(table, MONDAY, [0.5]))
    with pytest.raises(PublicationConflictError):
        publish(table, MONDAY, receipt_of(table, MONDAY, [0.5], rotten=(ROTTEN,)), previous="stale")
    assert table.count_day(MONDAY) == (1, 0)


# Columns


def test_classes_are_named_beside_their_index(table: PredictionTable) -> None:
    outputs = {"top_index": np.asarray([[2, 0], [1, 2]]), "top_score": np.asarray([[0.75, 0.25], [0.5, 0.5]])}
    publish(table, MONDAY, receipt_of(table, MONDAY, [0, 0], schema=TOP, outputs=outputs), schema=TOP)
    frame = table.read_day(MONDAY).sort_values("row_key")
    assert [list(names) for names in frame["top_label"]] == [["owl", "cat"], ["dog", "owl"]]
    assert [list(index) for index in frame["top_index"]] == [[2, 0], [1, 2]]
    assert [list(score) for score in frame["top_score"]] == [[0.75, 0.25], [0.5, 0.5]]


def test_a_single_class_is_a_plain_name(table: PredictionTable) -> None:
    schema = PredictionSchema((TensorSpec("class_index", "int32"),), {"class_index": ("cat", "dog")})
    receipt = receipt_of(table, MONDAY, [0, 0], schema=schema, outputs={"class_index": np.asarray([1, 0])})
    publish(table, MONDAY, receipt, schema=schema)
    assert sorted(table.read_day(MONDAY)["class_label"]) == ["cat", "dog"]
    assert label_column("class_index") == "class_label"


def test_rows_written_before_a_buffer_is_reused_keep_their_values(table: PredictionTable) -> None:
    scores = np.asarray([0.25, 0.5], np.float32)
    writer = table.shard_writer(SCHEMA, MONDAY, 0, "engine", "run")
    writer.append(["a", "b"], ["f"] * 2, [0, 1], {"score": scores})
    scores[:] = np.nan  # the executor's slot is overwritten by a later batch
    nbytes, sha256 = writer.finish()
    publish(table, MONDAY, Receipt(MONDAY, 0, "key", "run", writer.file, nbytes, sha256, 2, 2, ()))
    assert scores_of(table, MONDAY) == [0.25, 0.5]


def test_a_column_declared_later_is_added(table: PredictionTable) -> None:
    publish(table, MONDAY, receipt_of(table, MONDAY, [0.5]))
    wider = PredictionSchema((*SCHEMA.outputs, TensorSpec("bin_index", "int32")), {"bin_index": ("low", "high")})
    outputs = {"score": np.asarray([0.75]), "bin_index": np.asarray([1])}
    receipt = receipt_of(table, TUESDAY, [0.75], schema=wider, outputs=outputs)
    publish(table, TUESDAY, receipt, schema=wider)
    assert table.read_day(TUESDAY)[["score", "bin_index", "bin_label"]].values.tolist() == [[0.75, 1, "high"]]
    assert scores_of(table, MONDAY) == [0.5]
    assert table.read_day(MONDAY)["bin_label"].isna().all()


def test_a_column_of_another_type_is_refused_and_nothing_is_published(table: PredictionTable) -> None:
    publish(table, MONDAY, receipt_of(table, MONDAY, [0.5]))
    other = PredictionSchema((TensorSpec("score", "int64"),), {})
    with pytest.raises(SpecError, match="'score'"):
        publish(table, TUESDAY, receipt_of(table, TUESDAY, [1], schema=other), schema=other)
    assert table.current_publication(TUESDAY) is None


@pytest.mark.parametrize(
    "other",
    [
        PredictionSchema((TensorSpec("score", "float16"),), {}),
        PredictionSchema((TensorSpec("score", "float32", (2,)),), {}),
        PredictionSchema((TensorSpec("value", "float32"),), {}),
        PredictionSchema((TensorSpec("score", "float32"),), {"score": ("a",)}),
    ],
)
def test_any_change_of_the_columns_changes_the_schemas_digest(other: PredictionSchema) -> None:
    assert other.digest != SCHEMA.digest


def test_other_class_names_change_the_schemas_digest() -> None:
    renamed = PredictionSchema(TOP.outputs, {"top_index": ("cat", "dog", "bat")})
    assert renamed.digest != TOP.digest


# What the table's own state says


def test_publishing_the_same_files_again_commits_nothing(table: PredictionTable) -> None:
    receipt = receipt_of(table, MONDAY, [0.5])
    first = publish(table, MONDAY, receipt)
    version = DeltaTable(table.predictions).version()
    assert publish(table, MONDAY, receipt, previous=first) == first
    assert DeltaTable(table.predictions).version() == version


def test_no_commit_both_adds_and_removes_a_file(table: PredictionTable) -> None:
    kept = receipt_of(table, MONDAY, [0.5])
    first = publish(table, MONDAY, kept)
    publish(table, MONDAY, kept, receipt_of(table, MONDAY, [0.75], shard=1), previous=first)
    log = sorted((table.predictions / "_delta_log").glob("*.json"))[-1].read_text().splitlines()
    actions = [json.loads(line) for line in log]
    added = {action["add"]["path"] for action in actions if "add" in action}
    removed = {action["remove"]["path"] for action in actions if "remove" in action}
    assert added and removed and not added & removed
    assert scores_of(table, MONDAY) == [0.5, 0.75]


def test_a_publication_outlives_compaction_and_checkpoints(table: PredictionTable) -> None:
    rotten = (QuarantinedRow("k", "f", 0, "input", "null", "ValueError"),)
    publication = publish(table, MONDAY, receipt_of(table, MONDAY, [0.5], rotten=rotten), report={"run": 1})
    held = DeltaTable(table.predictions)
    held.optimize.compact()
    held.create_checkpoint()
    assert table.current_publication(MONDAY) == publication
    assert len(table.read_quarantine(MONDAY)) == 1 and table.read_run(MONDAY) == {"run": 1}


def test_many_writers_may_make_the_tables_at_once(tmp_path: Path) -> None:
    days = [f"2026-03-{day:02}" for day in range(1, 9)]
    barrier = threading.Barrier(len(days))

    def first_publication(day: str) -> str:
        table = PredictionTable(tmp_path / "new")
        receipt = receipt_of(table, day, [0.5])
        barrier.wait()
        return publish(table, day, receipt)

    with ThreadPoolExecutor(len(days)) as pool:
        published = list(pool.map(first_publication, days))
    table = PredictionTable(tmp_path / "new")
    assert [table.current_publication(day) for day in days] == published
    assert all(scores_of(table, day) == [0.5] for day in days)


def test_an_empty_day_published_again_commits_nothing(table: PredictionTable) -> None:
    first = publish(table, MONDAY)
    version = DeltaTable(table.predictions).version()
    assert publish(table, MONDAY, previous=first) == first
    assert DeltaTable(table.predictions).version() == version


def test_a_day_that_was_resumed_in_part_settles(table: PredictionTable) -> None:
    """Files that got a new name are known by it, so a third run finds nothing to replace."""
    receipts = [receipt_of(table, MONDAY, [0.5]), receipt_of(table, MONDAY, [0.75], shard=1)]
    for receipt in receipts:
        table.receipts.write(receipt)
    first = publish(table, MONDAY, receipts[0])
    second = publish(table, MONDAY, *receipts, previous=first)
    known = [table.receipts.find(MONDAY, shard, receipts[shard].resume_key) for shard in (0, 1)]
    assert all(known)
    assert publish(table, MONDAY, *[one for one in known if one], previous=second) == second
    DeltaTable(table.predictions).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert all(table.receipts.find(MONDAY, shard, receipts[shard].resume_key) for shard in (0, 1))
    assert scores_of(table, MONDAY) == [0.5, 0.75]


def test_another_quarantine_is_published_though_the_scored_files_are_the_same(table: PredictionTable) -> None:
    scored = receipt_of(table, MONDAY, [0.5])
    first = publish(table, MONDAY, scored, receipt_of(table, MONDAY, [], shard=1, rotten=(ROTTEN,)))
    another = QuarantinedRow("key-y", "a.parquet", 10, "input", "column 'a' is null", "ValueError")
    again = receipt_of(table, MONDAY, [], shard=1, rotten=(ROTTEN, another))
    assert publish(table, MONDAY, scored, again, previous=first) != first
    assert table.count_day(MONDAY) == (1, 2)
