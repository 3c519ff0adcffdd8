"""The seam between the executor and a piece of hardware.

Work is queued on streams and runs in order within one stream. `record` marks a point in a stream, `wait`
makes one stream wait for a point in another, `synchronize` makes the calling thread wait. A failed
launch skips what is queued behind it in its stream up to the next recorded event; that event carries the
failure to whoever waits for it, stream or thread, and the stream goes on with what comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gpu_runtime.specs import Dtype, digest_of

Buffer = Any
"""Device memory: a uint8 numpy array on host-like devices, an allocation with a pointer on others."""
Array = Any
"""A typed view of a `Buffer`, as a backend's context takes it: a numpy array on host-like devices."""
HostArray = Any
"""A numpy uint8 array in memory from which the device can copy at full speed."""


@dataclass(frozen=True)
class DeviceClass:
    """What an engine is built for. Two devices of one class run the same engine file.

    A CPU's class is its instruction-set flags; a GPU's its name, compute capability, SM count and MIG
    profile. Serial numbers and UUIDs are recorded elsewhere and are no part of it.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    features: tuple[str, ...] = ()

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> DeviceClass:
        """A class back from its JSON form."""
        return DeviceClass(plain["kind"], plain["name"], tuple(plain["features"]))

    @property
    def id(self) -> str:
        """Short and stable: names the promotion folder of this class."""
        return f"{self.kind}-{digest_of(self)[:12]}"


class Event(Protocol):
    def synchronize(self) -> None:
        """Block the caller until the recorded point is reached; raise what failed on the way to it."""


class Stream(Protocol):
    @property
    def busy_s(self) -> float:
        """Seconds spent on launched work so far."""

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None: ...

    def launch(self, work: Callable[[], None]) -> None:
        """Queue `work` (host and simulated devices; a CUDA stream takes kernels instead)."""

    def close(self, wait: bool = True) -> None:
        """Finish what is queued; without `wait`, give up on it: something in it hangs."""


class Device(Protocol):
    """Owns memory and streams; use it in a `with`."""

    @property
    def name(self) -> str: ...

    @property
    def device_class(self) -> DeviceClass: ...

    @property
    def shares_host_memory(self) -> bool:
        """Whether an engine here takes a host's array as it is: device memory *is* host memory."""

    def stream(self) -> Stream: ...

    def event(self) -> Event: ...

    def pinned(self, nbytes: int) -> HostArray:
        """Staging memory; page-locked where that exists."""

    def empty(self, staging: HostArray) -> Buffer:
        """Device memory as large as `staging`. Where host and device share memory it *is* `staging`."""

    def view(self, buffer: Buffer, dtype: Dtype, shape: tuple[int, ...]) -> Array:
        """The first bytes of `buffer` as an array; no copy."""

    def copy_in(self, staging: HostArray, buffer: Buffer, nbytes: int, stream: Stream) -> None: ...

    def copy_out(self, buffer: Buffer, staging: HostArray, nbytes: int, stream: Stream) -> None: ...

    def retire(self, *buffers: Buffer) -> None:
        """The contents may be overwritten from here on. The simulated device destroys them at once."""

    def close(self) -> None: ...

    def __enter__(self) -> Device: ...

    def __exit__(self, *exc: object) -> None: ...
