"""One suite over the backends that this machine can run: what is built can be loaded, and computes the graph.

TensorRT is only built here; what is its own is in `test_tensorrt_build.py`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gpu_runtime.artifacts import file_digest
from gpu_runtime.backends.onnxruntime_backend import ReferenceSession
from gpu_runtime.backends.protocol import Backend, Engine, EngineFile, EngineOptions
from gpu_runtime.backends.registry import get_backend
from gpu_runtime.device.host import HostDevice
from gpu_runtime.device.protocol import DeviceClass
from gpu_runtime.errors import BuildError, EngineMismatchError
from gpu_runtime.specs import Graph, TensorSpec, synthetic_rows

MAX_BATCH = 16
Arrays = dict[str, npt.NDArray[Any]]
node = helper.make_node


def graph_of(
    folder: Path,
    nodes: list[onnx.NodeProto],
    constants: Mapping[str, Any],
    inputs: list[TensorSpec],
    outputs: list[TensorSpec],
) -> Graph:
    def values(specs: list[TensorSpec]) -> list[onnx.ValueInfoProto]:
        kinds = {t.name: helper.np_dtype_to_tensor_dtype(t.numpy_dtype) for t in specs}
        return [helper.make_tensor_value_info(t.name, kinds[t.name], ["N", *t.shape]) for t in specs]

    initializers = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "model", values(inputs), values(outputs), initializers),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    path = folder / "model.onnx"
    onnx.save(model, path)
    return Graph(path, file_digest(path), "fp32", "fp32", None, tuple(inputs), tuple(outputs), MAX_BATCH)


def dense(folder: Path) -> Graph:
    """float32 in: two layers wide enough that bfloat16 would be off by far more than the tolerance."""
    rng = np.random.default_rng(3)
    nodes = [node("MatMul", ["x", "first"], ["h"]), node("Relu", ["h"], ["r"]), node("MatMul", ["r", "second"], ["y"])]
    first, second = rng.standard_normal((256, 256)), rng.random((256, 8))
    constants = {"first": first.astype("float32"), "second": second.astype("float32")}
    return graph_of(folder, nodes, constants, [TensorSpec("x", "float32", (256,))], [TensorSpec("y", "float32", (8,))])


def picture(folder: Path) -> Graph:
    """uint8 `[N, H, W, C]` in, normalised in the graph; the best classes out, their index as int32."""
    rng = np.random.default_rng(4)
    nodes = [
        node("Cast", ["pixels"], ["f"], to=TensorProto.FLOAT),
        node("Transpose", ["f"], ["t"], perm=[0, 3, 1, 2]),
        node("Sub", ["t", "mean"], ["s"]),
        node("Mul", ["s", "scale"], ["n"]),
        node("Conv", ["n", "kernel"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Flatten", ["p"], ["logits"]),
        node("Softmax", ["logits"], ["soft"], axis=-1),
        node("TopK", ["soft", "k"], ["top_score", "best"], axis=-1),
        node("Cast", ["best"], ["top_index"], to=TensorProto.INT32),
    ]
    constants = {
        "mean": np.full((1, 3, 1, 1), 127, "float32"),
        "scale": np.full((1, 3, 1, 1), 0.02, "float32"),
        "kernel": rng.standard_normal((8, 3, 3, 3)).astype("float32"),
        "k": np.array([3]),
    }
    outputs = [TensorSpec("top_index", "int32", (3,)), TensorSpec("top_score", "float32", (3,))]
    return graph_of(folder, nodes, constants, [TensorSpec("pixels", "uint8", (16, 16, 3))], outputs)


def table(folder: Path) -> Graph:
    """int32 indices into an embedding, beside float columns and one scalar a row."""
    rng = np.random.default_rng(5)
    nodes = [
        node("Gather", ["embedding", "code"], ["e"]),
        node("Flatten", ["e"], ["flat"]),
        node("Unsqueeze", ["scalar", "axis"], ["column"]),
        node("Concat", ["flat", "x", "column"], ["all"], axis=1),
        node("MatMul", ["all", "weight"], ["wide"]),
        node("Sigmoid", ["wide"], ["square"]),
        node("Squeeze", ["square", "axis"], ["score"]),
    ]
    constants = {
        "embedding": rng.standard_normal((50, 8)).astype("float32"),
        "weight": rng.standard_normal((21, 1)).astype("float32"),
        "axis": np.array([1]),
    }
    code = TensorSpec("code", "int32", (2,), minimum=0, maximum=49)
    inputs = [code, TensorSpec("x", "float32", (4,)), TensorSpec("scalar", "float32")]
    return graph_of(folder, nodes, constants, inputs, [TensorSpec("score", "float32")])


MODELS: dict[str, Callable[[Path], Graph]] = {"float": dense, "uint8": picture, "int32": table}


@pytest.fixture(params=["onnxruntime", "openvino"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with HostDevice() as opened:
        yield opened


def build(backend: Backend, graph: Graph, device: HostDevice) -> EngineFile:
    folder = graph.path.parent / "engines"
    folder.mkdir(exist_ok=True)
    return backend.build(graph, folder, device.device_class)


def on_device(device: HostDevice, specs: tuple[TensorSpec, ...], rows: int) -> Arrays:
    """Arrays as the executor's slots hold them: the start of a buffer for the largest batch."""
    made = {}
    for spec in specs:
        buffer = device.empty(device.pinned(spec.nbytes(MAX_BATCH)))
        buffer.fill(0xFF)  # no output may keep it
        made[spec.name] = device.view(buffer, spec.dtype, spec.batch_shape(rows))
    return made


