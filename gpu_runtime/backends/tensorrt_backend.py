"""TensorRT and TensorRT for RTX: one path from an ONNX graph to an engine file. Nothing here executes it yet.

Since TensorRT 11 precision lives in the graph (Q/DQ pairs), not in builder flags. What it asks of a graph:

- a uint8 input goes through a `Cast` first (`Transpose`, `Gather` and arithmetic refuse uint8): where our own
  export transposes the bytes before the `Cast`, because CPUs are faster that way, the two are swapped here;
- `Gather` takes int32 or int64 indices, nothing narrower; `TopK` gives int64: for int32, `Cast` its result;
- Q/DQ are signed with a zero point of 0, and the bias has none.

The library raises nothing: a failed call gives None, False or -1 and logs why. Here each becomes a
`BuildError` with the library's own words, and no file is written.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from gpu_runtime.artifacts import write_atomically
from gpu_runtime.backends.protocol import EngineFile, EngineOptions, describe
from gpu_runtime.device.protocol import Device, DeviceClass
from gpu_runtime.device.select import cuda_devices
from gpu_runtime.errors import BuildError, DeviceUnavailableError
from gpu_runtime.specs import Graph

_Refused = Callable[..., BuildError]
_DEFAULT_TARGET = DeviceClass("cuda", "sm86", ("sm86",))
_one_build = threading.Lock()  # the process has one logger of each library, so one build's words at a time


class _OnnxToEngine:
    name: str  # also the library's import name
    targets: tuple[str, ...]
    """Compute capabilities it builds for with no GPU present; none where it builds for the GPU it runs on."""

    def version(self) -> str:
        return str(importlib.import_module(self.name).__version__)

    def supports(self, graph: Graph) -> str | None:
        if graph.precision == "int8" and graph.scheme != "tensorrt":
            return "its parser rejects unsigned or asymmetric Q/DQ and INT32 bias DQ: it needs scheme 'tensorrt'"
        return None

    def runs_here(self) -> str:
        return _no_gpu() or "this release builds TensorRT engines but does not execute them yet"

    def build(self, graph: Graph, folder: Path, device_class: DeviceClass) -> EngineFile:
        """Write `<name>.<variant>.engine` for batches of 1 to `graph.max_batch` rows, tuned for full ones.

        An engine is for a GPU even where the host that builds it has none. Asked for a CPU's class, TensorRT
        for RTX therefore builds for compute capability 8.6 and the sidecar names that as the device class.
        """
        refused = functools.partial(BuildError, stage="build engine", item=f"{self.name}:{graph.variant}")
        target = _DEFAULT_TARGET if self.targets and device_class.kind == "cpu" else device_class
        capability = next((feature for feature in target.features if feature in self.targets), None)
        if target.kind == "cpu" or (self.targets and capability is None):
            raise refused(
                "does not build for this device class",
                expected=" | ".join(self.targets) or "the class of this machine's NVIDIA GPU",
                got=f"{target.kind} {target.name} ({', '.join(target.features)})",
            )
        with _one_build:
            plan, notes = _serialize(importlib.import_module(self.name), graph, capability, refused)
        path = folder / f"{self.name}.{graph.variant}.engine"
        write_atomically(path, plan)
        return describe(graph, path, self.name, self.version(), target, **notes)

    def load(self, file: EngineFile, device: Device, options: EngineOptions) -> NoReturn:
        raise DeviceUnavailableError(
            self.runs_here(),
            stage="load engine",
            item=file.key,
            got=f"device {device.name!r}",
            next_step="score with onnxruntime or openvino: TensorRT engines are built but not executed yet",
        )


class TensorRtBackend(_OnnxToEngine):
    name = "tensorrt"
    targets = ()


class TensorRtRtxBackend(_OnnxToEngine):
    name = "tensorrt_rtx"
    targets = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")


def _no_gpu() -> str | None:
    # CUDA itself is asked: with no driver, a TensorRT Runtime object can end the process on first use.
    count, words = cuda_devices()
    return None if count else f"needs an NVIDIA GPU and driver: {words}"


@functools.cache
def _logger(trt: Any) -> Any:
    """The process's only logger of this library: TensorRT does not promise to hear a second one."""
    kept = {trt.ILogger.WARNING, trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR}

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: deque[str] = deque(maxlen=50)  # TensorRT logs from any thread; append is atomic

        def log(self, severity: Any, message: str) -> None:
            if severity in kept:
                self.messages.append(message)

    return Log()


