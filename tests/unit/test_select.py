"""Which device is used, and that the reason is told."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from cuda.bindings import runtime

from gpu_runtime.device.select import choose_device, open_device
from gpu_runtime.errors import DeviceUnavailableError


def answer(monkeypatch: pytest.MonkeyPatch, *value: Any) -> None:
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: value)


def test_auto_without_a_driver_takes_the_cpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, runtime.cudaError_t.cudaErrorInsufficientDriver, None)
    choice = choose_device("auto")
    assert choice.name == "cpu" and "cudaErrorInsufficientDriver" in choice.reason
    with open_device(choice) as device:
        assert device.device_class.kind == "cpu"


def test_auto_without_the_bindings_takes_the_cpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "cuda-bindings" in choose_device("auto").reason


def test_auto_beside_a_gpu_says_that_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, runtime.cudaError_t.cudaSuccess, 2)
    choice = choose_device("auto")
    assert choice.name == "cpu" and "counts 2 device(s), but this release runs engines on CPUs only" in choice.reason


@pytest.mark.parametrize("devices", [0, 1])
def test_a_gpu_that_was_asked_for_is_never_replaced_in_silence(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, runtime.cudaError_t.cudaSuccess, devices)
    with pytest.raises(DeviceUnavailableError, match="cuda:0: the GPU cannot be used"):
        choose_device("cuda:0")


@pytest.mark.parametrize("name", ["gpu", "cuda", "cuda:x", "CPU", ""])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(DeviceUnavailableError, match="cuda:N"):
        choose_device(name)
