"""What a failing batch is worth: find the rows that cannot be scored, keep the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gpu_runtime.datasets.partition import RowFailure
from gpu_runtime.errors import DeviceError

_OUT_OF_MEMORY = (
    "out of memory",
    "out_of_memory",  # CUDA_ERROR_OUT_OF_MEMORY
    "cudaerrormemoryallocation",
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "failed to allocate memory",  # ONNX Runtime
    "smaller than requested bytes",  # ONNX Runtime's arena at its limit
    "bad_alloc",
    "bad allocation",
    "cannot allocate memory",
    "can't allocate memory",  # PyTorch on a CPU
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no room. Never a row's fault: such a batch must not be bisected."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in text for phrase in _OUT_OF_MEMORY)


def bisect_rows(
    rows: Sequence[int], run: Callable[[Sequence[int]], None], error: BaseException, engine: str
) -> list[RowFailure]:
    """Halve a failed batch until each row either ran or stands alone as the cause.

    `run` scores the given rows and keeps their results, or raises. `error` is what the whole batch raised.
    Out of memory, and a device that failed, are raised as `DeviceError`, whenever they show.
    """
    if is_out_of_memory(error):
        raise DeviceError(
            "out of memory while running a batch",
            stage="execute",
            item=engine,
            got=type(error).__name__,
            next_step="choose a smaller batch: lower `max_batch` and materialize benchmark and serving_plan again",
        ) from error
    if isinstance(error, DeviceError):
        raise error  # a lost device fails every row alike: none of them is the cause
    if not rows:
        return []
    if len(rows) == 1:
        return [RowFailure(rows[0], "engine", "the engine failed on this row", type(error).__name__)]
    failures: list[RowFailure] = []
    half = len(rows) // 2
    for part in (rows[:half], rows[half:]):
        try:
            run(part)
        except Exception as part_error:
            failures += bisect_rows(part, run, part_error, engine)
    return failures


def unusable_outputs(outputs: Mapping[str, npt.NDArray[np.generic]], rows: Sequence[int]) -> list[RowFailure]:
    """Rows among `rows` with a NaN or infinity in any float output (`[batch, *shape]`)."""
    failures: dict[int, RowFailure] = {}
    for name, values in outputs.items():
        if values.dtype.kind != "f":
            continue
        finite = np.isfinite(values.reshape(values.shape[0], -1)).all(axis=1)
        for row in rows:
            if not finite[row]:
                failures.setdefault(
                    row, RowFailure(row, "output", f"output {name!r} is not finite", "FloatingPointError")
                )
    return list(failures.values())