def scored(engine: Engine, device: HostDevice, rows: Arrays) -> Arrays:
    """One batch through a context of its own."""
    count = len(next(iter(rows.values())))
    inputs, outputs = (on_device(device, specs, count) for specs in (engine.file.inputs, engine.file.outputs))
    for name, values in rows.items():
        inputs[name][...] = values
    stream, done = device.stream(), device.event()
    engine.create_context().enqueue(inputs, outputs, stream)
    stream.record(done)
    done.synchronize()
    return outputs


def assert_same(found: Arrays, expected: Arrays, relative: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape)
        np.testing.assert_allclose(found[name], values, rtol=relative, atol=relative * np.abs(values).max())


@pytest.mark.parametrize(
    ("minimum", "maximum", "taken"),
    [(None, None, False), (0, None, False), (0, 2**31, False), (0, 30_521, True), (-(2**31), 2**31 - 1, True)],
)
def test_openvino_takes_whole_numbers_of_64_bits_only_where_it_computes_them_right(
    tmp_path: Path, minimum: int | None, maximum: int | None, taken: bool
) -> None:
    ids = TensorSpec("ids", "int64", (4,), minimum, maximum)
    reason = get_backend("openvino").supports(replace(dense(tmp_path), inputs=(ids,)))
    assert reason is None if taken else "'ids'" in str(reason)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_onnxruntime_has_the_threads_that_its_setting_says(tmp_path: Path, device: HostDevice, streams: int) -> None:
    """Each stream's own thread works, too."""
    backend, threads = get_backend("onnxruntime"), 3
    file = build(backend, dense(tmp_path), device)

    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = count()
    with backend.load(file, device, EngineOptions(streams, threads)):
        assert count() - before == streams * threads - streams


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "tensorrt_rtx"])
def test_a_sidecar_says_what_was_built_and_for_what(name: str, tmp_path: Path, device: HostDevice) -> None:
    backend, graph = get_backend(name), dense(tmp_path)
    assert backend.supports(graph) is None
    file = build(backend, graph, device)
    assert (file.backend, file.backend_version, file.key) == (name, backend.version(), f"{name}:fp32")
    assert (file.graph_digest, file.inputs, file.outputs) == (graph.digest, graph.inputs, graph.outputs)
    assert (file.digest, file.nbytes) == (file_digest(file.path), file.path.stat().st_size)
    assert (file.precision, file.scheme, file.max_batch) == ("fp32", None, MAX_BATCH)
    assert sorted(path.name for path in file.path.parent.iterdir()) == [file.path.name, f"{file.path.name}.json"]


@pytest.mark.parametrize("model", MODELS)
def test_an_engine_loaded_from_its_sidecar_computes_the_graph_at_every_batch(
    backend: Backend, model: str, tmp_path: Path, device: HostDevice
) -> None:
    graph = MODELS[model](tmp_path)
    written = build(backend, graph, device)
    sidecar = json.loads(written.path.with_name(f"{written.path.name}.json").read_text())
    file = EngineFile.from_sidecar(sidecar, written.path.parent)
    assert file == written
    if backend.name == "onnxruntime":
        assert backend.runs_here() is None
    reference = ReferenceSession(graph.path, optimize=False)
    with backend.load(file, device, EngineOptions()) as engine:
        assert (engine.file, engine.options) == (file, EngineOptions())
        for count in (MAX_BATCH, 1, 5, MAX_BATCH, 2):  # up and down: nothing may stay from another shape
            rows = synthetic_rows(graph.inputs, count, seed=count)
            assert_same(scored(engine, device, rows), reference(rows))


