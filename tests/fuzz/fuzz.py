"""Corrupt images, tables, arrays, texts and lists through the real sources: no crash, no row lost, no wrong value.

    python tests/fuzz/fuzz.py --cases 1200 --seed 0     the table of all kinds of corruption
    python tests/fuzz/fuzz.py --seed 0 --case 17        one case again, in this process

A case is one corrupt file, wholly determined by the seed and its number. Cases run in worker processes, so that a
segmentation fault or a hang is a line in the table and not the end of the run.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import resource
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from gpu_runtime.datasets.array_folder import ArrayFolderSource
from gpu_runtime.datasets.image_folder import ImageFolderSource
from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.datasets.partition import Source, read_rows
from gpu_runtime.datasets.workers import WorkerPool
from gpu_runtime.errors import DatasetError
from gpu_runtime.specs import TensorSpec

DAY = "2026-01-31"
BATCH_TIMEOUT_S = 240
MEMORY_NBYTES = 12 << 30  # of address space for a worker: a bomb that unpacks is a failure, not a swapping machine
MOST_CRASHES = 25


@dataclass(frozen=True)
class Outcome:
    """What one case came to. `wrong` and `crash` say what happened; both are empty when all is well."""

    case: int
    kind: str
    scored: int = 0
    quarantined: int = 0
    refused: int = 0
    wrong: str = ""
    crash: str = ""


class WrongError(Exception):
    """A row was lost, scored with another value than it has, or refused for no good reason."""


def demand(holds: Any, what: str) -> None:
    if not holds:
        raise WrongError(what)


# Reading, as a run does it


@dataclass(frozen=True)
class Read:
    """One shard: inputs by name, row → reason of those that failed, keys."""

    rows: dict[str, Any]
    failures: dict[int, str]
    keys: list[str]


def read_day(source: Source, pool: WorkerPool, batch: int) -> list[Read]:
    """Every shard of the day, in batches, into staging memory that holds nothing usable."""
    shards = []
    for shard in source.partition(DAY).shards:
        reader = source.open(shard)
        rows = {}
        for spec in source.inputs:
            rows[spec.name] = np.full(spec.batch_shape(reader.rows), 0xA5, np.uint8).astype(spec.numpy_dtype)
            if spec.numpy_dtype.kind in "fi":
                rows[spec.name][:] = np.nan if spec.numpy_dtype.kind == "f" else np.iinfo(spec.numpy_dtype).min
        failures: dict[int, str] = {}
        keys: list[str] = []
        for start in range(0, reader.rows, batch):
            stop = min(start + batch, reader.rows)
            staging = {name: values[start:stop] for name, values in rows.items()}
            futures = [pool.submit(piece) for piece in reader.pieces(start, stop, staging)]
            for failure in (failure for future in futures for failure in future.result()):
                demand(0 <= failure.row < stop - start, "a failure of a row outside its batch")
                demand(start + failure.row not in failures, "a row reported twice")
                failures[start + failure.row] = failure.reason
            found, files, positions = reader.origins(start, stop).to_pydict().values()
            demand(len(found) == len(files) == len(positions) == stop - start, "a row without an origin")
            keys += found
        for spec in source.inputs:
            scored = np.delete(rows[spec.name], list(failures), axis=0)
            demand(np.isfinite(scored.astype(np.float64)).all(), f"{spec.name}: scored, but not finite")
            demand(spec.minimum is None or (scored >= spec.minimum).all(), f"{spec.name}: scored, but below its range")
            demand(spec.maximum is None or (scored <= spec.maximum).all(), f"{spec.name}: scored, but above its range")
        shards.append(Read(rows, failures, keys))
    return shards


# Images

HOLE, SAME, SAME_OR_HOLE, ANY = "hole", "same", "same or hole", "any"
"""What a corrupt picture may become: a quarantined row, the row of the whole picture, one of both, or whatever."""

SIDE = 12
PIXELS = TensorSpec("pixels", "uint8", (SIDE, SIDE, 3))
IMAGE_REASONS = re.compile(
    r"not a whole picture|the file is empty|not a JPEG, PNG, WebP or BMP picture|more than \d+ (pixels|bytes|scans)"
)


@cache
def pictures() -> dict[str, bytes]:
    """Small whole pictures, by format and what is special about them."""
    rng = np.random.default_rng(0)
    height, width = 33, 40
    slope = np.linspace(0, 200, width)[None, :, None] * np.ones((height, 1, 3))
    rgb = Image.fromarray((slope + rng.integers(0, 56, (height, width, 3))).astype(np.uint8))
    alpha = rgb.copy()
    alpha.putalpha(Image.fromarray(rng.integers(0, 256, (height, width)).astype(np.uint8)))
    palette = rgb.quantize(16)
    palette.info["transparency"] = bytes(range(0, 160, 10))
    deep = Image.fromarray(rng.integers(0, 65536, (height, width)).astype(np.uint16))
    turned = Image.Exif()
    turned[0x0112] = 6
    many: dict[str, Any] = {"save_all": True, "append_images": [rgb.transpose(Image.Transpose.ROTATE_180)]}
    made = {
        "JPEG": (rgb, {}),
        "JPEG grey": (rgb.convert("L"), {}),
        "JPEG CMYK": (rgb.convert("CMYK"), {}),
        "JPEG progressive": (rgb, {"progressive": True}),
        "JPEG turned": (rgb, {"exif": turned}),
        "PNG": (rgb, {}),
        "PNG stored": (rgb, {"compress_level": 0}),
        "PNG alpha": (alpha, {}),
        "PNG grey": (rgb.convert("L"), {}),
        "PNG grey alpha": (alpha.convert("LA"), {}),
        "PNG palette": (palette, {}),
        "PNG bits": (rgb.convert("1"), {}),
        "PNG deep": (deep, {}),
        "PNG turned": (rgb, {"exif": turned}),
        "PNG animated": (rgb, many),
        "WEBP": (rgb, {}),
        "WEBP lossless": (rgb, {"lossless": True}),
        "WEBP alpha": (alpha, {}),
        "WEBP turned": (rgb, {"exif": turned}),
        "WEBP animated": (rgb, many),
        "BMP": (rgb, {}),
        "BMP grey": (rgb.convert("L"), {}),
        "BMP palette": (rgb.quantize(16), {}),
        "BMP bits": (rgb.convert("1"), {}),
    }
    files = {}
    for name, (image, save) in made.items():
        stream = io.BytesIO()
        image.save(stream, name.split()[0], **save)
        files[name] = stream.getvalue()
    return files


def read_pictures(files: Mapping[str, bytes], root: Path) -> Read:
    folder = root / DAY
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with closing(WorkerPool(2)) as pool:
        (shard,) = read_day(ImageFolderSource(str(root), (PIXELS,)), pool, batch=2)
    demand(shard.keys == sorted(files), "a picture without a row")
    return shard


@cache
def whole_rows() -> dict[str, Any]:
    """The row of each whole picture."""
    with tempfile.TemporaryDirectory() as folder:
        shard = read_pictures({f"{name}.jpg": data for name, data in pictures().items()}, Path(folder))
    demand(not shard.failures, f"whole pictures were refused: {shard.failures}")
    return {Path(key).stem: shard.rows["pixels"][row] for row, key in enumerate(shard.keys)}


def cut(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    return data[: int(rng.integers(1, len(data)))], SAME_OR_HOLE


def flip(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    changed = bytearray(data)
    for place in rng.integers(0, len(data), rng.integers(1, 9)):
        changed[place] ^= int(rng.integers(1, 256))
    return bytes(changed), checked(name)


def flip_header(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    changed = bytearray(data)
    for place in rng.integers(0, min(64, len(data)), rng.integers(1, 4)):
        changed[place] = int(rng.integers(0, 256))
    return bytes(changed), checked(name)


def zero(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    start = int(rng.integers(0, len(data)))
    stop = min(len(data), start + int(rng.integers(1, 200)))
    return data[:start] + bytes(stop - start) + data[stop:], checked(name)


def leave_out(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    start = int(rng.integers(0, len(data)))
    return data[:start] + data[start + int(rng.integers(1, 100)) :], ANY


def splice(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    other = list(pictures().values())[rng.integers(len(pictures()))]
    return data[: int(rng.integers(1, len(data)))] + other[int(rng.integers(1, len(other))) :], ANY


def append(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    # What follows a picture is not looked at, as in any viewer; WebP and BMP have their length in the header.
    return data + rng.bytes(int(rng.integers(1, 500))), SAME_OR_HOLE


def mislabel(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    return data, SAME  # the file's name never fits: see `image_case`


def empty(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    return b"", HOLE


def garbage(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    start = [b"", b"<!doctype html>", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"RIFF\xff\0\0\0WEBPVP8 ", b"BM"]
    return start[rng.integers(len(start))] + rng.bytes(int(rng.integers(1, 2000))), HOLE


def other_format(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    stream = io.BytesIO()
    kind = ["GIF", "TIFF", "EPS", "PPM", "ICO", "TGA", "PCX", "PDF"][rng.integers(8)]
    Image.open(io.BytesIO(data)).convert("RGB").save(stream, kind)
    return stream.getvalue(), HOLE


def size_fields(name: str, data: bytes) -> tuple[int, str]:
    """Where width and height stand, and how."""
    if name.startswith("JPEG"):
        found = re.search(rb"\xff[\xc0\xc2]\0.\x08", data, re.DOTALL)
        assert found
        return found.end(), ">HH"
    if name.startswith("PNG"):
        return 16, ">II"
    if name.startswith("BMP"):
        return 18, "<ii"
    return {b"VP8 ": (26, "<HH"), b"VP8L": (21, "VP8L"), b"VP8X": (24, "VP8X")}[data[12:16]]


def with_size(name: str, data: bytes, width: int, height: int) -> bytes:
    changed = bytearray(data)
    place, kind = size_fields(name, data)
    if kind == "VP8L":
        (bits,) = struct.unpack_from("<I", changed, place)
        struct.pack_into("<I", changed, place, bits & ~0xFFFFFFF | width - 1 & 0x3FFF | (height - 1 & 0x3FFF) << 14)
    elif kind == "VP8X":
        changed[place : place + 6] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    else:
        struct.pack_into(kind, changed, place, width, height)
    if name.startswith("PNG"):
        changed[29:33] = struct.pack(">I", zlib.crc32(changed[12:29]))
    return bytes(changed)


def resize_header(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    return with_size(name, data, int(rng.integers(1, 100)), int(rng.integers(1, 100))), ANY


def claim_much(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    limit = {"JPEG": 65535, "PNG": 2**31 - 1, "WEBP": 16383, "BMP": 2**31 - 1}[name.split()[0]]
    sides = [side for side in (8001, 9500, 13000, 16383, 65535, 2**31 - 1) if side <= limit]
    return with_size(name, data, *(int(sides[i]) for i in rng.integers(0, len(sides), 2))), HOLE


def parts_of(name: str, data: bytes) -> list[bytes]:
    """The file's segments or chunks; the first is its signature."""
    ends = [0]
    if name.startswith("JPEG"):
        ends.append(2)
        while ends[-1] < len(data) and data[ends[-1] + 1] != 0xDA:
            ends.append(ends[-1] + 2 + int.from_bytes(data[ends[-1] + 2 : ends[-1] + 4], "big"))
    elif name.startswith("PNG"):
        ends.append(8)
        while ends[-1] < len(data):
            ends.append(ends[-1] + 12 + int.from_bytes(data[ends[-1] : ends[-1] + 4], "big"))
    elif name.startswith("WEBP"):
        ends.append(12)
        while ends[-1] < len(data):
            length = int.from_bytes(data[ends[-1] + 4 : ends[-1] + 8], "little")
            ends.append(ends[-1] + 8 + length + length % 2)
    else:
        ends += [14, 54]
    return [data[start:stop] for start, stop in zip(ends, [*ends[1:], len(data)], strict=True)]


