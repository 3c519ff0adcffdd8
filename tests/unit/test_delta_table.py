"""The predictions table: a day appears whole or not at all, and no day is published twice at once."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from gpu_runtime.datasets.partition import origins_of
from gpu_runtime.errors import PublicationConflictError, SpecError
from gpu_runtime.faults import FaultPlan
from gpu_runtime.predictions import shard_file
from gpu_runtime.predictions.delta_table import PredictionTable
from gpu_runtime.predictions.receipts import QuarantinedRow, Receipt
from gpu_runtime.predictions.shard_file import PredictionSchema, Provenance, ShardWriter, label_column
from gpu_runtime.predictions.storage import Folder
from gpu_runtime.scoring import review_outputs
from gpu_runtime.specs import TensorSpec

MONDAY, TUESDAY = "2026-03-02", "2026-03-03"
TOP = PredictionSchema(
    (TensorSpec("top_index", "int32", (2,), 0, 2), TensorSpec("top_score", "float32", (2,))),
    {"top_index": ("cat", "dog", "owl")},
)


def scores_of(table: PredictionTable, day: str) -> list[float]:
    return sorted(table.read_day(day)["score"].tolist())


@pytest.fixture
def table(disk: Any) -> PredictionTable:
    return disk.table()


def before_commit(meanwhile: Callable[[], Any]) -> FaultPlan:
    """Somebody else does something after a publisher has read the table and before it commits; once."""
    done: list[bool] = []

    def plan(point: str) -> None:
        if point == "before commit" and not done:
            done.append(True)
            meanwhile()

    return plan


def log_of(table: PredictionTable) -> list[list[dict[str, Any]]]:
    """The actions of each version of the predictions."""
    files = sorted((Path(table.predictions.uri) / "_delta_log").glob("*.json"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


# Publishing


def test_a_published_day_holds_the_rows_of_all_its_shards(table: PredictionTable, days: Any) -> None:
    publication = days.publish(table, MONDAY, [0.25, 0.5], [0.75])
    frame = table.read_day(MONDAY).sort_values("row_key")
    assert frame["row_key"].tolist() == ["key-0-0", "key-0-1", "key-1-0"]
    assert frame["score"].tolist() == [0.25, 0.5, 0.75]
    assert frame["source_position"].tolist() == [0, 1, 0]
    assert set(frame["date"]) == {datetime.date(2026, 3, 2)}
    assert frame[["model_digest", "engine_digest", "run_id"]].drop_duplicates().values.tolist() == [
        ["model", "engine", "run"]
    ]
    assert table.current_publication(MONDAY) == publication
    assert table.count_day(MONDAY) == (3, 0)


def test_a_day_is_published_by_one_commit(table: PredictionTable, days: Any) -> None:
    first = days.publish(table, MONDAY, [0.25], [0.5])
    before = len(log_of(table))
    days.publish(table, MONDAY, [0.75], [1.0], previous=first)
    (commit,) = log_of(table)[before:]
    assert [sum(kind in action for action in commit) for kind in ("add", "remove")] == [2, 2]


def test_replacing_a_day_leaves_the_other_days(table: PredictionTable, days: Any) -> None:
    first = days.publish(table, MONDAY, [0.5])
    days.publish(table, TUESDAY, [0.125])
    second = days.publish(table, MONDAY, [0.75, 1.0], previous=first)
    assert scores_of(table, MONDAY) == [0.75, 1.0]
    assert scores_of(table, TUESDAY) == [0.125]
    assert table.current_publication(MONDAY) == second != first
    assert table.days() == [MONDAY, TUESDAY]


def test_an_older_reader_is_not_disturbed(table: PredictionTable, days: Any) -> None:
    first = days.publish(table, MONDAY, [0.5])
    reader = DeltaTable(table.predictions.uri)
    days.publish(table, MONDAY, [0.75], previous=first)
    assert reader.to_pandas()["score"].tolist() == [0.5]


def test_an_empty_day_is_an_empty_typed_partition_with_a_publication(table: PredictionTable, days: Any) -> None:
    publication = days.publish(table, MONDAY, report={"rows_in": 0})
    assert table.current_publication(MONDAY) == publication
    assert table.count_day(MONDAY) == (0, 0)
    frame = table.read_day(MONDAY)
    assert (len(frame), frame["score"].dtype) == (0, np.float32)
    assert table.read_run(MONDAY) == {"rows_in": 0}
    assert table.days() == [MONDAY]


def test_a_day_published_with_rows_can_become_empty_and_back(table: PredictionTable, days: Any) -> None:
    first = days.publish(table, MONDAY, [0.5])
    second = days.publish(table, MONDAY, previous=first)
    assert table.count_day(MONDAY) == (0, 0)
    days.publish(table, MONDAY, [0.5], previous=second)
    assert scores_of(table, MONDAY) == [0.5]


def test_every_file_of_a_finished_run_belongs_to_the_table(table: PredictionTable, days: Any) -> None:
    """Also those of shards without a scored row."""
    days.publish(table, MONDAY, [], [0.5], rotten=(days.rotten,))
    assert table.count_day(MONDAY) == (1, 1)
    held = {Path(uri).name for uri in DeltaTable(table.predictions.uri).file_uris()}
    assert {Path(file.name).name for file in table.predictions.list(f"date={MONDAY}")} == held


def test_a_file_that_no_publication_names_is_not_read(table: PredictionTable, days: Any) -> None:
    with table.attempt(MONDAY, "dead") as attempt:
        days.shard(table, attempt, [9.0], shard=7)
    days.publish(table, MONDAY, [0.5])
    assert scores_of(table, MONDAY) == [0.5]


def test_a_day_never_published_has_no_publication_and_no_run(table: PredictionTable, days: Any) -> None:
    assert (table.current_publication(MONDAY), table.read_run(MONDAY), table.days()) == (None, None, [])
    assert len(table.read_quarantine(MONDAY)) == 0
    days.publish(table, TUESDAY)
    assert (table.current_publication(MONDAY), table.published(MONDAY), table.read_run(MONDAY)) == (None, None, None)


def test_the_record_is_that_of_the_publication_in_force(table: PredictionTable, days: Any) -> None:
    first = days.publish(table, MONDAY, run="first", report={"run": 1})
    second = days.publish(
        table, MONDAY, [0.5, 0.25], run="second", rotten=(days.rotten,), previous=first, report={"run": 2}
    )
    days.publish(table, TUESDAY, run="third", report={"run": 3})
    found = table.published(MONDAY)
    assert found is not None and found.number == second
    assert found.record.provenance == Provenance("model", "engine", "second")
    assert (found.record.rows_in, found.record.scored, found.record.quarantined) == (3, 2, 1)
    assert (found.record.day_key, found.record.report) == ("day key", {"run": 2})
    assert table.read_run(MONDAY) == {"run": 2}


def test_a_day_whose_record_was_lost_is_not_taken_for_scored(table: PredictionTable, days: Any) -> None:
    number = days.publish(table, MONDAY, [0.5], report={"run": 1})
    DeltaTable(table.runs.uri).delete()
    found = table.published(MONDAY)
    assert found is not None
    assert (found.number, found.record.day_key, found.record.report) == (number, "", {})
    days.publish(table, MONDAY, [0.75], previous=found.number)
    assert scores_of(table, MONDAY) == [0.75]


def test_rows_without_a_day_are_no_day(table: PredictionTable, days: Any) -> None:
    days.publish(table, MONDAY, [0.5])
    rows = DeltaTable(table.predictions.uri).to_pyarrow_table().to_pandas().assign(date=None)
    fields = DeltaTable(table.predictions.uri).to_pyarrow_table().schema
    stray = pa.Table.from_pandas(rows, schema=fields, preserve_index=False)
    write_deltalake(table.predictions.uri, stray, mode="append")
    assert table.days() == [MONDAY]


# Conflicts


def test_a_day_published_since_it_was_read_is_a_conflict_and_stays(table: PredictionTable, days: Any) -> None:
    first = days.publish(table, MONDAY, [0.5])
    for stale in (None, "another"):
        with pytest.raises(PublicationConflictError, match="another run published the day"):
            days.publish(table, MONDAY, [0.75], previous=stale)
    assert scores_of(table, MONDAY) == [0.5]
    assert table.current_publication(MONDAY) == first


@pytest.mark.parametrize("exists", [False, True], ids=["first publication", "replacement"])
def test_two_publications_of_a_day_at_once_never_both_succeed(disk: Any, days: Any, exists: bool) -> None:
    table = disk.table()
    days.publish(table, TUESDAY, [0.125])
    first = days.publish(table, MONDAY, [0.25]) if exists else None
    slow = disk.table(faults=before_commit(lambda: days.publish(table, MONDAY, [0.5], previous=first)))
    with pytest.raises(PublicationConflictError):
        days.publish(slow, MONDAY, [0.75], rotten=(days.rotten,), previous=first)
    assert scores_of(table, MONDAY) == [0.5]
    assert scores_of(table, TUESDAY) == [0.125]
    assert table.count_day(MONDAY) == (1, 0)


def test_another_days_commit_in_between_is_no_conflict(disk: Any, days: Any) -> None:
    table = disk.table()
    first = days.publish(table, MONDAY, [0.25])
    slow = disk.table(faults=before_commit(lambda: days.publish(table, TUESDAY, [0.5])))
    days.publish(slow, MONDAY, [0.75], previous=first)
    assert scores_of(table, MONDAY) == [0.75]
    assert scores_of(table, TUESDAY) == [0.5]


@pytest.mark.parametrize("error", [CommitFailedError("version 1 already exists"), OSError("timed out")])
def test_a_commit_that_was_stored_though_its_answer_was_lost_is_a_success(
    table: PredictionTable, days: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A request that is sent again finds its own file and takes it for somebody else's."""
    real = DeltaTable.create_write_transaction

    def store_and_lose_the_answer(self: DeltaTable, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(deltalake.DeltaTable, "create_write_transaction", store_and_lose_the_answer)
    number = days.publish(table, MONDAY, [0.5])
    assert table.current_publication(MONDAY) == number
    assert scores_of(table, MONDAY) == [0.5]


def test_a_commit_that_fails_is_a_failure(table: PredictionTable, days: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("timed out")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="timed out"):
        patched.setattr(deltalake.DeltaTable, "create_write_transaction", fail)
        days.publish(table, MONDAY, [0.5])
    assert table.current_publication(MONDAY) is None
    days.publish(table, MONDAY, [0.5])
    assert table.count_day(MONDAY) == (1, 0)


def test_rows_that_were_stored_though_their_answer_was_lost_are_not_doubled(
    table: PredictionTable, days: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = deltalake.write_deltalake, list[str]()

    def store_and_lose_the_answer(uri: str, *args: Any, **kwargs: Any) -> None:
        real(uri, *args, **kwargs)
        if uri not in lost:
            lost.append(uri)
            raise CommitFailedError("version 1 already exists")

    monkeypatch.setattr(deltalake, "write_deltalake", store_and_lose_the_answer)
    days.publish(table, MONDAY, [0.5], rotten=(days.rotten,))
    assert lost == [table.quarantine.uri, table.runs.uri]
    assert len(table.read_quarantine(MONDAY)) == len(DeltaTable(table.runs.uri).to_pandas()) == 1


def test_many_writers_may_make_the_tables_at_once(disk: Any, days: Any) -> None:
    all_days = [f"2026-03-{day:02}" for day in range(1, 9)]
    barrier = threading.Barrier(len(all_days))

    def first_publication(day: str) -> str:
        table = disk.table()
        barrier.wait()
        return days.publish(table, day, [0.5], rotten=(days.rotten,))

    with ThreadPoolExecutor(len(all_days)) as pool:
        published = list(pool.map(first_publication, all_days))
    table = disk.table()
    assert [table.current_publication(day) for day in all_days] == published
    assert all(scores_of(table, day) == [0.5] and table.count_day(day) == (1, 1) for day in all_days)


# Quarantine


def test_quarantined_rows_are_those_of_the_publication_in_force(table: PredictionTable, days: Any) -> None:
    first = days.publish(table, MONDAY, [0.5], rotten=(days.rotten,))
    columns = ["row_key", "source_file", "source_position", "stage", "reason", "exception", "publication", "run_id"]
    assert table.read_quarantine(MONDAY)[columns].values.tolist() == [
        ["key-x", "a.parquet", 9, "input", "column 'a' is null", "ValueError", first, "run"]
    ]
    days.publish(table, TUESDAY, [0.5], rotten=(days.rotten, days.rotten))
    days.publish(table, MONDAY, [0.5, 0.75], previous=first)
    assert len(table.read_quarantine(MONDAY)) == 0
    assert table.count_day(TUESDAY) == (1, 2)


def test_the_quarantine_of_a_publication_that_failed_does_not_count(table: PredictionTable, days: Any) -> None:
    days.publish(table, MONDAY, [0.5])
    with pytest.raises(PublicationConflictError):
        days.publish(table, MONDAY, [0.5], rotten=(days.rotten,), previous="stale")
    assert table.count_day(MONDAY) == (1, 0)


def test_a_days_commit_names_the_publication_and_its_counts(table: PredictionTable, days: Any) -> None:
    number = days.publish(table, MONDAY, [0.5, 0.25], rotten=(days.rotten,))
    (commit,) = [action["commitInfo"] for action in log_of(table)[-1] if "commitInfo" in action]
    named = {name: commit[name] for name in ("publication", "run_id", "rows", "quarantined")}
    assert named == {"publication": number, "run_id": "run", "rows": "2", "quarantined": "1"}


def test_another_quarantine_is_published_though_the_scored_files_are_the_same(
    table: PredictionTable, days: Any
) -> None:
    with table.attempt(MONDAY, "first") as attempt:
        scored = days.shard(table, attempt, [0.5])
        rotten = days.shard(table, attempt, [], shard=1, rotten=(days.rotten,))
        first = days.commit(table, attempt, scored, rotten)
    another = QuarantinedRow("key-y", "a.parquet", 10, "input", "column 'a' is null", "ValueError")
    with table.attempt(MONDAY, "second") as attempt:
        again = days.shard(table, attempt, [], shard=1, rotten=(days.rotten, another))
        assert days.commit(table, attempt, scored, again, previous=first) != first
    assert table.count_day(MONDAY) == (1, 2)


# Columns


def test_classes_are_named_beside_their_index(table: PredictionTable, days: Any) -> None:
    outputs = {"top_index": np.asarray([[2, 0], [1, 2]]), "top_score": np.asarray([[0.75, 0.25], [0.5, 0.5]])}
    with table.attempt(MONDAY, "run") as attempt:
        days.commit(table, attempt, days.shard(table, attempt, [0, 0], schema=TOP, outputs=outputs), schema=TOP)
    frame = table.read_day(MONDAY).sort_values("row_key")
    assert [list(names) for names in frame["top_label"]] == [["owl", "cat"], ["dog", "owl"]]
    assert [list(index) for index in frame["top_index"]] == [[2, 0], [1, 2]]
    assert [list(score) for score in frame["top_score"]] == [[0.75, 0.25], [0.5, 0.5]]


def test_a_single_class_is_a_plain_name(table: PredictionTable, days: Any) -> None:
    schema = PredictionSchema((TensorSpec("class_index", "int32", (), 0, 1),), {"class_index": ("cat", "dog")})
    with table.attempt(MONDAY, "run") as attempt:
        outputs = {"class_index": np.asarray([1, 0])}
        days.commit(table, attempt, days.shard(table, attempt, [0, 0], schema=schema, outputs=outputs), schema=schema)
    assert sorted(table.read_day(MONDAY)["class_label"]) == ["cat", "dog"]
    assert label_column("class_index") == "class_label"


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("uint8", [200, 255]), ("float16", [0.5, 65504]), ("int8", [-128, 127]), ("bool", [True, False])],
)
def test_numbers_that_delta_has_no_type_for_are_kept_in_a_wider_one(
    table: PredictionTable, days: Any, dtype: Any, values: list[float]
) -> None:
    schema = PredictionSchema((TensorSpec("score", dtype), TensorSpec("mask", dtype, (2,))), {})
    given = np.asarray(values, dtype)
    with table.attempt(MONDAY, "run") as attempt:
        outputs = {"score": given, "mask": np.stack([given, given])}
        days.commit(table, attempt, days.shard(table, attempt, [0, 0], schema=schema, outputs=outputs), schema=schema)
    frame = table.read_day(MONDAY).sort_values("source_position")
    assert frame["score"].tolist() == given.tolist() and frame["mask"].iloc[1].tolist() == given.tolist()
    assert table.sample_outputs(MONDAY, schema.outputs, 10)[0]["mask"].tolist() == [given.tolist()] * 2


