"""A slot: everything one batch needs on its way through, allocated before the first batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from gpu_runtime.backends.protocol import Context, EngineFile
from gpu_runtime.datasets.batching import BatchShape
from gpu_runtime.device.host import typed_view
from gpu_runtime.device.protocol import Array, Buffer, Device, Event, HostArray, Stream
from gpu_runtime.specs import TensorSpec


@dataclass(frozen=True)
class TensorSlot:
    """One tensor's staging memory and device memory, each large enough for every batch shape."""

    spec: TensorSpec
    staging: HostArray
    buffer: Buffer
    views: dict[int | None, npt.NDArray[Any]]  # length → what `rows` gave
    arrays: dict[BatchShape, Array]  # the device memory as [rows, *shape], for each batch shape used so far

    def rows(self, length: int | None = None) -> npt.NDArray[Any]:
        """The staging memory as `[most, *shape]`: as many rows of that length as there is room for."""
        if length not in self.views:
            most = self.staging.nbytes // self.spec.nbytes(1, length)
            self.views[length] = typed_view(self.staging, self.spec.dtype, self.spec.batch_shape(most, length))
        return self.views[length]


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

    def staging(self, length: int | None = None) -> Mapping[str, npt.NDArray[Any]]:
        """Input name → `[most, *shape]`, for decoders to write into."""
        return {tensor.spec.name: tensor.rows(length) for tensor in self.inputs}

    @property
    def results(self) -> Mapping[str, npt.NDArray[Any]]:
        """Output name → `[most, *shape]`; valid from `copied_out` until the slot is freed."""
        return {tensor.spec.name: tensor.rows() for tensor in self.outputs}

    def enqueue(self, device: Device, shape: BatchShape, given: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        """Queue the computation of the slot's first rows, in that shape, on its compute stream; or, on a device that
        shares the host's memory, of the inputs `given`, `[rows, *shape]` each."""
        for tensor in (*self.inputs, *self.outputs):
            if shape not in tensor.arrays:
                dims = tensor.spec.batch_shape(shape.rows, shape.length)
                tensor.arrays[shape] = device.view(tensor.buffer, tensor.spec.dtype, dims)
        inputs = given or {tensor.spec.name: tensor.arrays[shape] for tensor in self.inputs}
        outputs = {tensor.spec.name: tensor.arrays[shape] for tensor in self.outputs}
        self.context.enqueue(inputs, outputs, self.compute)

    def fill_holes(self, rows: Sequence[int], length: int | None = None) -> None:
        """Put harmless values, inside the declared range, where rows are missing; to a mask such a row is whole."""
        if rows:
            for tensor in self.inputs:
                tensor.rows(length)[list(rows)] = 1 if tensor.spec.mask else tensor.spec.filler


def allocate_slot(
    file: EngineFile, device: Device, shapes: Iterable[BatchShape], context: Context, compute: Stream
) -> Slot:
    """A slot with room for a batch of any of `shapes`."""
    shapes = tuple(shapes)

    def tensors(specs: tuple[TensorSpec, ...]) -> tuple[TensorSlot, ...]:
        made = []
        for spec in specs:
            staging = device.pinned(max(spec.nbytes(shape.rows, shape.length) for shape in shapes))
            made.append(TensorSlot(spec, staging, device.empty(staging), {}, {}))
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
