"""Scoring a day: every row is accounted for, nothing is done twice, a bad day does not cost the others."""

from __future__ import annotations

import datetime
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from onnx import helper

from gpu_runtime import scoring
from gpu_runtime.backends.registry import get_backend
from gpu_runtime.datasets import parquet
from gpu_runtime.datasets.image_folder import ImageFolderSource
from gpu_runtime.datasets.partition import DatasetPartition, ShardReader, ShardTask, Source, origins_of
from gpu_runtime.device.host import HostDevice
from gpu_runtime.device.protocol import DeviceClass
from gpu_runtime.errors import (
    DatasetError,
    DeviceError,
    InferenceError,
    PublicationConflictError,
    SpecError,
    StalledError,
    TooManyQuarantinedError,
)
from gpu_runtime.predictions import delta_table
from gpu_runtime.predictions.attempts import Attempt
from gpu_runtime.predictions.delta_table import DayRecord, PredictionTable
from gpu_runtime.predictions.receipts import Receipt, ReceiptStore
from gpu_runtime.predictions.shard_file import PredictionSchema, Provenance
from gpu_runtime.promotion.store import CeilingStore
from gpu_runtime.quality.drift import OutputReview
from gpu_runtime.scoring import (
    Destination,
    Predictions,
    Scorer,
    ScoringPolicy,
    review_outputs,
    score_days,
    score_partition,
    score_shard,
)
from gpu_runtime.specs import ImageNormalization, ModelSpec, OnnxSource, TensorSpec, TopK

DAY, NEXT, LATER = "2026-03-01", "2026-03-02", "2026-03-03"
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

    def parts(self, shard: ShardTask) -> Iterator[ShardReader]:
        self._before(shard)
        self.opened.append(shard.index)
        yield from self._source.parts(shard)


@dataclass
class EngineWatch:
    """Between the executor and the real backend: notes each load and each row that reaches the engine.

    `during` is given the first number of each of a batch's rows before they are computed; `spoil` the results after.
    """

    during: Callable[[Sequence[float]], Any] = lambda given: None
    spoil: Callable[[Sequence[float], Mapping[str, Any]], Any] = lambda given, outputs: None
    loads: int = 0
    batches: list[list[float]] = field(default_factory=list)

    @property
    def seen(self) -> list[float]:
        """In order, without the padding."""
        return [value for batch in self.batches for value in batch if value]

    def backend(self, name: str) -> Any:
        def load(*given: Any) -> Any:
            self.loads += 1
            return _Watched(get_backend(name).load(*given), self)

        return SimpleNamespace(load=load)


class _Watched:
    """A loaded engine, or a context of it."""

    def __init__(self, real: Any, watch: EngineWatch) -> None:
        self._real, self._watch = real, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *exc: object) -> None:
        self._real.close()

    def create_context(self) -> Any:
        return _Watched(self._real.create_context(), self._watch)

    def enqueue(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any) -> None:
        first = next(iter(inputs.values()))
        given = first.reshape(len(first), -1)[:, 0].tolist()
        self._watch.batches.append(given)
        self._watch.during(given)
        self._real.enqueue(inputs, outputs, stream)
        stream.launch(lambda: self._watch.spoil(given, outputs))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EngineWatch:
    watch = EngineWatch()
    monkeypatch.setattr(scoring, "get_backend", watch.backend)
    return watch


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
def device() -> Iterator[HostDevice]:
    with HostDevice() as opened:
        yield opened


@pytest.fixture
def score(
    served: SimpleNamespace, device: HostDevice, flights: Any, table: PredictionTable, engine: EngineWatch
) -> Callable[..., Predictions]:
    """A run of its own: another scorer, always the same run id."""

    def run(
        source: Source,
        day: str = DAY,
        *,
        policy: ScoringPolicy = LENIENT,
        by: SimpleNamespace = served,
        schema: PredictionSchema = flights.schema,
        force: bool = False,
        **plan: Any,
    ) -> Predictions:
        engine.batches.clear()
        with Scorer(replace(by.plan, **plan), by.store, device, policy) as scorer:
            return score_partition(scorer, source.partition(day), source, schema, table, "run", force=force)

    return run


@pytest.fixture
def rows_at(flights: Any) -> Callable[..., list[float]]:
    """What `EngineWatch` sees of rows of the first file."""

    def values(*positions: int, count: int = 50) -> list[float]:
        return [float(value) for value in flights.rows(count)["numbers"][list(positions), 0]]

    return values


def nulls_at(*rows: int, count: int = 50) -> list[float | None]:
    return [None if row in rows else 0.5 for row in range(count)]


def files_of(table: PredictionTable, shard: int) -> list[Path]:
    assert table.predictions.local is not None
    return list(table.predictions.local.rglob(f"part-{shard:06}-*.parquet"))


def receipt_of(table: PredictionTable, shard: int) -> Path:
    assert table.root.local is not None
    found = (table.root.local / "receipts" / DAY).glob("*.json")
    # A file that is being put in place shows under its name only when it is whole.
    return next((path for path in found if json.loads(path.read_text())["shard"] == shard), Path("/nowhere"))


def dies_at(source: Source, table: PredictionTable, shard: int) -> CountingSource:
    """Cannot open that shard, and tells so only when the one before has its receipt."""

    def die(task: ShardTask) -> None:
        if task.index == shard:
            patience = time.monotonic() + 5
            while shard and not receipt_of(table, shard - 1).exists() and time.monotonic() < patience:
                time.sleep(0.002)
            raise OSError("the disk went away")

    return CountingSource(source, die)


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
    with pytest.raises(TooManyQuarantinedError, match=r"column 'a' is null \(3 rows, as in part-0.parquet\)"):
        score(source, policy=ScoringPolicy(0.05))
    assert table.current_publication(DAY) == before
    assert table.count_day(DAY) == (50, 0)
    assert score(source, policy=ScoringPolicy(0.06)).published_quarantined == 3