@pytest.mark.parametrize("name", ["row_key", "Run_ID", "date", "class_label", "Class_Index"])
def test_an_output_with_the_name_of_another_column_is_refused(name: str) -> None:
    outputs = (TensorSpec("class_index", "int32", (), 0, 1), TensorSpec(name, "float32"))
    with pytest.raises(SpecError, match=f"{name.casefold()}: two columns"):
        PredictionSchema(outputs, {"class_index": ("cat", "dog")})


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (TensorSpec("probability", "float32", (), 0, 1), "probability"),
        (TensorSpec("class_index", "int32", (), 0, 1), "class_idx"),
    ],
)
def test_class_names_are_of_an_output_that_counts(spec: TensorSpec, named: str) -> None:
    with pytest.raises(
        SpecError, match=f"{named}.*Expected a whole number.*(float32|no such output among class_index)"
    ):
        PredictionSchema((spec,), {named: ("cat", "dog")})


@pytest.mark.parametrize("bounds", [(None, None), (0, None), (0, 2), (0, 0), (-1, 1), (1, 1)])
def test_each_index_that_an_output_can_have_needs_a_name(bounds: tuple[float | None, float | None]) -> None:
    with pytest.raises(SpecError, match=r"class_index.*0 … 1, one for each of 2 names.*Next"):
        PredictionSchema((TensorSpec("class_index", "int32", (), *bounds),), {"class_index": ("cat", "dog")})


