"""Days in Dagster: ranges with a bad day, what is stale and why, what is scored again, and the checks of each day.

The tests share one promoted project; each has days of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import dagster as dg
import numpy as np
import pytest
from deltalake import DeltaTable

from gpu_runtime import scoring
from gpu_runtime.datasets.partition import origins_of
from gpu_runtime.errors import DeviceError
from gpu_runtime.predictions.delta_table import PredictionTable
from gpu_runtime.predictions.receipts import Receipt
from gpu_runtime.predictions.shard_file import PredictionSchema
from gpu_runtime.specs import TensorSpec

GREEN = dict.fromkeys(("row_accounting", "quarantined_fraction", "finite_outputs", "output_drift"), "SUCCEEDED")
SCHEMA = PredictionSchema((TensorSpec("score", "float32"),), {})


def day(number: int) -> str:
    return f"2026-01-{number:02}"


@pytest.fixture
def land(shared: Any) -> Callable[..., tuple[str, str]]:
    """Write days `first … last` and register them; returns the range."""

    def write(first: int, last: int, **how: Any) -> tuple[str, str]:
        for number in range(first, last + 1):
            shared.write_day(day(number), **how)
        assert shared.materialize("rows", days=(day(first), day(last))).success
        return day(first), day(last)

    return write


def failed_checks(result: dg.ExecuteInProcessResult) -> dict[str, Any]:
    """Those of single days and those of the whole range: name → the evaluation."""
    return {found.check_name: found for found in result.get_asset_check_evaluations() if not found.passed}


# Ranges


def test_a_bad_day_in_a_range_costs_only_itself_now_and_when_the_range_is_run_again(
    shared: Any, land: Any, failure_text: Any, engine_saw: list[float], first_feature: Any
) -> None:
    days = land(4, 6)
    shared.write_day(day(5), null_rows=150)
    first = shared.materialize("predictions", days=days)
    assert not first.success
    assert f"of 3 days: 2 published, 1 failed ({day(5)})" in failure_text(first)
    assert "so far; most often: column 'a' is null (64 rows, as in rows.parquet)" in failure_text(first)
    assert shared.table().current_publication(day(5)) is None
    assert shared.state(day(5)).status == "MISSING" and shared.state(day(5)).materializations == 0
    before = {number: shared.state(day(number)) for number in (4, 6)}
    for state in before.values():
        assert (state.status, state.checks, state.metadata["reused"]) == ("FRESH", GREEN, False)

    shared.write_day(day(5))
    engine_saw.clear()
    again = shared.materialize("rows", "predictions", days=days)
    assert again.success
    assert sorted(engine_saw) == sorted(first_feature(day(5)))
    for number in (4, 5, 6):
        state = shared.state(day(number))
        assert (state.status, state.checks, state.metadata["reused"]) == ("FRESH", GREEN, number != 5)
    for number, earlier in before.items():
        assert shared.state(day(number)).tags["dagster/data_version"] == earlier.tags["dagster/data_version"]

    engine_saw.clear()
    assert shared.materialize("predictions", days=days).success
    assert engine_saw == [] and {shared.state(day(number)).status for number in (4, 5, 6)} == {"FRESH"}


def test_a_day_of_a_range_has_the_versions_that_it_has_alone(shared: Any, land: Any) -> None:
    days = land(7, 8)
    assert shared.materialize("predictions", days=days).success
    in_range = shared.state(day(7))
    assert shared.materialize("predictions", day=day(7)).success
    alone = shared.state(day(7))
    upstream = "dagster/input_data_version/tiny/serving_plan"
    for tag in ("dagster/data_version", "dagster/code_version", "dagster/data_version_is_user_provided", upstream):
        assert in_range.tags[tag] == alone.tags[tag], tag
    assert in_range.tags.keys() == alone.tags.keys()
    wanted = dg.AssetRecordsFilter(dg.AssetKey(["tiny", "rows"]), asset_partitions=[day(7)])
    (own, *_) = shared.instance.fetch_materializations(wanted, limit=1).records
    own_version = own.asset_materialization.tags["dagster/data_version"]
    assert in_range.tags["dagster/input_data_version/tiny/rows"] == own_version
    assert in_range.metadata["publication"] == alone.metadata["publication"]
    assert in_range.tags["dagster/data_version"] != shared.state(day(8)).tags["dagster/data_version"]


def test_a_day_is_known_to_dagster_before_the_next_is_scored(shared: Any, land: Any, monkeypatch: Any) -> None:
    """So that a killed run leaves no published day that Dagster does not know."""
    days, known = land(9, 10), []
    score = scoring.score_partition

    def look_first(scorer: Any, partition: Any, *rest: Any, **more: Any) -> Any:
        known.append((shared.state(day(9)).status, shared.state(day(9)).checks))
        return score(scorer, partition, *rest, **more)

    monkeypatch.setattr(scoring, "score_partition", look_first)
    assert shared.materialize("predictions", days=days).success
    assert known[1] == ("FRESH", GREEN)


def test_a_range_of_one_day_is_a_day(shared: Any, land: Any) -> None:
    assert shared.materialize("predictions", days=land(11, 11)).success
    assert (shared.state(day(11)).status, shared.state(day(11)).checks) == ("FRESH", GREEN)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("disk full"), "of 3 days: 2 published, 1 failed (2026-01-13)"),
        (DeviceError("is lost", stage="execute"), "of 3 days: 1 published, 1 not tried, 1 failed (2026-01-13)"),
    ],
    ids=["a library", "the device"],
)
def test_what_fails_in_the_middle_of_a_range_is_told_with_its_cause(
    shared: Any, land: Any, failure_text: Any, monkeypatch: Any, error: Exception, told: str
) -> None:
    days, publish = land(12, 14), PredictionTable.publish

    def failing(self: Any, schema: Any, attempt: Any, *rest: Any) -> str:
        if attempt.day == day(13):
            raise error
        return publish(self, schema, attempt, *rest)

    monkeypatch.setattr(PredictionTable, "publish", failing)
    result = shared.materialize("predictions", days=days, force=True)
    assert not result.success
    assert told in failure_text(result) and str(error) in failure_text(result)
    assert shared.table().current_publication(day(13)) is None


def test_a_day_without_a_folder_fails_alone_and_an_empty_one_is_a_day(
    shared: Any, land: Any, failure_text: Any
) -> None:
    land(15, 15)
    shared.day_folder(day(16)).mkdir()
    for asset, outcome in (("rows", "registered"), ("predictions", "published")):
        result = shared.materialize(asset, days=(day(15), day(17)))
        assert not result.success
        assert f"of 3 days: 2 {outcome}, 1 failed ({day(17)})" in failure_text(result)
        assert "the day has no folder" in failure_text(result) and "an empty folder" in failure_text(result)
        alone = shared.materialize(asset, day=day(17))
        assert not alone.success and "the day has no folder" in failure_text(alone)
    empty = shared.state(day(16))
    assert (empty.status, empty.checks, empty.metadata["dagster/row_count"]) == ("FRESH", GREEN, 0)
    assert len(shared.table().read_day(day(16))) == 0
    assert [shared.state(day(number)).status for number in (15, 17)] == ["FRESH", "MISSING"]


# Stale, and scored again


@pytest.mark.parametrize("by", ["day", "days"])
def test_changed_input_makes_its_day_stale_and_the_next_run_replaces_it(
    shared: Any, land: Any, engine_saw: list[float], by: str
) -> None:
    days, stale = (day(18), day(19)), day(19)
    land(18, 19)
    assert shared.materialize("predictions", days=days).success
    where = {"day": stale} if by == "day" else {"days": days}
    shared.write_day(stale, rows=150)
    assert shared.materialize("rows", **where).success
    state = shared.state(stale)
    assert (state.status, state.causes) == ("STALE", ["has a new dependency data version: tiny/rows"])
    assert shared.state(day(18)).status == "FRESH"
    engine_saw.clear()
    assert shared.materialize("predictions", **where).success
    assert shared.state(stale).status == shared.state(day(18)).status == "FRESH"
    assert len(engine_saw) == len(shared.table().read_day(stale)) == 150


@pytest.mark.parametrize("by", ["day", "days"])
def test_force_scores_a_published_day_again_and_replaces_it(
    shared: Any, land: Any, engine_saw: list[float], first_feature: Any, by: str
) -> None:
    where = {"days": land(20, 20)} if by == "days" else {"day": land(20, 20)[0]}
    assert shared.materialize("predictions", **where).success
    before = shared.state(day(20))
    engine_saw.clear()
    assert shared.materialize("predictions", **where).success
    assert engine_saw == [] and shared.state(day(20)).metadata["publication"] == before.metadata["publication"]
    assert shared.materialize("predictions", **where, force=True).success
    assert engine_saw == first_feature(day(20))
    forced = shared.state(day(20))
    assert forced.metadata["publication"] != before.metadata["publication"] and forced.metadata["reused"] is False
    assert forced.tags["dagster/data_version"] == before.tags["dagster/data_version"]
    assert len(shared.table().read_day(day(20))) == 200


# Checks


@pytest.fixture
def forgets(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Takes rows of that day out of the table as soon as it is published."""

    def forget(bad: str) -> None:
        publish = PredictionTable.publish

        def forgetful(self: PredictionTable, schema: Any, attempt: Any, *rest: Any) -> str:
            number = publish(self, schema, attempt, *rest)
            if attempt.day == bad:
                DeltaTable(self.predictions.uri).delete(f"date = '{bad}' AND source_position < 64")
            return number

        monkeypatch.setattr(PredictionTable, "publish", forgetful)

    return forget


