"""Stands in for a camera feed: writes one day's photos, cut from pictures that scikit-image's wheel ships."""

from __future__ import annotations

import datetime
import hashlib
import os
import random
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cv2.typing import MatLike

# Only files inside the wheel (skimage.data would download the others), whose authors ask for nothing in
# return, with a subject that has an ImageNet class. Licences as stated in skimage/data/_fetchers.py.
SOURCES = {
    "camera.png": "CC0 (Lav Varshney)",  # grey
    "chelsea.png": "CC0 (Stefan van der Walt)",
    "coffee.png": "CC0 (Rachel Michetti)",
    "rocket.jpg": "public domain (SpaceX)",
}
CUT = (0.6, 1.0)  # part of each side that a cut keeps
SHORT_SIDE = (240, 500)  # pixels
QUALITY = (80, 95)  # JPEG


def land(day: str, folder: Path, photos: int = 300) -> None:
    """Writes `0000.jpg`, `0001.jpg`, ... into `folder`: the same bytes for the same day, others for another.

    A photo has its final name only once it is whole, so a crash leaves none cut short; landing the day again
    touches no file that is the same. Raises ValueError unless `day` is an ISO date such as 2026-01-31.
    """
    import cv2

    draw = random.Random(_seed(day))
    sources = _sources()
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(photos):
        image = _cut(draw.choice(sources), draw)
        ok, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, draw.randint(*QUALITY)])
        if not ok:
            raise RuntimeError(f"landing {day}: could not encode photo {number}, {image.dtype} {image.shape}")
        photo = folder / f"{number:04d}.jpg"
        if photo.exists() and photo.read_bytes() == jpeg.tobytes():
            continue  # landed already: touching it would make the day look changed
        partial = folder / f".{number:04d}.partial"
        partial.write_bytes(jpeg.tobytes())
        os.replace(partial, photo)


def _seed(day: str) -> int:
    try:
        if datetime.date.fromisoformat(day).isoformat() != day:
            raise ValueError("not in the extended form")  # 20260131 and 2026-W05-6 name days too
    except ValueError as error:
        raise ValueError(f"landing photos: expected a day such as 2026-01-31, got {day!r}") from error
    return int.from_bytes(hashlib.sha256(day.encode()).digest())


@lru_cache(maxsize=1)
def _sources() -> tuple[MatLike, ...]:  # each uint8 [H, W, 3], BGR
    import cv2

    folder = Path(str(files("skimage"))) / "data"
    images = [cv2.imread(str(folder / name), cv2.IMREAD_COLOR) for name in SOURCES]
    readable = tuple(image for image in images if image is not None)
    if len(readable) < len(SOURCES):
        raise FileNotFoundError(f"landing photos: expected {list(SOURCES)} in {folder}; install scikit-image")
    return readable


def _cut(source: MatLike, draw: random.Random) -> MatLike:
    """One rectangle of `source`, perhaps mirrored, at a drawn size: uint8 [H, W, 3]."""
    import cv2

    sides = [round(side * draw.uniform(*CUT)) for side in source.shape[:2]]
    top, left = (draw.randint(0, whole - side) for whole, side in zip(source.shape[:2], sides, strict=True))
    image = source[top : top + sides[0], left : left + sides[1]]
    if draw.random() < 0.5:
        image = image[:, ::-1]
    scale = draw.randint(*SHORT_SIDE) / min(sides)
    size = tuple(round(side * scale) for side in reversed(sides))  # OpenCV wants (width, height)
    return cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
