"""Scoring a day: every row is accounted for, nothing is done twice, a bad day does not cost the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from gpu_runtime.datasets.image_folder import ImageFolderSource
from gpu_runtime.datasets.partition import DatasetPartition, ShardReader, ShardTask, Source
from gpu_runtime.device.host import HostDevice
from gpu_runtime.errors import DatasetError, PublicationConflictError, TooManyQuarantinedError
from gpu_runtime.predictions.delta_table import PredictionSchema, PredictionTable
from gpu_runtime.scoring import Predictions, Scorer, ScoringPolicy, score_days, score_partition
from gpu_runtime.specs import ImageNormalization, ModelSpec, OnnxSource, TensorSpec, TopK

DAY, NEXT = "2026-03-01", "2026-03-02"
LENIENT = ScoringPolicy(1.0)


class CountingSource:
    """A source that notes each shard it opens, and may do something first."""

    def __init__(self, source: Source, before: Callable[[ShardTask], Any] = lambda shard: None) -> None:
        self._source, self._before = source, before
        self.opened: list[int] = []

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._source.inputs

    def partition(self, day: str) -> DatasetPartition:
        return self._source.partition(day)

    def open(self, shard: ShardTask) -> ShardReader:
        self._before(shard)
        self.opened.append(shard.index)
        return self._source.open(shard)


@pytest.fixture
def table(tmp_path: Path) -> PredictionTable:
    return PredictionTable(tmp_path / "table")


@pytest.fixture
def root(flights: Any, tmp_path: Path) -> Path:
    """A day of 50 rows in 5 shards; batches of 4 do not fit them."""
    flights.write_day(tmp_path / "days", DAY, 50, group=10)
    return tmp_path / "days"


@pytest.fixture
def source(flights: Any, root: Path) -> CountingSource:
    return CountingSource(flights.source(root, rows_per_shard=10))


@pytest.fixture
def scorer(served: SimpleNamespace) -> Iterator[Scorer]:
    with HostDevice() as device, Scorer(served.plan, served.store, device) as made:
        yield made


@pytest.fixture
def score(scorer: Scorer, flights: Any, table: PredictionTable) -> Callable[..., Predictions]:
    def run(source: Source, day: str = DAY, policy: ScoringPolicy = LENIENT, by: Scorer = scorer) -> Predictions:
        return score_partition(by, source.partition(day), source, flights.schema, table, policy, "run")

    return run


def nulls_at(*rows: int, count: int = 50) -> list[float | None]:
    return [None if row in rows else 0.5 for row in range(count)]


def test_every_row_gets_the_models_score_under_its_key(
    served: SimpleNamespace, flights: Any, source: CountingSource, table: PredictionTable, score: Any
) -> None:
    made = score(source)
    frame = table.read_day(DAY).sort_values("source_position")
    np.testing.assert_allclose(frame["probability"], served.run(flights.rows(50))["probability"], atol=1e-5)
    assert frame["row_key"].tolist() == [f"flight-0-{i}" for i in range(50)]
    assert set(frame["engine_digest"]) == {served.plan.engine_digest}
    assert (made.rows_in, made.scored, made.quarantined, made.published, made.shards) == (50, 50, 0, 50, 5)
    assert made.accounted


def test_rows_in_are_rows_scored_and_rows_quarantined(
    served: SimpleNamespace, flights: Any, root: Path, table: PredictionTable, score: Any
) -> None:
    flights.write_day(root, DAY, 50, group=10, a=nulls_at(0, 9, 10, 33, 49))
    made = score(flights.source(root, rows_per_shard=10))
    assert (made.rows_in, made.scored, made.quarantined) == (50, 45, 5)
    assert (made.published, made.published_quarantined, made.accounted) == (45, 5, True)
    lost = table.read_quarantine(DAY).sort_values("source_position")
    assert lost["source_position"].tolist() == [0, 9, 10, 33, 49]
    assert lost["row_key"].tolist() == [f"flight-0-{i}" for i in (0, 9, 10, 33, 49)]
    assert set(lost["reason"]) == {"column 'a' is null"}
    frame = table.read_day(DAY).sort_values("source_position")
    rows = flights.rows(50)
    rows["numbers"][:, 0] = 0.5
    kept = frame["source_position"].to_numpy()
    np.testing.assert_allclose(frame["probability"], served.run(rows)["probability"][kept], atol=1e-5)


def test_a_day_of_rotten_rows_only_is_published_when_that_is_allowed(flights: Any, root: Path, score: Any) -> None:
    flights.write_day(root, DAY, 20, a=nulls_at(*range(20), count=20))
    made = score(flights.source(root))
    assert (made.rows_in, made.published, made.published_quarantined) == (20, 0, 20)


def test_too_many_quarantined_rows_publish_nothing(
    flights: Any, root: Path, source: CountingSource, table: PredictionTable, score: Any
) -> None:
    before = score(source).publication
    flights.write_day(root, DAY, 50, group=10, a=nulls_at(1, 2, 3))
    with pytest.raises(TooManyQuarantinedError, match=r"column 'a' is null \(3 rows\)"):
        score(source, policy=ScoringPolicy(0.05))
    assert table.current_publication(DAY) == before
    assert table.count_day(DAY) == (50, 0)
    assert score(source, policy=ScoringPolicy(0.06)).published_quarantined == 3


def test_a_repaired_day_has_nothing_in_quarantine(
    flights: Any, root: Path, source: CountingSource, table: PredictionTable, score: Any
) -> None:
    flights.write_day(root, DAY, 50, group=10, a=nulls_at(7))
    score(source)
    flights.write_day(root, DAY, 50, group=10)
    made = score(source)
    assert (made.published, made.published_quarantined, len(table.read_quarantine(DAY))) == (50, 0, 0)


def test_an_empty_day_is_published(root: Path, source: CountingSource, table: PredictionTable, score: Any) -> None:
    (root / NEXT).mkdir()
    made = score(source, NEXT)
    assert (made.rows_in, made.published, made.accounted) == (0, 0, True)
    assert table.current_publication(NEXT) == made.publication


@pytest.mark.parametrize("empty", ["a.parquet", "part-0b.parquet", "z.parquet"], ids=["first", "between", "last"])
def test_a_file_without_rows_costs_nothing(
    flights: Any, root: Path, table: PredictionTable, score: Any, empty: str
) -> None:
    flights.write_day(root, DAY, 0, file=empty)
    flights.write_day(root, DAY, 6, seed=1, file="part-1.parquet")
    assert score(flights.source(root)).accounted
    assert table.count_day(DAY) == (56, 0)


# Never twice


def test_a_second_run_opens_no_shard(source: CountingSource, table: PredictionTable, score: Any) -> None:
    first = score(source)
    assert source.opened == [0, 1, 2, 3, 4]
    again = score(source)
    assert source.opened == [0, 1, 2, 3, 4]
    assert (first.resumed_shards, again.resumed_shards, again.stats) == (0, 5, None)
    assert table.count_day(DAY) == (50, 0)


def test_a_run_that_died_goes_on_where_it_was(flights: Any, root: Path, table: PredictionTable, score: Any) -> None:
    def die(shard: ShardTask) -> None:
        if shard.index == 3:
            raise OSError("the disk went away")

    plain = flights.source(root, rows_per_shard=10)
    with pytest.raises(OSError, match="disk"):
        score(CountingSource(plain, die))
    assert table.current_publication(DAY) is None
    left = [path for path in table.receipts.root.rglob("*.json")]
    resumed = CountingSource(plain)
    made = score(resumed)
    assert resumed.opened == list(range(len(left), 5))
    assert made.resumed_shards == len(left) > 0
    assert table.count_day(DAY) == (50, 0)
    assert table.read_day(DAY)["row_key"].is_unique


def test_a_shard_counts_as_done_before_the_next_is_even_open(
    flights: Any, root: Path, table: PredictionTable, score: Any
) -> None:
    done: list[bool] = []

    def wait_for_the_one_before(shard: ShardTask) -> None:
        receipt = table.receipts.root / DAY / f"{shard.index - 1:06}.json"
        patience = time.monotonic() + 5
        while shard.index and not receipt.exists() and time.monotonic() < patience:
            time.sleep(0.005)
        done.append(receipt.exists())

    score(CountingSource(flights.source(root, rows_per_shard=20), wait_for_the_one_before))
    assert done == [False, True, True]


def test_a_changed_engine_reuses_nothing(
    serve: Any,
    served: SimpleNamespace,
    flights: Any,
    source: CountingSource,
    table: PredictionTable,
    score: Any,
    tmp_path: Path,
) -> None:
    score(source)
    source.opened.clear()
    retrained = serve(replace(flights.spec(tmp_path / "retrained", seed=1), version=served.spec.version))
    with HostDevice() as device, Scorer(retrained.plan, retrained.store, device) as other:
        made = score(source, by=other)
    assert source.opened == [0, 1, 2, 3, 4]
    assert made.resumed_shards == 0
    frame = table.read_day(DAY).sort_values("source_position")
    np.testing.assert_allclose(frame["probability"], retrained.run(flights.rows(50))["probability"], atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"vocabularies": {"carrier": ("UA", "DL", "AA")}},
        {"columns": {"numbers": ("d", "c", "b", "a"), "carrier": ("carrier",)}},
    ],
    ids=["vocabulary", "columns"],
)
def test_another_way_of_reading_the_files_reuses_nothing(
    flights: Any, root: Path, source: CountingSource, table: PredictionTable, score: Any, settings: dict[str, Any]
) -> None:
    score(source)
    before = table.read_day(DAY).sort_values("source_position")["probability"].tolist()
    otherwise = CountingSource(flights.source(root, rows_per_shard=10, **settings))
    assert score(otherwise).resumed_shards == 0
    assert table.read_day(DAY).sort_values("source_position")["probability"].tolist() != before


def test_only_the_shards_of_a_changed_file_are_scored_again(flights: Any, root: Path, score: Any) -> None:
    flights.write_day(root, DAY, 10, seed=2, file="part-1.parquet")
    source = CountingSource(flights.source(root, rows_per_shard=10))
    score(source)
    source.opened.clear()
    flights.write_day(root, DAY, 12, seed=2, file="part-1.parquet")
    made = score(source)
    assert source.opened == [5]
    assert made.published == 62


def test_another_batch_size_reuses_every_shard(served: SimpleNamespace, source: CountingSource, score: Any) -> None:
    score(source)
    with HostDevice() as device, Scorer(replace(served.plan, batch=8, streams=2), served.store, device) as other:
        assert score(source, by=other).resumed_shards == 5


def test_a_shards_file_that_was_lost_is_scored_again(
    source: CountingSource, table: PredictionTable, score: Any
) -> None:
    score(source)
    source.opened.clear()
    next(table.predictions.rglob("part-000002-*.parquet")).unlink()
    assert score(source).published == 50
    assert source.opened == [2]


# Meanwhile


def test_a_day_published_by_another_run_meanwhile_is_a_conflict(
    flights: Any, root: Path, table: PredictionTable, score: Any
) -> None:
    others: list[str] = []

    def other_run(shard: ShardTask) -> None:
        if not others:
            others.append(PredictionTable(table.root).publish(flights.schema, DAY, [], "other", {}, None))

    with pytest.raises(PublicationConflictError):
        score(CountingSource(flights.source(root), other_run))
    assert table.current_publication(DAY) == others[0]


def test_a_file_that_changes_while_it_is_scored_is_never_published(
    flights: Any, root: Path, table: PredictionTable, score: Any
) -> None:
    def land_late(shard: ShardTask) -> None:
        if shard.index == 2:
            flights.write_day(root, DAY, 51, group=10)

    with pytest.raises(DatasetError, match="changed while"):
        score(CountingSource(flights.source(root, rows_per_shard=10), land_late))
    assert table.current_publication(DAY) is None


# Several days


def test_a_bad_day_does_not_cost_the_good_ones(
    flights: Any, root: Path, scorer: Scorer, table: PredictionTable
) -> None:
    days = [DAY, NEXT, "2026-03-03", "2026-03-04"]
    flights.write_day(root, NEXT, 20, b=None)
    flights.write_day(root, "2026-03-04", 7)
    source = flights.source(root)
    results = dict(score_days(days, scorer, source, flights.schema, table, LENIENT, "run"))
    kinds = [type(results[day]).__name__ for day in days]
    assert kinds == ["Predictions", "DatasetError", "DatasetError", "Predictions"]
    assert [table.current_publication(day) is None for day in days] == [False, True, True, False]
    assert table.count_day("2026-03-04") == (7, 0)


def test_days_are_published_one_by_one(flights: Any, root: Path, scorer: Scorer, table: PredictionTable) -> None:
    flights.write_day(root, NEXT, 5)
    days = score_days([DAY, NEXT], scorer, flights.source(root), flights.schema, table, LENIENT, "run")
    next(days)
    assert table.count_day(DAY) == (50, 0)
    assert table.current_publication(NEXT) is None


# One shard, and the report


def test_one_shard_leaves_a_file_and_a_receipt(
    flights: Any, source: CountingSource, scorer: Scorer, table: PredictionTable, score: Any
) -> None:
    task = source.partition(DAY).shards[3]
    receipt = scorer.score_shard(task, source, flights.schema, table, "worker")
    assert (receipt.shard, receipt.rows_in, receipt.rows, receipt.run_id) == (3, 10, 10, "worker")
    source.opened.clear()
    score(source)
    assert source.opened == [0, 1, 2, 4]


def test_the_run_report_says_what_ran_and_how_fast(
    served: SimpleNamespace, source: CountingSource, table: PredictionTable, score: Any
) -> None:
    made = score(source)
    report = table.read_run(DAY)
    assert report is not None
    assert (report["engine"], report["plan"]) == ("onnxruntime:fp32", served.plan.digest)
    assert (report["rows_in"], report["scored"], report["quarantined"]) == (50, 50, 0)
    assert report["of_engine_only"] == pytest.approx(report["rows_per_s"] / 1000.0)
    assert report["bottleneck"] in {"decode", "compute", "write"}
    assert made.report == report


# Pictures


def test_pictures_are_scored_and_named_and_a_broken_one_is_quarantined(
    serve: Any, make_graph: Any, write_jpeg: Any, table: PredictionTable, tmp_path: Path
) -> None:
    pixels = TensorSpec("pixels", "uint8", (8, 8, 3))
    path = make_graph(
        tmp_path / "image.onnx",
        [
            helper.make_node("GlobalAveragePool", ["pixels"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["logits"]),  # the colour that is strongest
        ],
        {},
        [TensorSpec("pixels", "float32", (3, 8, 8))],
        [TensorSpec("logits", "float32", (3,))],
    )
    normalize = {"pixels": ImageNormalization((0.0,) * 3, (64.0,) * 3)}
    photos = serve(ModelSpec("photos", "1", OnnxSource(str(path)), (pixels,), ("logits",), normalize, TopK(2), 8))
    colours = {"a.jpg": (250, 100, 0), "b.jpg": (0, 250, 100), "d.jpg": (100, 0, 250)}
    for name, colour in colours.items():
        write_jpeg(tmp_path / "days" / DAY / name, colour, colour)
    whole = (tmp_path / "days" / DAY / "a.jpg").read_bytes()
    (tmp_path / "days" / DAY / "c.jpg").write_bytes(whole[: len(whole) // 2])
    source = ImageFolderSource(str(tmp_path / "days"), (pixels,))
    schema = PredictionSchema(photos.exported.graph().outputs, {"top_index": ("red", "green", "blue")})
    with HostDevice() as device, Scorer(photos.plan, photos.store, device) as scorer:
        made = score_partition(scorer, source.partition(DAY), source, schema, table, LENIENT, "run")
    frame = table.read_day(DAY).sort_values("row_key")
    assert frame["row_key"].tolist() == ["a.jpg", "b.jpg", "d.jpg"]
    assert [list(names) for names in frame["top_label"]] == [["red", "green"], ["green", "blue"], ["blue", "red"]]
    assert table.read_quarantine(DAY)["row_key"].tolist() == ["c.jpg"]
    assert made.accounted
