"""Calibration: what every activation of a graph ranges over, from one streaming pass over real samples.

Each tensor gets a histogram whose bins are a float32's own sign, exponent and first five mantissa bits: bins
narrow near zero, wide far out, fixed before the first sample. Memory does not grow with the samples, one
outlier cannot spoil the resolution of the rest, and any percentile comes out of the same pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.artifacts import Artifact, ArtifactStore
from gpu_runtime.errors import QuantizationError
from gpu_runtime.export.onnx_export import ExportedModel
from gpu_runtime.specs import digest_of

KIND = "calibration"
_SHIFT = 18  # float32 bits kept: 1 sign + 8 exponent + 5 mantissa, so a bin is 3 % wide
_BINS = 1 << (32 - _SHIFT)
_HALF = _BINS // 2
_FIRST_NOT_FINITE = 255 << 5
_CALIBRATED_OPS = frozenset(
    {
        "Conv",
        "Gemm",
        "MatMul",
        "Add",
        "Mul",
        "Clip",
        "Relu",
        "AveragePool",
        "GlobalAveragePool",
        "MaxPool",
        "Concat",
    }
)
"""Operators whose float inputs and outputs are measured: everything any INT8 scheme here quantizes."""


class StreamingHistogram:
    """Counts of float32 values by sign, exponent and leading mantissa bits, with the exact extremes."""

    def __init__(self) -> None:
        self.counts = np.zeros(_BINS, np.int64)
        self.minimum, self.maximum = np.inf, -np.inf

    def add(self, values: npt.NDArray[np.float32]) -> None:
        flat = np.ascontiguousarray(values, np.float32).ravel()
        if not flat.size:
            return
        self.counts += np.bincount(flat.view(np.uint32) >> _SHIFT, minlength=_BINS)
        self.minimum = min(self.minimum, float(flat.min()))
        self.maximum = max(self.maximum, float(flat.max()))

    @property
    def not_finite(self) -> int:
        """How many NaN or infinite values were added."""
        return int(self.counts[_FIRST_NOT_FINITE:_HALF].sum() + self.counts[_HALF + _FIRST_NOT_FINITE :].sum())

    def range(self, percentile: float) -> tuple[float, float]:
        """The two-sided range that holds `percentile` percent of the values; 100 gives the exact extremes."""
        if percentile >= 100:
            return self.minimum, self.maximum
        # Ascending order: negative bins from the largest magnitude to the smallest, then positive ones.
        ascending = np.concatenate([self.counts[_HALF:][::-1], self.counts[:_HALF]])
        edges = _upper_edges()
        cumulative = np.cumsum(ascending)
        tail = (100.0 - percentile) / 200.0 * cumulative[-1]
        low = edges[max(0, int(np.searchsorted(cumulative, tail, side="right")) - 1)]
        high = edges[min(_BINS - 1, int(np.searchsorted(cumulative, cumulative[-1] - tail, side="left")))]
        return max(float(low), self.minimum), min(float(high), self.maximum)


def _upper_edges() -> npt.NDArray[np.float64]:
    """The upper edge of each bin in ascending order; infinite bins give the largest finite value."""
    starts = np.full(_HALF, np.finfo(np.float32).max, np.float64)
    bits = np.arange(_FIRST_NOT_FINITE, dtype=np.uint32) << _SHIFT
    starts[:_FIRST_NOT_FINITE] = bits.view(np.float32)
    above = np.append(starts[1:], starts[-1])
    return np.concatenate([-starts[::-1], above])


@dataclass(frozen=True)
class Calibration:
    """Measured ranges of every activation, and the prepared graph whose tensor names they carry."""

    artifact: Artifact

    @property
    def digest(self) -> str:
        return self.artifact.digest

    @property
    def export(self) -> str:
        """Digest of the export that was measured."""
        return str(self.artifact.metadata["export"])

    def ranges(self, percentile: float) -> dict[str, tuple[float, float]]:
        """Tensor name → (lowest, highest) that holds `percentile` percent of its values (100: the extremes)."""
        from safetensors.numpy import load_file

        held = load_file(self.artifact.file("histograms.safetensors"))
        ranges = {}
        for i, name in enumerate(self.artifact.metadata["tensors"]):
            histogram = StreamingHistogram()
            histogram.counts = held["counts"][i]
            histogram.minimum, histogram.maximum = (float(v) for v in held["extremes"][i])
            ranges[name] = histogram.range(percentile)
        return ranges


def calibration_recipe(exported: ExportedModel, samples_digest: str) -> str:
    """Identity of a calibration: the weights and the samples."""
    return digest_of({"export": exported.digest, "samples": samples_digest, "bins": _BINS, "v": 1})


def calibrate(
    exported: ExportedModel,
    samples: Iterable[Mapping[str, npt.NDArray[Any]]],
    samples_digest: str,
    store: ArtifactStore,
) -> Calibration:
    """Measure `exported` over `samples` (batches of the graph's inputs) in one pass.

    Identity = weights (the export's digest) + samples: the same pair is not measured again.
    Raises `QuantizationError` for no samples, and for samples that make a tensor NaN or infinite.
    """
    import onnx
    from safetensors.numpy import save_file

    from gpu_runtime.backends.onnxruntime_backend import ReferenceSession

    recipe = calibration_recipe(exported, samples_digest)
    if found := store.find(KIND, recipe):
        return Calibration(found)
    with store.draft(KIND, [recipe]) as draft:
        prepared = draft.folder / "prepared.onnx"
        _prepare(exported, prepared)
        model = onnx.load(str(prepared))
        names = _activations(model)
        if not names:
            raise QuantizationError(
                "the graph has nothing to calibrate",
                stage="calibrate",
                item=exported.artifact.metadata["model"],
                expected=f"at least one of {', '.join(sorted(_CALIBRATED_OPS))}",
                got=", ".join(sorted({node.op_type for node in model.graph.node})),
                next_step="leave INT8 out for this model",
            )
        shown = {output.name for output in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in shown)
        inputs = {spec.name for spec in exported.graph().inputs}
        # Fusions would remove the very tensors that are to be measured.
        run = ReferenceSession(model.SerializeToString(), optimize=False)
        histograms = {name: StreamingHistogram() for name in names}
        rows = 0
        for batch in samples:
            rows += next(iter(batch.values())).shape[0]
            values = {**run(batch), **{k: v for k, v in batch.items() if k in inputs}}
            for name, histogram in histograms.items():
                histogram.add(values[name])
        if not rows:
            raise QuantizationError(
                "the calibration set is empty",
                stage="calibrate",
                item=exported.artifact.metadata["model"],
                expected="at least one row",
                next_step="name calibration partitions that hold data",
            )
        spoiled = [name for name, histogram in histograms.items() if histogram.not_finite]
        if spoiled:
            raise QuantizationError(
                "calibration rows make activations NaN or infinite",
                stage="calibrate",
                item=exported.artifact.metadata["model"],
                expected="finite activations",
                got=f"{len(spoiled)} tensors, first {spoiled[0]!r}",
                next_step="leave rows with missing values out of the calibration set",
            )
        save_file(
            {
                "counts": np.stack([histograms[name].counts for name in names]),
                "extremes": np.asarray([(histograms[n].minimum, histograms[n].maximum) for n in names], np.float64),
            },
            draft.folder / "histograms.safetensors",
        )
        draft.metadata = {
            "model": exported.artifact.metadata["model"],
            "export": exported.digest,
            "samples": samples_digest,
            "rows": rows,
            "tensors": names,
        }
    return Calibration(draft.finished())


def _prepare(exported: ExportedModel, target: Any) -> None:
    """The graph with constants folded and shapes inferred: what Q/DQ pairs go into."""
    import onnx
    import onnxruntime
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    settings.optimized_model_filepath = str(target)
    settings.log_severity_level = 3
    onnxruntime.InferenceSession(str(exported.graph().path), settings, providers=["CPUExecutionProvider"])
    model = onnx.shape_inference.infer_shapes(onnx.load(str(target)))
    for i, node in enumerate(model.graph.node):
        node.name = node.name or f"unnamed_{i}"  # layers are left in float by name
    add_pre_process_metadata(model)  # tells the quantizer that this was done
    onnx.save(model, str(target))


def _activations(model: Any) -> list[str]:
    from onnx import TensorProto

    graph = model.graph
    constant = {i.name for i in graph.initializer}
    types = {v.name: v.type.tensor_type.elem_type for v in [*graph.value_info, *graph.input, *graph.output]}
    names: dict[str, None] = {}
    for node in graph.node:
        if node.op_type in _CALIBRATED_OPS:
            for name in [*node.input, *node.output]:
                if name and name not in constant and types.get(name) == TensorProto.FLOAT:
                    names[name] = None
    return list(names)
