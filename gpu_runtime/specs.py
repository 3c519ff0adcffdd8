"""What a model is: where it comes from, what goes in, what comes out. Frozen values, checked when made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from gpu_runtime.errors import SpecError

Dtype = Literal["float32", "float16", "uint8", "int8", "uint16", "int16", "int32", "int64", "bool"]
Precision = Literal["fp32", "int8"]
Scheme = Literal["vnni", "tensorrt"]
"""How INT8 is laid out: `vnni` = unsigned activations, signed weights (x86 CPUs); `tensorrt` = both
signed and symmetric, no bias Q/DQ (the only layout TensorRT's parser takes)."""

LENGTH = -1
"""In a row's shape: the dimension in which rows differ (tokens, samples, slices)."""

_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")


def to_plain(value: Any) -> Any:
    """`value` as JSON types only: dataclasses become objects, tuples lists, paths strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    return value


def digest_of(value: Any) -> str:
    """SHA-256 (hex) of `value` as canonical JSON: the identity of a value, independent of key order."""
    text = json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor. `shape` is that of **one row**; in a batch it is `[N, *shape]`.

    One dimension may be `LENGTH` (-1): it differs from row to row, and rows are padded with `filler` to the length of
    their batch. A `mask` is such an input that nobody supplies: 1 where the row has values, 0 where it is padded.

    `minimum` and `maximum` bound every element. An input row outside them is quarantined before it reaches a
    device, because one bad index can end a CUDA context for everybody; an output row outside them, or one that
    `varies` and whose values are all the same, is quarantined instead of published.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    varies: bool = False
    mask: bool = False

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise SpecError("not a tensor name", stage="spec", item=repr(self.name), expected="an identifier")
        if self.dtype not in get_args(Dtype):
            raise SpecError(
                "unknown dtype",
                stage="spec",
                item=self.name,
                expected=" | ".join(get_args(Dtype)),
                got=self.dtype,
            )
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if any(n < 1 and n != LENGTH for n in self.shape) or self.shape.count(LENGTH) > 1:
            raise SpecError(
                "not a row's shape",
                stage="spec",
                item=self.name,
                expected="dimensions of 1 and above, at most one of them -1: that in which rows differ",
                got=str(self.shape),
            )
        if self.mask and (self.shape != (LENGTH,) or (self.minimum, self.maximum) != (None, None)):
            raise SpecError(
                "cannot be a mask",
                stage="spec",
                item=self.name,
                expected="the shape [-1] and no range of its own: it holds ones and zeros",
                got=f"{self.shape}, {self.minimum} … {self.maximum}",
            )
        if self.minimum is not None and self.maximum is not None and not self.minimum <= self.maximum:
            raise SpecError(
                "its range holds nothing",
                stage="spec",
                item=self.name,
                expected="minimum <= maximum",
                got=f"{self.minimum} … {self.maximum}",
            )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @property
    def has_length(self) -> bool:
        """Whether rows differ in a dimension."""
        return LENGTH in self.shape

    @property
    def filler(self) -> Any:
        """What stands where there is no value: zero, or the nearest value that the range allows."""
        value, whole = 0.0, self.numpy_dtype.kind in "iu"
        if self.minimum is not None:
            value = max(value, math.ceil(self.minimum) if whole else self.minimum)
        if self.maximum is not None:
            value = min(value, math.floor(self.maximum) if whole else self.maximum)
        return np.asarray(value).astype(self.numpy_dtype)

    def batch_shape(self, batch: int, length: int | None = None) -> tuple[int, ...]:
        """`[batch, *shape]`, of rows padded to `length` where they differ."""
        if not self.has_length:
            return (batch, *self.shape)
        if length is None:
            raise ValueError(f"rows of {self.name!r} differ in length: say what they are padded to")
        return (batch, *(length if n == LENGTH else n for n in self.shape))

    def nbytes(self, batch: int, length: int | None = None) -> int:
        """Of a whole batch."""
        return math.prod(self.batch_shape(batch, length)) * self.numpy_dtype.itemsize

    def holds(self, values: npt.NDArray[Any]) -> bool:
        """Whether all of `values` are finite and inside the declared range; told by their extremes, in one pass."""
        if not values.size or (self.minimum is None and self.maximum is None and values.dtype.kind != "f"):
            return True
        low, high = values.min(), values.max()  # a NaN is the extreme of its array
        least = -np.inf if self.minimum is None else self.minimum
        most = np.inf if self.maximum is None else self.maximum
        return bool(np.isfinite(low) and np.isfinite(high) and low >= least and high <= most)

    def outside(self, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of `values`, numbers of any dtype, are outside the range or not of the tensor's kind."""
        outside = np.zeros(values.shape, bool)
        with np.errstate(invalid="ignore"):
            if self.minimum is not None:
                outside |= values < self.minimum
            if self.maximum is not None:
                outside |= values > self.maximum
            if self.numpy_dtype.kind == "b":
                outside |= (values != 0) & (values != 1)
            elif self.numpy_dtype.kind in "iu":
                limits = np.iinfo(self.numpy_dtype)
                outside |= (values < limits.min) | (values != np.floor(values))
                # As a float, int64's maximum rounds up to a number that it cannot hold.
                outside |= values > limits.max if values.dtype.kind in "iu" else values >= float(limits.max) + 1
        return outside


@dataclass(frozen=True)
class ImageNormalization:
    """Baked into the graph: uint8 `[N, H, W, C]` → `(x − mean) / std` as float32 `[N, C, H, W]`.

    Only narrow bytes cross to the device, and nobody can score with the wrong normalisation.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", tuple(float(v) for v in self.mean))
        object.__setattr__(self, "std", tuple(float(v) for v in self.std))
        if len(self.mean) != len(self.std) or not self.mean or any(v <= 0 for v in self.std):
            raise SpecError(
                "mean and std do not fit together",
                stage="spec",
                item="image normalization",
                expected="one mean and one positive std for each channel",
                got=f"mean {self.mean}, std {self.std}",
            )


@dataclass(frozen=True)
class TopK:
    """Baked into the graph: softmax over the model's only output, then its `k` highest classes.

    Replaces the output by `top_index` int32 `[N, k]` and `top_score` float32 `[N, k]`, best first.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise SpecError("top-k keeps nothing", stage="spec", item="top_k", expected="k >= 1", got=str(self.k))


Postprocess = Literal["softmax", "argmax"]
"""Baked into the graph, over an output's classes: axis 1 of `[N, classes, …]`. Softmax keeps the shape, arg-max leaves
int32 `[N, …]`."""


@dataclass(frozen=True)
class TorchSource:
    """`factory` is `module:function`; the function takes nothing and returns a `torch.nn.Module`."""

    factory: str

    def __post_init__(self) -> None:
        module, _, function = self.factory.partition(":")
        if not module or not function:
            raise SpecError(
                "not a factory",
                stage="spec",
                item=self.factory,
                expected="module:function",
                got=repr(self.factory),
            )


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX file on disk, as good a source as a torch factory."""

    path: str


@dataclass(frozen=True)
class ModelSpec:
    """A model before anything was done to it.

    `inputs` are what a *dataset* supplies, in the order of the module's arguments; where `normalize` names
    an input, the module itself receives float32 `[N, C, H, W]` instead of the uint8 `[N, H, W, C]` given here.
    `outputs` name the module's results in order. `max_batch` is the largest batch ever run, `max_length` the longest
    row where rows differ in a dimension. `output_ranges` bound every element of an output: a row whose result lies
    outside is quarantined, as one that is not finite is.
    """

    name: str
    version: str
    source: TorchSource | OnnxSource
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    normalize: Mapping[str, ImageNormalization] = field(default_factory=dict)
    top_k: TopK | None = None
    max_batch: int = 64
    output_ranges: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    max_length: int | None = None
    postprocess: Mapping[str, Postprocess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", tuple(self.outputs))
        if not _NAME.match(self.name):
            raise SpecError("not a model name", stage="spec", item=repr(self.name), expected="an identifier")
        names = [t.name for t in self.inputs] + list(self.outputs)
        if not self.inputs or not self.outputs or len(set(names)) != len(names):
            raise SpecError(
                "inputs and outputs must be named, and each name used once",
                stage="spec",
                item=self.name,
                got=", ".join(names) or "none",
            )
        if self.max_batch < 1:
            raise SpecError("max_batch below 1", stage="spec", item=self.name, got=str(self.max_batch))
        differ = [t.name for t in self.inputs if t.has_length]
        if (self.max_length is None) == bool(differ) or (self.max_length is not None and self.max_length < 2):
            raise SpecError(
                "max_length does not fit the inputs",
                stage="spec",
                item=self.name,
                expected=f"the longest row of {', '.join(differ)}, 2 or above"
                if differ
                else "none: all rows are alike",
                got=str(self.max_length),
            )
        if differ and all(t.mask for t in self.inputs if t.has_length):
            raise SpecError("a mask of nothing", stage="spec", item=f"{self.name}.{differ[0]}", got=", ".join(differ))
        for name, normalization in self.normalize.items():
            tensor = next((t for t in self.inputs if t.name == name), None)
            channels = len(normalization.mean)
            fits = tensor is not None and tensor.dtype == "uint8" and len(tensor.shape) == 3 and not tensor.has_length
            if tensor is None or not fits or tensor.shape[2] != channels:
                raise SpecError(
                    "cannot be normalised",
                    stage="spec",
                    item=f"{self.name}.{name}",
                    expected=f"a uint8 input of shape [H, W, {channels}]",
                    got="no such input" if tensor is None else f"{tensor.dtype} {tensor.shape}",
                )
        ranges = {name: (low, high) for name, (low, high) in self.output_ranges.items()}
        object.__setattr__(self, "output_ranges", ranges)
        for name, bounds in ranges.items():
            TensorSpec(name, "float32", (), *bounds)  # refuses a range that holds nothing
        ranged = set() if self.top_k else set(self.outputs) - self.postprocess.keys()
        if unknown := sorted(ranges.keys() - ranged):
            raise SpecError(
                "a range for what is no output of the finished graph, or has its own",
                stage="spec",
                item=f"{self.name}.{unknown[0]}",
                expected=", ".join(sorted(ranged)) or "none: top_k, softmax and argmax bring their own",
                got=", ".join(unknown),
            )
        unknown = sorted(self.postprocess.keys() - set(self.outputs))
        if unknown or (self.top_k and self.postprocess):
            raise SpecError(
                "cannot be post-processed",
                stage="spec",
                item=f"{self.name}.{(unknown or sorted(self.postprocess))[0]}",
                expected=", ".join(self.outputs) if unknown else "top_k, which has a softmax in it, or this: not both",
                got=", ".join(f"{name}: {kind}" for name, kind in self.postprocess.items()),
            )
        if self.top_k and len(self.outputs) != 1:
            raise SpecError(
                "top_k needs a model with one output",
                stage="spec",
                item=self.name,
                got=f"{len(self.outputs)} outputs",
            )

    @property
    def digest(self) -> str:
        # Where an ONNX file lies differs from machine to machine; what it holds is the export's business.
        source = self.source.factory if isinstance(self.source, TorchSource) else Path(self.source.path).name
        return digest_of({**to_plain(self), "source": [type(self.source).__name__, source]})

    def module_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs as the bare module takes them, before normalisation is baked in."""
        return tuple(
            TensorSpec(t.name, "float32", (t.shape[2], t.shape[0], t.shape[1])) if t.name in self.normalize else t
            for t in self.inputs
        )


def synthetic_rows(
    specs: tuple[TensorSpec, ...], rows: int, seed: int, length: int | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Seeded inputs `[rows, *shape]` inside each tensor's declared range; for proofs, never for calibration."""
    rng = np.random.default_rng(seed)
    made: dict[str, npt.NDArray[Any]] = {}
    for spec in specs:
        shape = spec.batch_shape(rows, length)
        values: npt.NDArray[Any]
        if spec.mask:
            values = np.ones(shape)
        elif spec.numpy_dtype.kind == "f":
            values = rng.standard_normal(shape)
            if spec.minimum is not None or spec.maximum is not None:
                values = np.clip(values, spec.minimum, spec.maximum)
        elif spec.dtype == "bool":
            values = rng.integers(0, 2, shape)
        else:
            low = min(0, int(spec.maximum or 0)) if spec.minimum is None else int(spec.minimum)
            high = max(low, 255 if spec.dtype == "uint8" else 1) if spec.maximum is None else int(spec.maximum)
            values = rng.integers(low, high, shape, endpoint=True)
        made[spec.name] = np.ascontiguousarray(values.astype(spec.numpy_dtype))
    return made


def padded_rows(spec: TensorSpec, values: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Rows `[n, *shape]` of a shorter length, padded to `length`."""
    padded = np.full(spec.batch_shape(len(values), length), 0 if spec.mask else spec.filler, spec.numpy_dtype)
    axis = 1 + spec.shape.index(LENGTH)
    padded[(slice(None),) * axis + (slice(values.shape[axis]),)] = values
    return padded


@dataclass(frozen=True)
class Graph:
    """An ONNX file and what it computes: the one form in which a model reaches a backend.

    `inputs` and `outputs` give one row's shape; the batch dimension is dynamic from 1 to `max_batch`, a length from 1
    to `max_length`.
    `variant` names how the precision was reached (`fp32`, `int8-vnni-minmax`, …) and is unique within a model.
    """

    path: Path
    digest: str
    variant: str
    precision: Precision
    scheme: Scheme | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int
    max_length: int | None = None


def tensor_specs(plain: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    """Tensor specs back from `to_plain`."""
    return tuple(TensorSpec(**entry) for entry in plain)
