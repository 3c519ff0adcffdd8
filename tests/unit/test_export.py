"""Export: a graph is kept only if it is the model, at any batch, row by row."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.engine_set import build_engines
from gpu_runtime.backends.onnxruntime_backend import ReferenceSession
from gpu_runtime.benchmark.report import run_rows
from gpu_runtime.datasets.sample import RowSample
from gpu_runtime.device.host import HostDevice, cpu_class
from gpu_runtime.errors import ExportError
from gpu_runtime.export.onnx_export import export_model
from gpu_runtime.export.parity import normalized
from gpu_runtime.specs import ImageNormalization, ModelSpec, OnnxSource, TensorSpec, TopK, TorchSource

X = TensorSpec("x", "float32", (4,))
Y = TensorSpec("y", "float32", (3,))
node = helper.make_node


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class Doubling(Layer):
    def forward(self, x: Any) -> Any:
        return self.layer(x) if x.shape[0] == 1 else self.layer(x) * 2


class TwoResults(Layer):
    def forward(self, x: Any) -> Any:
        return self.layer(x), self.layer(x) * 2


def dropout_left_in_train_mode() -> torch.nn.Module:
    return torch.nn.Sequential(Layer(), torch.nn.Dropout(0.5)).train()


def not_a_module() -> str:
    return "not a module"


def torch_spec(factory: str, **changes: Any) -> ModelSpec:
    values: dict[str, Any] = {"inputs": (X,), "outputs": ("y",), "max_batch": 8}
    return ModelSpec("m", "1", TorchSource(f"{__name__}:{factory}"), **{**values, **changes})


def onnx_spec(path: Path, **changes: Any) -> ModelSpec:
    values: dict[str, Any] = {"inputs": (X,), "outputs": ("y",), "max_batch": 8}
    return ModelSpec("m", "1", OnnxSource(str(path)), **{**values, **changes})


def matmul(make_graph: Any, folder: Path, seed: int = 0, **settings: Any) -> Path:
    weights = np.random.default_rng(seed).standard_normal((4, 3)).astype(np.float32)
    path: Path = make_graph(
        folder / f"{seed}.onnx", [node("MatMul", ["x", "w"], ["y"])], {"w": weights}, [X], [Y], **settings
    )
    return path


def rows(count: int, seed: int = 9) -> Any:
    return np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)


# From torch


def test_a_module_left_in_train_mode_is_exported_in_eval_mode(store: ArtifactStore) -> None:
    exported = export_model(torch_spec("dropout_left_in_train_mode"), store)
    x = rows(5)
    expected = Layer()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(ReferenceSession(exported.graph().path)({"x": x})["y"], expected, rtol=1e-5, atol=1e-6)
    assert exported.parity.max_difference < 1e-5


def test_a_branch_on_a_single_row_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(ExportError):
        export_model(torch_spec("Doubling"), store)


@pytest.mark.parametrize("names", [("first",), ("first", "second", "third")])
def test_another_number_of_outputs_than_declared_is_refused(store: ArtifactStore, names: tuple[str, ...]) -> None:
    with pytest.raises(ExportError, match="outputs"):
        export_model(torch_spec("TwoResults", outputs=names), store)


def test_an_output_may_have_the_name_of_an_inner_value(store: ArtifactStore) -> None:
    exported = export_model(torch_spec("Layer", outputs=("linear",), max_batch=1), store)
    assert [(t.name, t.shape) for t in exported.graph().outputs] == [("linear", (3,))]


@pytest.mark.parametrize("factory", ["no.such.module:f", f"{__name__}:no_such_function"])
def test_a_factory_that_cannot_be_imported_is_named(store: ArtifactStore, factory: str) -> None:
    with pytest.raises(ExportError, match="cannot be imported") as caught:
        export_model(ModelSpec("m", "1", TorchSource(factory), (X,), ("y",)), store)
    assert caught.value.item == factory


def test_a_factory_that_makes_something_else_is_refused(store: ArtifactStore) -> None:
    with pytest.raises(ExportError, match=r"torch\.nn\.Module"):
        export_model(torch_spec("not_a_module"), store)


# From ONNX


def test_an_onnx_file_is_an_equal_source(store: ArtifactStore, make_graph: Any, tmp_path: Path) -> None:
    path = matmul(make_graph, tmp_path)
    graph = export_model(onnx_spec(path), store).graph()
    x = rows(7)
    np.testing.assert_array_equal(ReferenceSession(graph.path)({"x": x})["y"], ReferenceSession(path)({"x": x})["y"])
    assert (graph.inputs, graph.outputs, graph.max_batch) == ((X,), (Y,), 8)


@pytest.mark.parametrize("k", [1, 2])
def test_one_or_two_equal_scores_can_be_meant(store: ArtifactStore, image_spec: Any, replaced: Any, k: int) -> None:
    assert not export_model(replaced(image_spec[0], top_k=TopK(k)), store).graph().outputs[1].varies


def test_an_outputs_range_goes_with_the_graph_and_with_every_engine_built_of_it(
    store: ArtifactStore, make_graph: Any, tmp_path: Path
) -> None:
    path = matmul(make_graph, tmp_path)
    for bounds in ((None, None), (None, 9.0), (-9.0, 9.0)):  # the same bytes each time
        graph = export_model(onnx_spec(path, output_ranges={"y": bounds}), store).graph()
        assert graph.outputs == (TensorSpec("y", "float32", (3,), *bounds),)
        engines = build_engines("m", [graph], ["onnxruntime", "openvino"], cpu_class(), store).engines
        assert {file.outputs for file in engines.values()} == {graph.outputs} and len(engines) == 2


def test_weights_listed_among_the_inputs_are_no_inputs(store: ArtifactStore, make_graph: Any, tmp_path: Path) -> None:
    path = matmul(make_graph, tmp_path, weights_as_inputs=True)
    graph = export_model(onnx_spec(path), store).graph()
    assert [t.name for t in graph.inputs] == ["x"]


@pytest.mark.parametrize("batch", [1, 4])
def test_an_onnx_file_of_fixed_batch_is_refused(
    store: ArtifactStore, make_graph: Any, tmp_path: Path, batch: int
) -> None:
    with pytest.raises(ExportError, match="first dimension is fixed"):
        export_model(onnx_spec(matmul(make_graph, tmp_path, batch=batch)), store)


def test_rows_that_see_their_neighbours_are_refused(store: ArtifactStore, make_graph: Any, tmp_path: Path) -> None:
    nodes = [node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1), node("Sub", ["x", "mean"], ["y"])]
    path = make_graph(tmp_path / "m.onnx", nodes, {}, [X], [TensorSpec("y", "float32", (4,))])
    with pytest.raises(ExportError, match="depends on its neighbours"):
        export_model(onnx_spec(path), store)


def test_a_batch_fixed_inside_the_graph_is_refused(store: ArtifactStore, make_graph: Any, tmp_path: Path) -> None:
    nodes = [node("Reshape", ["x", "two_rows"], ["y"])]
    path = make_graph(
        tmp_path / "m.onnx", nodes, {"two_rows": np.asarray([2, -1])}, [X], [TensorSpec("y", "float32", (4,))]
    )
    with pytest.raises(ExportError):
        export_model(onnx_spec(path), store)


@pytest.mark.parametrize("declared", [TensorSpec("x", "float32", (5,)), TensorSpec("x", "int32", (4,))])
def test_inputs_declared_with_another_shape_or_type_are_refused(
    store: ArtifactStore, make_graph: Any, tmp_path: Path, declared: TensorSpec
) -> None:
    with pytest.raises(ExportError, match="declared inputs"):
        export_model(onnx_spec(matmul(make_graph, tmp_path), inputs=(declared,)), store)


def test_inputs_and_outputs_of_other_names_are_refused(store: ArtifactStore, make_graph: Any, tmp_path: Path) -> None:
    path = matmul(make_graph, tmp_path)
    with pytest.raises(ExportError, match="other inputs"):
        export_model(onnx_spec(path, inputs=(TensorSpec("z", "float32", (4,)),)), store)
    with pytest.raises(ExportError, match="lacks outputs"):
        export_model(onnx_spec(path, outputs=("y", "z")), store)


@pytest.mark.parametrize("content", [None, b"not a model"])
def test_a_file_that_is_no_model_is_refused(store: ArtifactStore, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ExportError):
        export_model(onnx_spec(path), store)


def test_a_refused_model_leaves_nothing_in_the_store(store: ArtifactStore, make_graph: Any, tmp_path: Path) -> None:
    with pytest.raises(ExportError):
        export_model(onnx_spec(matmul(make_graph, tmp_path, batch=4)), store)
    assert not (store.root / "objects").exists()


# The same model twice


def test_the_same_model_exported_again_has_the_same_digest(
    store: ArtifactStore, make_graph: Any, tmp_path: Path
) -> None:
    spec = onnx_spec(matmul(make_graph, tmp_path))
    assert export_model(spec, store).digest == export_model(spec, store).digest


def test_changed_weights_are_exported_again(store: ArtifactStore, make_graph: Any, tmp_path: Path) -> None:
    path = matmul(make_graph, tmp_path, seed=0)
    first = export_model(onnx_spec(path), store)
    path.write_bytes(matmul(make_graph, tmp_path, seed=1).read_bytes())
    assert export_model(onnx_spec(path), store).digest != first.digest


def test_changed_weights_beside_the_onnx_file_are_exported_again(
    store: ArtifactStore, make_graph: Any, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    digests = []
    for seed in (0, 1):
        model = onnx.load(matmul(make_graph, tmp_path, seed=seed))
        (tmp_path / "weights.bin").unlink(missing_ok=True)
        onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        digests.append(export_model(onnx_spec(path), store).digest)
    assert digests[0] != digests[1]


# Baked in

CLASSES, K = 5, 3
NORMALIZATION = ImageNormalization((120.0, 110.0, 100.0), (60.0, 50.0, 40.0))
PIXELS = TensorSpec("pixels", "uint8", (4, 6, 3))


@pytest.fixture
def image_spec(make_graph: Any, tmp_path: Path) -> tuple[ModelSpec, Any]:
    """A layer over all pixels, so that none may change places; and its weights."""
    weights = np.random.default_rng(2).standard_normal((3 * 4 * 6, CLASSES)).astype(np.float32) / 8
    path = make_graph(
        tmp_path / "image.onnx",
        [
            node("Flatten", ["pixels"], ["flat"]),
            node("MatMul", ["flat", "w"], ["logits"]),
        ],
        {"w": weights},
        [TensorSpec("pixels", "float32", (3, 4, 6))],
        [TensorSpec("logits", "float32", (CLASSES,))],
    )
    source = OnnxSource(str(path))
    return ModelSpec("m", "1", source, (PIXELS,), ("logits",), {"pixels": NORMALIZATION}, TopK(K), 8), weights


def test_baked_normalisation_and_top_k_equal_numpy(store: ArtifactStore, image_spec: tuple[ModelSpec, Any]) -> None:
    spec, weights = image_spec
    graph = export_model(spec, store).graph()
    pixels = np.random.default_rng(3).integers(0, 256, (6, 4, 6, 3)).astype(np.uint8)
    got = ReferenceSession(graph.path)({"pixels": pixels})

    floats = (pixels.astype(np.float64) - NORMALIZATION.mean) / NORMALIZATION.std
    logits = floats.transpose(0, 3, 1, 2).reshape(6, -1) @ weights
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-probability, axis=1)[:, :K]
    np.testing.assert_array_equal(got["top_index"], order)
    np.testing.assert_allclose(got["top_score"], np.take_along_axis(probability, order, axis=1), rtol=1e-5)
    assert graph.inputs == (PIXELS,)
    index, score = graph.outputs
    assert index == TensorSpec("top_index", "int32", (K,), 0, 4)
    assert score == TensorSpec("top_score", "float32", (K,), 0.0, score.maximum, varies=True)
    assert score.maximum is not None and 1 < score.maximum < 1.01, "rounding may pass 1"


@pytest.mark.parametrize("shape", [(5,), (5, 2, 3)], ids=["a class a row", "a class a pixel"])
@pytest.mark.parametrize("kind", ["softmax", "argmax"])
def test_baked_softmax_and_argmax_equal_numpy(
    store: ArtifactStore, make_graph: Any, tmp_path: Path, kind: Any, shape: tuple[int, ...]
) -> None:
    x, logits = TensorSpec("x", "float32", shape), TensorSpec("classes", "float32", shape)
    path = make_graph(tmp_path / "m.onnx", [node("Neg", ["x"], ["classes"])], {}, [x], [logits])
    source = OnnxSource(str(path))
    spec = ModelSpec("m", "1", source, (x,), ("classes",), postprocess={"classes": kind}, max_batch=4)
    graph = export_model(spec, store).graph()
    rows = np.random.default_rng(0).standard_normal((4, *shape)).astype(np.float32)
    got = ReferenceSession(graph.path)({"x": rows})["classes"]
    if kind == "argmax":
        np.testing.assert_array_equal(got, (-rows).argmax(axis=1))
        assert graph.outputs == (TensorSpec("classes", "int32", shape[1:], 0, 4),)
    else:
        powers = np.exp(-rows)
        np.testing.assert_allclose(got, powers / powers.sum(axis=1, keepdims=True), rtol=1e-5)
        (made,) = graph.outputs
        assert (made.shape, made.minimum) == (shape, 0) and made.maximum is not None and 1 < made.maximum < 1.01


@pytest.mark.parametrize("shape", [(5,), (5, 2, 3)], ids=["a class a row", "a class a pixel"])
@pytest.mark.parametrize(("spoiled", "masked"), [(np.nan, False), (np.inf, False), (-np.inf, True)])
@pytest.mark.parametrize("opset", [11, 20])
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_scores_that_are_not_finite_have_no_largest_class(
    store: ArtifactStore,
    make_graph: Any,
    tmp_path: Path,
    shape: tuple[int, ...],
    spoiled: float,
    masked: bool,
    opset: int,
    backend: str,
) -> None:
    """-1 is outside the output's range: such a row is quarantined, not published as a class. -∞ masks one."""
    x, logits = TensorSpec("x", "float32", shape), TensorSpec("classes", "float32", shape)
    make = replace(make_graph, opset=opset)
    path = make(tmp_path / "m.onnx", [node("Neg", ["x"], ["classes"])], {}, [x], [logits])
    source = OnnxSource(str(path))
    spec = ModelSpec("m", "1", source, (x,), ("classes",), postprocess={"classes": "argmax"}, max_batch=4)
    graph = export_model(spec, store).graph()
    rows = np.random.default_rng(0).standard_normal((4, *shape)).astype(np.float32)
    expected = (-rows).argmax(axis=1)
    here = (0,) * (len(shape) - 1)
    rows[(1, expected[(1, *here)] - 1, *here)] = -spoiled  # not the largest class
    if not masked:
        expected[(1, *here)] = -1
    engines = build_engines("m", [graph], [backend], cpu_class(), store)
    with HostDevice() as device:
        file = engines.engines[f"{backend}:fp32"]
        got = run_rows(file, device, RowSample({"x": rows}, None, "rows"), "classes")
    np.testing.assert_array_equal(got, expected)
    assert graph.outputs[0].minimum == 0