def swap_chunks(rng: Any, name: str, data: bytes) -> tuple[bytes, str]:
    parts = parts_of(name, data)
    one, two = (int(i) for i in rng.integers(1, len(parts), 2))
    parts[one], parts[two] = parts[two], parts[one]
    if rng.random() < 0.5:
        parts.insert(one, parts[two])
    return b"".join(parts), ANY


def checked(name: str) -> str:
    return SAME_OR_HOLE if name.startswith("PNG") else ANY  # the only format with checksums


IMAGE_KINDS: dict[str, Callable[[Any, str, bytes], tuple[bytes, str]]] = {
    "image: cut short": cut,
    "image: bytes flipped": flip,
    "image: header overwritten": flip_header,
    "image: a span of zeros": zero,
    "image: a span left out": leave_out,
    "image: two files spliced": splice,
    "image: something appended": append,
    "image: mislabelled": mislabel,
    "image: empty": empty,
    "image: garbage": garbage,
    "image: another format": other_format,
    "image: another size claimed": resize_header,
    "image: a huge size claimed": claim_much,
    "image: chunks swapped": swap_chunks,
}


def image_case(kind: str, rng: Any, root: Path) -> Outcome:
    names = list(pictures())
    before, name, after = (names[i] for i in rng.integers(0, len(names), 3))
    data, allowed = IMAGE_KINDS[kind](rng, name, pictures()[name])
    suffixes = {"JPEG": ("png", "bmp"), "PNG": ("jpg", "webp"), "WEBP": ("jpg", "png"), "BMP": ("JPEG", "png")}
    suffix = suffixes[name.split()[0]][rng.integers(2)]
    shard = read_pictures({"a.jpg": pictures()[before], f"b.{suffix}": data, "c.jpg": pictures()[after]}, root)
    pixels = shard.rows["pixels"]
    demand(0 not in shard.failures and 2 not in shard.failures, "a whole picture beside it was refused")
    demand((pixels[[0, 2]] == [whole_rows()[before], whole_rows()[after]]).all(), "a whole picture beside it changed")
    if 1 in shard.failures:
        demand(allowed != SAME, f"{name}: refused, though it is whole")
        demand(IMAGE_REASONS.fullmatch(shard.failures[1]), f"{name}: the reason {shard.failures[1]!r}")
        demand(not pixels[1].any(), f"{name}: refused, but its row is not empty")
    else:
        demand(allowed != HOLE, f"{name}: scored, though it is no picture")
        same = (pixels[1] == whole_rows()[name]).all()
        demand(allowed == ANY or same, f"{name}: scored with other pixels than the whole picture has")
    return Outcome(0, kind, scored=3 - len(shard.failures), quarantined=len(shard.failures))


