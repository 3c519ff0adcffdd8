"""INT8: each scheme has its target's layout, and the numbers stay near FP32."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.onnxruntime_backend import ReferenceSession
from gpu_runtime.errors import QuantizationError
from gpu_runtime.export.onnx_export import export_model
from gpu_runtime.quantize.calibration import Calibration, calibrate
from gpu_runtime.quantize.int8 import Int8Recipe, QuantizedModel, quantize
from gpu_runtime.specs import ModelSpec, OnnxSource, TensorSpec

VNNI, TENSORRT = Int8Recipe("vnni"), Int8Recipe("tensorrt")
FIRST_FLOAT = Int8Recipe("vnni", keep_first_float=True)
PER_TENSOR = Int8Recipe("tensorrt", 99.9, per_channel=False)
RECIPES = (VNNI, TENSORRT, FIRST_FLOAT, PER_TENSOR)
X = TensorSpec("x", "float32", (4,))


@pytest.fixture(scope="module")
def quantized(served: SimpleNamespace, calibration: Calibration) -> QuantizedModel:
    return quantize(served.exported, calibration, RECIPES, served.store)


@pytest.fixture(scope="module")
def graphs(quantized: QuantizedModel) -> dict[str, Any]:
    """Variant → ONNX graph."""
    return {graph.variant: onnx.load(graph.path).graph for graph in quantized.graphs()}


def constants(graph: Any) -> dict[str, Any]:
    return {held.name: numpy_helper.to_array(held) for held in graph.initializer}


def zero_points(graph: Any, op: str, *, of_weights: bool) -> list[Any]:
    held = constants(graph)
    return [held[node.input[2]] for node in graph.node if node.op_type == op and (node.input[0] in held) == of_weights]


def quantized_layers(graph: Any) -> list[bool]:
    """For each Gemm in order: does it read its activation from a DequantizeLinear?"""
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    return [made_by.get(node.input[0]) == "DequantizeLinear" for node in graph.node if node.op_type == "Gemm"]


def test_vnni_activations_are_unsigned_and_weights_signed(graphs: dict[str, Any]) -> None:
    graph = graphs[VNNI.variant]
    activations = zero_points(graph, "QuantizeLinear", of_weights=False)
    assert activations
    assert {z.dtype for z in activations} == {np.dtype(np.uint8)}
    int8_weights = [v for v in constants(graph).values() if v.dtype == np.int8 and v.ndim == 2]
    assert len(int8_weights) == 3


@pytest.mark.parametrize("recipe", [TENSORRT, PER_TENSOR], ids=lambda recipe: recipe.variant)
def test_tensorrt_pairs_are_signed_and_symmetric(graphs: dict[str, Any], recipe: Int8Recipe) -> None:
    graph = graphs[recipe.variant]
    ops = ("QuantizeLinear", "DequantizeLinear")
    points = [point for op in ops for weights in (True, False) for point in zero_points(graph, op, of_weights=weights)]
    assert points
    assert {z.dtype for z in points} == {np.dtype(np.int8)}
    assert not any(z.any() for z in points)


def test_tensorrt_biases_stay_in_float(graphs: dict[str, Any]) -> None:
    graph = graphs[TENSORRT.variant]
    assert all(held.data_type != TensorProto.INT32 for held in graph.initializer)
    held = constants(graph)
    biases = [held[node.input[2]] for node in graph.node if node.op_type == "Gemm"]
    assert {bias.dtype for bias in biases} == {np.dtype(np.float32)}


def test_keep_first_float_leaves_the_first_layer_and_only_that_one(graphs: dict[str, Any]) -> None:
    assert quantized_layers(graphs[VNNI.variant]) == [True, True, True]
    assert quantized_layers(graphs[FIRST_FLOAT.variant]) == [False, True, True]


def test_keep_first_float_needs_no_node_names(store: ArtifactStore, flights: Any, tmp_path: Path) -> None:
    exported = export_model(flights.spec(tmp_path, named=False), store)
    calibration = calibrate(exported, [flights.rows(32)], "rows", store)
    graph = quantize(exported, calibration, (FIRST_FLOAT,), store).graphs()[0]
    assert quantized_layers(onnx.load(graph.path).graph) == [False, True, True]


def test_per_channel_weights_have_a_scale_for_each_output(graphs: dict[str, Any]) -> None:
    def widest_scale(variant: str) -> int:
        held = constants(graphs[variant])
        nodes = [n for n in graphs[variant].node if n.op_type == "DequantizeLinear"]
        return max(held[n.input[1]].size for n in nodes)

    assert widest_scale(TENSORRT.variant) == 16
    assert widest_scale(PER_TENSOR.variant) == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.variant)
def test_int8_scores_stay_near_fp32(
    served: SimpleNamespace, flights: Any, quantized: QuantizedModel, recipe: Int8Recipe
) -> None:
    graph = next(g for g in quantized.graphs() if g.variant == recipe.variant)
    rows = flights.rows(200, seed=11)
    exact, rounded = served.run(rows)["probability"], ReferenceSession(graph.path)(rows)["probability"]
    assert np.abs(exact - rounded).max() < 0.05
    assert np.abs(exact - rounded).max() > 0, "nothing was rounded"


def test_a_percentile_keeps_one_outlier_from_costing_the_rest(
    served: SimpleNamespace, flights: Any, store: ArtifactStore
) -> None:
    rows = flights.rows(500, seed=12)
    rows["numbers"][0, 0] = 1e4
    calibration = calibrate(served.exported, [rows], "one outlier", store)
    recipes = (Int8Recipe("vnni"), Int8Recipe("vnni", 99.5))
    usual = flights.rows(200, seed=13)
    exact = served.run(usual)["probability"]
    minmax, percentile = (
        np.abs(ReferenceSession(graph.path)(usual)["probability"] - exact).max()
        for graph in quantize(served.exported, calibration, recipes, store).graphs()
    )
    assert percentile < 0.05 < minmax


def test_an_int8_graph_takes_and_gives_what_the_model_does(served: SimpleNamespace, quantized: QuantizedModel) -> None:
    exported = served.exported.graph()
    for graph, recipe in zip(quantized.graphs(), RECIPES, strict=True):
        assert (graph.inputs, graph.outputs, graph.max_batch) == (exported.inputs, exported.outputs, 8)
        assert (graph.precision, graph.scheme, graph.variant) == ("int8", recipe.scheme, recipe.variant)


def test_a_graph_in_which_nothing_is_rounded_is_an_error(store: ArtifactStore, make_graph: Any, tmp_path: Path) -> None:
    path = make_graph(
        tmp_path / "m.onnx",
        [helper.make_node("Mul", ["x", "two"], ["y"])],
        {"two": np.float32([2])},
        [X],
        [TensorSpec("y", "float32", (4,))],
    )
    exported = export_model(ModelSpec("m", "1", OnnxSource(str(path)), (X,), ("y",)), store)
    calibration = calibrate(exported, [{"x": np.ones((4, 4), np.float32)}], "rows", store)
    with pytest.raises(QuantizationError, match="no Q/DQ pair"):
        quantize(exported, calibration, (TENSORRT,), store)


def test_any_number_of_recipes_needs_one_calibration(served: SimpleNamespace, calibration: Calibration) -> None:
    made = quantize(served.exported, calibration, (Int8Recipe("vnni", 99.9),), served.store)
    assert made.artifact.metadata["calibration"] == calibration.digest


def test_every_recipe_has_a_name_of_its_own() -> None:
    assert len({recipe.variant for recipe in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize("percentile", [89.9, 100.1, float("nan")])
def test_a_percentile_outside_its_bounds_is_refused(percentile: float) -> None:
    with pytest.raises(QuantizationError):
        Int8Recipe("vnni", percentile)


def test_percentiles_close_to_all_keep_names_of_their_own() -> None:
    close = (99.9, 99.99, 99.99999, 99.999999, 100.0)
    assert len({Int8Recipe("vnni", percentile).variant for percentile in close}) == len(close)
