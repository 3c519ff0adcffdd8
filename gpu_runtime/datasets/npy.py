"""`.npy` files in a few system calls each: where a day is ten thousand of them, mapping each and parsing its header
takes as long as a small engine takes for what is in it."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_FIRST_READ, _LONGEST_HEADER = 4096, 1 << 16


@dataclass(frozen=True)
class Header:
    """What the file says of its array, which begins at byte `offset`. `fortran`: its rows do not lie one behind the
    other."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    offset: int

    @property
    def whole(self) -> int:
        """Bytes of the file, if it holds the array and nothing else."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class NpyFile:
    """An open file of `nbytes`, as many as its array takes or more."""

    descriptor: int
    header: Header
    nbytes: int

    def nbytes_now(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self) -> npt.NDArray[Any]:
        """The array, copied: nothing that happens to the file later can end the process. Raises `EOFError` when it got
        shorter meanwhile."""
        header = self.header
        values = np.empty(math.prod(header.shape), header.dtype)
        left, offset = values.view(np.uint8).data, header.offset
        while left:
            count = os.preadv(self.descriptor, [left], offset)
            if not count:
                raise EOFError("the file got shorter")
            left, offset = left[count:], offset + count
        return values.reshape(header.shape, order="F" if header.fortran else "C")

    def mapped(self) -> np.memmap[Any, Any]:
        """The array where it lies in the file; private, so that nobody can write to it."""
        header = self.header
        with os.fdopen(os.dup(self.descriptor), "rb") as file:
            order: Any = "F" if header.fortran else "C"
            return np.memmap(file, header.dtype, "c", header.offset, header.shape, order)


@contextlib.contextmanager
def open_npy(path: Path) -> Iterator[NpyFile]:
    """Raises `OSError` for what is no file, `ValueError` and whatever a damaged header makes numpy raise for one that
    holds no whole array. Arrays of objects are refused: reading one would run what it says."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is not waited for
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        header = _parsed(_head_of(descriptor))
        if min(header.shape, default=0) < 0 or status.st_size < header.whole:
            raise ValueError("the file ends before its array")
        yield NpyFile(descriptor, header, status.st_size)
    finally:
        os.close(descriptor)


def _head_of(descriptor: int) -> bytes:
    """All that stands before the array's values: the magic, the version, the header's length in two bytes or four, and
    the header."""
    found = os.pread(descriptor, _FIRST_READ, 0)
    begins = 10 if found[6:7] == b"\x01" else 12
    ends = begins + int.from_bytes(found[8:begins], "little")
    if ends > _LONGEST_HEADER:
        raise ValueError("the header is too long")
    return (found if ends <= len(found) else os.pread(descriptor, ends, 0))[:ends]


@functools.lru_cache(maxsize=64)  # the files of a day are mostly alike
def _parsed(head: bytes) -> Header:
    file = io.BytesIO(head)
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    return Header(dtype, shape, fortran and sum(n > 1 for n in shape) > 1, file.tell())
