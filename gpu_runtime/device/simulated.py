"""A device that makes every missing wait and every early release show as wrong output, on any laptop.

**Deferred**: nothing runs when it is queued. Only `Event.synchronize` runs work, and only the work that the
event really depends on: its own stream up to the record, and other streams through `wait`. Take a wait
away and what should have run has not.
**Poisoned**: memory holds NaN or the type's minimum from the start, and again as soon as it is retired.
Host and device memory are apart, as on a GPU.
**On a virtual clock**: given the `Rates` of some hardware, it tells how long a schedule would take there, and how close
that is to the bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.device.host import cpu_class, typed_view
from gpu_runtime.device.protocol import DeviceClass
from gpu_runtime.device.virtual_clock import Rates, UnitName, VirtualClock
from gpu_runtime.specs import Dtype

# 0xFFFFFFFF is a NaN as float32 (and 0xFFFF as float16), -1 as a signed integer, 255 as uint8: never a
# plausible value of a score or an index.
POISON = 0xFF


class SimulatedEvent:
    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._at_s = clock, 0.0
        self._stream: SimulatedStream | None = None
        self._reached = True
        self._failure: BaseException | None = None

    def synchronize(self) -> None:
        self._clock.waited(self._at_s)
        self._reach()

    def _reach(self) -> None:
        if not self._reached:
            assert self._stream is not None
            self._stream._run_until(self)
        if self._failure is not None:
            raise self._failure


class SimulatedStream:
    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self._now_s = clock, 0.0  # when what is queued so far would be done
        self._pending: deque[tuple[str, Any]] = deque()
        self._failure: BaseException | None = None
        self.busy_s = 0.0  # real seconds, of which a deferred device takes none of its own

    def record(self, event: Any) -> None:
        event._stream, event._reached, event._failure, event._at_s = self, False, None, self._now_s
        self._pending.append(("record", event))
        self._clock.recorded()

    def wait(self, event: Any) -> None:
        self._now_s = max(self._now_s, event._at_s)
        self._pending.append(("wait", event))

    def launch(self, work: Callable[[], None]) -> None:
        self._run_on("compute", self._clock.rates.compute_s, work)

    def _run_on(self, unit: UnitName, cost_s: float, work: Callable[[], None]) -> None:
        self._now_s = self._clock.work(unit, self._now_s, cost_s)
        self._pending.append(("launch", work))

    def close(self, wait: bool = True) -> None:
        self._pending.clear()

    def _run_until(self, target: SimulatedEvent) -> None:
        while not target._reached:
            kind, what = self._pending.popleft()
            if kind == "record":
                what._reached, what._failure, self._failure = True, self._failure, None
            elif self._failure is None:
                try:
                    if kind == "wait":
                        what._reach()
                    else:
                        what()
                except BaseException as error:
                    self._failure = error


class SimulatedDevice:
    """Runs host engines under a GPU's rules. For tests, and for anyone who writes a schedule."""

    name = "simulated"
    shares_host_memory = False

    def __init__(self, rates: Rates | None = None) -> None:
        self.clock = VirtualClock(rates or Rates())

    @property
    def device_class(self) -> DeviceClass:
        return cpu_class()  # it runs the engines built for this CPU

    def stream(self) -> SimulatedStream:
        return SimulatedStream(self.clock)

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self.clock)

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        staging = np.full(nbytes, POISON, np.uint8)
        self.clock.allocated(staging)
        return staging

    def empty(self, staging: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return np.full(staging.nbytes, POISON, np.uint8)

    def view(self, buffer: npt.NDArray[np.uint8], dtype: Dtype, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return typed_view(buffer, dtype, shape)

    def copy_in(
        self,
        staging: npt.NDArray[np.uint8],
        buffer: npt.NDArray[np.uint8],
        nbytes: int,
        stream: Any,
    ) -> None:
        self.clock.decoded(staging)
        cost_s = nbytes / self.clock.rates.copy_in_bytes_per_s
        stream._run_on("copy_in", cost_s, lambda: np.copyto(buffer[:nbytes], staging[:nbytes]))

    def copy_out(
        self,
        buffer: npt.NDArray[np.uint8],
        staging: npt.NDArray[np.uint8],
        nbytes: int,
        stream: Any,
    ) -> None:
        cost_s = nbytes / self.clock.rates.copy_out_bytes_per_s
        stream._run_on("copy_out", cost_s, lambda: np.copyto(staging[:nbytes], buffer[:nbytes]))

    def retire(self, *buffers: npt.NDArray[np.uint8]) -> None:
        self.clock.retired(*buffers)
        for buffer in buffers:
            buffer.fill(POISON)

    def close(self) -> None:
        pass

    def __enter__(self) -> SimulatedDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        pass
