"""Image bytes to pixels."""

from __future__ import annotations

import io
import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.errors import RowError

MAX_PIXELS = 64_000_000
"""Larger pictures are refused undecoded: a few kilobytes can unpack to gigabytes."""

MAX_NBYTES = 8 * MAX_PIXELS
"""Larger files are refused unread: no accepted format needs more than 8 bytes a pixel."""

MAX_SCANS = 1_000
"""A JPEG of more scans is refused undecoded: a scan of 100 bytes can cost a pass over all the pixels. A progressive
picture has about ten; the mark is found by chance once in 64 KiB of what may follow it, such as a film."""

_NOT_WHOLE = "not a whole picture"
_TRANSPOSED = {  # EXIF orientation → the transposition that turns the picture upright; 1 is upright
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def decode_image(path: Path, target: npt.NDArray[np.uint8], crop_fraction: float) -> None:
    """Decode into `target` `[H, W, 3]`: centre square of the upright picture, resized bilinearly, RGB.

    Transparency is dropped, of an animation the first picture is taken, and a JPEG is decoded at a reduced scale
    when the target is small. Raises `RowError` for whatever is not a whole, sane picture; a file that was
    cut short never becomes half a grey one. What was overwritten in the middle of a JPEG or a WebP may pass: they carry
    no checksum.
    """
    from PIL import Image

    height, width = target.shape[:2]
    data = _bytes_of(path)
    # What a file holds is told by its first bytes. Only these decoders are tried: Pillow knows forty more, one of
    # which starts a program.
    kind = _format_of(data)
    try:
        if kind == "WEBP":  # whose decoder takes memory for the whole canvas when the file is opened
            _check_pixels(*_webp_size(data))
        # From memory: Pillow would map some files, and one that is cut short meanwhile would end the process.
        with Image.open(io.BytesIO(data), formats=(kind,)) as opened:
            _check_pixels(opened.width, opened.height)
            if kind == "PNG":  # loading does not look at the checksums of the pixels' chunks
                Image.open(io.BytesIO(data), formats=(kind,)).verify()
            if kind == "JPEG":
                if data.count(b"\xff\xda") > MAX_SCANS:
                    raise RowError("decode", f"more than {MAX_SCANS} scans")
                side = math.ceil(max(width, height) / crop_fraction)
                opened.draft("RGB", (side, side))
            opened.load()
            image: Any = opened
            turn = _TRANSPOSED.get(_orientation_of(opened))
            if turn is not None:
                image = image.transpose(Image.Transpose[turn])
            if image.mode.startswith("I;16"):  # convert() would clip all but the darkest to white
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode != "RGB":
                image = image.convert("RGB")
            side = min(image.width, image.height) * crop_fraction
            left, top = (image.width - side) / 2, (image.height - side) / 2
            box = (left, top, left + side, top + side)
            image = image.resize((width, height), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
            target[:] = np.asarray(image)
    except (RowError, MemoryError):  # no memory is the machine's fault, not the row's
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit is higher, but it looks first
        raise RowError("decode", _too_many_pixels()) from error
    except Exception as error:  # Pillow's decoders raise OSError, ValueError, SyntaxError, struct.error, …
        raise RowError("decode", _NOT_WHOLE) from error


def _bytes_of(path: Path) -> bytes:
    try:
        found = path.stat()
        nbytes = found.st_size
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
            raise RowError("decode", "not a regular file")
        if not nbytes:
            raise RowError("decode", "the file is empty")
        if nbytes > MAX_NBYTES:
            raise RowError("decode", f"more than {MAX_NBYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise RowError("decode", "the file vanished") from error
    except OSError as error:
        raise RowError("decode", "the file cannot be read") from error


def _format_of(data: bytes) -> str:
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith(b"BM"):
        return "BMP"
    raise RowError("decode", "not a JPEG, PNG, WebP or BMP picture")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height of the canvas, as the first chunk tells them (RFC 9649, sections 2.5 to 2.7)."""
    chunk, body = data[12:16], data[20:30]
    if len(body) == 10 and chunk == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if len(body) == 10 and chunk == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if len(body) == 10 and chunk == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    raise RowError("decode", _NOT_WHOLE)


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise RowError("decode", _too_many_pixels())


def _too_many_pixels() -> str:
    return f"more than {MAX_PIXELS} pixels"


def _orientation_of(opened: Any) -> Any:
    """EXIF's orientation. Damaged EXIF data turn nothing, as in any viewer: many a camera writes some."""
    try:
        return opened.getexif().get(0x0112)
    except Exception:
        return 1