# Tables

CARRIERS = ("AA", "DL", "UA", "ÜX")
COLUMNS = ("amount", "count", "share", "code", "small", "flag", "carrier")
INPUTS = (
    TensorSpec("numbers", "float32", (2,)),
    TensorSpec("share", "float32", (), -1.0, 1.0),
    TensorSpec("code", "int32", (), 0, 9),
    TensorSpec("small", "uint8"),
    TensorSpec("flag", "bool"),
    TensorSpec("carrier", "int32", (), 0, len(CARRIERS) - 1),
)
PLACES = {
    "amount": ("numbers", 0),
    "count": ("numbers", 1),
    **{name: (name, None) for name in COLUMNS[2:]},
}
TYPES = {
    "amount": pa.float64(),
    "count": pa.int64(),
    "share": pa.float32(),
    "code": pa.int32(),
    "small": pa.uint8(),
    "flag": pa.bool_(),
    "carrier": pa.string(),
    "id": pa.string(),
}
NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
NUMBERS += [pa.float16(), pa.float32(), pa.float64()]
FLOAT32_LIMIT = 2**128 - 2**103  # from here on, the nearest float32 is infinity
TABLE_REASONS = re.compile(
    r"column '(\w+)' (is null|is not finite|holds an unknown category|is outside its declared range or type"
    r"|does not fit float32)"
)


def source_of(root: Path, rows_per_shard: int) -> ParquetSource:
    columns = {spec.name: tuple(c for c in COLUMNS if PLACES[c][0] == spec.name) for spec in INPUTS}
    return ParquetSource(str(root), INPUTS, columns, {"carrier": CARRIERS}, "id", "late", rows_per_shard)


def good_cells(rng: Any, rows: int) -> dict[str, list[Any]]:
    return {
        "amount": rng.normal(0, 1000, rows).tolist(),
        "count": rng.integers(-1000, 1000, rows).tolist(),
        "share": rng.uniform(-1, 1, rows).astype(np.float32).tolist(),
        "code": rng.integers(0, 10, rows).tolist(),
        "small": rng.integers(0, 256, rows).tolist(),
        "flag": [bool(flag) for flag in rng.integers(0, 2, rows)],
        "carrier": [CARRIERS[i] for i in rng.integers(0, len(CARRIERS), rows)],
        "id": [f"row-{i}" for i in range(rows)],
    }


