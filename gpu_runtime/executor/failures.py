"""The failure ladder: what a batch that cannot be scored as it is comes to.

    out of memory        → halve the batch, and keep to the smaller size from then on
    any other exception  → halve the rows down to those that fail alone; they are quarantined, the rest is kept
    a value that would poison the device, or that no engine could have meant → its row is quarantined

Nobody else decides these things: the executor calls what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.datasets.batching import Batching, BatchShape
from gpu_runtime.datasets.partition import RowFailure
from gpu_runtime.errors import DeviceError, InferenceError
from gpu_runtime.specs import TensorSpec

_OUT_OF_MEMORY = (
    "out of memory",
    "out_of_memory",  # CUDA_ERROR_OUT_OF_MEMORY
    "outofmemory",  # TensorRT
    "cudaerrormemoryallocation",
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "failed to allocate memory",  # ONNX Runtime
    "memory allocation failed",
    "smaller than requested bytes",  # ONNX Runtime's arena at its limit
    "bad_alloc",
    "bad allocation",
    "cannot allocate memory",
    "could not allocate memory",  # OpenVINO
    "can't allocate memory",  # PyTorch on a CPU
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no room. Never a row's fault: such a batch must not be bisected."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in text for phrase in _OUT_OF_MEMORY)


class BatchCeiling:
    """How much fits on the device at once: the plan's batch, until the device has no room for it.

    `batching` cuts by it. `lowered` is told each new budget, so that it outlives the run.
    """

    def __init__(self, batching: Batching, lowered: Callable[[int], None]) -> None:
        self.batching = batching
        self._lowered = lowered

    def shape(self, length: int | None) -> BatchShape:
        """The largest batch of rows that are padded to `length`."""
        return self.batching.shape(length)

    def halve(self, tried: BatchShape, engine: str, error: BaseException) -> None:
        """The device had no room for `tried`. Raises `DeviceError` when not even one row fits."""
        if tried.rows <= 1:
            raise DeviceError(
                "out of memory while running a single row",
                stage="execute",
                item=engine,
                got=type(error).__name__,
                next_step="free memory on the device, or serve a smaller model; no row is to blame",
            ) from error
        budget = BatchShape(tried.rows // 2, tried.length).elements
        if budget < self.batching.budget:
            self.batching = replace(self.batching, budget=budget)
            self._lowered(budget)


@dataclass(frozen=True)
class Rescue:
    """Gets what can be had of rows that failed together.

    `run` does the given rows and keeps their results, or raises. `by` names what fails, for reasons; `item` what it
    belongs to, for errors. With a `ceiling`, `run` is never given more rows of `length` than that; without one, out of
    memory ends the run. `shorter_fit` tells, where rows differ in length, whether the device has room for shorter ones.
    `between_parts` is called before each `run`.
    """

    run: Callable[[Sequence[int]], None]
    stage: str
    by: str
    item: str
    ceiling: BatchCeiling | None = None
    length: int | None = None
    shorter_fit: Callable[[], bool] = lambda: False
    between_parts: Callable[[], None] = lambda: None

    def rows(self, rows: Sequence[int]) -> list[RowFailure]:
        """Do `rows`, in parts that fit; returns those that fail alone."""
        failures: list[RowFailure] = []
        while rows:
            tried = self._most(len(rows))
            part, rows = rows[: tried.rows], rows[tried.rows :]
            self.between_parts()
            try:
                self.run(part)
            except Exception as error:
                failures += self.after(error, part, tried)
        return failures

    def _most(self, rows: int) -> BatchShape:
        """What `run` is given at once."""
        return BatchShape(rows, self.length) if self.ceiling is None else self.ceiling.shape(self.length)

    def after(self, error: Exception, rows: Sequence[int], tried: BatchShape) -> list[RowFailure]:
        """Do what can be done of `rows`, which raised `error` in a batch of shape `tried`, padding included.

        A failed device and other errors of this package are raised as they are: no row is to blame for them.
        """
        if is_out_of_memory(error):
            if self.ceiling is None:
                raise DeviceError(
                    "out of memory", stage=self.stage, item=self.item, next_step="free memory, and run again"
                ) from error
            if tried.rows <= 1 and tried.length is not None and self.shorter_fit():
                reason = "the device has no memory for a row of this length"
                return [RowFailure(row, self.stage, reason, type(error).__name__) for row in rows]
            self.ceiling.halve(tried, self.item, error)
            return self.rows(rows)
        if isinstance(error, InferenceError):
            raise error
        if not rows:
            return []
        if len(rows) == 1:
            return self._alone(rows)
        half = len(rows) // 2
        return self.rows(rows[:half]) + self.rows(rows[half:])

    def _alone(self, rows: Sequence[int]) -> list[RowFailure]:
        """A row that failed by itself, once more: what failed may have been the device, for a moment."""
        try:
            self.run(rows)
        except Exception as error:
            if is_out_of_memory(error):
                return self.after(error, rows, self._most(1))
            if isinstance(error, InferenceError):
                raise
            return [RowFailure(rows[0], self.stage, f"the {self.by} failed on this row", type(error).__name__)]
        return []


def unusable_inputs(
    specs: Sequence[TensorSpec], staging: Mapping[str, npt.NDArray[Any]], rows: Sequence[int]
) -> list[RowFailure]:
    """Rows among `rows` that must not reach a device, whatever their source let through.

    One index outside its range ends a CUDA context for everybody. `staging` holds `[batch, *shape]`.
    """
    return _unusable("input", "ValueError", specs, staging, rows)


def unusable_outputs(
    specs: Sequence[TensorSpec], results: Mapping[str, npt.NDArray[Any]], rows: Sequence[int]
) -> list[RowFailure]:
    """Rows among `rows` whose results no engine can have meant: not finite, outside what the output can be, or
    degenerate. `results` holds `[batch, *shape]`."""
    return _unusable("output", "FloatingPointError", specs, results, rows)


def _unusable(
    role: str,
    exception: str,
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, npt.NDArray[Any]],
    rows: Sequence[int],
) -> list[RowFailure]:
    """The first broken rule of each row."""
    failures: dict[int, RowFailure] = {}
    for spec in specs:
        values = tensors[spec.name]
        values = values.reshape(values.shape[0], -1)
        for bad, reason in () if not spec.varies and spec.holds(values) else _rules(spec, values):
            for row in (row for row in rows if bad[row]) if bad.any() else ():
                failures.setdefault(row, RowFailure(row, role, f"{role} {spec.name!r} {reason}", exception))
    return list(failures.values())


def _rules(spec: TensorSpec, values: npt.NDArray[Any]) -> list[tuple[npt.NDArray[Any], str]]:
    """For `[batch, elements]`: which rows break a rule of the tensor, and how; only rules that it has."""
    rules: list[tuple[npt.NDArray[Any], str]] = []
    if values.dtype.kind == "f":
        rules.append((~np.isfinite(values).all(axis=1), "is not finite"))
    with np.errstate(invalid="ignore"):
        if spec.minimum is not None:
            rules.append((np.any(values < spec.minimum, axis=1), f"is below its declared minimum {spec.minimum:g}"))
        if spec.maximum is not None:
            rules.append((np.any(values > spec.maximum, axis=1), f"is above its declared maximum {spec.maximum:g}"))
        if spec.varies:
            rules.append((np.all(values == values[:, :1], axis=1), "is degenerate: all its values are the same"))
    return rules
