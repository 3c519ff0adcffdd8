"""Calibration: one pass, bounded memory, ranges that an outlier cannot spoil."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import helper
from safetensors.numpy import load_file

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.errors import QuantizationError
from gpu_runtime.export.onnx_export import export_model
from gpu_runtime.quantize.calibration import Calibration, StreamingHistogram, calibrate, calibration_recipe
from gpu_runtime.specs import ModelSpec, OnnxSource, TensorSpec


def histogram_of(values: Any) -> StreamingHistogram:
    histogram = StreamingHistogram()
    for part in np.array_split(np.asarray(values, np.float32), 7):
        histogram.add(part)
    return histogram


@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99])
@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.standard_normal(50_000),
        lambda rng: rng.exponential(3.0, 50_000) + 0.1,
        lambda rng: -rng.exponential(0.01, 50_000) - 0.001,
        lambda rng: np.concatenate([rng.standard_normal(50_000), [1e6]]),
    ],
    ids=["normal", "positive", "negative", "one outlier of 1e6"],
)
def test_a_percentile_range_is_numpys_quantiles(draw: Any, percentile: float) -> None:
    values = draw(np.random.default_rng(0)).astype(np.float32)
    tail = (100 - percentile) / 200
    low, high = np.quantile(values, [tail, 1 - tail])
    assert histogram_of(values).range(percentile) == pytest.approx((low, high), rel=0.04)


def test_the_whole_range_is_exact() -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    assert histogram_of(values).range(100) == (float(values.min()), float(values.max()))


def test_a_range_never_exceeds_the_extremes() -> None:
    assert histogram_of([1.01, 1.01, 1.01]).range(99.0) == (pytest.approx(1.01), pytest.approx(1.01))


def test_values_that_are_not_finite_are_counted() -> None:
    assert histogram_of([1.0, np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0]).not_finite == 4


def test_a_histogram_does_not_grow_with_its_samples() -> None:
    rng = np.random.default_rng(0)
    few, many = histogram_of(rng.standard_normal(10)), histogram_of(rng.standard_normal(200_000))
    assert few.counts.nbytes == many.counts.nbytes
    assert few.__dict__.keys() == many.__dict__.keys()  # nothing is kept beside the counts and the extremes
    assert many.counts.sum() == 200_000


def test_a_calibration_does_not_grow_with_its_samples(
    served: SimpleNamespace, flights: Any, store: ArtifactStore
) -> None:
    shapes = []
    for count in (8, 400):
        made = calibrate(served.exported, [flights.rows(count)], f"{count} rows", store)
        shapes.append({k: v.shape for k, v in load_file(made.artifact.file("histograms.safetensors")).items()})
    assert shapes[0] == shapes[1]


def test_every_activation_that_int8_may_round_is_measured(calibration: Calibration) -> None:
    ranges = calibration.ranges(100)
    assert {"joined", "active", "logit"} <= ranges.keys()
    assert ranges["active"][0] == 0.0, "a ReLU's output is never below zero"
    assert "w1" not in ranges


def test_the_ranges_are_those_of_all_batches(served: SimpleNamespace, flights: Any, store: ArtifactStore) -> None:
    rows = flights.rows(64, seed=3)
    batches = [{name: values[i : i + 8] for name, values in rows.items()} for i in range(0, 64, 8)]
    made = calibrate(served.exported, batches, "64 rows", store)
    low, high = made.ranges(100)["numbers"]
    assert (low, high) == (float(rows["numbers"].min()), float(rows["numbers"].max()))


def test_an_empty_set_is_an_error(served: SimpleNamespace, flights: Any, store: ArtifactStore) -> None:
    for nothing in ([], [flights.rows(0)]):
        with pytest.raises(QuantizationError, match="empty"):
            calibrate(served.exported, nothing, "nothing", store)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_an_error(
    served: SimpleNamespace, flights: Any, store: ArtifactStore, value: float
) -> None:
    rows = flights.rows(16)
    rows["numbers"][3, 1] = value
    with pytest.raises(QuantizationError, match="NaN or infinite"):
        calibrate(served.exported, [rows], "spoiled", store)
    assert store.find("calibration", calibration_recipe(served.exported, "spoiled")) is None


def test_a_graph_with_nothing_to_round_is_an_error(store: ArtifactStore, make_graph: Any, tmp_path: Path) -> None:
    x, y = TensorSpec("x", "float32", (4,)), TensorSpec("y", "float32", (4,))
    path = make_graph(tmp_path / "m.onnx", [helper.make_node("Sigmoid", ["x"], ["y"])], {}, [x], [y])
    exported = export_model(ModelSpec("m", "1", OnnxSource(str(path)), (x,), ("y",)), store)
    with pytest.raises(QuantizationError, match="Sigmoid"):
        calibrate(exported, [{"x": np.ones((2, 4), np.float32)}], "rows", store)


def test_the_same_weights_and_samples_are_measured_once(
    served: SimpleNamespace, flights: Any, store: ArtifactStore
) -> None:
    passes = []

    def batches() -> Iterator[Any]:
        passes.append("pass")
        yield flights.rows(8)

    first = calibrate(served.exported, batches(), "eight rows", store)
    assert calibrate(served.exported, batches(), "eight rows", store).digest == first.digest
    assert passes == ["pass"]


def test_other_weights_or_samples_have_another_identity(
    served: SimpleNamespace, flights: Any, store: ArtifactStore, tmp_path: Path
) -> None:
    spec = flights.spec(tmp_path, seed=1)
    retrained = export_model(spec, store)
    assert [t.name for t in retrained.graph().inputs] == [t.name for t in served.exported.graph().inputs]
    recipes = {
        calibration_recipe(served.exported, "samples"),
        calibration_recipe(served.exported, "other samples"),
        calibration_recipe(retrained, "samples"),
    }
    assert len(recipes) == 3