def fits(column: str, cell: Any) -> bool:
    """The oracle: whether this cell can be scored, decided in plain Python and exact arithmetic."""
    if cell is None:
        return False
    if column == "carrier":
        return cell in CARRIERS
    if isinstance(cell, float) and not math.isfinite(cell):
        return False
    exact = Fraction(cell)
    if column in ("amount", "count"):
        return abs(exact) < FLOAT32_LIMIT
    if column == "share":
        return -1 <= exact <= 1
    highest = {"code": 9, "small": 255, "flag": 1}[column]
    return exact.denominator == 1 and 0 <= exact <= highest


def is_score_of(column: str, cell: Any, got: Any) -> bool:
    """Whether `got` is what the cell has to become: the category's id, the same integer, or the nearest float32."""
    if column == "carrier":
        return bool(CARRIERS[int(got)] == cell)
    if column in ("code", "small", "flag"):
        return int(got) == cell
    off = abs(Fraction(float(got)) - Fraction(cell))
    with np.errstate(over="ignore"):
        around = [float(np.nextafter(np.float32(got), np.float32(way))) for way in (-np.inf, np.inf)]
    return all(off <= abs(Fraction(other) - Fraction(cell)) for other in around if math.isfinite(other))


@dataclass(frozen=True)
class Expected:
    """What the table is to give. `cells` None: whatever it gives, so long as every row is sound; `refused`: the
    column or the text that the refusal must name, or None where the table must not be refused."""

    data: bytes
    rows: int
    cells: dict[str, list[Any]] | None = None
    refused: str | None = None
    may_be_refused: bool = False


def written(rng: Any, table: Any, **settings: Any) -> bytes:
    stream = io.BytesIO()
    chosen = {
        "row_group_size": int(rng.integers(5, 80)),
        "compression": ["none", "snappy", "zstd", "gzip"][rng.integers(4)],
        "use_dictionary": bool(rng.integers(2)),
        "write_page_checksum": bool(rng.integers(2)),
        "data_page_version": ["1.0", "2.0"][rng.integers(2)],
        "data_page_size": int(rng.integers(64, 4096)),
    }
    pq.write_table(table, stream, **{**chosen, **settings})
    return stream.getvalue()


def arrays_of(rng: Any, cells: Mapping[str, list[Any]], types: Mapping[str, Any]) -> dict[str, Any]:
    """Columns, some of them dictionary-encoded, and the label."""
    arrays = {name: pa.array(values, types[name]) for name, values in cells.items()}
    for name, array in arrays.items():
        if rng.random() < 0.2 and not pa.types.is_null(array.type) and not pa.types.is_float16(array.type):
            arrays[name] = array.dictionary_encode()
        elif pa.types.is_string(array.type) and rng.random() < 0.3:
            arrays[name] = array.cast([pa.large_string(), pa.string_view()][rng.integers(2)])
    return arrays | {"late": pa.array(rng.integers(0, 2, len(cells["id"])))}


def bad_cells(kind: Any) -> list[Any]:
    """Cells of an Arrow type at which a decoder may stumble; some of them are quite in order."""
    if pa.types.is_string(kind):
        return ["ZZ", "", "aa", "AA ", "é" * 1000, "\0", "NaN", "ÜX"]
    if pa.types.is_boolean(kind):
        return [True, False]
    if pa.types.is_integer(kind):
        bits, signed = kind.bit_width, str(kind).startswith("int")
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        wanted = [low, high, -1, 0, 2, 10, 127, 128, 255, 256, 2**24 + 1, 2**31, 2**53 + 1, 2**62 + 2**38 + 1]
        return [cell for cell in wanted if low <= cell <= high]
    cells = [math.nan, math.inf, -math.inf, 0.5, -0.0, -1.0, 1.0, 9.0, 10.0, 255.0, 256.0, 1e-7, 65504.0]
    if kind.bit_width > 16:
        cells += [2.0**31, -(2.0**31), 2.0**63, -(2.0**63), 2.0**64, 1e-40, float(np.float32(3.4e38))]
    if kind.bit_width > 32:
        cells += [1e39, -1e300, 1.0 + 2.0**-50, float(FLOAT32_LIMIT), 5e-324]
    return cells


def spoil(rng: Any, cells: dict[str, list[Any]], types: Mapping[str, Any], pick: Callable[[Any], list[Any]]) -> None:
    """Replace some cells, in place, by some that `pick` gives for their column's type."""
    for column in rng.choice(COLUMNS, rng.integers(1, 5), replace=False):
        choices = pick(types[column])
        for row in rng.integers(0, len(cells["id"]), rng.integers(1, 6)):
            if choices:
                cells[column][row] = choices[rng.integers(len(choices))]


def cells_of(pick: Callable[[Any], list[Any]]) -> Callable[[Any], Expected]:
    def make(rng: Any) -> Expected:
        cells = good_cells(rng, int(rng.integers(1, 60)))
        spoil(rng, cells, TYPES, pick)
        if rng.random() < 0.3:
            cells["id"][rng.integers(len(cells["id"]))] = None
        return Expected(written(rng, pa.table(arrays_of(rng, cells, TYPES))), len(cells["id"]), cells)

    return make


def retyped(rng: Any) -> Expected:
    """Columns of other numeric types, with cells that only those can hold."""
    cells = good_cells(rng, int(rng.integers(1, 60)))
    types = dict(TYPES)
    for column in rng.choice(COLUMNS[:-1], rng.integers(1, 5), replace=False):
        kind = types[column] = NUMBERS[rng.integers(len(NUMBERS))]
        usual = [cell for cell in bad_cells(kind) if fits(column, cell)] or [0]
        cells[column] = [
            int(usual[i]) if pa.types.is_integer(kind) else float(usual[i])
            for i in rng.integers(0, len(usual), len(cells["id"]))
        ]
    spoil(rng, cells, types, bad_cells)
    arrays = arrays_of(rng, cells, types)
    held = {name: arrays[name].to_pylist() for name in cells}  # as the column's type holds them
    return Expected(written(rng, pa.table(arrays)), len(cells["id"]), held)


