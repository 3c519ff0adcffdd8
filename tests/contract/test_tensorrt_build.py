"""TensorRT's build path, run for real through TensorRT for RTX, which needs neither GPU nor driver."""

from __future__ import annotations

import ast
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import tensorrt_rtx
from cuda.bindings import runtime
from onnx import TensorProto, helper, numpy_helper

from gpu_runtime.artifacts import file_digest
from gpu_runtime.backends import tensorrt_backend
from gpu_runtime.backends.protocol import Backend, EngineFile, EngineOptions
from gpu_runtime.backends.registry import get_backend
from gpu_runtime.backends.tensorrt_backend import TensorRtBackend, TensorRtRtxBackend
from gpu_runtime.device.host import HostDevice
from gpu_runtime.device.protocol import DeviceClass
from gpu_runtime.errors import BuildError, DeviceUnavailableError
from gpu_runtime.specs import Dtype, Graph, TensorSpec

CPU = DeviceClass("cpu", "x86_64", ("avx2",))
SM86 = DeviceClass("cuda", "sm86", ("sm86",))
ELEMENT = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8, "int32": TensorProto.INT32}
RNG = np.random.default_rng(11)

node = helper.make_node


def graph_of(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    constants: dict[str, Any],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    batch: int | str = "N",
) -> Graph:
    def values(specs: Sequence[TensorSpec]) -> list[Any]:
        return [helper.make_tensor_value_info(t.name, ELEMENT[t.dtype], [batch, *t.shape]) for t in specs]

    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    model = helper.make_model(
        helper.make_graph(list(nodes), "model", values(inputs), values(outputs), initializers),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    path = folder / "model.onnx"
    onnx.save(model, path)
    return Graph(path, file_digest(path), "fp32", "fp32", None, tuple(inputs), tuple(outputs), 8)


def row(name: str, *shape: int, dtype: Dtype = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def linear(folder: Path, batch: int | str = "N") -> Graph:
    weight = RNG.standard_normal((16, 4)).astype("float32")
    nodes = [node("MatMul", ["x", "weight"], ["y"])]
    return graph_of(folder, nodes, {"weight": weight}, [row("x", 16)], [row("y", 4)], batch)


def quantized(folder: Path, zero: Any, bias: bool = False) -> Graph:
    """A dense layer between Q/DQ pairs; `zero` is the activation's zero point, or None to leave it out."""
    points = [] if zero is None else ["zero"]
    nodes = [
        node("QuantizeLinear", ["x", "scale", *points], ["q"]),
        node("DequantizeLinear", ["q", "scale", *points], ["dq"]),
        node("DequantizeLinear", ["weight", "scales"], ["w"], axis=1),
        node("MatMul", ["dq", "w"], ["product" if bias else "y"]),
    ]
    constants = {
        "scale": np.float32(0.05),
        "weight": RNG.integers(-127, 127, (16, 16)).astype("int8"),
        "scales": np.full(16, 0.02, "float32"),
        **({} if zero is None else {"zero": zero}),
    }
    if bias:
        nodes += [node("DequantizeLinear", ["b", "scale"], ["bias"]), node("Add", ["product", "bias"], ["y"])]
        constants["b"] = np.arange(16, dtype="int32")
    graph = graph_of(folder, nodes, constants, [row("x", 16)], [row("y", 16)])
    return replace(graph, variant="int8-tensorrt-minmax", precision="int8", scheme="tensorrt")


def image(folder: Path, cast_first: bool = True) -> Graph:
    """uint8 `[N, H, W, C]` in, normalised in the graph; the best three classes out, their index as int32."""
    cast = ("Cast", {"to": TensorProto.FLOAT})
    transpose = ("Transpose", {"perm": [0, 3, 1, 2]})
    (one, one_is), (two, two_is) = (cast, transpose) if cast_first else (transpose, cast)
    nodes = [
        node(one, ["x"], ["x1"], **one_is),
        node(two, ["x1"], ["x2"], **two_is),
        node("Sub", ["x2", "mean"], ["x3"]),
        node("Mul", ["x3", "scale"], ["x4"]),
        node("Conv", ["x4", "kernel"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("Softmax", ["f"], ["s"], axis=-1),
        node("TopK", ["s", "k"], ["top_score", "i"], axis=-1),
        node("Cast", ["i"], ["top_index"], to=TensorProto.INT32),
    ]
    constants = {
        "mean": np.full((1, 3, 1, 1), 127, "float32"),
        "scale": np.full((1, 3, 1, 1), 0.02, "float32"),
        "kernel": RNG.standard_normal((8, 3, 3, 3)).astype("float32"),
        "k": np.array([3]),
    }
    outputs = [row("top_index", 3, dtype="int32"), row("top_score", 3)]
    return graph_of(folder, nodes, constants, [row("x", 16, 16, 3, dtype="uint8")], outputs)


def embedding(folder: Path) -> Graph:
    """int32 indices `[N, 2]` into a table, beside float columns."""
    nodes = [
        node("Gather", ["table", "code"], ["e"]),
        node("Flatten", ["e"], ["flat"]),
        node("Concat", ["flat", "x"], ["all"], axis=1),
        node("MatMul", ["all", "weight"], ["y"]),
    ]
    constants = {
        "table": RNG.standard_normal((50, 8)).astype("float32"),
        "weight": RNG.standard_normal((20, 1)).astype("float32"),
    }
    return graph_of(folder, nodes, constants, [row("code", 2, dtype="int32"), row("x", 4)], [row("y", 1)])


def build(graph: Graph, folder: Path, device_class: DeviceClass = CPU) -> EngineFile:
    return TensorRtRtxBackend().build(graph, folder / "engines", device_class)


def refusal(graph: Graph, folder: Path, device_class: DeviceClass = CPU) -> str:
    """The error's text, once it is certain that no file was left behind."""
    with pytest.raises(BuildError) as caught:
        build(graph, folder, device_class)
    assert not (folder / "engines").exists()
    return str(caught.value)


def test_a_float_graph_becomes_an_engine_whose_sidecar_describes_it(tmp_path: Path) -> None:
    graph = linear(tmp_path)
    file = build(graph, tmp_path)
    assert file.path.name == "tensorrt_rtx.fp32.engine"
    assert file.path.read_bytes()[:4] == b"vtrt"
    assert (file.backend, file.backend_version) == ("tensorrt_rtx", TensorRtRtxBackend().version())
    assert file.device_class == SM86  # the class it was built for, not the host's
    assert file.notes == {
        "compute_capability": "sm86",
        "tf32": False,
        "profile_min_opt_max": {"x": [[1, 16], [8, 16], [8, 16]]},
    }
    sidecar = json.loads(file.path.with_suffix(".engine.json").read_text())
    assert EngineFile.from_sidecar(sidecar, file.path.parent) == file


def test_rows_that_differ_in_length_get_a_profile_up_to_the_longest(tmp_path: Path) -> None:
    free = replace(row("x", 1), shape=(-1,))
    graph = graph_of(tmp_path, [node("ReduceSum", ["x", "axis"], ["y"], keepdims=0)], {"axis": np.array([1])},
                     [free], [row("y")])  # fmt: skip
    model = onnx.load(graph.path)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "length"
    onnx.save(model, graph.path)
    graph = replace(graph, max_length=40)
    file = TensorRtRtxBackend().build(graph, tmp_path, SM86)
    assert file.notes["profile_min_opt_max"] == {"x": [[1, 1], [8, 40], [8, 40]]}
    assert (file.max_length, file.path.read_bytes()[:4]) == (40, b"vtrt")


def test_symmetric_signed_int8_builds(tmp_path: Path) -> None:
    file = build(quantized(tmp_path, np.int8(0)), tmp_path)
    assert (file.key, file.scheme) == ("tensorrt_rtx:int8-tensorrt-minmax", "tensorrt")
    assert file.notes["tf32"] is True


@pytest.mark.parametrize("make", [image, embedding])
def test_the_graphs_that_this_project_exports_build(make: Any, tmp_path: Path) -> None:
    assert build(make(tmp_path), tmp_path).nbytes > 0


def test_bytes_that_are_transposed_before_their_cast_build_too(tmp_path: Path) -> None:
    assert build(image(tmp_path, cast_first=False), tmp_path).inputs == image(tmp_path).inputs


def test_a_uint8_input_that_is_never_cast_is_refused_in_the_parsers_words(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        [node("Flatten", ["x"], ["f"]), node("Cast", ["f"], ["y"], to=TensorProto.FLOAT)],
        {},
        [row("x", 4, dtype="uint8")],
        [row("y", 4)],
    )
    assert "UINT8" in refusal(graph, tmp_path)


@pytest.mark.parametrize("zero", [np.uint8(128), np.int8(3)])
def test_the_parser_refuses_a_zero_point_in_its_own_words(zero: Any, tmp_path: Path) -> None:
    assert "Non-zero zero point is not supported" in refusal(quantized(tmp_path, zero), tmp_path)


def test_the_parser_refuses_a_quantized_bias(tmp_path: Path) -> None:
    assert "input has type Int32" in refusal(quantized(tmp_path, np.int8(0), bias=True), tmp_path)


@pytest.mark.parametrize("zero", [np.uint8(0), None])
def test_unsigned_quantization_that_the_parser_lets_through_is_refused(zero: Any, tmp_path: Path) -> None:
    assert "unsigned Q/DQ would be read as signed" in refusal(quantized(tmp_path, zero), tmp_path)


def test_every_error_of_the_parser_is_told(tmp_path: Path) -> None:
    nodes = [node("NoSuchOp", ["x"], ["a"], name="first"), node("NorThis", ["x"], ["b"], name="second")]
    text = refusal(graph_of(tmp_path, nodes, {}, [row("x", 16)], [row("a", 16), row("b", 16)]), tmp_path)
    assert "name: first" in text and "name: second" in text
    assert text.count("Plugin not found") == 2  # once each: the log's copies are left out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not an ONNX file", "Failed to parse the ONNX model"),
        (b"", "Got none"),  # the parser takes an empty file for an empty model
        (None, "Input file cannot be found"),
    ],
)
def test_a_broken_file_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    graph = linear(tmp_path)
    graph.path.unlink() if content is None else graph.path.write_bytes(content)
    assert words in refusal(graph, tmp_path)


def test_what_only_the_log_says_is_in_the_error(tmp_path: Path) -> None:
    text = refusal(linear(tmp_path, batch=4), tmp_path)
    assert "no engine" in text and "static dimensions that don't match kMIN" in text
    assert "Opset version" not in text  # neither chatter


def test_every_build_of_the_process_writes_to_one_logger(tmp_path: Path) -> None:
    log = tensorrt_backend._logger(tensorrt_rtx)
    in_use = tensorrt_rtx.Builder(log)  # the library warns when a second logger joins one that is in use
    refusal(linear(tmp_path, batch=4), tmp_path)
    assert [message.count("static dimensions") for message in log.messages] == [1]
    del in_use


def test_an_earlier_refusal_is_not_told_again(tmp_path: Path) -> None:
    refusal(linear(tmp_path, batch=4), tmp_path)
    assert "static dimensions" not in refusal(quantized(tmp_path, np.int8(3)), tmp_path)


def test_an_impossible_profile_is_refused(tmp_path: Path) -> None:
    text = refusal(replace(linear(tmp_path), max_batch=0), tmp_path)
    assert "optimization profile was refused" in text and "MIN<=OPT<=MAX" in text


@pytest.mark.parametrize("wrong", ["inputs", "outputs"])
def test_a_declared_name_that_the_network_lacks_is_refused(wrong: str, tmp_path: Path) -> None:
    graph = linear(tmp_path)
    declared: dict[str, Any] = {wrong: (*getattr(graph, wrong), row("absent", 2))}
    assert "Expected absent, x, y. Got x, y." in refusal(replace(graph, **declared), tmp_path)


def test_concurrent_builds_keep_their_messages_apart(tmp_path: Path) -> None:
    texts: dict[int, str] = {}

    def attempt(batch: int, graph: Graph) -> None:
        texts[batch] = refusal(graph, graph.path.parent)

    threads = []
    for batch in range(20, 36):
        folder = tmp_path / str(batch)
        folder.mkdir()
        threads.append(threading.Thread(target=attempt, args=(batch, linear(folder, batch))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {batch: text.count("Input dimensions are") for batch, text in texts.items()} == dict.fromkeys(texts, 1)
    assert len(texts) == 16 and all(f"are [{batch},16]" in text for batch, text in texts.items())


def test_a_gpu_class_is_built_for_when_its_compute_capability_is_known(tmp_path: Path) -> None:
    ada = DeviceClass("cuda", "NVIDIA L4", ("sm89", "58 SMs"))
    file = build(linear(tmp_path), tmp_path, ada)
    assert (file.device_class, file.notes["compute_capability"]) == (ada, "sm89")
    hopper = DeviceClass("cuda", "NVIDIA H200", ("sm90",))
    (tmp_path / "other").mkdir()
    text = refusal(linear(tmp_path / "other"), tmp_path / "other", hopper)
    assert "Expected sm75 | sm80 | sm86" in text and "NVIDIA H200 (sm90)" in text


def test_full_tensorrt_builds_for_the_gpu_at_hand_only(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="class of this machine's NVIDIA GPU"):
        TensorRtBackend().build(linear(tmp_path), tmp_path, CPU)


def test_int8_needs_the_scheme_of_that_name(tmp_path: Path) -> None:
    graph = quantized(tmp_path, np.int8(0))
    for backend in (TensorRtBackend(), TensorRtRtxBackend()):
        assert backend.supports(graph) is None
        assert backend.supports(linear(tmp_path)) is None
        assert "unsigned or asymmetric" in (backend.supports(replace(graph, scheme="vnni")) or "")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            (runtime.cudaError_t.cudaErrorInsufficientDriver, None),
            "needs an NVIDIA GPU and driver: CUDA reports",
        ),
        ((runtime.cudaError_t.cudaSuccess, 0), "needs an NVIDIA GPU and driver: CUDA counts 0 device"),
        ((runtime.cudaError_t.cudaSuccess, 1), "builds TensorRT engines but does not execute them yet"),
    ],
)
def test_loading_says_why_it_cannot(answer: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: answer)
    backend: Backend = get_backend("tensorrt_rtx")
    assert reason in (backend.runs_here() or "")
    file = build(linear(tmp_path), tmp_path)
    with HostDevice() as device, pytest.raises(DeviceUnavailableError) as caught:
        backend.load(file, cast(Any, device), EngineOptions())
    assert reason in str(caught.value) and "Next: score with onnxruntime or openvino" in str(caught.value)


def test_without_cuda_bindings_no_gpu_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "cuda-bindings, which looks for one, is not installed" in TensorRtRtxBackend().runs_here()


RTX_ONLY = {"trt.ComputeCapability", "config.num_compute_capabilities", "config.set_compute_capability"}
CLASS_OF = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
}


