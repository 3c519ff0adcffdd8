"""The GPU resource: lazy, one device and one loaded engine however often it is asked, closed with the run."""

from __future__ import annotations

import threading
from typing import Any

import dagster as dg
import pytest
from inference_resources import GpuResource

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.device.host import cpu_class
from gpu_runtime.errors import DeviceUnavailableError
from gpu_runtime.promotion.store import PromotionStore
from gpu_runtime.scoring import ScoringPolicy


def test_entering_a_run_opens_nothing() -> None:
    absent = GpuResource(device="cuda:7")
    with dg.build_resources({"gpu": absent}) as resources, pytest.raises(DeviceUnavailableError):
        resources.gpu.open()  # only the first use looks at the device


def test_the_engine_is_loaded_once_and_closed_with_the_run(promoted: Any) -> None:
    plan = PromotionStore(promoted.home / "artifacts").current("tiny", cpu_class()).plan
    store = ArtifactStore(promoted.home / "artifacts")
    before = threading.active_count()
    policy = ScoringPolicy()
    with GpuResource(device="cpu") as gpu:
        scorer = gpu.scorer(plan, store, policy)
        assert gpu.scorer(plan, store, policy) is scorer and gpu.open() is gpu.open()
        assert gpu.scorer(plan, store, ScoringPolicy(0.5)).policy == ScoringPolicy(0.5)
        executor = scorer.executor
        assert executor is scorer.executor and executor.batch == plan.batch
    assert gpu._device is None and gpu._scorers == {}
    assert threading.active_count() == before


def test_a_range_of_days_loads_the_engine_once(promoted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_runtime.backends import onnxruntime_backend, openvino_backend

    loads: list[str] = []
    for backend in (onnxruntime_backend.OnnxRuntimeBackend, openvino_backend.OpenVinoBackend):
        load = backend.load
        monkeypatch.setattr(
            backend, "load", lambda self, file, *rest, _load=load: (loads.append(file.key), _load(self, file, *rest))[1]
        )
    for day in ("2026-01-04", "2026-01-05"):
        promoted.write_day(day)
    assert promoted.materialize("predictions", days=("2026-01-03", "2026-01-05")).success
    assert len(loads) == 1