def test_a_hopeless_day_is_given_up_early_and_what_is_known_of_it_is_kept(
    flights: Any, root: Path, engine: EngineWatch, score: Any
) -> None:
    """20 shards: 4 bad rows in the first, 9 in the second; 10 are allowed."""
    flights.write_day(root, DAY, 200, group=10, a=nulls_at(0, 1, 2, 3, *range(10, 19), count=200))
    source = CountingSource(flights.source(root, rows_per_shard=10))
    for already_known in (0, 1):
        source.opened.clear()
        with pytest.raises(TooManyQuarantinedError, match=r"at most 5\.0% of 200 rows .*Got 1[1-3] .* so far"):
            score(source, policy=ScoringPolicy(0.05))
        assert len(engine.seen) < 100 and source.opened[0] == already_known and len(source.opened) < 10
    with pytest.raises(OSError, match="disk"):
        score(CountingSource(source, lambda task: (_ for _ in ()).throw(OSError("disk")) if task.index > 5 else None))
    source.opened.clear()
    with pytest.raises(TooManyQuarantinedError):
        score(source, policy=ScoringPolicy(0.05))
    assert (source.opened, engine.seen) == ([], []), "13 rows are known to be bad: nothing need be looked at"


@pytest.mark.parametrize("how", ["raises", "gives no number", "raises, and its device fails"])
def test_rows_that_the_engine_failed_on_are_tried_again_by_the_next_run(
    root: Path, source: CountingSource, engine: EngineWatch, table: PredictionTable, score: Any, rows_at: Any, how: str
) -> None:
    """Not so the shards before and between, of which every row was scored."""
    bad = set(rows_at(11, 12, 33))

    def fail(given: Sequence[float]) -> None:
        if "fails" in how and rows_at(49)[0] in given:
            raise DeviceError("is lost", stage="execute")
        if bad & set(given):
            raise RuntimeError("no kernel")

    def spoil(given: Sequence[float], outputs: Mapping[str, Any]) -> None:
        outputs["probability"][[value in bad for value in given]] = np.nan

    engine.during, engine.spoil = (fail, engine.spoil) if "raises" in how else (engine.during, spoil)
    with pytest.raises(DeviceError if "fails" in how else TooManyQuarantinedError):
        score(source, policy=ScoringPolicy(1.0 if "fails" in how else 0.05))
    assert table.current_publication(DAY) is None
    engine.during, engine.spoil = lambda given: None, lambda given, outputs: None
    made = score(source, policy=ScoringPolicy(0.0))
    assert (made.published, made.published_quarantined) == (50, 0)
    assert engine.seen == rows_at(*range(10, 20), *range(30, 50))


def test_an_output_outside_its_range_is_quarantined(
    serve: Any, served: Any, flights: Any, source: CountingSource, table: PredictionTable, score: Any, tmp_path: Path
) -> None:
    """The same weights with another range are another engine set."""
    expected = served.run(flights.rows(50))["probability"]
    limit = float(np.median(expected))
    ranged = serve(replace(flights.spec(tmp_path), output_ranges={"probability": (None, limit)}))
    (output,) = ranged.plan.engine_file(ranged.store).outputs
    assert (output.minimum, output.maximum) == (None, limit)
    assert ranged.plan.engine_digest == served.plan.engine_digest
    made = score(source, by=ranged)
    lost = table.read_quarantine(DAY)
    assert sorted(lost["source_position"]) == np.flatnonzero(expected > limit).tolist()
    assert set(lost["reason"]) == {f"output 'probability' is above its declared maximum {limit:g}"}
    assert made.accounted and table.read_day(DAY)["probability"].max() <= limit


def test_a_repaired_day_has_nothing_in_quarantine(
    flights: Any, root: Path, source: CountingSource, table: PredictionTable, score: Any
) -> None:
    flights.write_day(root, DAY, 50, group=10, a=nulls_at(7))
    score(source)
    flights.write_day(root, DAY, 50, group=10)
    made = score(source)
    assert (made.published, made.published_quarantined, len(table.read_quarantine(DAY))) == (50, 0, 0)


def test_an_empty_day_is_published_typed_and_a_day_without_a_folder_is_an_error(
    root: Path, source: CountingSource, engine: EngineWatch, table: PredictionTable, score: Any
) -> None:
    (root / NEXT).mkdir()
    made, again = score(source, NEXT), score(source, NEXT)
    assert (made.rows_in, made.published, made.accounted, made.reused) == (0, 0, True, False)
    assert again.reused and again.day_key == made.day_key
    assert table.current_publication(NEXT) == made.publication
    assert engine.loads == 0
    score(source)
    empty, full = table.read_day(NEXT), table.read_day(DAY)
    assert len(empty) == 0 and empty.dtypes.to_dict() == full.dtypes.to_dict()
    with pytest.raises(DatasetError, match=r"the day has no folder.*an empty folder"):
        score(source, LATER)


@pytest.mark.parametrize("empty", ["a.parquet", "part-0b.parquet", "z.parquet"], ids=["first", "between", "last"])
def test_a_file_without_rows_costs_nothing(
    flights: Any, root: Path, table: PredictionTable, score: Any, empty: str
) -> None:
    flights.write_day(root, DAY, 0, file=empty)
    flights.write_day(root, DAY, 6, seed=1, file="part-1.parquet")
    assert score(flights.source(root)).accounted
    assert table.count_day(DAY) == (56, 0)


