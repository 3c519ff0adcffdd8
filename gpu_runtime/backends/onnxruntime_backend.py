"""ONNX Runtime's CPU provider. The engine file is the graph after ONNX Runtime's own optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_runtime.backends.protocol import EngineFile, EngineOptions, cannot_open, check_fits, describe
from gpu_runtime.device.protocol import Array, Device, DeviceClass, Stream
from gpu_runtime.errors import BuildError, EngineMismatchError
from gpu_runtime.specs import Graph

_PROVIDER = "CPUExecutionProvider"


class OnnxRuntimeBackend:
    name = "onnxruntime"

    def version(self) -> str:
        import onnxruntime

        return str(onnxruntime.__version__)

    def supports(self, graph: Graph) -> str | None:
        return None

    def runs_here(self) -> str | None:
        return None

    def build(self, graph: Graph, folder: Path, device_class: DeviceClass) -> EngineFile:
        import onnxruntime

        path = folder / f"{self.name}.{graph.variant}.onnx"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.optimized_model_filepath = str(path)
        options.log_severity_level = 3  # it warns that the file fits this CPU only: the sidecar says so
        try:
            onnxruntime.InferenceSession(str(graph.path), options, providers=[_PROVIDER])
        except Exception as error:  # its own exceptions share no base class below Exception
            raise BuildError(
                f"ONNX Runtime refused the graph: {error}",
                stage="build engine",
                item=f"{self.name}:{graph.variant}",
            ) from error
        return describe(graph, path, self.name, self.version(), device_class, provider=_PROVIDER)

    def load(self, file: EngineFile, device: Device, options: EngineOptions) -> OnnxRuntimeEngine:
        check_fits(file, self.version(), device.device_class)
        return OnnxRuntimeEngine(file, options)


class OnnxRuntimeEngine:
    def __init__(self, file: EngineFile, options: EngineOptions) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # done when built
        # Concurrent runs share the session's pool, and each calling thread, one a stream, works beside it. The number
        # counts one of the callers.
        settings.intra_op_num_threads = options.streams * (options.threads - 1) + 1
        settings.inter_op_num_threads = 1
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning starves decoding
        settings.log_severity_level = 3
        self.file, self.options = file, options
        try:
            self._session: Any = onnxruntime.InferenceSession(str(file.path), settings, providers=[_PROVIDER])
        except Exception as error:  # its own exceptions share no base class below Exception
            raise cannot_open(file, error) from error
        used = self._session.get_providers()[0]
        if used != _PROVIDER:
            raise EngineMismatchError(
                "runs on another provider than asked",
                stage="load engine",
                item=file.key,
                expected=_PROVIDER,
                got=used,
            )

    def create_context(self) -> OnnxRuntimeContext:
        return OnnxRuntimeContext(self._session)

    def close(self) -> None:
        self._session = None

    def __enter__(self) -> OnnxRuntimeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class OnnxRuntimeContext:
    def __init__(self, session: Any) -> None:
        self._session = session

    def enqueue(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], stream: Stream) -> None:
        def run() -> None:
            binding = self._session.io_binding()
            for name, array in inputs.items():
                _bind(binding.bind_input, name, array)
            for name, array in outputs.items():
                _bind(binding.bind_output, name, array)
            self._session.run_with_iobinding(binding)

        stream.launch(run)


def _bind(bind: Any, name: str, array: Any) -> None:
    # A pointer carries no strides: ONNX Runtime would read a non-contiguous array wrongly, in silence.
    if not array.flags.c_contiguous:
        raise ValueError(f"tensor {name!r} must be contiguous")
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


class ReferenceSession:
    """A graph run as it stands, synchronously, for proofs and calibration: numpy in, numpy out."""

    def __init__(self, model: Path | bytes, *, optimize: bool = True) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        if not optimize:
            settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        source = model if isinstance(model, bytes) else str(model)
        self._session: Any = onnxruntime.InferenceSession(source, settings, providers=[_PROVIDER])
        self.outputs = tuple(output.name for output in self._session.get_outputs())

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self.outputs, self._session.run(None, dict(inputs)), strict=True))
