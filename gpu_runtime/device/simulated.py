"""A device that makes every missing wait and every early release show as wrong output, on any laptop.

**Deferred**: nothing runs when it is queued. Only `Event.synchronize` runs work, and only the work that the
event really depends on: its own stream up to the record, and other streams through `wait`. Take a wait
away and what should have run has not.
**Poisoned**: memory holds NaN or the type's minimum from the start, and again as soon as it is retired.
Host and device memory are apart, as on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.device.host import cpu_class, typed_view
from gpu_runtime.device.protocol import DeviceClass, Stream
from gpu_runtime.specs import Dtype

# 0xFFFFFFFF is a NaN as float32 (and 0xFFFF as float16), -1 as a signed integer, 255 as uint8: never a
# plausible value of a score or an index.
POISON = 0xFF


class SimulatedEvent:
    def __init__(self) -> None:
        self._stream: SimulatedStream | None = None
        self._reached = True
        self._failure: BaseException | None = None

    def synchronize(self) -> None:
        if not self._reached:
            assert self._stream is not None
            self._stream._run_until(self)
        if self._failure is not None:
            raise self._failure


class SimulatedStream:
    def __init__(self) -> None:
        self._pending: deque[tuple[str, Any]] = deque()
        self._failure: BaseException | None = None
        self.busy_s = 0.0  # a deferred device has no time of its own

    def record(self, event: Any) -> None:
        event._stream, event._reached, event._failure = self, False, None
        self._pending.append(("record", event))

    def wait(self, event: Any) -> None:
        self._pending.append(("wait", event))

    def launch(self, work: Callable[[], None]) -> None:
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
                        what.synchronize()
                    else:
                        what()
                except BaseException as error:
                    self._failure = error


class SimulatedDevice:
    """Runs host engines under a GPU's rules. For tests, and for anyone who writes a schedule."""

    name = "simulated"
    shares_host_memory = False

    @property
    def device_class(self) -> DeviceClass:
        return cpu_class()  # it runs the engines built for this CPU

    def stream(self) -> SimulatedStream:
        return SimulatedStream()

    def event(self) -> SimulatedEvent:
        return SimulatedEvent()

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.full(nbytes, POISON, np.uint8)

    def empty(self, staging: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return np.full(staging.nbytes, POISON, np.uint8)

    def view(self, buffer: npt.NDArray[np.uint8], dtype: Dtype, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return typed_view(buffer, dtype, shape)

    def copy_in(
        self,
        staging: npt.NDArray[np.uint8],
        buffer: npt.NDArray[np.uint8],
        nbytes: int,
        stream: Stream,
    ) -> None:
        stream.launch(lambda: np.copyto(buffer[:nbytes], staging[:nbytes]))

    def copy_out(
        self,
        buffer: npt.NDArray[np.uint8],
        staging: npt.NDArray[np.uint8],
        nbytes: int,
        stream: Stream,
    ) -> None:
        stream.launch(lambda: np.copyto(staging[:nbytes], buffer[:nbytes]))

    def retire(self, *buffers: npt.NDArray[np.uint8]) -> None:
        for buffer in buffers:
            buffer.fill(POISON)

    def close(self) -> None:
        pass

    def __enter__(self) -> SimulatedDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        pass
