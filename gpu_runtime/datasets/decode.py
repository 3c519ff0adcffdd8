"""Image bytes to pixels."""

from __future__ import annotations

import io
import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.errors import RowError, SpecError

MAX_PIXELS = 64_000_000
"""Larger pictures are refused undecoded: a few kilobytes can unpack to gigabytes."""

MAX_NBYTES = 8 * MAX_PIXELS
"""Larger files are refused unread: no accepted format needs more than 8 bytes a pixel."""

MAX_SCANS = 1_000
"""A JPEG of more scans is refused undecoded: a scan of 100 bytes can cost a pass over all the pixels. A progressive
picture has about ten; the mark is found by chance once in 64 KiB of what may follow it, such as a film."""

OVERSAMPLING = 2.0
"""A JPEG's own scaling is coarse: straight to the target's size it moves a value by 4 to 6 of 255 on average, from
twice as large by 1 to 2."""

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
    """Decode into `target` `[H, W, 3]`: the centre square of the upright picture, to half a pixel, resized by averaging
    what falls on each pixel, RGB. That is within 2.5 of 255 on average of the picture decoded whole and resized by
    Pillow with antialiasing, and all but one value in a hundred are within 16.

    Transparency is dropped, of an animation the first picture is taken. A JPEG much larger than the target is decoded
    at a reduced scale, at least `OVERSAMPLING` times the target. Raises `RowError` for whatever is not a whole, sane
    picture: a JPEG that its decoder has to guess at counts as none, and a file that was cut short never becomes half a
    grey one. What was overwritten in the middle of a WebP or a BMP may pass, and some of it in a JPEG, if it still
    decodes: they carry no checksum.
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
            if kind == "JPEG" and data.count(b"\xff\xda") > MAX_SCANS:
                raise RowError("decode", f"more than {MAX_SCANS} scans")
            turn = _TRANSPOSED.get(_orientation_of(opened))
            if kind == "JPEG" and opened.mode in ("RGB", "L"):
                pixels = _jpeg_pixels(data, math.ceil(OVERSAMPLING * max(width, height) / crop_fraction))
            else:
                pixels = _pillow_pixels(opened)
        if turn is not None:
            pixels = np.asarray(Image.fromarray(pixels).transpose(Image.Transpose[turn]))
        _centre_square(pixels, target, crop_fraction)
    except (RowError, MemoryError, ImportError):  # the machine is at fault, not the row
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit is higher, but it looks first
        raise RowError("decode", _too_many_pixels()) from error
    except Exception as error:  # Pillow's decoders raise OSError, ValueError, SyntaxError, struct.error, …
        raise RowError("decode", _NOT_WHOLE) from error


def _jpeg_pixels(data: bytes, side: int) -> npt.NDArray[np.uint8]:
    """Upright or not, at the smallest scale whose shorter side is no less than `side`. Pillow goes on where the
    decoder warns that the data are damaged; this does not."""
    import simplejpeg

    return simplejpeg.decode_jpeg(  # type: ignore[no-any-return]
        data, "RGB", fastdct=False, fastupsample=False, min_height=side, min_width=side, strict=True
    )


def _pillow_pixels(opened: Any) -> npt.NDArray[np.uint8]:
    from PIL import Image

    opened.load()
    image = opened
    if image.mode.startswith("I;16"):  # convert() would clip all but the darkest to white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _centre_square(pixels: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], crop_fraction: float) -> None:
    import cv2

    shorter = min(pixels.shape[:2])
    side = shorter * crop_fraction
    # As much left over on one side as on the other, so that the centre stays where it is: no shift, at the cost of
    # half a pixel at the edges.
    top, left = (min(max(0, round((n - side) / 2)), (n - 1) // 2) for n in pixels.shape[:2])  # a pixel at least
    # Averaging areas is for making smaller; it would leave blocks behind where a picture gets larger.
    how = cv2.INTER_AREA if side >= max(target.shape[:2]) else cv2.INTER_LINEAR
    square = pixels[top : pixels.shape[0] - top, left : pixels.shape[1] - left]
    made = cv2.resize(square, (target.shape[1], target.shape[0]), dst=target, interpolation=how)
    if not np.may_share_memory(made, target):  # rows with gaps between them: OpenCV made an array of its own
        target[:] = made


def open_decoders() -> None:
    """Before the first picture: every library is there, or `SpecError`, and OpenCV keeps to one thread instead of
    cutting each picture into pieces for all cores."""
    try:
        import cv2
        import PIL
        import simplejpeg
    except ImportError as error:  # no picture is to blame
        raise SpecError(
            "a library that decodes pictures is missing",
            stage="dataset",
            item=str(error.name),
            expected=", ".join(("opencv-python-headless", "pillow", "simplejpeg")),
            got="not installed",
            next_step="pip install 'inference-dags[images]'",
        ) from error
    assert PIL and simplejpeg
    cv2.setNumThreads(1)


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
