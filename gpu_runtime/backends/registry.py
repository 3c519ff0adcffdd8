"""Which backends there are, and which are installed."""

from __future__ import annotations

import importlib
import importlib.util

from gpu_runtime.backends.protocol import Backend
from gpu_runtime.errors import BuildError

# name → (library that must be installed, module, class, extra that brings the library)
_TABLE: dict[str, tuple[str, str, str, str]] = {
    "onnxruntime": ("onnxruntime", "gpu_runtime.backends.onnxruntime_backend", "OnnxRuntimeBackend", "cpu"),
    "openvino": ("openvino", "gpu_runtime.backends.openvino_backend", "OpenVinoBackend", "cpu"),
    "tensorrt": ("tensorrt", "gpu_runtime.backends.tensorrt_backend", "TensorRtBackend", "gpu"),
    "tensorrt_rtx": ("tensorrt_rtx", "gpu_runtime.backends.tensorrt_backend", "TensorRtRtxBackend", "rtx"),
}


def is_installed(name: str) -> bool:
    """Whether the backend's library is there; `BuildError` when there is no such backend."""
    check_known(name)
    return importlib.util.find_spec(_TABLE[name][0]) is not None


def check_known(name: str) -> None:
    if name not in _TABLE:
        raise BuildError("unknown backend", stage="backends", item=name, expected=", ".join(_TABLE))


def get_backend(name: str) -> Backend:
    """The backend of that name; `BuildError` when there is none or its library is not installed."""
    check_known(name)
    library, module, cls, extra = _TABLE[name]
    if not is_installed(name):
        raise BuildError(
            f"the library {library!r} is not installed",
            stage="backends",
            item=name,
            next_step=f"pip install 'inference-dags[{extra}]'",
        )
    backend: Backend = getattr(importlib.import_module(module), cls)()
    return backend