def nulls(rng: Any) -> Expected:
    cells = good_cells(rng, int(rng.integers(1, 40)))
    types = dict(TYPES)
    for column in rng.choice([*COLUMNS, "id"], rng.integers(1, 4), replace=False):
        cells[column] = [None] * len(cells["id"])
        types[column] = [pa.null(), types[column]][rng.integers(2)]
    return Expected(written(rng, pa.table(arrays_of(rng, cells, types))), len(cells["id"]), cells)


def rearranged(rng: Any) -> Expected:
    """Other columns beside, and another order."""
    cells = good_cells(rng, int(rng.integers(1, 40)))
    arrays = arrays_of(rng, cells, TYPES)
    rows = len(cells["id"])
    arrays |= {"list": pa.array([[1, 2]] * rows), "struct": pa.array([{"code": 1}] * rows), "": pa.nulls(rows)}
    order = rng.permutation(list(arrays))
    table = pa.table({name: arrays[name] for name in order})
    if rng.random() < 0.5:
        table = table.append_column("list", pa.array(["again"] * rows))
    return Expected(written(rng, table), rows, cells)


def without_a_column(rng: Any) -> Expected:
    cells = good_cells(rng, 10)
    arrays = arrays_of(rng, cells, TYPES)
    column = [*COLUMNS, "id"][rng.integers(len(COLUMNS) + 1)]
    del arrays[column]
    if rng.random() < 0.5:
        arrays[column.upper()] = pa.array(cells[column], TYPES[column])
    return Expected(written(rng, pa.table(arrays)), 10, refused=column)


def with_a_column_twice(rng: Any) -> Expected:
    arrays = arrays_of(rng, good_cells(rng, 10), TYPES)
    column = [*COLUMNS, "id"][rng.integers(len(COLUMNS) + 1)]
    table = pa.table(arrays)
    return Expected(written(rng, table.add_column(int(rng.integers(9)), column, table[column])), 10, refused=column)


def of_another_type(rng: Any) -> Expected:
    arrays = arrays_of(rng, good_cells(rng, 10), TYPES)
    column = COLUMNS[rng.integers(len(COLUMNS))]
    others = [
        pa.array([1, 2] * 5, pa.timestamp("ms")),
        pa.array([1, 2] * 5, pa.date32()),
        pa.array([Decimal("1.5")] * 10),
        pa.array([b"1"] * 10),
        pa.array([[1.0]] * 10),
        pa.array([{"x": 1.0}] * 10),
        pa.array(range(10)) if column == "carrier" else pa.array(["1"] * 10),
    ]
    arrays[column] = others[rng.integers(len(others))]
    return Expected(written(rng, pa.table(arrays)), 10, refused=column)


def without_rows(rng: Any) -> Expected:
    arrays = arrays_of(rng, good_cells(rng, 5), TYPES)
    return Expected(written(rng, pa.table(arrays).slice(0, 0)), 0, {name: [] for name in [*COLUMNS, "id"]})


def good_file(rng: Any) -> tuple[bytes, int, int]:
    """A whole file, where its footer begins, how many rows it has."""
    cells = good_cells(rng, int(rng.integers(20, 200)))
    data = written(rng, pa.table(arrays_of(rng, cells, TYPES)))
    return data, len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(cells["id"])


def file_cut_short(rng: Any) -> Expected:
    data, _, rows = good_file(rng)
    return Expected(data[: int(rng.integers(1, len(data)))], rows, refused="a whole Parquet file")


def flipped_at(part: str) -> Callable[[Any], Expected]:
    def make(rng: Any) -> Expected:
        data, footer, rows = good_file(rng)
        changed = bytearray(data)
        start, stop = {"pages": (4, footer), "footer": (footer, len(data) - 8), "end": (len(data) - 8, len(data))}[part]
        for place in rng.integers(start, stop, rng.integers(1, 9)):
            changed[place] ^= 1 << int(rng.integers(8)) if rng.random() < 0.5 else int(rng.integers(1, 256))
        return Expected(bytes(changed), rows, may_be_refused=True)

    return make


def span_lost(rng: Any) -> Expected:
    data, footer, rows = good_file(rng)
    start = int(rng.integers(4, footer))
    stop = min(footer, start + int(rng.integers(1, 400)))
    filled = bytes(stop - start) if rng.random() < 0.5 else rng.bytes(stop - start)
    return Expected(data[:start] + filled + data[stop:], rows, may_be_refused=True)


def no_table(rng: Any) -> Expected:
    whole = list(pictures().values())[rng.integers(len(pictures()))]
    texts = [b"", b"PAR1", b"PAR1PAR1", b"<html>" + b"not found " * 40, rng.bytes(500), b"a,b\n1,2\n" * 30, whole]
    texts.append(b"PAR1" + rng.bytes(300) + struct.pack("<I", int(rng.integers(1, 400))) + b"PAR1")
    return Expected(texts[rng.integers(len(texts))], 0, refused="a whole Parquet file")


TABLE_KINDS: dict[str, Callable[[Any], Expected]] = {
    "table: NaN, infinite, out of range, unknown": cells_of(bad_cells),
    "table: null cells": cells_of(lambda kind: [None]),
    "table: all sorts of cells": cells_of(lambda kind: [None, *bad_cells(kind)]),
    "table: other numeric types": retyped,
    "table: columns of nulls": nulls,
    "table: columns rearranged and more": rearranged,
    "table: a column missing": without_a_column,
    "table: a column twice": with_a_column_twice,
    "table: a column of another type": of_another_type,
    "table: no rows": without_rows,
    "table: cut short": file_cut_short,
    "table: bytes flipped in pages": flipped_at("pages"),
    "table: a span of the pages lost": span_lost,
    "table: bytes flipped in the footer": flipped_at("footer"),
    "table: bytes flipped at the end": flipped_at("end"),
    "table: no table": no_table,
}


