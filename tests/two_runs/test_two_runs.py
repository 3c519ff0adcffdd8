"""Two processes publish at once: a day has one winner, two days both succeed, and nothing is mixed or doubled.

Both stand right before their commit when they are released, so both have read the same version of the table. The
tests hold for the versions of deltalake that `pyproject.toml` allows.
"""

from __future__ import annotations

from typing import Any

import deltalake
import pytest
from deltalake import DeltaTable

from gpu_runtime.predictions.delta_table import PredictionTable
from gpu_runtime.predictions.storage import Folder

MONDAY, TUESDAY = "2026-03-02", "2026-03-03"
ROUNDS = [pytest.param(2, id="a few"), pytest.param(25, id="many", marks=pytest.mark.slow)]


def command(place: Any, do: str, **told: Any) -> dict[str, Any]:
    return {"do": do, "root": place.root, "options": place.options, "stop": "before commit", **told}


def publish(place: Any, day: str, run: str, rows: int, rotten: int, **told: Any) -> dict[str, Any]:
    return command(place, "publish", day=day, run=run, rows=rows, rotten=rotten, **told)


def rows_of(folder: Folder) -> Any:
    return DeltaTable(folder.uri, storage_options=folder.options).to_pandas()


def run_of(table: PredictionTable, day: str) -> tuple[set[str], tuple[int, int]]:
    """The runs that the day's rows, quarantine and record are from, and the counts."""
    published = table.published(day)
    assert published is not None
    runs = set(table.read_day(day)["run_id"]) | set(table.read_quarantine(day)["run_id"])
    return runs | {published.record.provenance.run_id}, table.count_day(day)


def check_one_winner(results: list[dict[str, Any]], day: str) -> int:
    (winner,) = [number for number, result in enumerate(results) if "ok" in result]
    loser = results[1 - winner]
    assert loser["error"] == "PublicationConflictError", loser
    assert f"{day}: another run published the day meanwhile" in loser["text"]
    assert f"Got {results[winner]['ok']}." in loser["text"] and "Next: " in loser["text"]
    return winner


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("exists", [False, True], ids=["first publications", "replacements"])
def test_one_day_has_one_winner(place: Any, publishers: Any, days: Any, exists: bool, rounds: int) -> None:
    for number in range(rounds):
        there = place.folder(str(number))
        table = there.table()
        days.publish(table, TUESDAY, [0.5], run="tuesday", rotten=(days.rotten,))
        previous = days.publish(table, MONDAY, [0.25], run="before", rotten=(days.rotten,)) if exists else None
        results = publishers.together(publish(there, MONDAY, "a", 10, 3), publish(there, MONDAY, "b", 7, 2))
        winner = check_one_winner(results, MONDAY)
        run, counts = [("a", (10, 3)), ("b", (7, 2))][winner]
        assert run_of(table, MONDAY) == ({run}, counts)
        assert run_of(table, TUESDAY) == ({"tuesday"}, (1, 1))
        assert table.current_publication(MONDAY) == results[winner]["ok"] != previous
        # What the loser left counts for nobody, and goes with the next publication.
        days.publish(table, MONDAY, [1.0], run="after", previous=results[winner]["ok"])
        for folder in (table.quarantine, table.runs):
            assert set(rows_of(folder)["run_id"]) - {"tuesday", "before", "after"} == {run}
        assert len(table.predictions.list(f"date={MONDAY}")) == 2 + exists  # one file for each publication
        assert table.root.list("attempts") == []


@pytest.mark.parametrize("rounds", ROUNDS)
def test_two_days_both_succeed(place: Any, publishers: Any, rounds: int) -> None:
    table = place.table()
    for number in range(rounds):  # the first time both make the table, later they replace
        a, b = f"a{number}", f"b{number}"
        results = publishers.together(publish(place, MONDAY, a, 10, 3), publish(place, TUESDAY, b, 7, 2))
        assert [table.current_publication(day) for day in (MONDAY, TUESDAY)] == [one.get("ok") for one in results]
        assert run_of(table, MONDAY) == ({a}, (10, 3))
        assert run_of(table, TUESDAY) == ({b}, (7, 2))
    assert len(rows_of(table.predictions)) == 17


def test_two_whole_runs_of_a_day(place: Any, publishers: Any, served: Any) -> None:
    """With an engine: the loser's next run finds the winner's day and scores nothing."""
    table = place.table()

    def score(run: str, **told: Any) -> dict[str, Any]:
        return command(place, "score", day=MONDAY, run=run, store=served.store, data=served.data, **told)

    winner = check_one_winner(results := publishers.together(score("a"), score("b")), MONDAY)
    expected = (served.rows - served.rotten, served.rotten)
    assert run_of(table, MONDAY) == ({"ab"[winner]}, expected)
    assert table.read_day(MONDAY)["row_key"].is_unique
    again = publishers.together(score("c", stop="before clean-up"), score("d", stop="before clean-up"))
    assert [one.get("ok") for one in again] == [results[winner]["ok"]] * 2
    assert run_of(table, MONDAY) == ({"ab"[winner]}, expected)
    assert table.root.list(f"attempts/{MONDAY}") == []
    held = DeltaTable(table.predictions.uri, storage_options=place.options).file_uris()
    assert len(table.predictions.list(f"date={MONDAY}")) == len(held)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_two_processes_make_the_tables_at_once(place: Any, publishers: Any, rounds: int) -> None:
    for number in range(rounds):
        there = place.folder(str(number))
        results = publishers.together(command(there, "create"), command(there, "create"))
        assert results == [{"ok": "created"}] * 2
        table = there.table()
        for folder in (table.predictions, table.quarantine, table.runs):
            assert DeltaTable(folder.uri, storage_options=place.options).version() == 0


@pytest.mark.parametrize("commits", ["retried", "plain"])
def test_deltalake_left_alone_publishes_a_day_twice(place: Any, publishers: Any, commits: str) -> None:
    """What the rounds above would see without the two things that prevent it, each of which suffices: the day's
    transaction entry, and no retries."""
    results = publishers.together(
        publish(place, MONDAY, "a", 10, 3, commits=commits), publish(place, MONDAY, "b", 7, 2, commits=commits)
    )
    if commits == "retried":
        check_one_winner(results, MONDAY)
        return
    assert [sorted(one) for one in results] == [["ok"], ["ok"]]
    assert set(place.table().read_day(MONDAY)["run_id"]) == {"a", "b"}


def test_the_version_for_which_all_this_holds() -> None:
    """Another one may check conflicts in another way: read its notes and run the many rounds before you allow it."""
    assert deltalake.__version__.startswith("1.6.")