def test_a_score_without_classes_has_no_argmax(store: ArtifactStore, make_graph: Any, tmp_path: Path) -> None:
    x, score = TensorSpec("x", "float32", ()), TensorSpec("score", "float32", ())
    path = make_graph(tmp_path / "m.onnx", [node("Neg", ["x"], ["score"])], {}, [x], [score])
    spec = ModelSpec("m", "1", OnnxSource(str(path)), (x,), ("score",), postprocess={"score": "argmax"})
    with pytest.raises(ExportError, match="has no classes to choose from"):
        export_model(spec, store)


def test_the_reference_normalisation_is_the_formula() -> None:
    pixels = np.random.default_rng(4).integers(0, 256, (2, 4, 6, 3)).astype(np.uint8)
    made = normalized(pixels, NORMALIZATION)
    assert made.shape == (2, 3, 4, 6)
    np.testing.assert_allclose(made[1, 2, 3, 5], (pixels[1, 3, 5, 2] - 100.0) / 40.0, rtol=1e-6)


def test_more_top_classes_than_classes_are_refused(
    store: ArtifactStore, image_spec: tuple[ModelSpec, Any], replaced: Any
) -> None:
    with pytest.raises(ExportError):
        export_model(replaced(image_spec[0], top_k=TopK(CLASSES + 1)), store)