def test_rows_written_before_a_buffer_is_reused_keep_their_values(table: PredictionTable, days: Any) -> None:
    scores = np.asarray([0.25, 0.5], np.float32)
    with table.attempt(MONDAY, "run") as attempt:
        writer = table.shard_writer(days.schema, 0, attempt.ticket, Provenance("model", "engine", "run"))
        writer.append(origins_of(["a", "b"], "f", [0, 1]), {"score": scores})
        scores[:] = np.nan  # the executor's slot is overwritten by a later batch
        nbytes, sha256 = writer.finish()
        days.commit(table, attempt, Receipt(MONDAY, 0, "key", "run", writer.file, nbytes, sha256, 2, 2, ()))
    assert scores_of(table, MONDAY) == [0.25, 0.5]


def test_a_column_declared_later_is_added(table: PredictionTable, days: Any) -> None:
    days.publish(table, MONDAY, [0.5])
    wider = PredictionSchema(
        (*days.schema.outputs, TensorSpec("bin_index", "int32", (), 0, 1)), {"bin_index": ("low", "high")}
    )
    outputs = {"score": np.asarray([0.75]), "bin_index": np.asarray([1])}
    with table.attempt(TUESDAY, "run") as attempt:
        days.commit(table, attempt, days.shard(table, attempt, [0.75], schema=wider, outputs=outputs), schema=wider)
    assert table.read_day(TUESDAY)[["score", "bin_index", "bin_label"]].values.tolist() == [[0.75, 1, "high"]]
    assert scores_of(table, MONDAY) == [0.5]
    assert table.read_day(MONDAY)["bin_label"].isna().all()


