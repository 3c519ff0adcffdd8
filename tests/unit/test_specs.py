"""Specs: contradictions are refused when the value is made; digests tell values apart and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu_runtime.errors import InferenceError, SpecError
from gpu_runtime.specs import (
    ImageNormalization,
    ModelSpec,
    OnnxSource,
    TensorSpec,
    TopK,
    TorchSource,
    digest_of,
    synthetic_rows,
    tensor_specs,
    to_plain,
)

PIXELS = TensorSpec("pixels", "uint8", (8, 8, 3))
GREY = ImageNormalization((0.5,), (1.0,))
RGB = ImageNormalization((1, 2, 3), (4, 5, 6))


def model(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "name": "m",
        "version": "1",
        "source": OnnxSource("m.onnx"),
        "inputs": (PIXELS,),
        "outputs": ("logits",),
    }
    return ModelSpec(**{**values, **changes})


@pytest.mark.parametrize(
    "contradiction",
    [
        lambda: TensorSpec("not a name", "float32"),
        lambda: TensorSpec("x", "float128"),  # type: ignore[arg-type]
        lambda: TensorSpec("x", "float32", (3, 0)),
        lambda: TensorSpec("x", "int32", (), minimum=5, maximum=2),
        lambda: ImageNormalization((1, 2), (1,)),
        lambda: ImageNormalization((1,), (0,)),
        lambda: ImageNormalization((), ()),
        lambda: TopK(0),
        lambda: TorchSource("module.without.function"),
        lambda: model(inputs=()),
        lambda: model(outputs=("pixels",)),
        lambda: model(max_batch=0),
        lambda: model(name="two words"),
        lambda: model(normalize={"pixels": GREY}),
        lambda: model(normalize={"other": RGB}),
        lambda: model(outputs=("a", "b"), top_k=TopK(1)),
        lambda: model(output_ranges={"scores": (0, 1)}),
        lambda: model(output_ranges={"pixels": (0, 1)}),
        lambda: model(output_ranges={"logits": (0, 1)}, top_k=TopK(1)),
        lambda: model(output_ranges={"logits": (0, 1)}, postprocess={"logits": "softmax"}),
        lambda: model(postprocess={"other": "softmax"}),
        lambda: model(postprocess={"logits": "argmax"}, top_k=TopK(1)),
        lambda: model(output_ranges={"logits": (1, 0)}),
    ],
)
def test_a_contradiction_is_refused_when_the_value_is_made(contradiction: Any) -> None:
    with pytest.raises(SpecError):
        contradiction()


def test_a_digest_does_not_depend_on_key_order_or_on_tuple_and_list() -> None:
    assert digest_of({"a": 1, "b": (1, 2)}) == digest_of({"b": [1, 2], "a": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"version": "2"},
        {"max_batch": 9},
        {"outputs": ("scores",)},
        {"normalize": {"pixels": RGB}},
        {"top_k": TopK(2)},
        {"postprocess": {"logits": "softmax"}},
        {"output_ranges": {"logits": (None, 1)}},
        {"source": OnnxSource("other.onnx")},
        {"source": TorchSource("m:onnx")},
        {"inputs": (TensorSpec("pixels", "uint8", (8, 8, 3), maximum=9),)},
    ],
)
def test_any_change_of_a_model_spec_changes_its_digest(change: dict[str, Any]) -> None:
    assert model(**change).digest != model().digest


def test_normalised_inputs_reach_the_module_as_channels_first_floats() -> None:
    assert model(normalize={"pixels": RGB}).module_inputs() == (TensorSpec("pixels", "float32", (3, 8, 8)),)


def test_tensor_specs_survive_json() -> None:
    specs = (PIXELS, TensorSpec("x", "int32", (), 0, 5), TensorSpec("s", "float32", (3,), None, 1.0, varies=True))
    assert tensor_specs(to_plain(specs)) == specs


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 4), (5, None), (None, -3), (None, None), (-7, -7)])
def test_synthetic_ids_stay_inside_the_declared_range(minimum: float | None, maximum: float | None) -> None:
    made = synthetic_rows((TensorSpec("ids", "int32", (6,), minimum, maximum),), 50, seed=0)["ids"]
    assert made.shape == (50, 6)
    assert minimum is None or made.min() >= minimum
    assert maximum is None or made.max() <= maximum


def test_synthetic_rows_are_the_same_for_the_same_seed() -> None:
    first, again = (synthetic_rows((PIXELS,), 4, seed=3)["pixels"] for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.max() > 200, "pixels that never get bright prove nothing about an image model"


def test_an_error_says_stage_item_expected_got_and_next_step() -> None:
    error = InferenceError(
        "does not fit", stage="load", item="engine", expected="7 bytes", got="6", next_step="build it again"
    )
    assert str(error) == "[load] engine: does not fit. Expected 7 bytes. Got 6. Next: build it again."