@pytest.mark.parametrize("by", ["day", "days"])
def test_a_lost_row_fails_the_check_of_its_day(shared: Any, land: Any, forgets: Any, by: str) -> None:
    days, bad = land(21, 22), day(21)
    forgets(bad)
    result = shared.materialize("predictions", **({"day": bad} if by == "day" else {"days": days}), force=True)
    assert not result.success
    assert set(failed_checks(result)) == {"row_accounting"}
    state, found = shared.state(bad), failed_checks(result)["row_accounting"]
    assert state.checks == GREEN | {"row_accounting": "FAILED"}
    if by == "day":
        assert found.partition == bad and found.metadata["rows_in"].value == 200 > found.metadata["published"].value
        return
    assert found.metadata["failed"].value == [bad]
    other = shared.state(day(22))
    assert (other.status, other.checks) == ("FRESH", GREEN)
    # Dagster's own event of the step gave all days one version; each day's own is the last all the same.
    assert len({one.tags["dagster/data_version"] for one in (state, other)}) == 2
    assert other.metadata["rows_in"] == 200


def test_a_limit_that_was_lowered_since_holds_for_a_published_day(
    shared: Any, land: Any, engine_saw: list[float]
) -> None:
    (bad, _) = land(23, 23, null_rows=8)
    assert shared.materialize("predictions", day=bad).success
    assert shared.state(bad).checks == GREEN
    engine_saw.clear()
    stricter = replace(shared, settings=copy.deepcopy(shared.settings) | {"max_quarantined_fraction": 0.03})
    result = stricter.materialize("predictions", day=bad)
    assert not result.success and set(failed_checks(result)) == {"quarantined_fraction"}
    assert failed_checks(result)["quarantined_fraction"].metadata["fraction"].value == pytest.approx(0.04)
    assert engine_saw == []