def table_case(kind: str, rng: Any, root: Path) -> Outcome:
    expected = TABLE_KINDS[kind](rng)
    folder = root / DAY
    folder.mkdir()
    (folder / "part.parquet").write_bytes(expected.data)
    source = source_of(root, int(rng.integers(1, 60)))
    try:
        with closing(WorkerPool(2)) as pool:
            shards = read_day(source, pool, int(rng.integers(1, 30)))
    except DatasetError as error:
        demand(expected.refused or expected.may_be_refused, f"refused: {error}")
        demand(error.item == f"{DAY}/part.parquet", f"the refusal does not name the file: {error}")
        demand(error.expected and error.got, f"the refusal does not say what was expected and found: {error}")
        if expected.refused:
            named = error.what if expected.refused in TYPES else error.expected
            demand(expected.refused in str(named), f"the refusal does not name what is wrong: {error}")
        return Outcome(0, kind, refused=1)
    demand(not expected.refused, "read, though it is not as declared")
    failures: dict[int, str] = {}
    rows = 0
    for shard in shards:
        failures |= {rows + row: reason for row, reason in shard.failures.items()}
        rows += len(shard.keys)
    demand(rows == expected.rows, f"{expected.rows} rows in, {rows} read")
    for reason in failures.values():
        demand(TABLE_REASONS.fullmatch(reason), f"the reason {reason!r}")
    if expected.cells is not None:
        compare(expected.cells, shards, failures)
    return Outcome(0, kind, scored=rows - len(failures), quarantined=len(failures))


def compare(cells: Mapping[str, list[Any]], shards: Sequence[Read], failures: Mapping[int, str]) -> None:
    """Every row against the oracle."""
    keys = [key for shard in shards for key in shard.keys]
    wanted = [f"part.parquet#{i}" if key is None else key for i, key in enumerate(cells["id"])]
    demand(keys == wanted, "the rows have other keys")
    made = {spec.name: [row for shard in shards for row in shard.rows[spec.name]] for spec in INPUTS}
    for row in range(len(keys)):
        bad = [column for column in COLUMNS if not fits(column, cells[column][row])]
        demand(bool(bad) == (row in failures), f"row {row}: bad in {bad}, but {failures.get(row, 'scored')}")
        if bad:
            named = TABLE_REASONS.fullmatch(failures[row])
            demand(named and named[1] in bad, f"row {row}: bad in {bad}, but {failures[row]}")
            continue
        for column in COLUMNS:
            name, place = PLACES[column]
            got = made[name][row] if place is None else made[name][row][place]
            demand(is_score_of(column, cells[column][row], got), f"row {row}: {column} was scored with another value")


# Arrays

VALUES = TensorSpec("values", "int32", (3,))


def array_bytes(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def flipped_between(start: int, stop: int | None) -> Callable[[Any, bytes], tuple[bytes, str]]:
    def make(rng: Any, data: bytes) -> tuple[bytes, str]:
        changed = bytearray(data)
        for place in rng.integers(start, stop or len(data), rng.integers(1, 4)):
            changed[place] ^= 1 << int(rng.integers(8)) if rng.random() < 0.5 else int(rng.integers(1, 256))
        return bytes(changed), SAME_OR_HOLE if stop else SAME

    return make


def array_cut_short(rng: Any, data: bytes) -> tuple[bytes, str]:
    return data[: int(rng.integers(0, len(data)))], HOLE


def array_with_more(rng: Any, data: bytes) -> tuple[bytes, str]:
    return data + (data if rng.random() < 0.3 else rng.bytes(int(rng.integers(1, 300)))), HOLE


def another_array(rng: Any, data: bytes) -> tuple[bytes, str]:
    values = rng.integers(0, 99, (int(rng.integers(2, 60)), 3)).astype(np.int32)
    others = [
        values.astype(">i4"),
        values.astype(np.float32),
        values.astype(np.uint32),
        values.astype(object),
        values.astype("U3"),
        np.asfortranarray(values),
        values[:, :2],
        values[:, 0],
        values[..., None],
        values[0, 0],
    ]
    return array_bytes(others[rng.integers(len(others))]), HOLE


ARRAY_KINDS: dict[str, Callable[[Any, bytes], tuple[bytes, str]]] = {
    "array: cut short": array_cut_short,
    "array: bytes flipped in the header": flipped_between(0, 128),
    "array: bytes flipped in the rows": flipped_between(128, None),
    "array: something appended": array_with_more,
    "array: another array": another_array,
}
"""Each says of its file whether it is to be read (SAME: as its bytes are), refused (HOLE), or one of both."""


def array_case(kind: str, rng: Any, root: Path) -> Outcome:
    rows = int(rng.integers(1, 60))
    values = rng.integers(-(2**31) + 1, 2**31, (rows, 3)).astype(np.int32)
    data, allowed = ARRAY_KINDS[kind](rng, array_bytes(values))
    (root / DAY).mkdir()
    (root / DAY / "part.npy").write_bytes(data)
    source = ArrayFolderSource(str(root), (VALUES,), int(rng.integers(1, 60)))
    try:
        with closing(WorkerPool(2)) as pool:
            shards = read_day(source, pool, int(rng.integers(1, 30)))
    except DatasetError as error:
        demand(allowed != SAME, f"refused: {error}")
        demand(error.item == f"{DAY}/part.npy", f"the refusal does not name the file: {error}")
        demand(error.expected and error.got, f"the refusal does not say what was expected and found: {error}")
        return Outcome(0, kind, refused=1)
    demand(allowed != HOLE, "read, though it is not as declared")
    demand([key for shard in shards for key in shard.keys] == [f"part.npy#{row}" for row in range(rows)], "other keys")
    read = np.concatenate([shard.rows["values"] for shard in shards])
    demand((read == np.frombuffer(data[128:], "<i4").reshape(rows, 3)).all(), "rows were scored with other values")
    return Outcome(0, kind, scored=rows)


# Rows that differ in length

IDS = TensorSpec("ids", "int32", (-1,), minimum=1, maximum=99)
MASK = TensorSpec("mask", "bool", (-1,), mask=True)
LONGEST = 6
WORDS = {"[UNK]": 1, "a": 2, "b": 3, "late": 4}
RAGGED_REASONS = re.compile(
    r"column 'x' (is null( or no UTF-8)?|is empty|holds a null|holds no token|holds more than 6 (values|tokens)"
    r"|is outside its declared range or type)"
)


@cache
def tokenizer_json() -> str:
    """Words by white space."""
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "[UNK]"},
    }
    return json.dumps(made)


