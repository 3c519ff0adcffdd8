"""Proofs that an exported graph is the model: same numbers, any batch size, no row sees another or its padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.errors import ExportError
from gpu_runtime.specs import ImageNormalization, ModelSpec, Postprocess, padded_rows, synthetic_rows

Run = Callable[[Mapping[str, npt.NDArray[Any]]], Mapping[str, npt.NDArray[Any]]]

# FP32 sums in another order differ by a few units in the last place per addition; thousands of additions
# stay two decades below this, a wrong operator does not.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class ParityReport:
    """`max_difference`: the largest |graph − module| over all outputs, relative to each output's own scale."""

    rows: int
    max_difference: float
    tolerance: float = TOLERANCE


def proof_length(spec: ModelSpec) -> int | None:
    """The length of rows in proofs, shorter than the longest; None where all rows are alike."""
    return None if spec.max_length is None else max(1, min(7, spec.max_length - 1))


def compare(reference: Run, core: Run, baked: Run, spec: ModelSpec) -> ParityReport:
    """Hold the bare graph against the module, and the baked one against the bare.

    `reference` and `core` take the module's inputs, `baked` takes the dataset's. Raises `ExportError`.
    """
    rows = min(8, spec.max_batch)
    raw = synthetic_rows(spec.inputs, rows, 2, proof_length(spec))
    module_rows = {
        t.name: normalized(raw[t.name], spec.normalize[t.name]) if t.name in spec.normalize else raw[t.name]
        for t in spec.inputs
    }
    # A single row as well: a module may hold a branch for it that tracing with a larger batch left out.
    single = {name: value[:1] for name, value in module_rows.items()}
    expected, got, expected_single, got_single = (
        reference(module_rows),
        core(module_rows),
        reference(single),
        core(single),
    )
    worst = max(
        max(_difference(expected[name], got[name]), _difference(expected_single[name], got_single[name]))
        for name in spec.outputs
    )
    _demand(worst, spec, "the graph and the model disagree", "the model's own outputs")
    final = baked(raw)
    if spec.top_k:
        scores = -np.sort(-_softmax(got[spec.outputs[0]]), axis=1)[:, : spec.top_k.k]
        drift = _difference(scores, final["top_score"])
    else:
        drift = max(_drift(got[name], final[name], spec.postprocess.get(name)) for name in spec.outputs)
    _demand(drift, spec, "what was baked into the graph changes the result", "the same scores as outside it")
    return ParityReport(rows, float(max(worst, drift)))


def _softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Over axis 1."""
    raw = np.asarray(logits, np.float64)
    powers = np.exp(raw - raw.max(1, keepdims=True))
    return np.asarray(powers / powers.sum(1, keepdims=True))


def _drift(raw: npt.NDArray[Any], final: npt.NDArray[Any], kind: Postprocess | None) -> float:
    """How far the finished output is from what numpy makes of the bare one; near a tie arg-max may take either."""
    if kind is None:
        return _difference(raw, final)
    if kind == "softmax":
        return _difference(_softmax(raw), final)
    if final.shape != (raw.shape[0], *raw.shape[2:]):
        return float("inf")
    return _difference(raw.max(1), np.take_along_axis(raw, final[:, None].astype(np.int64), 1)[:, 0])


def check_batching(run: Run, spec: ModelSpec) -> None:
    """Batches of 1, 2, 3 and the maximum, and no row that depends on its neighbours. Raises `ExportError`."""
    sizes = sorted({1, 2, 3, spec.max_batch} & set(range(1, spec.max_batch + 1)))
    rows = synthetic_rows(spec.inputs, max(sizes), 3, proof_length(spec))
    for size in sizes:
        batch = {name: np.ascontiguousarray(value[:size]) for name, value in rows.items()}
        try:
            made = run(batch)
        except Exception as error:
            raise ExportError(
                f"the graph fails at batch {size}",
                stage="export",
                item=spec.name,
                expected=f"a dynamic batch, 1 … {spec.max_batch}",
                got=f"{type(error).__name__}: {error}",
                next_step="remove what depends on shape[0] from forward()",
            ) from error
        for name, value in made.items():
            if value.shape[0] != size:
                raise ExportError(
                    f"output {name!r} keeps a fixed batch",
                    stage="export",
                    item=spec.name,
                    expected=f"{size} rows",
                    got=f"{value.shape[0]} rows",
                    next_step="remove what depends on shape[0] from forward()",
                )
    count = min(8, spec.max_batch)
    batch = {name: np.ascontiguousarray(value[:count]) for name, value in rows.items()}
    together = run(batch)
    order = np.random.default_rng(4).permutation(count)
    shuffled = run({name: np.ascontiguousarray(value[order]) for name, value in batch.items()})
    alone = [run({name: np.ascontiguousarray(value[i : i + 1]) for name, value in batch.items()}) for i in range(count)]
    for name, value in together.items():
        if value.dtype.kind != "f":
            continue  # an index near a tie may move by rounding; its score tells
        single = np.concatenate([one[name] for one in alone])
        if max(_difference(value, single), _difference(value[order], shuffled[name])) > TOLERANCE:
            raise ExportError(
                f"a row's {name!r} depends on its neighbours in the batch",
                stage="export",
                item=spec.name,
                expected="the same result alone, in a batch and in another order",
                got="different results",
                next_step="look for batch statistics or a reshape across dimension 0",
            )


def check_padding(run: Run, spec: ModelSpec) -> None:
    """Rows of a length of their own give the same when they are padded to the longest. Raises `ExportError`."""
    if spec.max_length is None:
        return
    length = proof_length(spec)
    rows = synthetic_rows(spec.inputs, min(4, spec.max_batch), 5, length)
    padded = {
        t.name: padded_rows(t, rows[t.name], spec.max_length) if t.has_length else rows[t.name] for t in spec.inputs
    }
    alone, together = run(rows), run(padded)
    for name, value in alone.items():
        if value.dtype.kind == "f" and not _difference(value, together[name]) <= TOLERANCE:
            raise ExportError(
                f"a row's {name!r} depends on its padding",
                stage="export",
                item=spec.name,
                expected=f"the same result for a row of length {length}, alone and padded to {spec.max_length}",
                got="different results",
                next_step="declare an input with `mask: true`, and leave out in forward() what it says is padding",
            )


def normalized(image: npt.NDArray[Any], normalization: ImageNormalization) -> npt.NDArray[np.float32]:
    """uint8 `[N, H, W, C]` → float32 `[N, C, H, W]`, in numpy: what the baked graph must equal."""
    mean = np.asarray(normalization.mean, np.float32)
    std = np.asarray(normalization.std, np.float32)
    return np.ascontiguousarray(((image.astype(np.float32) - mean) / std).transpose(0, 3, 1, 2))


def _difference(expected: npt.NDArray[Any], got: npt.NDArray[Any]) -> float:
    if expected.shape != got.shape:
        return float("inf")
    a, b = np.asarray(expected, np.float64), np.asarray(got, np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    finite = np.isfinite(a)
    scale = max(1e-6, float(np.abs(a[finite]).max(initial=0.0)))
    return float(np.abs(a[finite] - b[finite]).max(initial=0.0)) / scale


def _demand(difference: float, spec: ModelSpec, what: str, expected: str) -> None:
    if not difference <= TOLERANCE:
        raise ExportError(
            what,
            stage="export",
            item=spec.name,
            expected=f"{expected}, within {TOLERANCE:g} of their scale",
            got=f"a difference of {difference:.3g}",
        )