def test_a_score_that_is_no_number_fails_the_check_whoever_published_it(shared: Any, land: Any) -> None:
    (bad, _) = land(24, 24)
    assert shared.materialize("predictions", day=bad).success
    table = shared.table()
    published, frame = table.published(bad), table.read_day(bad)
    scores = frame["score"].to_numpy().copy()
    scores[[3, 77]] = np.nan, np.inf
    with table.attempt(bad, "by hand") as attempt:
        writer = table.shard_writer(SCHEMA, 0, attempt.ticket, published.record.provenance)
        writer.append(
            origins_of(frame["row_key"], list(frame["source_file"]), frame["source_position"]), {"score": scores}
        )
        nbytes, sha256 = writer.finish()
        receipt = Receipt(bad, 0, "key", "by hand", writer.file, nbytes, sha256, 200, 200, ())
        table.publish(SCHEMA, attempt, [receipt], published.record, published.number)
    result = shared.materialize("predictions", day=bad)
    assert not result.success and set(failed_checks(result)) == {"finite_outputs"}
    found = failed_checks(result)["finite_outputs"].metadata["rows_with_values_not_finite"].value
    assert found == {"score": 2}
    assert shared.state(bad).checks == GREEN | {"finite_outputs": "FAILED"}


@pytest.mark.parametrize("by", ["day", "days"])
def test_a_day_of_another_distribution_is_a_warning(shared: Any, land: Any, by: str) -> None:
    land(25, 25)
    land(26, 26, shift=3.0)
    assert shared.materialize("predictions", day=day(25)).success
    where = {"day": day(26)} if by == "day" else {"days": (day(25), day(26))}
    result = shared.materialize("predictions", **where)
    assert result.success
    found = failed_checks(result)
    assert set(found) == {"output_drift"}
    severities = {one.severity for one in result.get_asset_check_evaluations() if not one.passed}
    assert severities == {dg.AssetCheckSeverity.WARN}
    assert shared.state(day(25)).checks == GREEN
    assert shared.state(day(26)).checks == GREEN | {"output_drift": "FAILED"}
    if by == "day":
        assert found["output_drift"].metadata["compared_with"].value == day(25)
        assert found["output_drift"].metadata["drifted"].value == ["score"]
        tolerant = replace(shared, settings=copy.deepcopy(shared.settings) | {"max_drift": 1.0})
        assert failed_checks(tolerant.materialize("predictions", **where)) == {}
