"""A slot: everything one batch needs on its way through, allocated before the first batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.backends.protocol import Context, EngineFile
from gpu_runtime.device.host import typed_view
from gpu_runtime.device.protocol import Array, Buffer, Device, Event, HostArray, Stream
from gpu_runtime.specs import TensorSpec


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's staging memory and device memory, each at its full batch size."""

    spec: TensorSpec
    staging: HostArray
    buffer: Buffer
    rows: npt.NDArray[Any]  # the staging memory as [batch, *shape]
    arrays: dict[int, Array]  # rows → the device memory as [rows, *shape], for each batch shape used so far


@dataclass(frozen=True)
class Slot:
    """Owns its buffers and events; shares its context's stream with slots of the same context."""

    inputs: tuple[TensorSlot, ...]
    outputs: tuple[TensorSlot, ...]
    context: Context
    compute: Stream
    copied_in: Event
    computed: Event
    copied_out: Event

    @property
    def staging(self) -> Mapping[str, npt.NDArray[Any]]:
        """Input name → `[batch, *shape]`, for decoders to write into."""
        return {tensor.spec.name: tensor.rows for tensor in self.inputs}

    @property
    def results(self) -> Mapping[str, npt.NDArray[Any]]:
        """Output name → `[batch, *shape]`; valid from `copied_out` until the slot is freed."""
        return {tensor.spec.name: tensor.rows for tensor in self.outputs}

    def enqueue(self, device: Device, rows: int, given: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        """Queue the computation of the slot's first `rows` rows on its compute stream; or, on a device that shares the
        host's memory, of the inputs `given`, `[rows, *shape]` each."""
        for tensor in (*self.inputs, *self.outputs):
            if rows not in tensor.arrays:
                tensor.arrays[rows] = device.view(tensor.buffer, tensor.spec.dtype, tensor.spec.batch_shape(rows))
        inputs = given or {tensor.spec.name: tensor.arrays[rows] for tensor in self.inputs}
        outputs = {tensor.spec.name: tensor.arrays[rows] for tensor in self.outputs}
        self.context.enqueue(inputs, outputs, self.compute)

    def fill_holes(self, rows: Sequence[int]) -> None:
        """Put a harmless value, inside the declared range, where rows are missing."""
        if rows:
            for tensor in self.inputs:
                tensor.rows[list(rows)] = hole_value(tensor.spec)


def allocate_slot(file: EngineFile, device: Device, batch: int, context: Context, compute: Stream) -> Slot:
    def tensors(specs: tuple[TensorSpec, ...]) -> tuple[TensorSlot, ...]:
        made = []
        for spec in specs:
            staging = device.pinned(batch * spec.row_nbytes)
            buffer = device.empty(staging)
            rows = typed_view(staging, spec.dtype, spec.batch_shape(batch))
            made.append(TensorSlot(spec, staging, buffer, rows, {}))
        return tuple(made)

    return Slot(
        tensors(file.inputs),
        tensors(file.outputs),
        context,
        compute,
        device.event(),
        device.event(),
        device.event(),
    )


def hole_value(spec: TensorSpec) -> Any:
    """Zero, or the nearest value that the tensor's range allows."""
    value = 0.0
    if spec.minimum is not None:
        value = max(value, spec.minimum)
    if spec.maximum is not None:
        value = min(value, spec.maximum)
    return np.asarray(value).astype(spec.numpy_dtype)
