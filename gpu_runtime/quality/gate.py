"""The gate: may this built engine, on this class of device, score a day?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpu_runtime.errors import GateError, SpecError
from gpu_runtime.quality.metrics import accuracy, agreement, auc, cosine
from gpu_runtime.specs import Precision, TensorSpec

Metric = Literal["auc", "top1", "agreement", "cosine"]


_READS: dict[Metric, str] = {
    "auc": "one float score a row",
    "top1": "class indices, best first (see `top_k`)",
    "agreement": "class indices, best first (see `top_k`)",
    "cosine": "a float vector a row",
}


@dataclass(frozen=True)
class GatePolicy:
    """What an engine must keep.

    `metric`: `auc` and `top1` need labels; `agreement` compares first choices with FP32 and `cosine` vectors
    (embeddings), and need none. `output`: the output the metric reads. `max_drop`: how far below the FP32 reference
    the metric may fall (for `agreement` and `cosine`, whose reference is 1: below that). `min_speedup`: rows per
    second of a reduced-precision engine ÷ the best FP32 engine, measured in the same run. `min_value`: what the
    metric must reach whatever the reference says, so that a badly trained model does not serve in any precision.
    """

    metric: Metric
    output: str
    max_drop: float
    min_speedup: float = 1.0
    min_value: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop < 1 or self.min_speedup < 0:
            raise SpecError(
                "not a gate",
                stage="gate",
                item=self.metric,
                expected="0 <= max_drop < 1 and min_speedup >= 0",
                got=f"max_drop {self.max_drop}, min_speedup {self.min_speedup}",
            )

    @property
    def needs_labels(self) -> bool:
        return self.metric in ("auc", "top1")

    def check_output(self, outputs: Sequence[TensorSpec]) -> None:
        """Raise `GateError` unless the metric can read its output: a metric of the wrong tensor passes anything."""
        spec = next((one for one in outputs if one.name == self.output), None)
        fits = False
        if spec is not None:
            floats, whole = spec.numpy_dtype.kind == "f", spec.numpy_dtype.kind in "iu"
            fits = {
                "auc": floats and spec.shape in ((), (1,)),
                "cosine": floats and math.prod(spec.shape) > 1,
            }.get(self.metric, whole and len(spec.shape) <= 1)
        if not fits:
            raise GateError(
                f"{self.metric} cannot read this output",
                stage="gate",
                item=self.output,
                expected=_READS[self.metric],
                got=f"{spec.dtype} rows of shape {spec.shape}" if spec else f"outputs {[o.name for o in outputs]}",
                next_step="name another output under `gate`, or bake top-k into the graph",
            )

    def measure(
        self, got: npt.NDArray[Any], reference: npt.NDArray[Any], labels: npt.NDArray[np.float64] | None
    ) -> float:
        """The metric of `got` `[n, …]`; NaN when `got` is not finite where `reference` is. Rows without a label
        do not count, nor do rows that the reference cannot score."""
        if self.metric == "agreement":
            return agreement(reference, got)
        if self.metric == "cosine":
            scored = _finite(reference)
            return cosine(reference[scored], got[scored]) if _finite(got[scored]).all() else math.nan
        if labels is None:
            raise GateError(
                "the metric needs labels and the dataset declares none",
                stage="gate",
                item=self.metric,
                next_step="declare `label` in defs.yaml, or gate on `agreement` or `cosine`",
            )
        known = np.isfinite(labels) & _finite(reference)
        if not _finite(got[_finite(reference)]).all():
            return math.nan  # a NaN would sort as the highest score; FP32 can score these rows, labelled or not
        return (auc if self.metric == "auc" else accuracy)(labels[known], got[known])


def _finite(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows of `[n, …]` hold neither NaN nor infinity."""
    finite: npt.NDArray[np.bool_] = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    return finite


@dataclass(frozen=True)
class Verdict:
    """`passed` with the reasons for a refusal; there are none when it passed."""

    passed: bool
    reasons: tuple[str, ...] = ()


def judge_accuracy(policy: GatePolicy, value: float, reference: float) -> Verdict:
    floor = max(reference - policy.max_drop, -math.inf if policy.min_value is None else policy.min_value)
    if math.isfinite(value) and value >= floor:
        return Verdict(True)
    return Verdict(False, (f"{policy.metric} {value:.4f} is below {floor:.4f}",))


def judge_speed(policy: GatePolicy, precision: Precision, speedup: float) -> Verdict:
    """FP32 is the baseline and needs no speed-up."""
    if precision == "fp32" or speedup >= policy.min_speedup:
        return Verdict(True)
    return Verdict(False, (f"{speedup:.2f} × the best FP32 engine, less than {policy.min_speedup:g} ×",))
