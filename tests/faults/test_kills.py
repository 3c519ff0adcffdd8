"""`dagster asset materialize`, killed at every fault point and from outside: nothing lost, nothing twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_runtime.faults import POINTS

LATE = ("quarantine", "commit", "clean-up")  # once a day, after the last shard
IN_EVERY_SUITE = ("before receipt", "after commit")


def fault_points() -> list[Any]:
    points = [f"{when} {point}" for point in POINTS for when in ("before", "after")]
    return [pytest.param(p, marks=() if p in IN_EVERY_SUITE else pytest.mark.slow) for p in points]


@pytest.mark.parametrize("point", fault_points())
def test_a_run_killed_here_is_finished_by_the_next(
    point: str, fresh_home: Callable[[], Any], uninterrupted: Any, crashes: Any
) -> None:
    home = fresh_home()
    killed = home.materialize(kill=point)
    assert killed.returncode == 1, "the run was not killed"
    *_, last = home.log()
    assert last.startswith(f"killed {point} in flight ")
    late = point.split(" ", 1)[1] in LATE
    assert late or int(last.rpartition(" ")[2]) >= 2
    first_batches, receipts = home.batches(), home.receipts()
    assert receipts == crashes.SHARDS if late else 2 <= receipts < crashes.SHARDS
    if home.table.current_publication(crashes.DAY):
        assert home.day() == uninterrupted  # whole, or not there at all

    time.sleep(1.2 * crashes.LEASE_S)  # the killed run's lease runs out: from now on it is known to be dead
    finished = home.materialize()
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert home.day() == uninterrupted
    assert home.leftovers() == []
    # A shard with a receipt is never opened again, and of the others no more than one shard and the ring was lost.
    shard_batches = crashes.BATCHES // crashes.SHARDS
    assert home.batches() == crashes.BATCHES - receipts * shard_batches
    assert first_batches + home.batches() - crashes.BATCHES <= shard_batches + home.slots()


@pytest.mark.slow
def test_a_hundred_kills_from_outside(unscored: Any, uninterrupted: Any, tmp_path: Path, crashes: Any) -> None:
    tally = crashes.soak(unscored, uninterrupted, tmp_path, seed=1, kills=100)
    assert tally.kills >= 100
    assert (tally.lost, tally.duplicated, tally.wrong) == (0, 0, 0)
    assert tally.by_kind["group"] >= 20 and tally.by_kind["step"] >= 20


@pytest.mark.slow
def test_another_model_reuses_nothing_of_a_killed_run(fresh_home: Callable[[], Any], crashes: Any) -> None:
    home = fresh_home()
    home.materialize(kill="after receipt")
    assert 2 <= home.receipts() < crashes.SHARDS
    crashes.change_one_weight(home)
    home.promote()
    finished = home.materialize()
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert home.batches() == crashes.BATCHES
    assert len({digest for digest in home.table.read_day(crashes.DAY)["model_digest"]}) == 1
