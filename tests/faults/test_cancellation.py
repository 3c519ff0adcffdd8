"""A run that is told to end, or that hangs, ends soon, says why, and can be resumed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("number", "group"),
    [
        pytest.param(signal.SIGTERM, False, id="SIGTERM to the run"),
        pytest.param(signal.SIGINT, True, id="Ctrl-C", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_run_and_the_next_one_resumes_it(
    number: int, group: bool, fresh_home: Callable[[], Any], uninterrupted: Any, crashes: Any
) -> None:
    home = fresh_home()
    stopped = crashes.signal_while_scoring(home, number, group=group)
    assert stopped.returncode == 1
    assert home.batches() < crashes.BATCHES / 2  # most of the day was not scored any more
    assert home.attempts_ended() == [True]  # it went through its own clean end, engine and threads released
    receipts = home.receipts()
    finished = home.materialize()
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert home.day() == uninterrupted and home.leftovers() == []
    assert home.batches() == crashes.BATCHES - receipts * (crashes.BATCHES // crashes.SHARDS)


@pytest.mark.parametrize(
    ("point", "stage"),
    [
        pytest.param("before write", "write", marks=pytest.mark.slow),
        pytest.param("before read", "read", marks=pytest.mark.slow),
        pytest.param("before enqueue", "compute", marks=pytest.mark.slow),
        pytest.param("before quarantine", "publish", marks=pytest.mark.slow),
        pytest.param("before commit", "publish", marks=pytest.mark.slow),
        pytest.param("before clean-up", "clean-up", marks=pytest.mark.slow),
    ],
)
def test_a_stage_that_hangs_is_named_and_ends_the_run(
    point: str, stage: str, fresh_home: Callable[[], Any], uninterrupted: Any
) -> None:
    home = fresh_home()
    hung = home.materialize(stall=point)  # its process ends by itself, though a thread of it never does
    assert hung.returncode == 1
    assert f"the {stage} stage hangs" in hung.stderr and "within 3 s" in hung.stderr
    finished = home.materialize()
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert home.day() == uninterrupted and home.leftovers() == []
