"""Objective: what a plan's settings are chosen for, and what they must keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args

from gpu_runtime.benchmark.measure import Measurement, Setting
from gpu_runtime.errors import SpecError

Optimize = Literal["rows_per_s", "cost"]

CLOSE = 0.97
"""Figures this near the best are within what two runs of one setting differ by."""


class Rated(Protocol):
    """What has been run, and how fast."""

    @property
    def rows_per_s(self) -> float: ...

    @property
    def cpu_s_per_row(self) -> float: ...


R = TypeVar("R", bound=Rated)


@dataclass(frozen=True)
class Objective:
    """The best setting among those that keep every bound.

    `optimize`: `rows_per_s` is also the least cost where the whole machine is paid for by the hour, busy or not.
    `cost` is for cores that are shared or paid for as they are used: the fewest CPU-seconds a row, among the settings
    that finish in time.
    `max_p99_batch_ms`: the 99th percentile of a batch's time on the engine, with one batch on every stream.
    `max_memory_mib`: what the engine and its slots take of the process' own memory.
    `rows_per_day` in `finish_within_s` seconds is a target, not a bound: a setting too slow for it gives way to any
    that is not, and if all are too slow the fastest serves, because a late day is worth more than none.
    """

    optimize: Optimize = "rows_per_s"
    max_p99_batch_ms: float | None = None
    max_memory_mib: float | None = None
    rows_per_day: int | None = None
    finish_within_s: float | None = None

    def __post_init__(self) -> None:
        if self.optimize not in get_args(Optimize):
            raise _unusable("optimize", " | ".join(get_args(Optimize)), self.optimize)
        for name in ("max_p99_batch_ms", "max_memory_mib", "rows_per_day", "finish_within_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise _unusable(name, "a number above 0", value)
        if (self.rows_per_day is None) != (self.finish_within_s is None):
            given = "rows_per_day" if self.finish_within_s is None else "finish_by"
            raise _unusable("finish_by", "`finish_by` and `rows_per_day` together", f"`{given}` alone")

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by name."""
        named = {"max_p99_batch_ms": self.max_p99_batch_ms, "max_memory_mib": self.max_memory_mib}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def required_rows_per_s(self) -> float | None:
        if self.rows_per_day is None or self.finish_within_s is None:
            return None
        return self.rows_per_day / self.finish_within_s

    def excess(self, one: Measurement) -> dict[str, float]:
        """Bound that `one` does not keep → its figure ÷ the bound. Memory that the system does not tell of is
        infinitely too much: it cannot be promised."""
        figures = {
            "max_p99_batch_ms": one.p99_ms,
            "max_memory_mib": float("inf") if one.memory_mib is None else one.memory_mib,
        }
        return {name: figures[name] / bound for name, bound in self.bounds.items() if figures[name] > bound}

    def keeps(self, one: Measurement) -> bool:
        return not self.excess(one)

    def in_time(self, rows_per_s: float) -> bool:
        return rows_per_s >= (self.required_rows_per_s or 0.0)

    def score(self, one: Rated) -> float:
        """Higher is better: rows a second, or rows a CPU-second."""
        return one.rows_per_s if self.optimize == "rows_per_s" else 1 / max(one.cpu_s_per_row, 1e-12)

    def ranked(self, measured: Sequence[Measurement]) -> list[Measurement]:
        """Best first: what keeps the bounds, then what is in time, by score; what is too slow, by speed. What does not
        keep them comes last, the nearest first."""

        def rank(one: Measurement) -> tuple[float, bool, float]:
            in_time, beyond = self.in_time(one.rows_per_s), max(self.excess(one).values(), default=0.0)
            return -beyond, in_time, self.score(one) if in_time else one.rows_per_s

        return sorted(measured, key=rank, reverse=True)

    def best(self, rated: Sequence[R]) -> list[R]:
        """Those in time with the highest score, and all as good as equal; where none is in time, the fastest."""
        in_time = [one for one in rated if self.in_time(one.rows_per_s)]
        score, candidates = (self.score, in_time) if in_time else (Objective().score, rated)
        top = max((score(one) for one in candidates), default=0.0)
        return [one for one in candidates if score(one) >= CLOSE * top]

    def choose(self, measured: Sequence[Measurement]) -> Measurement | None:
        """The best that keeps every bound; among settings as good as equal, the one of the lowest p99. None when
        nothing keeps them."""
        return min(self.best([m for m in measured if self.keeps(m)]), key=lambda m: m.p99_ms, default=None)

    def binding(self, measured: Sequence[Measurement], chosen: Measurement) -> str | None:
        """Which limits, as few as possible, hold back a better setting than `chosen`, in words; None when none do."""
        on_time = self.in_time(chosen.rows_per_s)
        by_speed = self.optimize == "rows_per_s" or not on_time
        score = Objective().score if by_speed else self.score

        def broken(one: Measurement) -> list[str]:
            late = on_time and not self.in_time(one.rows_per_s)
            return [f"{name} = {self.bounds[name]:g}" for name in self.excess(one)] + ["finish_by"] * late

        better = [one for one in measured if broken(one) and CLOSE * score(one) > score(chosen)]
        held = min(better, key=lambda one: (len(broken(one)), -score(one)), default=None)
        if held is None:
            return None
        gain = score(held) / score(chosen)
        worth = f"give {gain:.2f} × the rows/s" if by_speed else f"take {1 / gain:.2f} × the CPU time"
        return f"{' with '.join(broken(held))} holds back {in_words(held.setting)}, which would {worth}"


def frontier(measured: Sequence[Measurement]) -> list[Measurement]:
    """The settings that no other one equals or beats in rows/s, p99 and memory at once; fastest first."""

    def goods(one: Measurement) -> tuple[float, float, float]:
        return one.rows_per_s, -one.p99_ms, -(one.memory_mib or 0.0)

    kept: list[Measurement] = []
    for one in sorted(measured, key=goods, reverse=True):  # whatever could beat `one` comes before it
        if not any(all(a >= b for a, b in zip(goods(other), goods(one), strict=True)) for other in kept):
            kept.append(one)
    return kept


def in_words(setting: Setting) -> str:
    return f"{setting.engine} at {layout_in_words(setting)}"


def layout_in_words(setting: Setting) -> str:
    batch = f"a budget of {setting.batch} elements" if setting.lengths else f"batch {setting.batch}"
    return f"{batch} × {setting.streams} streams × {setting.threads} threads"


def _unusable(name: str, expected: str, got: object) -> SpecError:
    return SpecError("cannot be used", stage="objective", item=name, expected=expected, got=str(got))
