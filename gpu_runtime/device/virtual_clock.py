"""How long a schedule takes on hardware with given rates, whatever the threads of this machine do.

Every thread and every stream has a virtual time of its own. Times meet only where one waits for another: a stream
or a thread at an event, work at the unit that does it, a batch at its slot. So the makespan follows from what the
schedule makes wait for what, and is the same number in every run. A batch that has to be rescued is the exception:
its work is queued among that of others, as the threads come.

Streams, events and slots are observed. Decoding and writing happen outside the device and are modelled: a batch's
pieces are decoded in order, from when its slot is free, and a batch is written before its slot is retired. Opening
shards, checking rows and changing threads take no time, and what a failure skips is counted all the same.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

UnitName = Literal["decode", "copy_in", "compute", "copy_out", "write"]


@dataclass(frozen=True)
class Rates:
    """What work costs. The defaults are hardware that takes no time.

    `decode_s`: one worker's seconds for a whole batch, which is cut into `decode_pieces` equal pieces for
    `decode_workers`. `compute_s`: seconds of one launch. `write_s`: seconds of one batch.
    """

    decode_s: float = 0.0
    decode_pieces: int = 1
    decode_workers: int = 1
    copy_in_bytes_per_s: float = math.inf
    compute_s: float = 0.0
    copy_out_bytes_per_s: float = math.inf
    write_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.decode_s, self.compute_s, self.write_s) < 0:
            raise ValueError(f"seconds must not be negative, got {self}")
        if min(self.copy_in_bytes_per_s, self.copy_out_bytes_per_s) <= 0:
            raise ValueError(f"bytes per second must be positive, got {self}")
        if min(self.decode_pieces, self.decode_workers) < 1:
            raise ValueError(f"there must be at least one piece and one worker, got {self}")


class Unit:
    """Hardware for one kind of work: does it in the order it comes, `width` pieces at a time."""

    def __init__(self, width: int = 1) -> None:
        self.width, self.busy_s = width, 0.0
        self._free_s = [0.0] * width  # a heap

    def take(self, ready_s: float, cost_s: float) -> float:
        """When work that could start at `ready_s` ends."""
        end_s = max(ready_s, self._free_s[0]) + cost_s
        heapq.heapreplace(self._free_s, end_s)
        self.busy_s += cost_s
        return end_s

    @property
    def last_end_s(self) -> float:
        return max(self._free_s)


class _Thread(threading.local):
    """A host thread's own time, and whether it has been charged for the batch that it is at."""

    now_s = 0.0
    charged = False


class VirtualClock:
    """Seconds since the device was made. Read it between runs; runs on one device follow each other."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        # All compute streams share one unit, as kernels that fill a GPU do.
        self.units: Mapping[UnitName, Unit] = {
            "decode": Unit(rates.decode_workers),
            "copy_in": Unit(),
            "compute": Unit(),
            "copy_out": Unit(),
            "write": Unit(),
        }
        self._thread = _Thread()
        self._free_since_s: dict[int, float] = {}  # id of staging memory → when it could be decoded into

    @property
    def makespan_s(self) -> float:
        return max(unit.last_end_s for unit in self.units.values())

    @property
    def busy_s(self) -> dict[UnitName, float]:
        """Of all a unit's workers together."""
        return {name: unit.busy_s for name, unit in self.units.items()}

    @property
    def bound_s(self) -> float:
        """What no schedule can beat: the slowest unit alone, without a pause."""
        return max(unit.busy_s / unit.width for unit in self.units.values())

    @property
    def efficiency(self) -> float:
        return self.bound_s / self.makespan_s if self.makespan_s else 0.0

    def allocated(self, staging: Any) -> None:
        self._free_since_s[id(staging)] = self._thread.now_s

    def decoded(self, staging: Any) -> None:
        """The calling thread copies `staging`, so it has waited for its decoding. A batch's other tensors were decoded
        with it, and what was not retired since its last copy (a batch that is rescued) is not decoded again."""
        free_since_s = self._free_since_s.pop(id(staging), None)
        if free_since_s is None or self._thread.charged:
            return
        pieces, workers = self.rates.decode_pieces, self.units["decode"]
        for _ in range(pieces):
            self._advance(workers.take(free_since_s, self.rates.decode_s / pieces))
        self._thread.charged = True

    def work(self, unit: UnitName, ready_s: float, cost_s: float) -> float:
        """When work that the calling thread queues now, behind work that ends at `ready_s`, ends."""
        return self.units[unit].take(max(ready_s, self._thread.now_s), cost_s)

    def recorded(self) -> None:
        """What the calling thread copies in next is another batch."""
        self._thread.charged = False

    def waited(self, until_s: float) -> None:
        """What the calling thread retires next is another batch."""
        self._advance(until_s)
        self._thread.charged = False

    def retired(self, *memory: Any) -> None:
        """The calling thread has written the batch; a batch may be retired in several calls."""
        if not self._thread.charged:
            self._advance(self.units["write"].take(self._thread.now_s, self.rates.write_s))
            self._thread.charged = True
        for each in memory:
            self.allocated(each)

    def _advance(self, until_s: float) -> None:
        self._thread.now_s = max(self._thread.now_s, until_s)
