"""ExportedModel + Calibration → INT8 graphs by static Q/DQ, one for each recipe.

The layout belongs to the target: VNNI CPUs multiply unsigned activations by signed weights, TensorRT takes
signed symmetric pairs only, on the inputs of its big operators. Every recipe reads the same calibration, so
any number of trials costs one pass over the data.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu_runtime.artifacts import Artifact, ArtifactStore
from gpu_runtime.errors import QuantizationError
from gpu_runtime.export.onnx_export import ExportedModel
from gpu_runtime.quantize.calibration import Calibration
from gpu_runtime.specs import Graph, Scheme, digest_of, tensor_specs, to_plain

KIND = "int8_model"
_WEIGHTED_OPS = ("Conv", "Gemm", "MatMul")
# Baked-in normalisation and top-k consist of other operators: they keep full precision.
_OPS: dict[Scheme, tuple[str, ...]] = {
    "vnni": (*_WEIGHTED_OPS, "Add", "Clip", "Relu", "AveragePool", "GlobalAveragePool", "MaxPool"),
    "tensorrt": _WEIGHTED_OPS,
}


@dataclass(frozen=True)
class Int8Recipe:
    """How one INT8 graph is made from a calibration.

    `percentile`: share of an activation's values inside its range, in percent; 100 is min-max.
    `keep_first_float`: leave the first weighted layer, which sees the raw inputs, in FP32.
    `per_channel`: a weight scale for each output channel instead of one for the tensor.
    """

    scheme: Scheme
    percentile: float = 100.0
    keep_first_float: bool = False
    per_channel: bool = True

    def __post_init__(self) -> None:
        if not 90.0 <= self.percentile <= 100.0:
            raise QuantizationError(
                "not a calibration percentile",
                stage="quantize",
                item=self.scheme,
                expected="90 … 100",
                got=str(self.percentile),
            )

    @property
    def variant(self) -> str:
        method = "minmax" if self.percentile == 100 else f"p{self.percentile:.10g}"
        suffix = ("-first-float" if self.keep_first_float else "") + ("" if self.per_channel else "-per-tensor")
        return f"int8-{self.scheme}-{method}{suffix}"


@dataclass(frozen=True)
class QuantizedModel:
    """The INT8 graphs of a model, one for each recipe, by name."""

    artifact: Artifact

    @property
    def digest(self) -> str:
        return self.artifact.digest

    @property
    def export(self) -> str:
        """Digest of the export that was quantized."""
        return str(self.artifact.metadata["export"])

    def graphs(self) -> list[Graph]:
        facts = self.artifact.metadata
        inputs, outputs = tensor_specs(facts["inputs"]), tensor_specs(facts["outputs"])
        return [
            Graph(
                path=self.artifact.file(f"{variant}.onnx"),
                digest=self.artifact.files[f"{variant}.onnx"],
                variant=variant,
                precision="int8",
                scheme=entry["scheme"],
                inputs=inputs,
                outputs=outputs,
                max_batch=facts["max_batch"],
                max_length=facts["max_length"],
            )
            for variant, entry in facts["variants"].items()
        ]


def quantize_recipe(exported: ExportedModel, calibration: Calibration, recipes: tuple[Int8Recipe, ...]) -> str:
    return digest_of({"calibration": calibration.digest, "export": exported.digest, "recipes": recipes, "v": 2})


def quantize(
    exported: ExportedModel, calibration: Calibration, recipes: tuple[Int8Recipe, ...], store: ArtifactStore
) -> QuantizedModel:
    """One INT8 graph for each recipe. Raises `QuantizationError` when a recipe inserts no Q/DQ pair."""
    if calibration.export != exported.digest:
        raise QuantizationError(
            "the calibration is of another export",
            stage="quantize",
            item=str(exported.artifact.metadata["model"]),
            expected=f"export {exported.digest[:12]}",
            got=calibration.export[:12],
            next_step="materialize calibration again, then int8_model",
        )
    key = quantize_recipe(exported, calibration, recipes)
    if found := store.find(KIND, key):
        return QuantizedModel(found)
    variants: dict[str, Any] = {}
    with store.draft(KIND, [key]) as draft:
        for recipe in recipes:
            counts = _quantize_one(calibration, recipe, draft.folder / f"{recipe.variant}.onnx")
            variants[recipe.variant] = {**to_plain(recipe), **counts}
        facts = exported.artifact.metadata
        draft.metadata = {
            "model": facts["model"],
            "calibration": calibration.digest,
            "export": exported.digest,
            "variants": variants,
            **{name: facts[name] for name in ("inputs", "outputs", "max_batch", "max_length")},
        }
    return QuantizedModel(draft.finished())


def _quantize_one(calibration: Calibration, recipe: Int8Recipe, target: Path) -> dict[str, int]:
    import onnx
    from onnxruntime.quantization import (
        CalibrationMethod,
        QuantFormat,
        QuantType,
        TensorsData,
        quantize_static,
        save_tensors_data,
    )

    prepared = calibration.artifact.file("prepared.onnx")
    ranges = {
        name: (np.asarray(low, np.float32), np.asarray(high, np.float32))
        for name, (low, high) in calibration.ranges(recipe.percentile).items()
    }
    nodes = list(onnx.load(str(prepared)).graph.node)
    wanted = _OPS[recipe.scheme]
    excluded = []
    first = next((node.name for node in nodes if node.op_type in _WEIGHTED_OPS), None)
    if recipe.keep_first_float and first is not None:
        excluded.append(first)
    symmetric = recipe.scheme == "tensorrt"
    extra: dict[str, Any] = {"ActivationSymmetric": symmetric, "WeightSymmetric": True}
    if symmetric:
        extra |= {
            "QuantizeBias": False,  # the parser rejects an INT32 bias behind a DQ
            "AddQDQPairToWeight": True,
            "OpTypesToExcludeOutputQuantization": list(wanted),
        }
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "ranges.json"
        save_tensors_data(TensorsData(CalibrationMethod.MinMax, ranges), cache)
        quantize_static(
            str(prepared),
            str(target),
            None,
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            per_channel=recipe.per_channel,
            op_types_to_quantize=list(wanted),
            nodes_to_exclude=excluded,
            calibration_cache_path=cache,
            extra_options=extra,
        )
    model = onnx.load(str(target))
    _drop_pairs_before_float(model, nodes, frozenset(wanted))
    onnx.save(model, str(target))
    made = list(model.graph.node)
    pairs = sum(node.op_type == "QuantizeLinear" for node in made)
    if not pairs:
        raise QuantizationError(
            "no Q/DQ pair was inserted",
            stage="quantize",
            item=f"{calibration.artifact.metadata['model']}:{recipe.variant}",
            expected=f"at least one of {', '.join(_WEIGHTED_OPS)} in the graph",
            got=", ".join(sorted({node.op_type for node in nodes})),
            next_step="leave INT8 out for this model, or keep its first layer quantized",
        )
    return {
        "quantize_nodes": pairs,
        "dequantize_nodes": sum(node.op_type == "DequantizeLinear" for node in made),
        "weighted_layers": sum(node.op_type in _WEIGHTED_OPS for node in nodes),
    }


def _drop_pairs_before_float(model: Any, before: list[Any], quantized_ops: frozenset[str]) -> None:
    """Remove each Q/DQ pair whose result no quantized operator reads; `before` are the nodes without any pairs.

    The quantizer rounds the last layer's output too, although what follows (softmax, sigmoid, the caller)
    computes in float: it gains no speed and turns close scores into ties. A pair that took over a Clip or Relu
    (its range saturates instead) stays, or the activation would be gone.
    """
    maker_before = {name: node.op_type for node in before for name in node.output}
    saturated = {name for node in before if node.op_type in ("Clip", "Relu") for name in node.input}
    graph = model.graph
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    made_by = {name: node for node in graph.node for name in node.output}
    results = {output.name for output in graph.output}
    dropped: list[Any] = []
    for dequantize in graph.node:
        quantize_node = made_by.get(dequantize.input[0]) if dequantize.op_type == "DequantizeLinear" else None
        if quantize_node is None or quantize_node.op_type != "QuantizeLinear":
            continue
        source, result = quantize_node.input[0], dequantize.output[0]
        maker = made_by.get(source)
        if maker is None or source in saturated or maker.op_type != maker_before.get(source):
            continue
        if len(readers[quantize_node.output[0]]) > 1 or any(
            node.op_type in quantized_ops for node in readers.get(result, [])
        ):
            continue
        if result in results:
            maker.output[list(maker.output).index(source)] = result
            for node in readers[source]:
                node.input[:] = [result if name == source else name for name in node.input]
        else:
            for node in readers.get(result, []):
                node.input[:] = [source if name == result else name for name in node.input]
        dropped += [quantize_node, dequantize]
    for node in dropped:
        graph.node.remove(node)