def test_a_column_of_another_type_is_refused_and_nothing_is_published(table: PredictionTable, days: Any) -> None:
    days.publish(table, MONDAY, [0.5])
    other = PredictionSchema((TensorSpec("score", "int64"),), {})
    with pytest.raises(SpecError, match="'score'"), table.attempt(TUESDAY, "run") as attempt:
        days.commit(table, attempt, days.shard(table, attempt, [1], schema=other), schema=other)
    assert table.current_publication(TUESDAY) is None


@pytest.mark.parametrize(
    "other",
    [
        PredictionSchema((TensorSpec("score", "int64"),), {}),
        PredictionSchema((TensorSpec("score", "float32", (2,)),), {}),
        PredictionSchema((TensorSpec("value", "float32"),), {}),
    ],
)
def test_any_change_of_the_columns_changes_the_schemas_digest(other: PredictionSchema, days: Any) -> None:
    assert other.digest != days.schema.digest


def test_other_class_names_change_the_schemas_digest() -> None:
    renamed = PredictionSchema(TOP.outputs, {"top_index": ("cat", "dog", "bat")})
    assert renamed.digest != TOP.digest


# What the table's own state says


def test_no_commit_both_adds_and_removes_a_file(table: PredictionTable, days: Any) -> None:
    """Nor names a file again that an earlier version had: such a file may be vacuumed at any time."""
    first = days.publish(table, MONDAY, [0.5])
    kept = table.receipts.find(MONDAY, 0, "key-0")
    with table.attempt(MONDAY, "second") as attempt:
        days.commit(table, attempt, kept, days.shard(table, attempt, [0.75], shard=1), previous=first)
    versions = log_of(table)
    added = [action["add"]["path"] for version in versions for action in version if "add" in action]
    removed = {action["remove"]["path"] for action in versions[-1] if "remove" in action}
    assert removed == {kept.file}
    assert len(added) == len(set(added)) == 3
    assert scores_of(table, MONDAY) == [0.5, 0.75]