def test_a_model_output_named_like_a_baked_one_is_refused(
    store: ArtifactStore, make_graph: Any, tmp_path: Path
) -> None:
    logits = TensorSpec("top_index", "float32", (4,))
    path = make_graph(tmp_path / "m.onnx", [node("Relu", ["x"], ["top_index"])], {}, [X], [logits])
    with pytest.raises(ExportError, match="top_index"):
        export_model(onnx_spec(path, outputs=("top_index",), top_k=TopK(1)), store)


def test_a_changed_forward_is_another_model_though_its_weights_are_the_same(
    tmp_path: Path, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class lives in another module than the factory, and what changed in a base class of it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "nets_of_a_project.py").write_text(NET.format(factor="1"))
    (tmp_path / "factory_of_a_project.py").write_text("from nets_of_a_project import Net as build\n")
    spec = ModelSpec(
        "net", "1", TorchSource("factory_of_a_project:build"), (TensorSpec("x", "float32", (2,)),), ("y",), max_batch=4
    )

    def exported() -> str:
        for name in ("nets_of_a_project", "factory_of_a_project"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return export_model(spec, store).digest

    first = exported()
    assert exported() == first
    (tmp_path / "nets_of_a_project.py").write_text(NET.format(factor="2.5"))
    second = exported()
    assert second != first
    found = store.find("onnx_model", spec.digest)
    assert found is not None and found.digest == second
    (tmp_path / "nets_of_a_project.py").write_text(NET.format(factor="1"))
    assert exported() == first
    found = store.find("onnx_model", spec.digest)
    assert found is not None and found.digest == first, "the newest export is what a bare job must find"


NET = """
import torch

class Base(torch.nn.Module):
    def forward(self, x):
        return self.layer(x) * {factor}

class Net(Base):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 3)
"""
