"""Which device to run on, and why that one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpu_runtime.device.host import HostDevice
from gpu_runtime.device.protocol import Device
from gpu_runtime.errors import DeviceUnavailableError


@dataclass(frozen=True)
class DeviceChoice:
    """`name` is `cpu` or `cuda:N`; `reason` is for a person."""

    name: str
    reason: str


def cuda_devices() -> tuple[int, str]:
    """How many CUDA devices can really be used here, and in words why none or how many.

    Asks the CUDA runtime itself: an installed library, or a provider's name in a list, proves nothing.
    """
    try:
        from cuda.bindings import runtime
    except ImportError:
        return 0, "cuda-bindings, which looks for one, is not installed"
    try:
        error, count = runtime.cudaGetDeviceCount()
    except RuntimeError as failure:  # raised when not even the runtime library can be opened
        return 0, f"the CUDA runtime cannot be opened ({failure})"
    if error != runtime.cudaError_t.cudaSuccess:
        return 0, f"CUDA reports {error.name}"
    return int(count), f"CUDA counts {count} device(s)"


def choose_device(asked: str) -> DeviceChoice:
    """`auto`, `cpu` or `cuda:N` → the device that will be used. Raises `DeviceUnavailableError`."""
    if asked == "cpu":
        return DeviceChoice("cpu", "asked for")
    if asked != "auto" and not re.fullmatch(r"cuda:\d+", asked):
        raise DeviceUnavailableError(
            "no such device", stage="device", item=asked, expected="auto | cpu | cuda:N", got=repr(asked)
        )
    count, words = cuda_devices()
    if asked == "auto":
        if not count:
            return DeviceChoice("cpu", f"no usable GPU: {words}")
        return DeviceChoice("cpu", f"{words}, but this release runs engines on CPUs only")
    raise DeviceUnavailableError(
        "the GPU cannot be used",
        stage="device",
        item=asked,
        expected="a usable CUDA device",
        got=words if not count else f"{words}, but this release runs engines on CPUs only",
        next_step="set device to auto or cpu",
    )


def open_device(choice: DeviceChoice) -> Device:
    assert choice.name == "cpu", choice
    return HostDevice()