def test_a_publication_outlives_compaction_checkpoints_and_log_clean_up(table: PredictionTable, days: Any) -> None:
    DeltaTable.create(table.predictions.uri, days.schema.arrow(), partition_by=["date"])
    DeltaTable(table.predictions.uri).alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 0 seconds", "delta.deletedFileRetentionDuration": "interval 0 seconds"}
    )
    first = days.publish(table, MONDAY, [0.25])
    publication = days.publish(table, MONDAY, [0.5], rotten=(days.rotten,), report={"run": 1}, previous=first)
    DeltaTable(table.predictions.uri).optimize.compact()
    for _ in range(2):
        held = DeltaTable(table.predictions.uri)
        held.create_checkpoint()
        held.cleanup_metadata()
    assert not (Path(table.predictions.uri) / "_delta_log" / f"{0:020}.json").exists()
    assert table.current_publication(MONDAY) == publication
    assert len(table.read_quarantine(MONDAY)) == 1 and table.read_run(MONDAY) == {"run": 1}
    assert scores_of(table, MONDAY) == [0.5]
    days.publish(table, MONDAY, [0.75], previous=publication)
    assert scores_of(table, MONDAY) == [0.75]


def test_a_resumed_days_receipts_name_the_files_in_force(table: PredictionTable, days: Any) -> None:
    """So the next run resumes them too, whatever was vacuumed meanwhile."""
    first = days.publish(table, MONDAY, [0.5])
    with table.attempt(MONDAY, "second") as attempt:
        resumed, added = table.receipts.find(MONDAY, 0, "key-0"), days.shard(table, attempt, [0.75], shard=1)
        table.receipts.write(added)
        second = days.commit(table, attempt, resumed, added, previous=first)
    table.vacuum(0)
    known = [table.receipts.find(MONDAY, shard, f"key-{shard}") for shard in (0, 1)]
    assert [one.run_id for one in known if one] == ["run", "second"]
    with table.attempt(MONDAY, "third") as attempt:
        days.commit(table, attempt, *known, previous=second)
    assert scores_of(table, MONDAY) == [0.5, 0.75]


