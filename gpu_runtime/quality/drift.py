"""What a published day's outputs look like, and how far from the last day's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

_BINS = 20
_DRAWS = 200


@dataclass(frozen=True)
class Drift:
    """`distance`: Jensen–Shannon distance (base 2: 0 the same, 1 nothing in common) between two days' values.

    `chance`: what it stays below, 99 times in 100, when the rows of both days are dealt out anew at random. A short
    day or an output with many classes is far from any other day by chance alone.
    """

    distance: float
    chance: float

    def beyond(self, limit: float) -> bool:
        """Further than `limit`, and further than chance explains."""
        return self.distance > max(limit, self.chance)


@dataclass(frozen=True)
class OutputReview:
    """`non_finite`: float output → rows published with a NaN or infinity in it. `drift`: output → its distance from
    `compared_with`, the last day published before; empty when there is none, or when a day has no row."""

    non_finite: Mapping[str, int]
    compared_with: str | None = None
    drift: Mapping[str, Drift] = field(default_factory=dict)


def drift(reference: npt.NDArray[Any], current: npt.NDArray[Any]) -> Drift:
    """Compare two samples of one output, `[n, …]` and `[m, …]`, n and m above 0; every element counts.

    Integers are compared class by class, floats in bins that hold equal shares of both days together. After J. Lin,
    Divergence Measures Based on the Shannon Entropy (1991); the distance is SciPy's. `chance` is a permutation
    test's: whole rows change sides, because a row's values belong together.
    """
    from scipy.spatial.distance import jensenshannon

    places = _places(np.concatenate([reference, current]).reshape(len(reference) + len(current), -1))
    total = np.bincount(places.ravel())

    def distance(one_side: npt.NDArray[np.int64]) -> float:
        counts = np.bincount(one_side.ravel(), minlength=len(total))
        return float(jensenshannon(counts, total - counts, base=2))

    rng, smaller = np.random.default_rng(0), min(len(reference), len(current))
    by_chance = [distance(places[rng.permutation(len(places))[:smaller]]) for _ in range(_DRAWS)]
    return Drift(distance(places[: len(reference)]), float(np.quantile(by_chance, 0.99)))


def _places(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The class or bin of each value, as 0, 1, …"""
    if values.dtype.kind != "f":
        return np.unique(values, return_inverse=True)[1].reshape(values.shape)
    edges = np.unique(np.quantile(values, np.linspace(0, 1, _BINS + 1)[1:-1]))
    # Even places lie between edges, odd ones on them: a value that most rows share has a bin of its own.
    return np.searchsorted(edges, values, side="left") + np.searchsorted(edges, values, side="right")