def some_lists(rng: Any, rows: int) -> tuple[Any, list[list[int] | None]]:
    """A list column of some type, and what each row is worth: its ids, or None."""
    kind = [pa.int8(), pa.int32(), pa.uint16(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()][rng.integers(7)]
    outer = [pa.list_, pa.large_list, lambda value: pa.list_(value, LONGEST)][rng.integers(3)]
    fixed = pa.types.is_fixed_size_list(outer(kind))
    cells: list[Any] = []
    for _ in range(rows):
        count = LONGEST if fixed else int(rng.integers(1, LONGEST + 1))
        cell: Any = [True] * count if pa.types.is_boolean(kind) else rng.integers(1, 100, count).tolist()
        what = rng.integers(12)
        if what == 0:
            cell = None
        elif what == 1 and not fixed:
            cell = []
        elif what == 2 and not fixed:
            cell = cell * LONGEST + cell
        elif what == 3:
            cell[rng.integers(count)] = None
        elif what == 4:
            cell[rng.integers(count)] = False if pa.types.is_boolean(kind) else int(rng.choice([0, 100, 127]))
        elif what == 5 and pa.types.is_floating(kind):
            cell[rng.integers(count)] = float(rng.choice([np.nan, np.inf, -np.inf, 1.5, 99.0001, 1e30]))
        cells.append(cell)

    def worth(cell: Any) -> list[int] | None:
        if not cell or len(cell) > LONGEST or any(v is None or not 1 <= v <= 99 or v != int(v) for v in cell):
            return None
        return [int(v) for v in cell]

    return pa.array(cells, outer(kind)), [worth(cell) for cell in cells]


def some_texts(rng: Any, rows: int) -> tuple[Any, list[list[int] | None]]:
    """A text column of some type, and what each row is worth."""
    cells: list[bytes | None] = []
    for _ in range(rows):
        words = [
            ["a", "b", "late", "other", "\u00e4\U0001f600"][i] for i in rng.integers(0, 5, rng.integers(1, LONGEST + 1))
        ]
        cell: bytes | None = " ".join(words).encode()
        what = rng.integers(12)
        if what == 0:
            cell = None
        elif what == 1:
            cell = b"" if rng.random() < 0.5 else b"  \n "
        elif what == 2:
            cell = b"a " * int(rng.integers(LONGEST + 1, 3_000))
        elif what == 3:
            cell = b"late " + [b"\xff", b"\xc3", b"\xed\xa0\x80"][rng.integers(3)]
        elif what == 4:
            cell = b"a\0b a" + b"x" * int(rng.integers(0, 100_000))
        cells.append(cell)

    def worth(cell: bytes | None) -> list[int] | None:
        try:
            words = (cell or b"").decode().split()
        except UnicodeDecodeError:
            return None
        return [WORDS.get(word, 1) for word in words] if 0 < len(words) <= LONGEST else None

    # A view checks what it is made of: text that is no UTF-8 gets into a file only as the others.
    kind = [pa.string(), pa.large_string()][rng.integers(2)]
    raw = pa.array(cells, pa.large_binary() if kind == pa.large_string() else pa.binary())
    text = pa.Array.from_buffers(kind, len(raw), raw.buffers())
    return text, [worth(cell) for cell in cells]


RAGGED_KINDS = {"ragged: lists of all sorts": False, "ragged: texts of all sorts": False, "ragged: bytes flipped": True}


def ragged_case(kind: str, rng: Any, root: Path) -> Outcome:
    rows = int(rng.integers(1, 80))
    texts = kind == "ragged: texts of all sorts" or (RAGGED_KINDS[kind] and rng.random() < 0.5)
    column, worth = (some_texts if texts else some_lists)(rng, rows)
    (root / DAY).mkdir()
    path = root / DAY / "part.parquet"
    group, dictionary = int(rng.integers(1, rows + 1)), bool(rng.random() < 0.5)
    pq.write_table(
        pa.table({"x": column}), path, row_group_size=group, use_dictionary=dictionary, write_page_checksum=True
    )
    if RAGGED_KINDS[kind]:
        path.write_bytes(flip(rng, "", path.read_bytes())[0])
    (root / "tokenizer.json").write_text(tokenizer_json())
    source = ParquetSource(
        str(root),
        (IDS, MASK),
        {"ids": ("x",)},
        rows_per_shard=int(rng.integers(1, 80)),
        tokenizer=str(root / "tokenizer.json") if texts else None,
        max_length=LONGEST,
        nbytes_per_shard=int(rng.integers(1, 2_000)),
    )
    try:
        found = read_ragged(source)
    except DatasetError as error:
        demand(RAGGED_KINDS[kind], f"refused: {error}")
        return Outcome(0, kind, refused=1)
    demand(sorted(found) == list(range(rows)), f"{rows} rows in, {sorted(found)} read")
    reasons = [made for made in found.values() if isinstance(made, str)]
    for reason in reasons:
        demand(RAGGED_REASONS.fullmatch(reason), f"the reason {reason!r}")
    for row, made in found.items():  # the checksums of the pages see to it that a flipped byte changes nothing
        demand(
            isinstance(made, str) if worth[row] is None else made == worth[row], f"row {row}: {worth[row]} is {made}"
        )
    return Outcome(0, kind, scored=rows - len(reasons), quarantined=len(reasons))


def read_ragged(source: ParquetSource) -> dict[int, list[int] | str]:
    """Position → the row's ids, or why it has none."""
    found: dict[int, list[int] | str] = {}
    for shard in source.partition(DAY).shards:
        total = 0
        for part in source.parts(shard):
            total += part.rows
            inputs, failures = read_rows(source.inputs, part, 0, part.rows)
            positions = part.origins(0, part.rows).column("source_position").to_pylist()
            demand(not found.keys() & set(positions) and len(set(positions)) == part.rows, "a row twice")
            demand(part.lengths is not None and (inputs["mask"].sum(axis=1) == part.lengths).all(), "another mask")
            ids = inputs["ids"]
            demand(((ids >= 1) & (ids <= 99)).all(), "an id outside its range")
            found |= {place: ids[row][inputs["mask"][row]].tolist() for row, place in enumerate(positions)}
            found |= {positions[failure.row]: failure.reason for failure in failures}
        demand(total == shard.rows, "a shard has other rows than were counted")
    return found


# Running


CASES = dict.fromkeys(IMAGE_KINDS, image_case) | dict.fromkeys(TABLE_KINDS, table_case)
CASES |= dict.fromkeys(ARRAY_KINDS, array_case) | dict.fromkeys(RAGGED_KINDS, ragged_case)
KINDS = tuple(CASES)


def run_case(seed: int, case: int) -> Outcome:
    """One case, in this process. Raises whatever the sources raise beside `DatasetError`."""
    kind = KINDS[case % len(KINDS)]
    rng = np.random.default_rng([seed, case])
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = CASES[kind](kind, rng, Path(folder))
        except WrongError as error:
            outcome = Outcome(case, kind, wrong=str(error))
    return replace(outcome, case=case)


def work(seed: int, cases: range) -> None:
    """Run cases and write one line each; a process that dies leaves out the line of the case that it died of."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    for case in cases:
        try:
            outcome = run_case(seed, case)
        except Exception as error:
            outcome = Outcome(case, KINDS[case % len(KINDS)], crash=f"{type(error).__name__}: {error}")
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()


def supervise(seed: int, cases: range, command: Sequence[str], timeout_s: float) -> Iterator[Outcome]:
    """The cases' outcomes. A worker that dies or hangs is a crash of its case; another one takes over after it."""
    crashes = 0
    while cases and crashes < MOST_CRASHES:
        with tempfile.TemporaryFile("w+") as lines:
            argv = [*command, "--seed", str(seed), "--work", str(cases.start), str(cases.stop)]
            try:
                ended = f"worker ended with {subprocess.run(argv, stdout=lines, timeout=timeout_s).returncode}"
            except subprocess.TimeoutExpired:
                ended = f"worker hung for {timeout_s} s"
            lines.seek(0)
            outcomes = [Outcome(**json.loads(line)) for line in lines if line.endswith("\n")]
        yield from outcomes
        cases = cases[len(outcomes) :]
        if cases:
            crashes += 1
            yield Outcome(cases.start, KINDS[cases.start % len(KINDS)], crash=ended)
            cases = cases[1:]
    for case in cases:
        yield Outcome(case, KINDS[case % len(KINDS)], crash=f"not run: {MOST_CRASHES} workers had died")


def run_all(
    seed: int,
    cases: int,
    command: Sequence[str] = (sys.executable, str(Path(__file__).resolve())),
    timeout_s: float = BATCH_TIMEOUT_S,
) -> list[Outcome]:
    """Two workers at a time, each with a share of the cases."""
    step = max(1, -(-cases // (2 if cases < 500 else 4)))
    spans = [range(start, min(start + step, cases)) for start in range(0, cases, step)]
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda span: list(supervise(seed, span, command, timeout_s)), spans)
        return [outcome for outcomes in done for outcome in outcomes]


def report(seed: int, outcomes: Sequence[Outcome]) -> str:
    """The table, and how to run again what went wrong."""
    columns = ("cases", "scored", "quarantined", "refused", "wrong", "crashes")
    lines = [f"{'kind':<46}" + "".join(f"{column:>13}" for column in columns)]

    def line(name: str, chosen: Sequence[Outcome]) -> str:
        sums = (
            len(chosen),
            sum(o.scored for o in chosen),
            sum(o.quarantined for o in chosen),
            sum(o.refused for o in chosen),
            sum(bool(o.wrong) for o in chosen),
            sum(bool(o.crash) for o in chosen),
        )
        return f"{name:<46}" + "".join(f"{number:>13}" for number in sums)

    lines += [line(kind, [o for o in outcomes if o.kind == kind]) for kind in KINDS]
    lines.append(line("all", outcomes))
    for failed in [o for o in outcomes if o.wrong or o.crash][:20]:
        lines.append(f"--seed {seed} --case {failed.case} ({failed.kind}): {failed.wrong or failed.crash}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run only this case, in this process")
    parser.add_argument("--work", type=int, nargs=2, metavar=("START", "STOP"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.seed, range(*asked.work))
        return 0
    outcomes = [run_case(asked.seed, asked.case)] if asked.case is not None else run_all(asked.seed, asked.cases)
    sys.stdout.write(report(asked.seed, outcomes))
    return int(any(outcome.wrong or outcome.crash for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