# Never twice


def test_a_published_day_is_reported_as_reused_and_the_engine_is_not_even_loaded(
    source: CountingSource, engine: EngineWatch, table: PredictionTable, score: Any, rows_at: Any
) -> None:
    first = score(source)
    assert (source.opened, engine.loads, engine.seen) == ([0, 1, 2, 3, 4], 1, rows_at(*range(50)))
    again = score(source)
    assert (source.opened, engine.loads, engine.seen) == ([0, 1, 2, 3, 4], 1, [])
    assert (first.reused, first.resumed_shards, again.reused, again.stats) == (False, 0, True, None)
    same = ("publication", "day_key", "rows_in", "scored", "published", "report")
    assert [getattr(again, name) for name in same] == [getattr(first, name) for name in same]
    assert table.count_day(DAY) == (50, 0)


def test_force_scores_every_row_again_and_replaces_the_day(
    source: CountingSource, engine: EngineWatch, table: PredictionTable, score: Any, rows_at: Any
) -> None:
    first = score(source)
    forced = score(source, force=True)
    assert engine.seen == rows_at(*range(50))
    assert (forced.reused, forced.resumed_shards, forced.day_key) == (False, 0, first.day_key)
    assert table.current_publication(DAY) == forced.publication != first.publication
    assert table.count_day(DAY) == (50, 0)
    assert score(source).reused


@pytest.mark.parametrize("shard", range(5))
def test_a_run_that_died_goes_on_at_its_first_unfinished_shard(
    flights: Any, root: Path, table: PredictionTable, score: Any, engine: EngineWatch, rows_at: Any, shard: int
) -> None:
    plain = flights.source(root, rows_per_shard=10)
    with pytest.raises(OSError, match="disk"):
        score(dies_at(plain, table, shard))
    assert table.current_publication(DAY) is None
    resumed = CountingSource(plain)
    made = score(resumed)
    assert resumed.opened == list(range(shard, 5))
    assert engine.seen == rows_at(*range(10 * shard, 50))
    assert made.resumed_shards == shard
    assert table.count_day(DAY) == (50, 0)
    assert table.read_day(DAY)["row_key"].is_unique


def test_a_shard_counts_as_done_before_the_next_is_even_open(
    flights: Any, root: Path, table: PredictionTable, score: Any
) -> None:
    done: list[bool] = []

    def wait_for_the_one_before(shard: ShardTask) -> None:
        patience = time.monotonic() + 5
        while shard.index and not receipt_of(table, shard.index - 1).exists() and time.monotonic() < patience:
            time.sleep(0.005)
        done.append(receipt_of(table, shard.index - 1).exists())

    score(CountingSource(flights.source(root, rows_per_shard=20), wait_for_the_one_before))
    assert done == [False, True, True]


def nothing(**changes: Any) -> Callable[..., dict[str, Any]]:
    """Changes the plan and nothing else."""
    return lambda path, flights, retrained: changes


def touched(path: Path, flights: Any, retrained: Any) -> dict[str, Any]:
    os.utime(path, ns=(1, 1))
    return {}


def rewritten(path: Path, flights: Any, retrained: Any) -> dict[str, Any]:
    flights.write_day(path.parent.parent, DAY, 50, group=10, seed=3)
    return {}


CHANGES = {
    "model version": nothing(model_version="2"),
    "declaration": nothing(declaration="another"),
    "device class": nothing(device_class=DeviceClass("cpu", "x86_64", ("another",))),
    "weights": lambda path, flights, retrained: {"by": retrained},
    "file's time": touched,
    "file's content": rewritten,
    "vocabulary": lambda path, flights, retrained: {"vocabularies": {"carrier": ("UA", "DL", "AA")}},
    "columns": lambda path, flights, retrained: {"columns": {"numbers": ("d", "c", "b", "a"), "carrier": ("carrier",)}},
}


