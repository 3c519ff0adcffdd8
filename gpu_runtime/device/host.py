"""The CPU as a device: a stream is a worker thread, and device arrays *are* the staging arrays."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.device.protocol import DeviceClass, Stream
from gpu_runtime.specs import Dtype

_CACHE_LINE = 64
_CLASS_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
)
"""The instruction sets that decide which kernels an INT8 or BF16 engine uses; others do not change a class."""


class HostEvent:
    def __init__(self) -> None:
        self._reached = threading.Event()
        self._reached.set()  # like CUDA's: an event never recorded counts as reached
        self._failure: BaseException | None = None

    def _arm(self) -> None:
        self._reached.clear()
        self._failure = None

    def _complete(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._reached.set()

    def synchronize(self) -> None:
        self._reached.wait()
        if self._failure is not None:
            raise self._failure


class HostStream:
    """Runs what is launched, in order, on one daemon thread that starts with the first entry."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy_s = 0.0

    def _put(self, kind: str, what: Any) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()  # raises where the process may have no more threads: nothing is queued then
            self._thread = thread
        if kind == "record":
            what._arm()
        self._work.put((kind, what))

    def record(self, event: Any) -> None:
        self._put("record", event)

    def wait(self, event: Any) -> None:
        self._put("wait", event)

    def launch(self, work: Callable[[], None]) -> None:
        self._put("launch", work)

    def close(self, wait: bool = True) -> None:
        """Finish what is queued, then end the thread; without `wait`, leave it to end when it can."""
        if self._thread is not None:
            self._work.put(None)
            if wait:
                self._thread.join()
            self._thread = None

    def _run(self) -> None:
        failure: BaseException | None = None
        while (entry := self._work.get()) is not None:
            kind, what = entry
            if kind == "record":
                what._complete(failure)
                failure = None
            elif failure is None:
                try:
                    if kind == "wait":
                        what.synchronize()
                    else:
                        started = time.perf_counter()
                        try:
                            what()
                        finally:
                            self.busy_s += time.perf_counter() - started
                except BaseException as error:  # carried to whoever waits for the next event
                    failure = error


class HostDevice:
    """One machine's CPU, through all the cores this process may use."""

    name = "cpu"
    shares_host_memory = True

    def __init__(self) -> None:
        self._streams: list[HostStream] = []

    @property
    def device_class(self) -> DeviceClass:
        return cpu_class()

    def stream(self) -> HostStream:
        stream = HostStream(f"host-stream-{len(self._streams)}")
        self._streams.append(stream)
        return stream

    def event(self) -> HostEvent:
        return HostEvent()

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        # Engines read and write whole cache lines; an aligned start spares them a copy.
        raw = np.empty(nbytes + _CACHE_LINE, np.uint8)
        start = -raw.ctypes.data % _CACHE_LINE
        return raw[start : start + nbytes]

    def empty(self, staging: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return staging

    def view(self, buffer: npt.NDArray[np.uint8], dtype: Dtype, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return typed_view(buffer, dtype, shape)

    def copy_in(
        self, staging: npt.NDArray[np.uint8], buffer: npt.NDArray[np.uint8], nbytes: int, stream: Stream
    ) -> None:
        """Nothing to move: `buffer` is `staging`."""

    def copy_out(
        self, buffer: npt.NDArray[np.uint8], staging: npt.NDArray[np.uint8], nbytes: int, stream: Stream
    ) -> None:
        """Nothing to move: `buffer` is `staging`."""

    def retire(self, *buffers: npt.NDArray[np.uint8]) -> None:
        pass

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()

    def __enter__(self) -> HostDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def typed_view(buffer: npt.NDArray[np.uint8], dtype: Dtype, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The first bytes of a uint8 array as `dtype[shape]`, without a copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return buffer[:nbytes].view(dtype).reshape(shape)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may really use: the affinity mask, and the tightest CPU quota of its control group and of
    the groups above it. Of a quota of 2.5 cores two are used, because a third thread would be paused in every period;
    of less than one, one. `root` is where `proc` and `sys` lie."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quotas = [quota for group in _cpu_groups(root) if (quota := _quota(group)) is not None]
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def _cpu_groups(root: Path) -> list[Path]:
    """The folders that may set this process a quota: its group and those above it, of cgroup v2 and of v1.

    In a container the process may be told its group's name outside, where nothing lies; the groups above it up to the
    mount are looked at all the same, and the mount is the container's own group.
    """
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [mounts]
    groups = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = mounts / controllers  # v2 has no controllers in its line
        path = mount / name.lstrip("/")
        groups += [path, *(above for above in path.parents if above == mount or mount in above.parents)]
    return groups


def _quota(group: Path) -> float | None:
    """Cores' worth of time that a control group may use; None where it sets no limit."""
    try:
        if (group / "cpu.max").exists():  # v2
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None


def anonymous_memory_mib() -> float | None:
    """What this process holds in memory of its own now, in MiB, files that it maps left out; None where the system
    does not tell (only Linux does). What an allocator keeps of freed memory is given back first."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's; or memory freed by an earlier engine would hide a later one's
    return _status_mib("RssAnon")


class PeakMemory:
    """The most memory this process held since this was made, in MiB: resident, files that it maps included. None
    where the system does not tell (only Linux does)."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far

    @property
    def mib(self) -> float | None:
        return _status_mib("VmHWM")


def _status_mib(name: str) -> float | None:
    """A figure that Linux gives of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), None)


def cpu_class() -> DeviceClass:
    """The CPU's class: architecture and the instruction sets that choose an engine's kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    except OSError:
        flags = []
    return DeviceClass("cpu", os.uname().machine, tuple(f for f in _CLASS_FLAGS if f in flags))
