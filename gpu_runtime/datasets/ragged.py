"""Rows that differ in length: the tokens of a text column, or the numbers of a list column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.artifacts import file_digest
from gpu_runtime.errors import DatasetError
from gpu_runtime.specs import TensorSpec

_TEXTS_AT_ONCE = 1_000
"""The library's own form of a text takes many times the memory of its ids."""


@dataclass(frozen=True)
class RaggedRows:
    """Row i is `values[offsets[i] : offsets[i + 1]]`, one value at least. `bad`: row → why it cannot be scored; such a
    row's values mean nothing."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    bad: Mapping[int, str]

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def take(self, order: npt.NDArray[np.int64]) -> RaggedRows:
        """The same rows in another order."""
        lengths = self.lengths[order]
        offsets = _offsets_of(lengths)
        places = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - self.offsets[:-1][order], lengths)
        bad = {new: self.bad[int(old)] for new, old in enumerate(order) if int(old) in self.bad} if self.bad else {}
        return RaggedRows(self.values[places], offsets, bad)

    def fill(self, start: int, stop: int, target: npt.NDArray[Any], filler: Any) -> dict[int, str]:
        """Rows `start … stop` into `target` (`[stop − start, length]`); returns those among them that are bad."""
        target[:] = filler
        target[self.mask(start, stop, target.shape[1])] = self.values[self.offsets[start] : self.offsets[stop]]
        return {row - start: reason for row, reason in self.bad.items() if start <= row < stop} if self.bad else {}

    def mask(self, start: int, stop: int, length: int) -> npt.NDArray[np.bool_]:
        """`[stop − start, length]`: where those rows have values."""
        return np.arange(length) < self.lengths[start:stop, None]


def tokens_of(texts: Sequence[str | None], tokenizer: Any, spec: TensorSpec, longest: int, column: str) -> RaggedRows:
    """The ids of `texts`, special tokens included, by a `tokenizers.Tokenizer`. A row of more than `longest` is bad,
    unless the tokenizer truncates."""
    bad = {row: f"column {column!r} is null or no UTF-8" for row, text in enumerate(texts) if text is None}
    parts, lengths = [np.zeros(0, np.uint32)], np.ones(len(texts), np.int64)
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        some = [text or "" for text in texts[start : start + _TEXTS_AT_ONCE]]
        for row, ids in enumerate(_encoded(some, tokenizer), start):
            if ids is None:
                bad.setdefault(row, f"column {column!r} cannot be tokenised")
            elif not ids:
                bad.setdefault(row, f"column {column!r} holds no token")
            elif len(ids) > longest:
                bad.setdefault(row, f"column {column!r} holds more than {longest} tokens")
            kept = ids if ids is not None and row not in bad else [int(spec.filler)]
            parts.append(np.asarray(kept, np.uint32))
            lengths[row] = len(kept)
    return _checked(np.concatenate(parts).astype(np.int64), _offsets_of(lengths), bad, spec, column)


def _encoded(texts: list[str], tokenizer: Any) -> list[list[int] | None]:
    """The ids of each text; None for one that the tokenizer fails on."""
    try:
        return [found.ids for found in tokenizer.encode_batch_fast(texts)]
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException:  # it raises what it likes for the whole batch, and what panics in it is no `Exception`
        if len(texts) == 1:
            return [None]
        half = len(texts) // 2
        return _encoded(texts[:half], tokenizer) + _encoded(texts[half:], tokenizer)


def open_tokenizer(path: str, longest: int, truncate: bool) -> Any:
    """A `tokenizers.Tokenizer` from its JSON file; batches are padded by us, whatever the file says. A text is cut at
    the side that the file names, at its end if it names none.

    Raises `DatasetError` if `longest` leaves no room for text beside the special tokens.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # it raises bare exceptions
        raise _no_tokenizer(path, error) from error
    tokenizer.no_padding()
    if (special := tokenizer.num_special_tokens_to_add(False)) >= longest:
        raise DatasetError(
            "max_length leaves no room for text",
            stage="dataset",
            item=path,
            expected=f"more than its {special} special tokens",
            got=f"max_length {longest}",
            next_step="raise max_length",
        )
    if truncate:
        kept = tokenizer.truncation or {}
        tokenizer.enable_truncation(longest, direction=kept.get("direction", "right"))
    else:
        tokenizer.no_truncation()
    return tokenizer


def tokenizer_digest(path: str) -> str:
    """What the tokenizer's file holds, wherever it lies."""
    try:
        return file_digest(Path(path))
    except OSError as error:
        raise _no_tokenizer(path, error) from error


def _no_tokenizer(path: str, error: Exception) -> DatasetError:
    return DatasetError(
        "not a readable tokenizer",
        stage="dataset",
        item=path,
        expected="a tokenizer.json of the `tokenizers` library",
        got=type(error).__name__,
        next_step="name the model's tokenizer.json under `tokenizer`",
    )


def lists_of(lists: Any, spec: TensorSpec, longest: int, column: str) -> RaggedRows:
    """The rows of an Arrow list array."""
    import pyarrow as pa
    import pyarrow.compute as pc

    null = lists.is_null().to_numpy(zero_copy_only=False)
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    bad = {int(row): f"column {column!r} is null" for row in np.flatnonzero(null)}
    for wrong, reason in ((lengths == 0, "is empty"), (lengths > longest, f"holds more than {longest} values")):
        for row in np.flatnonzero(wrong):
            bad.setdefault(int(row), f"column {column!r} {reason}")
    found = lists.flatten()  # without what lies under a null
    if pa.types.is_boolean(found.type) or pa.types.is_null(found.type):
        found = found.cast(pa.int64())
    rows = np.repeat(np.arange(len(lengths)), lengths)
    for row in np.unique(rows[found.is_null().to_numpy(zero_copy_only=False)]):
        bad.setdefault(int(row), f"column {column!r} holds a null")
    values = np.asarray(pc.fill_null(found, 0).to_numpy(zero_copy_only=False))
    if bad:
        gone = np.zeros(len(lengths), bool)
        gone[list(bad)] = True
        kept = np.where(gone, 1, lengths)
        offsets, whole = _offsets_of(kept), np.full(int(kept.sum()), spec.filler, values.dtype)
        whole[np.repeat(~gone, kept)] = values[~gone[rows]]
        return _checked(whole, offsets, bad, spec, column)
    return _checked(values, _offsets_of(lengths), bad, spec, column)


def _checked(
    values: npt.NDArray[Any], offsets: npt.NDArray[np.int64], bad: dict[int, str], spec: TensorSpec, column: str
) -> RaggedRows:
    """With the values in the tensor's dtype; rows that hold what it cannot are bad, too."""
    with np.errstate(over="ignore", invalid="ignore"):
        outside = spec.outside(values) | ~np.isfinite(values.astype(spec.numpy_dtype))
    if outside.any():
        for row in np.unique(np.searchsorted(offsets, np.flatnonzero(outside), side="right") - 1):
            bad.setdefault(int(row), f"column {column!r} is outside its declared range or type")
    with np.errstate(over="ignore"):
        kept = np.where(outside, spec.filler, values).astype(spec.numpy_dtype)
    return RaggedRows(kept, offsets, bad)


def _offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