def test_one_context_serves_batches_of_changing_size(backend: Backend, tmp_path: Path, device: HostDevice) -> None:
    graph = table(tmp_path)
    reference = ReferenceSession(graph.path)
    with backend.load(build(backend, graph, device), device, EngineOptions()) as engine:
        context, stream = engine.create_context(), device.stream()
        for count in (3, MAX_BATCH, 1):
            rows = synthetic_rows(graph.inputs, count, seed=count)
            inputs, outputs = on_device(device, graph.inputs, count), on_device(device, graph.outputs, count)
            for name, values in rows.items():
                inputs[name][...] = values
            context.enqueue(inputs, outputs, stream)
            done = device.event()
            stream.record(done)
            done.synchronize()
            assert_same(outputs, reference(rows))


def test_two_contexts_at_once_do_not_mix_their_results(backend: Backend, tmp_path: Path, device: HostDevice) -> None:
    graph = picture(tmp_path)
    reference = ReferenceSession(graph.path)
    with backend.load(build(backend, graph, device), device, EngineOptions(streams=2)) as engine:
        lanes = [(engine.create_context(), device.stream()) for _ in range(2)]
        waiting = []
        for number in range(40):
            context, stream = lanes[number % 2]
            rows = synthetic_rows(graph.inputs, 4, seed=number)
            inputs, outputs = on_device(device, graph.inputs, 4), on_device(device, graph.outputs, 4)
            inputs["pixels"][...] = rows["pixels"]
            context.enqueue(inputs, outputs, stream)
            done = device.event()
            stream.record(done)
            waiting.append((rows, inputs, outputs, done))
        for rows, inputs, outputs, done in waiting:
            done.synchronize()
            assert_same(outputs, reference(rows))
            assert (inputs["pixels"] == rows["pixels"]).all()  # and what was given to read was only read


def test_results_are_in_the_arrays_given_and_nowhere_beyond(
    backend: Backend, tmp_path: Path, device: HostDevice
) -> None:
    graph = dense(tmp_path)
    reference = ReferenceSession(graph.path)
    rows = synthetic_rows(graph.inputs, 3, seed=9)
    memory = device.pinned(graph.outputs[0].nbytes(MAX_BATCH))
    memory.fill(0xAB)
    given = device.view(memory, "float32", (3, 8))
    with backend.load(build(backend, graph, device), device, EngineOptions()) as engine:
        stream, done = device.stream(), device.event()
        engine.create_context().enqueue(rows, {"y": given}, stream)
        stream.record(done)
        done.synchronize()
    written = memory[: given.nbytes].view("float32").reshape(3, 8)
    assert_same({"y": written}, reference(rows))
    assert (memory[given.nbytes :] == 0xAB).all()


def test_an_fp32_engine_really_computes_in_fp32(backend: Backend, tmp_path: Path, device: HostDevice) -> None:
    """OpenVINO would take bfloat16 wherever the CPU has it: three digits instead of seven."""
    graph = dense(tmp_path)
    rows = synthetic_rows(graph.inputs, MAX_BATCH, seed=1)
    layers = {t.name: numpy_helper.to_array(t) for t in onnx.load(graph.path).graph.initializer}
    exact = np.maximum(rows["x"].astype("float64") @ layers["first"], 0) @ layers["second"]
    with backend.load(build(backend, graph, device), device, EngineOptions()) as engine:
        np.testing.assert_allclose(scored(engine, device, rows)["y"], exact, rtol=1e-5)


def test_wrong_names_and_strided_arrays_fail_the_batch_not_the_process(
    backend: Backend, tmp_path: Path, device: HostDevice
) -> None:
    graph = dense(tmp_path)
    rows = synthetic_rows(graph.inputs, 4, seed=2)
    strided = np.zeros((4, 512), "float32")[:, ::2]
    with backend.load(build(backend, graph, device), device, EngineOptions()) as engine:
        context, stream = engine.create_context(), device.stream()
        for inputs in ({"absent": rows["x"]}, {"x": strided}, {"x": rows["x"][:, :100].copy()}):
            done = device.event()
            context.enqueue(inputs, on_device(device, graph.outputs, 4), stream)
            stream.record(done)
            with pytest.raises(Exception):  # noqa: B017  (the library's own kinds)
                done.synchronize()
        assert_same(scored(engine, device, rows), ReferenceSession(graph.path)(rows))


