"""Which runs live, which are dead, and what becomes of what a dead one left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from gpu_runtime.errors import PublicationConflictError
from gpu_runtime.predictions.attempts import Attempt
from gpu_runtime.predictions.delta_table import PredictionTable
from gpu_runtime.predictions.quarantine import append_quarantine
from gpu_runtime.predictions.storage import Folder

MONDAY, TUESDAY = "2026-03-02", "2026-03-03"


def age(place: Any, *attempts: Attempt) -> None:
    """As if nothing had been heard of them for an hour."""
    for attempt in attempts:
        past = time.time() - 3600
        os.utime(Path(place.root) / "attempts" / attempt.day / f"{attempt.id}.json", (past, past))


def files_of(table: PredictionTable, day: str = MONDAY) -> set[str]:
    return {file.name for file in table.predictions.list(f"date={day}")}


def attempts_of(table: PredictionTable, day: str = MONDAY) -> set[str]:
    return {file.name for file in table.root.list(f"attempts/{day}")}


def publications_in(folder: Folder) -> set[str]:
    return set(DeltaTable(folder.uri, storage_options=folder.options).to_pandas()["publication"])


def kill_at(point: str, days: Any) -> Any:
    def plan(reached: str) -> None:
        if reached == point:
            raise days.Killed

    return plan


# Dead or alive


def test_who_has_ended_or_was_silent_for_a_lease_is_dead(disk: Any, days: Any) -> None:
    table = disk.table()
    with days.killed(table, MONDAY) as silent, days.killed(table, MONDAY) as fresh:
        pass
    age(disk, silent)
    with pytest.raises(ZeroDivisionError), table.attempt(MONDAY, "failed") as failed:
        failed.note_publication("17")
        raise ZeroDivisionError
    with (
        days.killed(table, TUESDAY) as elsewhere,
        table.attempt(MONDAY, "live") as live,
        table.attempt(MONDAY, "me") as me,
    ):
        dead = {one.id: one.publications for one in me.dead_ones()}
    assert dead == {silent.id: (), failed.id: ("17",)}
    assert attempts_of(table) == {f"attempts/{MONDAY}/{one.id}.json" for one in (silent, fresh, failed)}
    assert live.id not in dead and elsewhere.id not in dead


def test_a_slow_run_gives_signs_of_life_by_itself(place: Any, days: Any) -> None:
    table = place.table(lease_s=3.0)  # object stores stamp whole seconds
    with days.killed(table, MONDAY) as dead:
        pass
    with table.attempt(MONDAY, "slow") as slow:
        time.sleep(4.5)
        with table.attempt(MONDAY, "me") as me:
            assert [one.id for one in me.dead_ones()] == [dead.id]
        slow.renew()


def test_a_record_that_cannot_be_read_is_known_by_its_name(disk: Any, days: Any) -> None:
    table = disk.table()
    with days.killed(table, MONDAY) as dead:
        days.shard(table, dead, [9.0])
    table.root.write(f"attempts/{MONDAY}/{dead.id}.json", b"")
    table.root.write(f"attempts/{MONDAY}/a.json", b"")  # nobody's: were it a run's, its name would be in many others
    os.utime(Path(disk.root) / "attempts" / MONDAY / "a.json", (1, 1))
    days.publish(table, MONDAY, [0.5])
    assert len(attempts_of(table)) == 2  # it may be somebody who lives
    age(disk, dead)
    with table.attempt(MONDAY, "again") as attempt:
        assert [Path(name).name for name in table.clean_up(attempt)] == [f"part-000000-{dead.id}.parquet"]
    assert attempts_of(table) == {f"attempts/{MONDAY}/a.json"}


def test_what_a_renewal_writes_never_undoes_what_was_added(disk: Any, days: Any) -> None:
    """A renewal that is overtaken, right before it writes, by the drawing of a publication."""
    table = disk.table()
    with table.attempt(MONDAY, "run") as attempt:
        arrived, drawn, lock = threading.Event(), threading.Event(), attempt._lock

        @contextmanager
        def overtaken() -> Iterator[None]:
            if threading.current_thread() is renewing:
                arrived.set()
                assert drawn.wait(10)
            with lock:
                yield

        attempt._lock = overtaken()  # type: ignore[assignment]
        renewing = threading.Thread(target=attempt.renew)
        renewing.start()
        assert arrived.wait(10)
        attempt._lock = overtaken()  # type: ignore[assignment]
        attempt.note_publication("17")
        drawn.set()
        renewing.join()
        attempt._lock = lock
        assert b'"17"' in (table.root.read(f"attempts/{MONDAY}/{attempt.id}.json") or b"")


# Taken for dead


@pytest.mark.parametrize("asleep", ["in a shard", "before commit"])
@pytest.mark.parametrize("other", ["publishes", "has nothing to score"])
def test_a_run_taken_for_dead_publishes_nothing(disk: Any, days: Any, asleep: str, other: str) -> None:
    """Whether it wakes before it looks at its record or after, and whether or not the day changed meanwhile."""
    table = disk.table()
    first = days.publish(table, MONDAY, [0.25], run="first")

    def others_turn() -> None:
        age(disk, sleeper)
        if other == "publishes":
            days.publish(table, MONDAY, [0.75], run="other", previous=first)
        else:
            with table.attempt(MONDAY, "other") as attempt:
                assert len(table.clean_up(attempt)) >= 1

    def plan(point: str) -> None:
        if point == asleep:
            others_turn()

    slept = disk.table(faults=plan)
    refused = pytest.raises(PublicationConflictError, match=f"{MONDAY}.*Next: .*the day")
    with refused, slept.attempt(MONDAY, "sleeper") as sleeper:
        receipts = [days.shard(slept, sleeper, [0.5], rotten=(days.rotten,))]
        if asleep == "in a shard":
            others_turn()
            with pytest.raises(PublicationConflictError, match="took this one for dead"):
                sleeper.renew()
            with pytest.raises(PublicationConflictError, match="took this one for dead"):
                slept.shard_writer(days.schema, 1, sleeper.ticket, days.record(sleeper, (), {}).provenance)
        days.commit(slept, sleeper, *receipts, previous=first)
    expected = [0.75] if other == "publishes" else [0.25]
    assert table.read_day(MONDAY)["score"].tolist() == expected
    assert table.count_day(MONDAY) == (1, 0)
    days.publish(table, MONDAY, [1.0], previous=table.current_publication(MONDAY))
    assert not [name for name in files_of(table) if sleeper.id in name]
    assert attempts_of(table) == set()


def test_a_run_that_resumed_files_which_another_removed_fails_clearly(disk: Any, days: Any) -> None:
    table = disk.table()
    with days.killed(table, MONDAY) as dead:
        found = days.shard(table, dead, [0.5])
        table.receipts.write(found)
    age(disk, dead)
    with pytest.raises(PublicationConflictError, match="removed the file"), table.attempt(MONDAY, "run") as attempt:
        receipt = table.receipts.find(MONDAY, 0, "key-0")
        with table.attempt(MONDAY, "other") as other:
            table.create(days.schema)
            assert table.clean_up(other) == [found.file]
        days.commit(table, attempt, receipt)
    assert table.current_publication(MONDAY) is None
    assert table.receipts.find(MONDAY, 0, "key-0") is None  # so it is scored anew


# What a dead run leaves


@pytest.mark.parametrize("point", ["before quarantine", "after quarantine", "before commit"])
def test_leftovers_of_a_dead_run_go_with_the_next_publication(place: Any, days: Any, point: str) -> None:
    table = place.table()
    kept = days.publish(table, TUESDAY, [0.5], rotten=(days.rotten,))
    first = days.publish(table, MONDAY, [0.25], rotten=(days.rotten,))
    resumed = table.receipts.find(MONDAY, 0, "key-0")
    doomed = place.table(faults=kill_at(point, days))
    with pytest.raises(days.Killed), doomed.attempt(MONDAY, "dead") as dead:
        days.shard(doomed, dead, [9.0], shard=1)  # no receipt
        unused = days.shard(doomed, dead, [9.0], shard=2)  # a receipt of a shard that the day no longer has
        doomed.receipts.write(unused)
        own = days.shard(doomed, dead, [9.0], shard=3, rotten=(days.rotten,))
        days.commit(doomed, dead, resumed, own, previous=first)
    left = {name for name in files_of(table) if dead.id in name}
    assert len(left) == 4  # and the copy of the resumed one
    with table.attempt(MONDAY, "next") as attempt:
        second = days.commit(table, attempt, days.shard(table, attempt, [0.75], rotten=(days.rotten,)), previous=first)
        assert set(table.clean_up(attempt)) == left
    assert not [name for name in files_of(table) if dead.id in name]
    assert publications_in(table.quarantine) == publications_in(table.runs) == {kept, first, second}
    assert (attempts_of(table), table.count_day(MONDAY), table.count_day(TUESDAY)) == (set(), (1, 1), (1, 1))


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "silent"])
def test_superseded_files_stay_for_older_readers(disk: Any, days: Any, ended: bool) -> None:
    """Also those of a run that died after its commit, with what is in quarantine for it."""
    doomed, table = disk.table(faults=kill_at("after commit", days)), disk.table()

    def run(attempt: Attempt) -> None:
        days.commit(doomed, attempt, days.shard(doomed, attempt, [0.25], rotten=(days.rotten,)))

    if ended:
        with pytest.raises(days.Killed), doomed.attempt(MONDAY, "dead") as dead:
            run(dead)
    else:
        with days.killed(doomed, MONDAY) as dead:
            run(dead)
        age(disk, dead)
    first, reader = table.current_publication(MONDAY), DeltaTable(table.predictions.uri)
    second = days.publish(table, MONDAY, [0.5], previous=first)
    days.publish(table, MONDAY, [0.75], previous=second)
    assert attempts_of(table) == set()
    assert reader.to_pandas()["score"].tolist() == [0.25]
    assert first in publications_in(table.quarantine) and first in publications_in(table.runs)


def test_a_run_that_died_after_its_commit_keeps_its_day(place: Any, days: Any) -> None:
    doomed, table = place.table(faults=kill_at("after commit", days)), place.table()
    with pytest.raises(days.Killed), doomed.attempt(MONDAY, "dead") as dead:
        receipt = days.shard(doomed, dead, [0.25], rotten=(days.rotten,))
        doomed.receipts.write(receipt)
        days.commit(doomed, dead, receipt)
    with table.attempt(MONDAY, "next") as attempt:
        assert table.published(MONDAY) is not None
        assert table.clean_up(attempt) == []
    assert (table.count_day(MONDAY), attempts_of(table)) == ((1, 1), set())
    assert table.receipts.find(MONDAY, 0, "key-0") == receipt


def test_the_next_run_publishes_what_it_resumed_of_a_dead_one(place: Any, days: Any) -> None:
    table = place.table()
    with pytest.raises(days.Killed), table.attempt(MONDAY, "dead") as dead:
        for shard, score in enumerate((0.25, 0.5)):
            table.receipts.write(days.shard(table, dead, [score], shard=shard))
        raise days.Killed
    with table.attempt(MONDAY, "next") as attempt:
        resumed = [table.receipts.find(MONDAY, shard, f"key-{shard}") for shard in (0, 1)]
        days.commit(table, attempt, *resumed, days.shard(table, attempt, [0.75], shard=2))
        table.clean_up(attempt)
    assert sorted(table.read_day(MONDAY)["score"]) == [0.25, 0.5, 0.75]
    assert all(attempt.id in name for name in files_of(table)) and len(files_of(table)) == 3
    assert all(table.receipts.find(MONDAY, shard, f"key-{shard}") for shard in (0, 1))


def test_files_of_live_runs_are_never_touched(disk: Any, days: Any) -> None:
    table = disk.table()
    with table.attempt(MONDAY, "live") as live, table.attempt(MONDAY, "also") as also:
        with (
            days.killed(table, MONDAY) as dead,
            days.killed(table, MONDAY) as other,
            days.killed(table, TUESDAY) as far,
        ):
            for attempt in (dead, live, other, also, far):
                table.receipts.write(days.shard(table, attempt, [0.5]))
            days.shard(table, far, [0.5], shard=1)  # whose receipt was not written any more
        half = table.predictions.writer(f"date={MONDAY}/part-000009-{live.id}.parquet")
        half.write(bytes(20 << 20))
        age(disk, dead, other, far)
        number = days.publish(table, MONDAY, [0.75])
        assert {name.rpartition("-")[2] for name in files_of(table)} > {f"{one.id}.parquet" for one in (live, also)}
        assert not [name for name in files_of(table) if dead.id in name or other.id in name]
        assert half.commit()[0] == 20 << 20
        # Of another day the shard that is finished stays, and what tells the day's next run of it.
        assert [name.split("/part-")[1][:6] for name in files_of(table, TUESDAY)] == ["000000"]
        assert attempts_of(table, TUESDAY) == {f"attempts/{TUESDAY}/{far.id}.dead.json"}
        days.publish(table, TUESDAY, [0.25])
        assert len(files_of(table, TUESDAY)) == 1 and not attempts_of(table, TUESDAY)
        days.commit(table, live, days.shard(table, live, [1.0]), previous=number)
    assert table.read_day(MONDAY)["score"].tolist() == [1.0]


def test_a_file_that_was_never_finished_goes_too(disk: Any, days: Any) -> None:
    table = disk.table()
    days.publish(table, TUESDAY)
    with days.killed(table, MONDAY) as dead:
        unfinished = Path(disk.root) / f"predictions/date={MONDAY}/part-000000-{dead.id}.parquet#1"
        unfinished.parent.mkdir()
        unfinished.write_bytes(b"half")
        record = Path(disk.root) / f"attempts/{MONDAY}/{dead.id}.json#3"
        record.write_bytes(b"{")
    age(disk, dead)
    days.publish(table, MONDAY, [0.5])
    assert not unfinished.exists() and not record.exists()


def test_many_dead_runs_are_removed_by_one_commit(place: Any, days: Any) -> None:
    table = place.table()
    first = days.publish(table, MONDAY, [0.5])
    for number in range(1, 21):
        with pytest.raises(days.Killed), table.attempt(MONDAY, str(number)) as dead:
            days.shard(table, dead, [9.0])
            dead.note_publication(str(number))
            append_quarantine(table.quarantine, MONDAY, str(number), "dead", [days.rotten])
            raise days.Killed

    def version() -> int:
        return int(DeltaTable(table.predictions.uri, storage_options=place.options).version())

    before = version()
    with table.attempt(MONDAY, "next") as attempt:
        assert len(table.clean_up(attempt)) == 20
        assert table.clean_up(attempt) == []
    assert (version(), publications_in(table.quarantine)) == (before + 1, set())
    assert (len(files_of(table)), attempts_of(table), table.current_publication(MONDAY)) == (1, set(), first)


# Several at once


def test_two_runs_may_clean_up_at_once_while_others_publish(disk: Any, days: Any) -> None:
    """No warning, nothing lost: the fixture above turns a clean-up that fails into an error."""
    table = disk.table()
    days.publish(table, MONDAY, [0.5], rotten=(days.rotten,))
    for round_ in range(5):
        for number in range(3):
            with pytest.raises(days.Killed), table.attempt(MONDAY, "dead") as dead:
                days.shard(table, dead, [9.0])
                publication = str(1 + round_ * 10 + number)
                dead.note_publication(publication)
                append_quarantine(table.quarantine, MONDAY, publication, "dead", [days.rotten])
                raise days.Killed
        barrier = threading.Barrier(3)

        def clean(run: str, barrier: threading.Barrier = barrier) -> None:
            mine = disk.table()
            with mine.attempt(MONDAY, run) as attempt:
                barrier.wait()
                mine.clean_up(attempt)

        def publish(day: str, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            days.publish(disk.table(), day, [0.5], rotten=(days.rotten,))

        with ThreadPoolExecutor(3) as pool:
            done = [pool.submit(clean, "a"), pool.submit(clean, "b"), pool.submit(publish, f"2026-04-{round_ + 1:02}")]
            for one in done:
                one.result()
    assert attempts_of(table) == set()
    assert len(files_of(table)) == 1
    assert len(publications_in(table.quarantine)) == 6
    assert all(table.count_day(day) == (1, 1) for day in table.days())


def test_a_clean_up_that_fails_costs_nothing_and_is_made_up_for(
    disk: Any, days: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = disk.table()
    with pytest.raises(days.Killed), table.attempt(MONDAY, "dead") as dead:
        days.shard(table, dead, [9.0])
        raise days.Killed

    def fail(*args: Any) -> None:
        raise OSError("no answer")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="no answer"):
        patched.setattr(Folder, "sweep", fail)
        days.publish(table, MONDAY, [0.5])
    first = table.current_publication(MONDAY)
    assert table.count_day(MONDAY) == (1, 0)
    days.publish(table, MONDAY, [0.75], previous=first)
    assert not [name for name in files_of(table) if dead.id in name]


def test_storage_that_fails_at_the_very_end_does_not_undo_a_day(
    disk: Any, days: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = disk.table()

    def fail(*args: Any) -> None:
        raise OSError("no answer")

    with monkeypatch.context() as patched, table.attempt(MONDAY, "run") as attempt:
        number = days.commit(table, attempt, days.shard(table, attempt, [0.5]))
        patched.setattr(Folder, "delete", fail)
    assert table.current_publication(MONDAY) == number
    age(disk, attempt)
    days.publish(table, MONDAY, [0.75], previous=number)
    assert attempts_of(table) == set()


# Vacuum


def test_a_vacuum_removes_what_no_version_that_young_needs(place: Any, days: Any) -> None:
    table = place.table()
    assert table.vacuum(0) == []
    first = days.publish(table, MONDAY, [0.5], rotten=(days.rotten,))
    second = days.publish(table, MONDAY, [0.75], previous=first)
    with pytest.raises(days.Killed), table.attempt(MONDAY, "dead") as dead:
        dead.note_publication("1")
        append_quarantine(table.quarantine, MONDAY, "1", "dead", [days.rotten])
        raise days.Killed
    with table.attempt(MONDAY, "next") as attempt:
        table.clean_up(attempt)
    assert table.vacuum() == []
    assert len(files_of(table)) == 2
    removed = table.vacuum(0)
    assert sorted({name.partition("/")[0] for name in removed}) == ["predictions", "quarantine"]
    assert len(removed) == 2 and all(table.root.read(name) is None for name in removed)
    assert table.current_publication(MONDAY) == second
    assert table.read_day(MONDAY)["score"].tolist() == [0.75]
    assert publications_in(table.quarantine) == {first}
