"""Seeded rows from named days: what calibration and gates look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.datasets.batching import Batching, longest_first
from gpu_runtime.datasets.partition import ShardReader, Source, read_rows
from gpu_runtime.device.host import usable_cores
from gpu_runtime.errors import DatasetError
from gpu_runtime.specs import LENGTH, TensorSpec, digest_of, padded_rows

_MAX_SHARDS = 128  # a sample of a large set reads this many shards at most
_TRIES = 20  # times the rows that are wanted of it: where hardly one is usable, no sample is worth the night
_ELEMENTS = 4096  # rows × length of a batch
_WHOLE_NBYTES = 256 << 20  # a shard that takes more in memory is read row by row, and no more of it than is drawn


@dataclass(frozen=True)
class RowSample:
    """Rows in memory. `inputs`: name → `[rows, *shape]`; `labels`: float64 `[rows]` (NaN: none) or None.
    `lengths`: `[rows]`, longest first, where rows differ in one; the inputs `of_length` are padded to the longest then.

    `digest` covers the files the rows were drawn from and how they were drawn.
    """

    inputs: dict[str, npt.NDArray[Any]]
    labels: npt.NDArray[np.float64] | None
    digest: str
    lengths: npt.NDArray[np.int64] | None = None
    of_length: tuple[TensorSpec, ...] = ()

    @property
    def rows(self) -> int:
        return int(next(iter(self.inputs.values())).shape[0])

    def part(self, start: int, stop: int, length: int | None) -> dict[str, npt.NDArray[Any]]:
        """Rows `start … stop`, padded to `length` only."""
        rows = {name: values[start:stop] for name, values in self.inputs.items()}
        if length is not None:
            rows |= {spec.name: _trimmed(spec, rows[spec.name], length) for spec in self.of_length}
        return rows

    def batches(self, size: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Of `size` rows each; where they differ in length, padded to their longest, and fewer of long ones."""
        known = () if self.lengths is None else tuple(int(n) for n in np.unique(self.lengths))
        batching = Batching(_ELEMENTS if known else size, size, known)
        for start, stop, length in batching.cut(self.rows, self.lengths):
            yield self.part(start, stop, length)


def sample_digest(source: Source, days: Sequence[str], rows: int, seed: int) -> str:
    """The digest that `sample_rows` would give, without reading a row."""
    return digest_of({"days": [(d, source.partition(d).digest) for d in days], "rows": rows, "seed": seed})


def sample_rows(source: Source, days: Sequence[str], rows: int, seed: int, *, labelled: bool = False) -> RowSample:
    """About `rows` scorable rows, spread evenly over the days' shards; rows that cannot be read are left out.

    Labels are read only where they are asked for. Raises `DatasetError` when the days hold no usable row, or no
    label column that was asked for.
    """
    shards = [shard for day in days for shard in source.partition(day).shards]
    rng = np.random.default_rng(seed)
    if len(shards) > _MAX_SHARDS:
        shards = [shards[i] for i in sorted(rng.choice(len(shards), _MAX_SHARDS, replace=False))]
    taken: dict[str, list[npt.NDArray[Any]]] = {spec.name: [] for spec in source.inputs}
    labels: list[npt.NDArray[Any] | None] = []
    lengths: list[npt.NDArray[np.int64]] = []
    count, left = 0, len(shards)
    with ThreadPoolExecutor(usable_cores()) as pool:
        for shard in shards:
            reader, wanted = source.open(shard), -(-(rows - count) // left)
            longest = None if reader.lengths is None else int(reader.lengths.max(initial=1))
            nbytes = sum(spec.nbytes(reader.rows, longest) for spec in source.inputs)
            draw = _drawn_from_all if nbytes <= _WHOLE_NBYTES else _drawn_one_by_one
            chosen, arrays = draw(source, reader, wanted, rng, pool)
            for name, values in arrays.items():
                taken[name].append(values)
            if reader.lengths is not None:
                lengths.append(reader.lengths[chosen])
            found = reader.labels() if labelled else None
            labels.append(None if found is None else np.asarray(found, np.float64)[chosen])
            count, left = count + len(chosen), left - 1
    if not count:
        raise DatasetError(
            "no usable row in these days",
            stage="sample",
            item=", ".join(days[:3]) + (" …" if len(days) > 3 else ""),
            expected="at least one row",
            next_step="land the days, or name other ones in defs.yaml",
        )
    known = [part for part in labels if part is not None]
    sample = RowSample(
        {spec.name: _together(spec, taken[spec.name]) for spec in source.inputs},
        np.concatenate(known) if len(known) == len(labels) else None,
        sample_digest(source, days, rows, seed),
    )
    if not lengths:
        return sample
    together = np.concatenate(lengths)
    order = longest_first(together)
    return replace(
        sample,
        inputs={name: values[order] for name, values in sample.inputs.items()},
        labels=None if sample.labels is None else sample.labels[order],
        lengths=together[order],
        of_length=tuple(spec for spec in source.inputs if spec.has_length),
    )


def _drawn_from_all(
    source: Source, reader: ShardReader, wanted: int, rng: np.random.Generator, pool: ThreadPoolExecutor
) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]:
    """Rows of the reader, and their inputs; all of its rows are read."""
    arrays, failures = read_rows(source.inputs, reader, 0, reader.rows, pool.map)
    failed = {failure.row for failure in failures}
    usable = np.asarray([row for row in range(reader.rows) if row not in failed], np.int64)
    chosen = np.sort(rng.choice(usable, min(len(usable), wanted), replace=False))
    return chosen, {name: values[chosen] for name, values in arrays.items()}


def _drawn_one_by_one(
    source: Source, reader: ShardReader, wanted: int, rng: np.random.Generator, pool: ThreadPoolExecutor
) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]:
    """The same of a reader whose rows do not fit in memory together: fewer than wanted, where few are usable."""
    taken: dict[int, dict[str, npt.NDArray[Any]]] = {}
    tried, order = 0, rng.permutation(reader.rows)
    while tried < len(order) and len(taken) < wanted and tried < _TRIES * wanted:
        row, tried = int(order[tried]), tried + 1
        arrays, failures = read_rows(source.inputs, reader, row, row + 1, pool.map)
        if not failures:
            taken[row] = arrays
    chosen = np.asarray(sorted(taken), np.int64)
    made = {spec.name: _together(spec, [taken[row][spec.name] for row in chosen]) for spec in source.inputs if taken}
    return chosen, made


def _together(spec: TensorSpec, parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One array of rows that came padded to several lengths."""
    if spec.has_length:
        axis = 1 + spec.shape.index(LENGTH)
        longest = max(part.shape[axis] for part in parts)
        parts = [padded_rows(spec, part, longest) for part in parts]
    return np.concatenate(parts)


def _trimmed(spec: TensorSpec, values: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Rows padded to `length`, of rows padded to another."""
    axis = 1 + spec.shape.index(LENGTH)
    values = values[(slice(None),) * axis + (slice(length),)]
    return padded_rows(spec, values, length) if values.shape[axis] < length else np.ascontiguousarray(values)