def flip_a_byte(file: EngineFile) -> EngineFile:
    content = bytearray(file.path.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.path.write_bytes(content)
    return file


def truncate(file: EngineFile) -> EngineFile:
    file.path.write_bytes(file.path.read_bytes()[: file.nbytes // 2])
    return file


def remove(file: EngineFile) -> EngineFile:
    file.path.unlink()
    return file


def of_another_version(file: EngineFile) -> EngineFile:
    return replace(file, backend_version="0.0.1")


def of_another_device(file: EngineFile) -> EngineFile:
    return replace(file, device_class=DeviceClass("cpu", "x86_64", ("no_such_flag",)))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (flip_a_byte, "the engine's file does not match"),
        (truncate, "the engine's file does not match"),
        (remove, "Got no file"),
        (of_another_version, "the engine's backend version does not match. Expected 0.0.1"),
        (of_another_device, "the engine's device class does not match"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_with_a_next_step(
    backend: Backend, spoil: Callable[[EngineFile], EngineFile], words: str, tmp_path: Path, device: HostDevice
) -> None:
    file = spoil(build(backend, dense(tmp_path), device))
    with pytest.raises(EngineMismatchError) as caught:
        backend.load(file, device, EngineOptions())
    assert words in str(caught.value)
    assert caught.value.item == f"{backend.name}:fp32"
    assert "materialize engine" in (caught.value.next_step or "")


def test_an_engine_that_a_whole_file_does_not_hold_is_refused_with_a_next_step(
    backend: Backend, tmp_path: Path, device: HostDevice
) -> None:
    """The bytes are what the sidecar says, and still not an engine."""
    file = build(backend, dense(tmp_path), device)
    file.path.write_bytes(b"not an engine" * 100)
    with pytest.raises(EngineMismatchError, match="Next: materialize engine"):
        backend.load(replace(file, digest=file_digest(file.path)), device, EngineOptions())


def unknown_operator(graph: Graph) -> None:
    model = onnx.load(graph.path)
    model.graph.node[0].op_type = "NoSuchOp"
    onnx.save(model, graph.path)


def wrong_shape(graph: Graph) -> None:
    model = onnx.load(graph.path)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((7, 5), "float32"), "first"))
    onnx.save(model, graph.path)


BROKEN: dict[str, Callable[[Graph], Any]] = {
    "unknown operator": unknown_operator,
    "wrong shape": wrong_shape,
    "not ONNX": lambda graph: graph.path.write_bytes(b"not an ONNX file"),
    "cut in half": lambda graph: graph.path.write_bytes(graph.path.read_bytes()[:1000]),
    "no file": lambda graph: graph.path.unlink(),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_graph_is_refused_in_the_library_s_words_and_leaves_no_file(
    backend: Backend, fault: str, tmp_path: Path, device: HostDevice
) -> None:
    graph = dense(tmp_path)
    BROKEN[fault](graph)
    with pytest.raises(BuildError, match=r"refused the graph: .+") as caught:
        build(backend, graph, device)
    assert (caught.value.stage, caught.value.item) == ("build engine", f"{backend.name}:fp32")
    assert caught.value.__cause__ is not None
    assert list((tmp_path / "engines").iterdir()) == []


def test_an_unknown_backend_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(BuildError, match=r"nonsense: unknown backend. Expected onnxruntime, openvino, tensorrt"):
        get_backend("nonsense")


@pytest.mark.parametrize(
    ("name", "extra"), [("onnxruntime", "cpu"), ("openvino", "cpu"), ("tensorrt", "gpu"), ("tensorrt_rtx", "rtx")]
)
def test_a_backend_whose_library_is_missing_names_the_extra_that_brings_it(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda library: None if library == name else find_spec(library))
    with pytest.raises(BuildError) as caught:
        get_backend(name)
    assert f"the library {name!r} is not installed" in str(caught.value)
    assert caught.value.next_step == f"pip install 'inference-dags[{extra}]'"


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "tensorrt", "tensorrt_rtx"])
def test_a_backend_answers_to_the_name_it_is_registered_under(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda library: object())
    assert get_backend(name).name == name