def test_a_shards_file_that_vanished_before_the_commit_is_a_conflict(table: PredictionTable, days: Any) -> None:
    with table.attempt(MONDAY, "other") as other:
        lost = days.shard(table, other, [0.5])
    table.predictions.delete([lost.file])
    with pytest.raises(PublicationConflictError, match="removed the file"), table.attempt(MONDAY, "run") as attempt:
        days.commit(table, attempt, lost)
    assert table.current_publication(MONDAY) is None


# Reading while a day is replaced


def test_a_reader_sees_whole_versions_only(disk: Any, days: Any) -> None:
    table = disk.table()
    stop, seen, mixed = threading.Event(), set[str](), list[Any]()

    def read() -> None:
        reader = disk.table()
        while not stop.is_set():
            version = DeltaTable(reader.predictions.uri)
            number = str(version.transaction_version(f"day/{MONDAY}"))
            rows = version.to_pandas(columns=["run_id", "score"])
            quarantine = DeltaTable(reader.quarantine.uri).to_pandas(filters=[("publication", "=", number)])
            runs = set(rows["run_id"]) | set(quarantine["run_id"])
            run = next(iter(runs))
            if len(runs) > 1 or len(rows) != 2 + int(run) % 3 or len(quarantine) != 1 + int(run) % 2:
                mixed.append((number, runs, len(rows), len(quarantine)))
            seen.add(run)

    def replace(run: int, previous: str | None) -> str:
        rotten = (days.rotten,) * (1 + run % 2)
        return days.publish(table, MONDAY, [0.5] * (1 + run % 3), [0.5], run=str(run), rotten=rotten, previous=previous)

    number = replace(0, None)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for run in range(1, 31):
            number = replace(run, number)
        stop.set()
        reading.result()
    assert not mixed
    assert len(seen) > 3


