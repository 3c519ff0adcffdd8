"""How rows are cut into batches: by count where all are alike, by a budget where they differ in length.

Rows of unequal length are padded to the longest of their batch. So a shard's rows come longest first, and
neighbours need about the same padding; a batch is as many of them as the budget allows at its length. Lengths are
rounded up to a few, so that an engine meets no more shapes than there are of those.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class BatchShape:
    """What an engine is given at once: `rows`, padded to `length` where they differ in one."""

    rows: int
    length: int | None = None

    @property
    def elements(self) -> int:
        """Rows × length: what the batch costs. Rows alone where all are alike."""
        return self.rows * (self.length or 1)


@dataclass(frozen=True)
class Batching:
    """`budget`: the most elements of a batch; a single row may have more. `max_rows`: the most rows, whatever their
    length. `lengths`: what rows are padded to, ascending; empty where all are alike."""

    budget: int
    max_rows: int
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.budget < 1 or self.max_rows < 1:
            raise ValueError(f"a batch holds 1 row at least, got budget {self.budget}, max_rows {self.max_rows}")
        if any(n < 1 for n in self.lengths) or sorted(set(self.lengths)) != list(self.lengths):
            raise ValueError(f"lengths must be ascending, from 1, got {self.lengths}")

    @property
    def shapes(self) -> tuple[BatchShape, ...]:
        """All that the engine may meet."""
        return tuple(self.shape(length) for length in self.lengths) or (self.shape(None),)

    @property
    def shortest(self) -> BatchShape:
        """The least that can be asked of the engine."""
        return BatchShape(1, self.lengths[0]) if self.lengths else self.shape(None)

    @property
    def largest(self) -> tuple[BatchShape, ...]:
        """The most that may be asked of the engine: the most elements, and the longest rows."""
        most = max(self.shapes, key=lambda shape: (shape.elements, shape.length or 0))
        return tuple(dict.fromkeys((most, self.shapes[-1])))

    def shape(self, longest: int | None) -> BatchShape:
        """That of a batch whose longest row has `longest` elements."""
        if longest is None:
            return BatchShape(min(self.budget, self.max_rows))
        place = bisect.bisect_left(self.lengths, longest)
        if place == len(self.lengths):
            raise ValueError(f"a row of length {longest} is longer than any of {self.lengths}")
        length = self.lengths[place]
        return BatchShape(max(1, min(self.budget // length, self.max_rows)), length)

    def cut(self, rows: int, lengths: npt.NDArray[np.int64] | None) -> Iterator[tuple[int, int, int | None]]:
        """Rows 0 … `rows` as half-open ranges, each with the length that it is padded to. `lengths` is `[rows]`,
        longest first; None where all are alike."""
        start = 0
        while start < rows:
            shape = self.shape(None if lengths is None else int(lengths[start]))
            stop = min(start + shape.rows, rows)
            yield start, stop, shape.length
            start = stop


def longest_first(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The order in which rows of `lengths` are scored; rows of one length keep theirs."""
    return np.argsort(-lengths, kind="stable")


def choose_lengths(observed: npt.NDArray[np.int64], longest: int, count: int) -> tuple[int, ...]:
    """At most `count` lengths, the last of them `longest`, that need the least padding for rows as `observed`.

    Exact, by dynamic programming over the lengths that occur: padding to a length that no row has costs more than
    padding to the one below.
    """
    values, rows = np.unique(np.minimum(observed, longest), return_counts=True)
    if not len(values) or values[-1] != longest:
        values, rows = np.append(values, longest), np.append(rows, 0)
    upto = np.concatenate([[0], np.cumsum(rows)])
    # cost[j]: of padding the j shortest values; at each step the last group reaches from i to j - 1.
    cost = np.concatenate([[0.0], values * upto[1:]])
    froms = [np.zeros(len(values) + 1, np.int64)]
    for _ in range(min(count, len(values)) - 1):
        start = np.zeros(len(values) + 1, np.int64)
        better = cost.copy()
        for j in range(1, len(values) + 1):
            tried = cost[:j] + values[j - 1] * (upto[j] - upto[:j])
            start[j] = int(np.argmin(tried))
            better[j] = tried[start[j]]
        cost = better
        froms.append(start)
    chosen, end = list[int](), len(values)
    for start in reversed(froms):
        if end:
            chosen.append(int(values[end - 1]))
            end = int(start[end])
    return tuple(reversed(chosen))
