"""Photos, the INT8 engine of EfficientNet-Lite0 that all entrants of the photo benchmarks share, and ways to decode."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.builds import int8_case

if TYPE_CHECKING:
    from gpu_runtime.specs import ModelSpec

DAY, SIDE, CROP = "2026-01-01", 224, 0.875
BACKEND = "openvino"
MAX_BATCH = 32
Pixels = npt.NDArray[np.uint8]  # [224, 224, 3], RGB


def tags_spec() -> ModelSpec:
    """That of the `photo_tags` model of this project."""
    from gpu_runtime.specs import ImageNormalization, ModelSpec, TensorSpec, TopK, TorchSource

    return ModelSpec(
        "photo_tags",
        "1",
        TorchSource("inference_dags.defs.photo_tags.model:build"),
        (TensorSpec("image", "uint8", (SIDE, SIDE, 3)),),
        ("logits",),
        {"image": ImageNormalization((127.0,) * 3, (128.0,) * 3)},
        TopK(5),
        MAX_BATCH,
    )


def engine_case(work: Path, calibration_rows: int) -> dict[str, Any]:
    """Its engine as this project makes it: exported, calibrated, quantized, built."""
    from gpu_runtime.datasets.image_folder import ImageFolderSource

    spec, days = tags_spec(), work / "calibration"
    landed(days / DAY, calibration_rows)
    return int8_case(spec, ImageFolderSource(str(days), spec.inputs, CROP), DAY, calibration_rows, work / "store")


def landed(folder: Path, photos: int) -> None:
    from inference_dags.defs.photo_tags.land import land

    if len(list(folder.glob("*.jpg"))) < photos:
        land(DAY, folder, photos)


def photo_files(work: Path, photos: Path | None, folder: Path, count: int) -> list[str]:
    """`count` files in `folder` with names of their own, copied in turn from the JPEGs in `photos`, else from those
    that the `photo_tags` model lands for itself."""
    if photos is None:
        photos = work / "photos" / "landed"
        landed(photos, min(count, 50))
    originals = sorted(path for path in photos.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    if not originals:
        raise FileNotFoundError("the folder given by --photos holds no JPEG")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number in range(count):
        shutil.copyfile(originals[number % len(originals)], folder / f"{number:05}.jpg")
    return sorted(str(path) for path in folder.iterdir())


def our_decoder(path: str) -> Pixels:
    from gpu_runtime.datasets.decode import decode_image

    pixels = np.empty((SIDE, SIDE, 3), np.uint8)
    decode_image(Path(path), pixels, CROP)
    return pixels


def pillow_decoder(path: str) -> Pixels:
    """What most people write: the shorter side to 256, then the middle 224 × 224."""
    from PIL import Image

    with Image.open(path) as image:
        scale = round(SIDE / CROP) / min(image.size)
        small = image.convert("RGB").resize(
            (round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR
        )
    left, top = (small.width - SIDE) // 2, (small.height - SIDE) // 2
    return np.asarray(small.crop((left, top, left + SIDE, top + SIDE)))


def opencv_decoder(path: str) -> Pixels:
    import cv2

    cv2.setNumThreads(1)
    image = cv2.imread(path, cv2.IMREAD_COLOR_RGB)
    if image is None:
        raise OSError("not a picture")
    height, width = image.shape[:2]
    side = int(min(height, width) * CROP)
    top, left = (height - side) // 2, (width - side) // 2
    cut = image[top : top + side, left : left + side]
    return cv2.resize(cut, (SIDE, SIDE), interpolation=cv2.INTER_AREA)  # type: ignore[no-any-return]


DECODERS: Mapping[str, Callable[[str], Pixels]] = {
    "ours": our_decoder,
    "pillow": pillow_decoder,
    "opencv": opencv_decoder,
}


def write_tags(out: Path, keys: list[Any], top_index: npt.NDArray[Any], top_score: npt.NDArray[Any]) -> None:
    """The peers' table: one Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"row_key": keys, "top_index": list(top_index), "top_score": list(top_score)})
    pq.write_table(table, out / "part-0.parquet")


def first_values(out: Path, column: str) -> list[float]:
    """The first value of each row's list in `column`, in the order of the keys, from whichever table lies there."""
    import pyarrow.parquet as pq

    found: dict[str, float] = {}
    for path in out.rglob("*.parquet"):
        columns = pq.ParquetFile(path).read()
        if column in columns.column_names:
            keys = [str(key).rpartition("/")[2] for key in columns.column("row_key").to_pylist()]
            found |= {key: values[0] for key, values in zip(keys, columns.column(column).to_pylist(), strict=True)}
    return [found[key] for key in sorted(found)]