@pytest.fixture(scope="module")
def retrained(serve: Any, flights: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Other weights under the same version."""
    spec = flights.spec(tmp_path_factory.mktemp("retrained"), seed=1)
    made: SimpleNamespace = serve(replace(spec, version="0"))
    return made


@pytest.mark.parametrize("published", [True, False], ids=["published", "four receipts"])
@pytest.mark.parametrize("change", CHANGES)
def test_any_change_that_could_change_a_score_reuses_nothing(
    retrained: SimpleNamespace,
    flights: Any,
    root: Path,
    engine: EngineWatch,
    table: PredictionTable,
    score: Any,
    change: str,
    published: bool,
) -> None:
    source = flights.source(root, rows_per_shard=10)
    if published:
        score(source)
    else:
        with pytest.raises(OSError, match="disk"):
            score(dies_at(source, table, 4))
    changed = CHANGES[change](root / DAY / "part-0.parquet", flights, retrained)
    reading = {name: changed.pop(name) for name in ("vocabularies", "columns") if name in changed}
    made = score(flights.source(root, rows_per_shard=10, **reading), **changed)
    assert len(engine.seen) == 50 and len(set(engine.seen)) == 50
    assert (made.reused, made.resumed_shards) == (False, 0)
    assert table.count_day(DAY) == (50, 0)
    if change == "weights":
        frame = table.read_day(DAY).sort_values("source_position")
        np.testing.assert_allclose(frame["probability"], retrained.run(flights.rows(50))["probability"], atol=1e-5)
        assert set(frame["model_digest"]) == {retrained.exported.digest}


@pytest.mark.parametrize("published", [True, False], ids=["published", "four receipts"])
def test_another_batch_size_or_number_of_streams_reuses_everything(
    source: CountingSource,
    engine: EngineWatch,
    table: PredictionTable,
    score: Any,
    rows_at: Any,
    published: bool,
) -> None:
    if published:
        score(source)
    else:
        with pytest.raises(OSError, match="disk"):
            score(dies_at(source, table, 4))
    made = score(source, batch=8, streams=2, threads=2, decode_workers=1)
    assert made.reused is published
    assert engine.seen == ([] if published else rows_at(*range(40, 50)))


def test_only_the_shards_of_a_changed_file_are_scored_again(flights: Any, root: Path, score: Any) -> None:
    flights.write_day(root, DAY, 10, seed=2, file="part-1.parquet")
    source = CountingSource(flights.source(root, rows_per_shard=10))
    score(source)
    source.opened.clear()
    flights.write_day(root, DAY, 12, seed=2, file="part-1.parquet")
    made = score(source)
    assert source.opened == [5]
    assert made.published == 62


def edited(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("which", ["data file", "receipt"])
@pytest.mark.parametrize("damage", [Path.unlink, cut_short, edited, lambda path: path.write_bytes(b"[]")])
def test_a_shard_whose_file_or_receipt_is_damaged_is_scored_again_alone(
    source: CountingSource,
    engine: EngineWatch,
    table: PredictionTable,
    score: Any,
    rows_at: Any,
    which: str,
    damage: Callable[[Path], Any],
) -> None:
    with pytest.raises(OSError, match="disk"):
        score(dies_at(source, table, 4))
    (data,) = files_of(table, 2)
    if which == "receipt" and damage is edited:  # one that can be read, of something else
        plain = json.loads(receipt_of(table, 2).read_text())
        receipt_of(table, 2).write_text(json.dumps({**plain, "resume_key": "another"}))
    else:
        damage(data if which == "data file" else receipt_of(table, 2))
    source.opened.clear()
    made = score(source)
    assert source.opened == [2, 4]
    assert engine.seen == rows_at(*range(20, 30), *range(40, 50))
    assert (made.resumed_shards, made.published) == (3, 50)


def test_a_published_day_that_lost_a_file_is_mended_by_the_next_run(
    source: CountingSource, table: PredictionTable, score: Any
) -> None:
    score(source)
    for path in files_of(table, 2):
        path.unlink()
    source.opened.clear()
    made = score(source)
    assert (made.reused, made.published, source.opened) == (False, 50, [2])


def test_a_published_day_whose_rows_somebody_removed_is_mended_too(
    source: CountingSource, table: PredictionTable, score: Any
) -> None:
    score(source)
    DeltaTable(table.predictions.uri).delete(f"date = '{DAY}' AND source_position < 7")
    assert score(source).published == 50


def test_a_file_that_arrives_late_and_sorts_first_costs_only_itself(
    flights: Any, root: Path, source: CountingSource, engine: EngineWatch, score: Any
) -> None:
    score(source)
    flights.write_day(root, DAY, 10, seed=1, file="a-late.parquet")
    source.opened.clear()
    made = score(source)
    assert source.opened == [0] and (made.resumed_shards, made.published) == (5, 60)


# Meanwhile


def test_a_day_published_by_another_run_meanwhile_is_a_conflict(
    flights: Any, root: Path, table: PredictionTable, score: Any
) -> None:
    others: list[str] = []

    def other_run(shard: ShardTask) -> None:
        if not others:
            others.append(publish(PredictionTable(table.root.uri), flights.schema, DAY))

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


# After the commit


def test_leftovers_that_cannot_be_removed_do_not_fail_a_published_day(
    source: CountingSource, table: PredictionTable, score: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="disk"):
        score(dies_at(source, table, 4))
    with monkeypatch.context() as patched:
        patched.setattr(PredictionTable, "clean_up", lambda self, attempt: (_ for _ in ()).throw(OSError("read-only")))
        made = score(source)
    assert (made.published, made.left_behind) == (50, "OSError")
    assert score(source).left_behind is None


def test_a_published_day_that_cannot_be_read_back_is_not_called_unpublished(
    source: CountingSource, table: PredictionTable, score: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(scoring, "review_outputs", lambda *given: (_ for _ in ()).throw(OSError("timed out")))
        with pytest.raises(InferenceError, match="the day is published") as caught:
            score(source)
    assert str(table.current_publication(DAY)) in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert score(source).reused


# A stage beside the executor's that hangs


HANGS: dict[str, tuple[Any, str]] = {  # where a run hangs → the stage that is named
    "listing": (CountingSource.partition, "list"),
    "beginning": (Attempt.__enter__, "look-up"),
    "looking up": (PredictionTable.published, "look-up"),
    "reading a receipt": (ReceiptStore.find, "look-up"),
    "loading the engine": (Scorer.executor.fget, "load"),
    "the last shard, without a row": (Scorer._close_shard, "write"),
    "creating": (PredictionTable.create, "publish"),
    "quarantine": (delta_table.append_quarantine, "publish"),
    "commit": (PredictionTable._commit, "publish"),
    "clean-up": (PredictionTable.clean_up, "clean-up"),
    "counting": (PredictionTable.count_day, "check"),
    "review": (scoring.review_outputs, "check"),
}


def test_a_shard_whose_opening_hangs_is_left_behind_by_a_run_that_ends_for_another_reason(
    flights: Any, root: Path, score: Any, engine: EngineWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next shard is opened while one is scored: a library may hang in it though nobody waits for it any more."""
    before = set(threading.enumerate())
    left: list[Callable[[], bool]] = []
    monkeypatch.setattr(scoring, "leave_behind", left.append)
    opening, let_go = threading.Event(), threading.Event()

    def hang(task: ShardTask) -> None:
        if task.index == 1:
            opening.set()
            let_go.wait()

    def lose(given: Sequence[float]) -> None:
        opening.wait(10)
        raise DeviceError("is lost", stage="execute")

    engine.during = lose
    with pytest.raises(DeviceError, match="is lost"):
        score(
            CountingSource(flights.source(root, rows_per_shard=10), hang), policy=ScoringPolicy(1.0, stage_timeout_s=2)
        )
    assert [done() for done in left] == [False]
    let_go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert not [thread.name for thread in set(threading.enumerate()) - before]


FAST = {("looking up", "fails"), ("commit", "succeeds"), ("counting", "fails")}


@pytest.mark.parametrize(
    ("place", "then"),
    [
        pytest.param(place, then, marks=() if (place, then) in FAST else pytest.mark.slow)
        for place in HANGS
        for then in ("fails", "succeeds")
    ],
)
def test_what_hangs_beside_the_executor_ends_the_range_and_the_next_run_makes_the_day_whole(
    place: str,
    then: str,
    flights: Any,
    root: Path,
    served: SimpleNamespace,
    device: HostDevice,
    table: PredictionTable,
    score: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flights.write_day(root, DAY, 50, group=10, a=nulls_at(7))
    flights.write_day(root, DAY, 0, file="z.parquet")
    flights.write_day(root, NEXT, 5)
    source = CountingSource(flights.source(root, rows_per_shard=10))
    let_go, hung, ended = threading.Event(), threading.Event(), threading.Event()
    work, stage = HANGS[place]

    def hang(*given: Any, **named: Any) -> Any:
        if place == "the last shard, without a row" and given[1].task.rows:
            return work(*given, **named)
        hung.set()
        let_go.wait()
        try:
            if then == "fails":  # once the storage is there again
                raise ConnectionError
            return work(*given, **named)
        finally:
            ended.set()

    for owner in (CountingSource, PredictionTable, ReceiptStore, Attempt, Scorer, scoring, delta_table):
        for name, value in vars(owner).items():
            if value is work:
                monkeypatch.setattr(owner, name, hang)
            if isinstance(value, property) and value.fget is work:
                monkeypatch.setattr(owner, name, property(hang))
    before = set(threading.enumerate())
    try:
        with Scorer(served.plan, served.store, device, ScoringPolicy(1.0, stage_timeout_s=3)) as scorer:
            results = dict(score_days([DAY, NEXT], scorer, source, flights.schema, table, "run"))
        published = table.current_publication(DAY) is not None
    finally:
        monkeypatch.undo()
        let_go.set()
    assert hung.is_set() and list(results) == [DAY]
    error = results[DAY]
    assert isinstance(error, StalledError) and f"the {stage} stage hangs" in str(error) and DAY in str(error)
    assert ("the day is published" in str(error)) is published is (stage in ("clean-up", "check"))
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(10)
    assert ended.wait(10) and not [thread.name for thread in left if thread.is_alive()]
    assert (table.current_publication(DAY) is not None) is published, "published by work that nobody waited for"
    done = score(source)
    assert (done.published, done.published_quarantined, done.accounted) == (49, 1, True)
    quarantine, runs = (DeltaTable(folder.uri).to_pandas() for folder in (table.quarantine, table.runs))
    assert set(quarantine["publication"]) == set(runs["publication"]) == {done.publication}
    assert not list(Path(table.root.uri, "attempts").rglob("*.json"))


# Several days


@pytest.fixture
def days(
    served: SimpleNamespace, device: HostDevice, flights: Any, table: PredictionTable, engine: EngineWatch
) -> Iterator[Callable[..., Iterator[tuple[str, Predictions | InferenceError]]]]:
    with Scorer(served.plan, served.store, device, LENIENT) as scorer:
        yield lambda source, *days: score_days(days, scorer, source, flights.schema, table, "run")


def test_a_bad_day_does_not_cost_the_good_ones_and_is_scored_alone_the_next_time(
    flights: Any, root: Path, table: PredictionTable, days: Any, engine: EngineWatch
) -> None:
    flights.write_day(root, NEXT, 20, b=None)
    flights.write_day(root, "2026-03-04", 7)
    source = flights.source(root)
    wanted = [DAY, NEXT, LATER, "2026-03-04"]
    results = dict(days(source, *wanted))
    kinds = [type(results[day]).__name__ for day in wanted]
    assert kinds == ["Predictions", "DatasetError", "DatasetError", "Predictions"]
    assert [table.current_publication(day) is None for day in wanted] == [False, True, True, False]
    assert table.count_day("2026-03-04") == (7, 0)
    flights.write_day(root, NEXT, 20)
    engine.batches.clear()
    again = dict(days(source, *wanted))
    assert len(engine.seen) == 20 and engine.loads == 1
    assert [again[day].reused for day in (DAY, NEXT, "2026-03-04")] == [True, False, True]


def test_the_finished_shards_of_a_bad_day_outlive_the_publication_of_others(
    flights: Any, root: Path, table: PredictionTable, days: Any, engine: EngineWatch, score: Any
) -> None:
    flights.write_day(root, NEXT, 5)
    source = dies_at(flights.source(root, rows_per_shard=10), table, 4)
    results = dict(days(source, DAY, NEXT))
    assert isinstance(results[DAY], InferenceError) and isinstance(results[NEXT], Predictions)
    for run in range(2):  # clean-up remembers what it has spared
        flights.write_day(root, NEXT, 6 + run)
        assert score(flights.source(root), NEXT).published == 6 + run
    made = score(flights.source(root, rows_per_shard=10))
    assert (made.resumed_shards, len(engine.seen), made.published) == (4, 10, 50)
    assert len(list(Path(table.predictions.uri, f"date={DAY}").iterdir())) == 5
    assert not list(Path(table.root.uri, "attempts").rglob("*.json"))


def test_an_error_that_is_kept_for_the_end_of_a_range_keeps_nothing_of_its_day(
    flights: Any, root: Path, table: PredictionTable, days: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("no room")

    readers: list[Any] = []
    made = parquet.ParquetReader.__init__

    def noted(reader: parquet.ParquetReader, *given: Any) -> None:
        made(reader, *given)
        readers.append(weakref.ref(reader))

    monkeypatch.setattr(parquet.ParquetReader, "__init__", noted)
    monkeypatch.setattr(scoring, "_write_rows", fail)
    ((_, outcome),) = days(flights.source(root, rows_per_shard=10), DAY)
    assert isinstance(outcome, InferenceError) and outcome.__cause__ is not None
    for thread in threading.enumerate():
        if thread.name.startswith("open"):  # it ends what it was reading ahead
            thread.join(10)
    gc.collect()
    assert readers and not [reader for reader in readers if reader() is not None]


def test_days_are_published_one_by_one(flights: Any, root: Path, days: Any, table: PredictionTable) -> None:
    flights.write_day(root, NEXT, 5)
    scored = days(flights.source(root), DAY, NEXT)
    next(scored)
    assert table.count_day(DAY) == (50, 0)
    assert table.current_publication(NEXT) is None


def test_a_failed_device_ends_the_range_with_its_day(
    flights: Any, root: Path, days: Any, engine: EngineWatch, rows_at: Any, table: PredictionTable
) -> None:
    def lose(given: Sequence[float]) -> None:
        if rows_at(49)[0] in given:
            raise DeviceError("is lost", stage="execute")

    engine.during = lose
    flights.write_day(root, "2026-02-27", 5, b=None)
    flights.write_day(root, "2026-02-28", 5)
    flights.write_day(root, NEXT, 5)
    results = dict(days(flights.source(root), "2026-02-27", "2026-02-28", DAY, NEXT))
    assert [(day, type(found).__name__) for day, found in results.items()] == [
        ("2026-02-27", "DatasetError"),
        ("2026-02-28", "Predictions"),
        (DAY, "DeviceError"),
    ]


# One shard alone, memory, and the report


@pytest.fixture
def workers(
    served: SimpleNamespace, device: HostDevice, flights: Any, table: PredictionTable, engine: EngineWatch
) -> Iterator[Callable[[ShardTask, Source], Receipt]]:
    """Scores single shards for one attempt at the day."""
    table.create(flights.schema)
    strict = ScoringPolicy(0.1)
    with table.attempt(DAY, "run") as attempt, Scorer(served.plan, served.store, device, strict) as scorer:
        yield lambda task, source: score_shard(task, scorer, source, Destination(table, flights.schema, attempt.ticket))


WORKER = """
import pickle, sys
from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.device.host import HostDevice
from gpu_runtime.scoring import Scorer, ScoringPolicy, score_shard

plan, store, tasks, source, to = pickle.load(sys.stdin.buffer)
with HostDevice() as device, Scorer(plan, ArtifactStore(store), device, ScoringPolicy()) as scorer:
    receipts = [score_shard(task, scorer, source, to) for task in tasks]
sys.stdout.buffer.write(pickle.dumps(receipts))
"""


def test_other_processes_score_the_shards_of_one_attempt(
    served: SimpleNamespace, flights: Any, root: Path, table: PredictionTable, engine: EngineWatch, score: Any
) -> None:
    source = flights.source(root, rows_per_shard=10)
    tasks = source.partition(DAY).shards
    table.create(flights.schema)
    with table.attempt(DAY, "run") as attempt:
        to = Destination(table, flights.schema, attempt.ticket)
        table.current_publication(DAY)  # its folders are open: what they hold cannot be sent
        workers = [
            subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for number, worker in enumerate(workers):
            assert worker.stdin is not None
            with worker.stdin as channel:
                pickle.dump((served.plan, str(served.store.root), tasks[number::2], source, to), channel)
        done = []
        for worker in workers:
            assert worker.stdout is not None
            done += pickle.load(worker.stdout)
            worker.stdout.close()
            assert worker.wait() == 0
        assert sorted(receipt.shard for receipt in done) == [0, 1, 2, 3, 4]
        assert all(attempt.id in receipt.file and receipt.run_id == "run" for receipt in done)
        made = score(CountingSource(source))
    assert (made.published, made.resumed_shards, engine.seen) == (50, 5, [])
    Path(table.root.uri, "attempts", DAY, f"{attempt.id}.json").unlink(missing_ok=True)
    taken_for_dead = pytest.raises(PublicationConflictError, match="took this one for dead")
    with taken_for_dead, HostDevice() as device, Scorer(served.plan, served.store, device, LENIENT) as scorer:
        score_shard(replace(tasks[0], reading="another"), scorer, source, to)


def test_one_shard_alone_leaves_the_receipt_that_it_leaves_among_others(
    root: Path, source: CountingSource, engine: EngineWatch, table: PredictionTable, score: Any, workers: Any
) -> None:
    task = source.partition(DAY).shards[3]
    alone = workers(task, source)
    assert workers(task, source) == alone and source.opened == [3]
    assert (alone.shard, alone.rows_in, alone.rows, alone.run_id) == (3, 10, 10, "run")
    made = score(source)
    assert source.opened == [3, 0, 1, 2, 4] and made.resumed_shards == 1
    score(source, force=True)
    among = Receipt.from_plain(json.loads(receipt_of(table, 3).read_text()))
    assert replace(among, file=alone.file) == alone, "down to the checksum of the file"


def test_shards_that_others_scored_make_a_day_that_is_judged_as_a_whole(
    flights: Any, root: Path, engine: EngineWatch, score: Any, workers: Any
) -> None:
    """Half of one shard is bad, a tenth of the day."""
    flights.write_day(root, DAY, 50, group=10, a=nulls_at(20, 21, 22, 23, 24))
    source = CountingSource(flights.source(root, rows_per_shard=10))
    receipts = [workers(task, source) for task in reversed(source.partition(DAY).shards)]
    assert [len(receipt.quarantined) for receipt in receipts] == [0, 0, 5, 0, 0]
    source.opened.clear()
    with pytest.raises(TooManyQuarantinedError):
        score(source, policy=ScoringPolicy(0.09))
    assert score(source, policy=ScoringPolicy(0.1)).published == 45
    assert source.opened == []


def test_what_fits_on_the_device_is_remembered_by_the_next_run(
    served: SimpleNamespace, source: CountingSource, engine: EngineWatch, score: Any
) -> None:
    def take_two(given: Sequence[float]) -> None:
        if len(given) > 2:
            raise MemoryError

    small = DeviceClass("cpu", "x86_64", ("little memory",))
    engine.during = take_two
    assert score(source, device_class=small).published == 50
    assert max(map(len, engine.batches)) == 4
    assert CeilingStore(served.store.root).find(served.plan.engine_digest, small) == 2
    assert score(source, device_class=small, force=True).published == 50
    assert {len(batch) for batch in engine.batches} == {2}
    engine.during = lambda given: None
    score(source)
    assert {len(batch) for batch in engine.batches} == {4}, "another class of device has room"


def test_the_run_report_says_what_ran_and_how_fast(
    served: SimpleNamespace, source: CountingSource, table: PredictionTable, score: Any
) -> None:
    made = score(source)
    report = table.read_run(DAY)
    assert report is not None
    assert (report["engine"], report["plan"]) == ("onnxruntime:fp32", served.plan.digest)
    assert (report["model_digest"], report["engine_digest"]) == (served.exported.digest, served.plan.engine_digest)
    assert (report["rows_in"], report["scored"], report["quarantined"]) == (50, 50, 0)
    assert report["of_engine_only"] == pytest.approx(report["rows_per_s"] / 1000.0)
    assert report["bottleneck"] in {"read", "decode", "dispatch", "compute", "write"}
    assert made.report == report
    assert 0 < report["latency_p50_ms"] <= report["latency_p90_ms"] <= report["latency_p99_ms"]
    assert report["peak_memory_mib"] > 50 and report["cost_per_million_rows"] is None
    assert report["padding"] == report["padded_elements"] / 50 == 10 / 50  # five shards of 10 rows, in batches of 4


def test_a_run_says_what_a_million_rows_cost(source: CountingSource, score: Any) -> None:
    report = score(source, policy=ScoringPolicy(price_per_hour=3.6)).report
    assert report["cost_per_million_rows"] == pytest.approx(3.6 / 3600 * report["run"]["wall_s"] / 50 * 1e6)
    with pytest.raises(SpecError, match="price_per_hour"):
        ScoringPolicy(price_per_hour=-1)


# Pictures


def test_pictures_are_scored_and_named_and_a_broken_one_is_quarantined(
    serve: Any, make_graph: Any, write_jpeg: Any, table: PredictionTable, score: Any, engine: Any, tmp_path: Path
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
    outputs = photos.plan.engine_file(photos.store).outputs
    made = score(source, by=photos, schema=PredictionSchema(outputs, {"top_index": ("red", "green", "blue")}))
    frame = table.read_day(DAY).sort_values("row_key")
    assert frame["row_key"].tolist() == ["a.jpg", "b.jpg", "d.jpg"]
    assert [list(names) for names in frame["top_label"]] == [["red", "green"], ["green", "blue"], ["blue", "red"]]
    assert table.read_quarantine(DAY)["row_key"].tolist() == ["c.jpg"]
    assert made.accounted
    renamed = PredictionSchema(outputs, {"top_index": ("rot", "grün", "blau")})
    assert not score(source, by=photos, schema=renamed).reused and len(engine.batches) == 1
    assert set(table.read_day(DAY)["top_label"].explode()) == {"rot", "grün", "blau"}
    assert score(source, by=photos, schema=renamed).reused


# The review of what was published


def publish(table: PredictionTable, schema: PredictionSchema, day: str, **outputs: Any) -> str:
    """A day written by hand: one shard of these outputs, or none."""
    made = Provenance("model", "engine", "by hand")
    with table.attempt(day, "by hand") as attempt:
        receipts, rows = [], len(next(iter(outputs.values()), ()))
        table.create(schema)
        if rows:
            writer = table.shard_writer(schema, 0, attempt.ticket, made)
            writer.append(origins_of([str(row) for row in range(rows)], "f", range(rows)), outputs)
            nbytes, sha256 = writer.finish()
            receipts = [Receipt(day, 0, "key", "by hand", writer.file, nbytes, sha256, rows, rows, ())]
        record = DayRecord("key", made, rows, rows, 0, {})
        return table.publish(schema, attempt, receipts, record, table.current_publication(day))


WIDE = PredictionSchema((TensorSpec("p", "float32"), TensorSpec("k", "int32", (2,))), {})
NARROW = PredictionSchema((TensorSpec("p", "float32"),), {})


def outputs_of(rows: int, shift: float = 0.0) -> dict[str, Any]:
    p = np.linspace(0, 1, rows, dtype=np.float32) + np.float32(shift)
    return {"p": p, "k": np.stack([np.arange(rows) % 3, np.arange(rows) % 5], axis=1).astype(np.int32)}


def test_a_day_is_compared_with_the_last_one_before_it_that_has_rows(table: PredictionTable) -> None:
    publish(table, WIDE, "2026-03-05", **outputs_of(40, shift=9.0))
    publish(table, WIDE, DAY, **outputs_of(40))
    assert review_outputs(table, WIDE, DAY) == OutputReview({"p": 0})  # nothing before it
    publish(table, WIDE, NEXT)
    assert review_outputs(table, WIDE, NEXT) == OutputReview({"p": 0})  # nothing in it
    publish(table, WIDE, LATER, **outputs_of(40))
    review = review_outputs(table, WIDE, LATER)
    assert review.compared_with == DAY and {name: one.distance for name, one in review.drift.items()} == {
        "p": 0.0,
        "k": 0.0,
    }


def test_an_output_that_the_earlier_day_lacks_is_not_compared(table: PredictionTable) -> None:
    publish(table, NARROW, DAY, p=outputs_of(40)["p"])
    publish(table, WIDE, NEXT, **outputs_of(40))
    assert list(review_outputs(table, WIDE, NEXT).drift) == ["p"]
    publish(table, WIDE, LATER, **outputs_of(40, shift=0.5))
    review = review_outputs(table, WIDE, LATER)
    assert review.compared_with == NEXT and review.drift["p"].beyond(0.1) and not review.drift["k"].beyond(0.1)


def test_every_row_that_is_not_finite_is_counted_and_none_is_compared(
    table: PredictionTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_REVIEWED_VALUES", 10)
    monkeypatch.setattr(scoring, "_REVIEWED_ROWS", 10)
    publish(table, NARROW, DAY, p=outputs_of(1000)["p"])
    spoilt = outputs_of(1000)["p"]
    spoilt[[7, 500, 993]] = np.nan, np.inf, -np.inf
    publish(table, NARROW, NEXT, p=spoilt)
    review = review_outputs(table, NARROW, NEXT)
    assert review.non_finite == {"p": 3} and not review.drift["p"].beyond(0.1)
    publish(table, NARROW, LATER, p=np.full(10, np.nan, np.float32))
    assert review_outputs(table, NARROW, LATER) == OutputReview({"p": 10})


@pytest.mark.parametrize(("counted", "scored"), [(11, 10), (9, 0)])
def test_a_shard_that_reads_other_rows_than_were_counted_is_no_day(
    flights: Any, root: Path, table: PredictionTable, score: Any, counted: int, scored: int
) -> None:
    class Miscounted(CountingSource):
        def partition(self, day: str) -> Any:
            cut = super().partition(day)
            return replace(cut, shards=tuple(replace(shard, rows=counted) for shard in cut.shards))

    message = rf"Expected {counted} rows\. Got 10 read, {scored} scored, 0 quarantined"
    with pytest.raises(DatasetError, match=message):
        score(Miscounted(flights.source(root, rows_per_shard=10)))
    assert table.current_publication(DAY) is None and not receipt_of(table, 0).exists()


def test_a_shard_whose_surplus_shows_when_it_counts_as_done_is_not_kept(
    flights: Any, root: Path, table: PredictionTable, score: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = threading.Event()
    write = ReceiptStore.write

    def noted(store: ReceiptStore, receipt: Receipt) -> None:
        write(store, receipt)
        kept.set()

    class Twice(CountingSource):
        def parts(self, shard: ShardTask) -> Iterator[ShardReader]:
            yield from super().parts(shard)
            assert kept.wait(60)
            yield from super().parts(shard)

    monkeypatch.setattr(ReceiptStore, "write", noted)
    with pytest.raises(DatasetError, match=r"Got 20 read, 10 scored"):
        score(Twice(flights.source(root, rows_per_shard=10)))
    assert table.current_publication(DAY) is None and not receipt_of(table, 0).exists()


def test_a_shard_that_is_read_in_parts_is_one_file_with_every_row(
    served: SimpleNamespace,
    flights: Any,
    root: Path,
    table: PredictionTable,
    score: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parquet, "_ROWS_AT_ONCE", 7)
    flights.write_day(root, DAY, 50, group=10, a=nulls_at(6, 7, 49))
    made = score(flights.source(root))
    assert (made.shards, made.rows_in, made.scored, made.quarantined, made.accounted) == (1, 50, 47, 3, True)
    frame = table.read_day(DAY).sort_values("source_position")
    kept = [row for row in range(50) if row not in (6, 7, 49)]
    assert frame["source_position"].tolist() == kept and len(files_of(table, 0)) == 1
    rows = flights.rows(50)
    rows["numbers"][:, 0] = 0.5
    np.testing.assert_allclose(frame["probability"], served.run(rows)["probability"][kept], atol=1e-5)
    assert table.read_quarantine(DAY)["source_position"].tolist() == [6, 7, 49]


def test_a_table_whose_runs_are_of_an_older_kind_is_scored_again_and_goes_on(
    source: CountingSource, table: PredictionTable, score: Any
) -> None:
    score(source)
    number = table.current_publication(DAY)
    shutil.rmtree(table.runs.uri)
    day = datetime.date.fromisoformat(DAY)
    old = pa.table({"date": [day], "publication": [number], "run_id": ["r"], "report": ["{}"]})
    write_deltalake(table.runs.uri, old, partition_by=["date"])
    made = score(source)
    assert not made.reused and made.published == 50 and score(source).reused


def test_errors_reach_another_process_as_they_are() -> None:
    error = DatasetError("gone", stage="dataset", item="a", expected="b", got="c", next_step="d")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DatasetError and str(again) == str(error) and again.item == "a"