def test_an_earlier_day_whose_outputs_were_wider_is_not_compared(table: PredictionTable, days: Any) -> None:
    """As after `top_k: 5` became `top_k: 3`: the earlier day's lists are longer than today's."""
    wide, narrow = (PredictionSchema((TensorSpec("best", "float32", (k,)),), {}) for k in (5, 3))
    for day, schema in ((MONDAY, wide), (TUESDAY, narrow)):
        with table.attempt(day, "run") as attempt:
            table.create(schema)
            rows = {"best": np.zeros((4, *schema.outputs[0].shape), np.float32)}
            receipt = days.shard(table, attempt, [0.0] * 4, schema=schema, outputs=rows)
            table.publish(schema, attempt, [receipt], days.record(attempt, (receipt,), {}), None)
    assert review_outputs(table, narrow, TUESDAY).compared_with is None


@pytest.mark.parametrize("places", [None, [4, 0, 3, 1, 2]], ids=["as they come", "held back"])
def test_wide_rows_are_written_in_groups_of_so_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: list[int] | None
) -> None:
    monkeypatch.setattr(shard_file, "_NBYTES_PER_GROUP", 64)
    schema, folder = PredictionSchema((TensorSpec("mask", "int32", (4, 2)),), {}), Folder(tmp_path)
    writer = ShardWriter(folder, schema, "2026-01-01", 0, "attempt", Provenance("model", "engine", "run"))
    masks = np.arange(40, dtype=np.int32).reshape(5, 4, 2)
    for first, last in ((0, 3), (3, 5)):
        origins = origins_of([str(row) for row in range(first, last)], "f", range(first, last))
        writer.append(origins, {"mask": masks[first:last]}, None if places is None else np.asarray(places[first:last]))
    writer.finish()
    written = pq.ParquetFile(tmp_path / writer.file)
    rows = [written.metadata.row_group(group).num_rows for group in range(written.num_row_groups)]
    assert sum(rows) == 5 and max(rows) == 2, "a row takes 32 bytes"
    order = np.arange(5) if places is None else np.argsort(places)
    table = written.read()
    assert table.column("row_key").to_pylist() == [str(row) for row in order]
    assert table.column("mask").to_pylist() == masks[order].reshape(5, 8).tolist()