def names_used() -> set[str]:
    """Every `trt.X`, `trt.X.Y` and `<variable>.<member>` of the backend's source."""
    tree = ast.parse(Path(tensorrt_backend.__file__).read_text())
    chains = {ast.unparse(found) for found in ast.walk(tree) if isinstance(found, ast.Attribute)}
    return {chain for chain in chains if chain.split(".")[0] in {"trt", *CLASS_OF} and "(" not in chain}


def is_recorded(chain: str, classes: dict[str, list[str]]) -> bool:
    first, *rest = chain.split(".")
    path = rest if first == "trt" else [CLASS_OF[first], *rest]
    return path[0] in classes and all(name in classes[path[0]] for name in path[1:2] if not name.startswith("__"))


def test_every_name_of_the_library_is_one_that_it_has() -> None:
    recorded = json.loads(Path(__file__).with_name("tensorrt_names.json").read_text())
    used = names_used()
    assert {"trt.Builder", "trt.BuilderFlag.TF32", "builder.build_serialized_network"} <= used
    missing = {
        library: {name for name in used if not is_recorded(name, recorded[library]["classes"])}
        for library in ("tensorrt", "tensorrt_rtx")
    }
    assert missing == {"tensorrt": RTX_ONLY, "tensorrt_rtx": set()}
    capabilities = recorded["tensorrt_rtx"]["classes"]["ComputeCapability"]
    assert {target.upper() for target in TensorRtRtxBackend.targets} <= set(capabilities)
