"""OpenVINO on the CPU. The engine file is the compiled model as OpenVINO exports it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpu_runtime.backends.protocol import EngineFile, EngineOptions, cannot_open, check_fits, describe
from gpu_runtime.device.protocol import Array, Device, DeviceClass, Stream
from gpu_runtime.errors import BuildError
from gpu_runtime.specs import Graph

_DEVICE = "CPU"


# Without the hint OpenVINO runs an FP32 graph in bfloat16 wherever the CPU can, and the baseline would not be what
# its name says. What an INT8 graph leaves in float keeps FP32 too.
_HINT = {"INFERENCE_PRECISION_HINT": "f32"}


class OpenVinoBackend:
    name = "openvino"

    def version(self) -> str:
        import openvino

        return str(openvino.__version__)

    def supports(self, graph: Graph) -> str | None:
        held = np.iinfo(np.int32)
        for spec in graph.inputs:
            low = -math.inf if spec.minimum is None else spec.minimum
            high = math.inf if spec.maximum is None else spec.maximum
            if spec.dtype == "int64" and not held.min <= low <= high <= held.max:
                return f"it computes int64 as int32: declare {spec.name!r} with a minimum and a maximum inside int32"
        return None

    def runs_here(self) -> str | None:
        return None

    def build(self, graph: Graph, folder: Path, device_class: DeviceClass) -> EngineFile:
        import openvino

        path = folder / f"{self.name}.{graph.variant}.blob"
        try:
            core = openvino.Core()
            compiled = core.compile_model(core.read_model(str(graph.path)), _DEVICE, _HINT)
            exported = compiled.export_model()
        except RuntimeError as error:
            raise BuildError(
                f"OpenVINO refused the graph: {error}",
                stage="build engine",
                item=f"{self.name}:{graph.variant}",
            ) from error
        path.write_bytes(exported if isinstance(exported, bytes) else exported.getvalue())
        return describe(graph, path, self.name, self.version(), device_class, **_HINT)

    def load(self, file: EngineFile, device: Device, options: EngineOptions) -> OpenVinoEngine:
        check_fits(file, self.version(), device.device_class)
        return OpenVinoEngine(file, options)


class OpenVinoEngine:
    def __init__(self, file: EngineFile, options: EngineOptions) -> None:
        import openvino

        self.file, self.options = file, options
        # The hint is not part of the exported file: leave it out and the imported engine changes precision.
        settings = {
            "NUM_STREAMS": options.streams,
            "INFERENCE_NUM_THREADS": options.streams * options.threads,
            **_HINT,
        }
        try:
            self._compiled: Any = openvino.Core().import_model(file.path.read_bytes(), _DEVICE, settings)
        except RuntimeError as error:
            raise cannot_open(file, error) from error

    def create_context(self) -> OpenVinoContext:
        return OpenVinoContext(self._compiled.create_infer_request())

    def close(self) -> None:
        self._compiled = None

    def __enter__(self) -> OpenVinoEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class OpenVinoContext:
    """One inference request; several in flight are what fills OpenVINO's streams."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def enqueue(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], stream: Stream) -> None:
        import openvino

        def run() -> None:
            for name, array in inputs.items():
                self._request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
            for name, array in outputs.items():
                self._request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
            self._request.infer()

        stream.launch(run)
