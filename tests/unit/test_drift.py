"""Drift: the distance is the formula's, and a warning is neither given for chance nor withheld for a change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import log2, sqrt
from typing import Any

import numpy as np
import pytest

from gpu_runtime.quality.drift import Drift, drift

LIMIT = 0.1


def by_hand(reference: Any, current: Any) -> float:
    """Lin's formula over classes, in plain Python."""
    before, after = (Counter(np.ravel(side).tolist()) for side in (reference, current))
    p = {one: count / before.total() for one, count in before.items()}
    q = {one: count / after.total() for one, count in after.items()}
    divergence = 0.0
    for one in {*p, *q}:
        mean = (p.get(one, 0) + q.get(one, 0)) / 2
        divergence += sum(share / 2 * log2(share / mean) for share in (p.get(one, 0), q.get(one, 0)) if share)
    return sqrt(max(divergence, 0.0))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [(), (3,)])
def test_the_distance_of_classes_is_the_formulas_in_both_directions(seed: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(seed)
    before, after = rng.integers(0, 9, (40, *shape)), rng.integers(2, 14, (25, *shape))
    assert drift(before, after).distance == pytest.approx(by_hand(before, after), abs=1e-9)
    assert drift(after, before).distance == pytest.approx(drift(before, after).distance, abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.bool_])
def test_the_distance_is_0_of_the_same_and_1_of_what_has_nothing_in_common(dtype: Any) -> None:
    low, high = np.zeros(50, dtype), np.ones(50, dtype)
    assert drift(low, low).distance == drift(high, high).distance == 0
    assert drift(low, high).distance == drift(high, low).distance == pytest.approx(1)


def test_floats_are_compared_in_bins_of_equal_shares() -> None:
    values = np.arange(1000, dtype=np.float32)
    share = np.searchsorted(np.quantile(np.concatenate([values, values[500:]]), np.arange(1, 20) / 20), values)
    assert drift(values, values[500:]).distance == pytest.approx(by_hand(share, share[500:]), abs=0.02)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.full(200, 0.5, np.float32), np.full(200, 0.7, np.float32)),
        (np.full(200, 0.7, np.float32), np.full(200, 0.5, np.float32)),
        (np.full(200, 0.5, np.float32), np.linspace(0.5, 1, 200, dtype=np.float32)),
        (np.full(1000, 0.5, np.float32), np.where(np.arange(1000) < 40, 0.9, 0.5).astype(np.float32)),
        (np.linspace(0, 1, 200, dtype=np.float32), np.full(200, 1.0, np.float32)),
        (np.linspace(0, 1, 200, dtype=np.float32), np.linspace(0.3, 1.3, 200, dtype=np.float32)),
        (np.arange(200) % 10, np.arange(200) % 7),
        (np.arange(2000) % 1000, np.arange(2000) % 10),
    ],
    ids=[
        "up",
        "down",
        "no longer constant",
        "hardly any other",
        "now constant",
        "shifted",
        "fewer classes",
        "far fewer classes",
    ],
)
def test_a_change_is_beyond_the_limit(before: Any, after: Any) -> None:
    assert drift(before, after).beyond(LIMIT)


def correlated(rng: np.random.Generator, rows: int) -> Any:
    """Outputs of one row that go together, as logits do: 50 values say hardly more than one."""
    return (rng.standard_normal((rows, 1)) + 0.2 * rng.standard_normal((rows, 50))).astype(np.float32)


def related(rng: np.random.Generator, rows: int) -> Any:
    """The top five of a thousand classes, always neighbours."""
    return 5 * rng.integers(0, 200, (rows, 1)) + np.arange(5)


SAME: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "scores": lambda rng, rows: rng.random(rows).astype(np.float32),
    "saturated": lambda rng, rows: np.where(rng.random(rows) < 0.7, 1, rng.random(rows)).astype(np.float32),
    "two classes": lambda rng, rows: rng.integers(0, 2, rows),
    "thousand classes": lambda rng, rows: rng.integers(0, 1000, rows),
    "rare classes": lambda rng, rows: np.minimum(rng.zipf(1.3, rows), 5000),
    "correlated": correlated,
    "related": related,
}


@pytest.mark.parametrize("rows", [(1, 1), (5, 200), (60, 60), (500, 40)], ids=str)
@pytest.mark.parametrize("kind", SAME)
def test_two_days_of_one_distribution_do_not_warn(kind: str, rows: tuple[int, int]) -> None:
    """Without any limit one day in a hundred may."""
    found = []
    for seed in range(25):
        rng = np.random.default_rng(seed)
        found.append(drift(*(SAME[kind](rng, count) for count in rows)))
    assert sum(one.beyond(0.0) for one in found) <= 3  # more: once in ten thousand such tests


def test_chance_shrinks_with_the_rows_and_is_the_same_every_time() -> None:
    rng = np.random.default_rng(0)
    days = [(rng.random(rows), rng.random(rows)) for rows in (20, 200, 2000, 20_000)]
    found = [drift(*day) for day in days]
    assert [one.chance for one in found] == sorted((one.chance for one in found), reverse=True)
    assert found[0].chance > 3 * LIMIT and found[-1].chance < LIMIT / 3
    assert found == [drift(*day) for day in days]


@pytest.mark.parametrize(
    ("distance", "chance", "beyond"), [(0.2, 0.05, True), (0.2, 0.3, False), (0.08, 0.05, False), (0.1, 0.1, False)]
)
def test_a_warning_takes_more_than_the_limit_and_more_than_chance(distance: float, chance: float, beyond: bool) -> None:
    assert Drift(distance, chance).beyond(LIMIT) is beyond
