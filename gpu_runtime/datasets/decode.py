"""Image bytes to pixels, and the pool of threads that does it beside the engine."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu_runtime.datasets.partition import Piece, RowFailure
from gpu_runtime.errors import RowError

MAX_PIXELS = 64_000_000
"""Larger pictures are refused unopened: a few kilobytes can unpack to gigabytes."""


def decode_image(path: Path, target: npt.NDArray[np.uint8], crop_fraction: float) -> None:
    """Decode into `target` `[H, W, 3]`: centre square of the upright picture, resized bilinearly, RGB.

    A JPEG is decoded at a reduced scale when the target is small. Raises `RowError` for whatever is not a
    whole, sane picture; half a file never becomes half a grey picture.
    """
    from PIL import Image, ImageOps

    height, width = target.shape[:2]
    try:
        if not path.stat().st_size:
            raise RowError("decode", "the file is empty")
        with Image.open(path) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise RowError("decode", f"more than {MAX_PIXELS} pixels")
            if opened.format == "JPEG":
                opened.draft("RGB", (int(width / crop_fraction), int(height / crop_fraction)))
            image: Any = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16"):  # convert() would clip all but the darkest to white
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            elif image.mode in ("I", "F"):
                raise RowError("decode", "pixels of 32 bits, whose range is not known")
            if image.mode != "RGB":
                image = image.convert("RGB")
            side = min(image.width, image.height) * crop_fraction
            left, top = (image.width - side) / 2, (image.height - side) / 2
            box = (left, top, left + side, top + side)
            image = image.resize((width, height), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
            target[:] = np.asarray(image)
    except (RowError, MemoryError):  # no memory is the machine's fault, not the row's
        raise
    except FileNotFoundError as error:
        raise RowError("decode", "the file vanished") from error
    except Exception as error:  # Pillow's decoders raise OSError, ValueError, SyntaxError, struct.error, …
        raise RowError("decode", "not a whole picture") from error


class DecodePool:
    """Threads that fill slots. Decoders release the GIL, so they run beside each other and the engine."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self._lock = threading.Lock()
        self.busy_s = 0.0

    def submit(self, piece: Piece) -> Future[list[RowFailure]]:
        return self._pool.submit(self._timed, piece)

    def _timed(self, piece: Piece) -> list[RowFailure]:
        started = time.perf_counter()
        try:
            return piece()
        finally:
            with self._lock:
                self.busy_s += time.perf_counter() - started

    def close(self) -> None:
        """Drop what has not started, wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)