def _serialize(trt: Any, graph: Graph, capability: str | None, refused: _Refused) -> tuple[bytes, dict[str, Any]]:
    """The engine's bytes and the notes of how they were made."""
    log = _logger(trt)
    log.messages.clear()

    def checked(step: str, result: Any) -> Any:
        if result is None or result is False:
            words = " | ".join(log.messages) or "the library logged nothing"
            raise refused(f"{step}: {words}")
        return result

    try:
        builder = trt.Builder(log)
    except TypeError:  # how the bindings say that the constructor gave null
        builder = None
    checked("no builder", builder)
    network = checked("no network", builder.create_network(0))  # referred to, not owned, by the parser
    parser = trt.OnnxParser(network, log)
    with tempfile.TemporaryDirectory() as scratch:
        parsed = parser.parse_from_file(str(_with_casts_first(graph, Path(scratch))))
    if parser.num_errors:
        log.messages.clear()  # what was logged says the same without naming the node
        log.messages.extend(str(parser.get_error(i)) for i in range(parser.num_errors))
    checked("the ONNX parser refused the graph", parsed and not parser.num_errors)
    _check_parsed(network, graph, refused)

    config = checked("no builder configuration", builder.create_builder_config())
    if graph.precision == "fp32":  # on by default, and a baseline with 10-bit mantissas is not FP32
        config.clear_flag(trt.BuilderFlag.TF32)
        checked("TF32 stays on", not config.get_flag(trt.BuilderFlag.TF32))
    if capability:
        config.num_compute_capabilities = 1
        kind = getattr(trt.ComputeCapability, capability.upper())
        checked(f"compute capability {capability} refused", config.set_compute_capability(kind, 0))
    profile = checked("no optimization profile", builder.create_optimization_profile())
    # min, opt, max: only the last batch of a run is not full
    most = [(1, graph.max_length and 1), *[(graph.max_batch, graph.max_length)] * 2]
    shapes = {t.name: [list(t.batch_shape(*sizes)) for sizes in most] for t in graph.inputs}
    for name, (smallest, usual, largest) in shapes.items():
        profile.set_shape(name, smallest, usual, largest)
    checked("the optimization profile was refused", config.add_optimization_profile(profile) >= 0)
    plan = bytes(checked("no engine", builder.build_serialized_network(network, config)))
    tf32 = bool(config.get_flag(trt.BuilderFlag.TF32))
    return plan, {"compute_capability": capability, "tf32": tf32, "profile_min_opt_max": shapes}


def _with_casts_first(graph: Graph, scratch: Path) -> Path:
    """The graph's file, or a copy in `scratch` in which uint8 → Transpose → Cast became uint8 → Cast → Transpose."""
    pixels = {t.name for t in graph.inputs if t.dtype == "uint8"}
    if not pixels:
        return graph.path
    import onnx

    model = onnx.load(graph.path)
    nodes = model.graph.node
    for place, transpose in enumerate(nodes):
        if transpose.op_type != "Transpose" or transpose.input[0] not in pixels:
            continue
        readers = [node for node in nodes if transpose.output[0] in node.input]
        if len(readers) == 1 and readers[0].op_type == "Cast":
            cast, later = readers[0], list(nodes).index(readers[0])
            pixel, between, result = transpose.input[0], transpose.output[0], cast.output[0]
            cast.input[0], cast.output[0] = pixel, between
            transpose.input[0], transpose.output[0] = between, result
            first, second = onnx.NodeProto(), onnx.NodeProto()
            first.CopyFrom(cast)
            second.CopyFrom(transpose)
            nodes[place].CopyFrom(first)
            nodes[later].CopyFrom(second)
    del model.graph.value_info[:]  # they name the tensor between the two as bytes
    onnx.save(model, scratch / "graph.onnx")
    return scratch / "graph.onnx"


def _check_parsed(network: Any, graph: Graph, refused: _Refused) -> None:
    """What the library passes over in silence: a name that is not in the network, and unsigned Q/DQ."""
    expected = sorted(t.name for t in (*graph.inputs, *graph.outputs))
    inputs = [network.get_input(i).name for i in range(network.num_inputs)]
    found = sorted(inputs + [network.get_output(i).name for i in range(network.num_outputs)])
    if found != expected:
        what = "the parsed network has other inputs and outputs than the graph declares"
        raise refused(what, expected=", ".join(expected), got=", ".join(found) or "none")
    import onnx

    # An unsigned zero point of 0, or none at all, is read as signed: half of the range would saturate.
    model = onnx.shape_inference.infer_shapes(onnx.load(graph.path, load_external_data=False)).graph
    uint8 = {v.name for v in model.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.UINT8}
    unsigned = sorted(uint8 & {n.output[0] for n in model.node if n.op_type == "QuantizeLinear"})
    if unsigned:
        raise refused(
            "unsigned Q/DQ would be read as signed",
            expected="int8 zero points",
            got=f"{len(unsigned)} uint8 tensors, {unsigned[0]!r} among them",
            next_step="quantize with the scheme 'tensorrt'",
        )
