"""Photos, the INT8 engine of EfficientNet-Lite0 that all entrants of the photo benchmarks share, and ways to decode."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DAY, SIDE, CROP = "2026-01-01", 224, 0.875
BACKEND = "openvino"
MAX_BATCH = 32
Pixels = npt.NDArray[np.uint8]  # [224, 224, 3], RGB


def engine_case(work: Path, calibration_rows: int) -> dict[str, Any]:
    """The engine as the `photo_tags` model of this project makes it: exported, calibrated, quantized, built."""
    from gpu_runtime.artifacts import ArtifactStore
    from gpu_runtime.backends.engine_set import build_engines
    from gpu_runtime.datasets.image_folder import ImageFolderSource
    from gpu_runtime.datasets.sample import sample_rows
    from gpu_runtime.device.host import cpu_class
    from gpu_runtime.export.onnx_export import export_model
    from gpu_runtime.quantize.calibration import calibrate
    from gpu_runtime.quantize.int8 import Int8Recipe, quantize
    from gpu_runtime.specs import ImageNormalization, ModelSpec, TensorSpec, TopK, TorchSource

    inputs = (TensorSpec("image", "uint8", (SIDE, SIDE, 3)),)
    spec = ModelSpec(
        "photo_tags",
        "1",
        TorchSource("inference_dags.defs.photo_tags.model:build"),
        inputs,
        ("logits",),
        {"image": ImageNormalization((127.0,) * 3, (128.0,) * 3)},
        TopK(5),
        MAX_BATCH,
    )
    days = work / "calibration"
    landed(days / DAY, calibration_rows)
    store = ArtifactStore(work / "store")
    exported = export_model(spec, store)
    sample = sample_rows(ImageFolderSource(str(days), inputs, CROP), [DAY], calibration_rows, 0)
    ranges = calibrate(exported, sample.batches(16), sample.digest, store)
    graphs = quantize(exported, ranges, (Int8Recipe("vnni"),), store).graphs()
    engines = build_engines("photo_tags", graphs, [BACKEND], cpu_class(), store)
    ((key, file),) = engines.engines.items()
    return {
        "store": str(store.root),
        "engine_set": engines.digest,
        "engine_keys": {BACKEND: key},
        "engine": str(file.path),
    }


def landed(folder: Path, photos: int) -> None:
    from inference_dags.defs.photo_tags.land import land

    if len(list(folder.glob("*.jpg"))) < photos:
        land(DAY, folder, photos)


def repeat_photos(photos: Path, folder: Path, count: int) -> None:
    """`count` files with names of their own, copied in turn from the JPEGs in `photos`."""
    originals = sorted(path for path in photos.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    if not originals:
        raise FileNotFoundError("the folder given by --photos holds no JPEG")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number in range(count):
        shutil.copyfile(originals[number % len(originals)], folder / f"{number:05}.jpg")


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


def first_tags(out: Path) -> list[float]:
    """Each row's first tag, in the order of the keys, from whichever table lies there."""
    import pyarrow.parquet as pq

    found: dict[str, int] = {}
    for path in out.rglob("*.parquet"):
        columns = pq.ParquetFile(path).read()
        if "top_index" in columns.column_names:
            keys = [str(key).rpartition("/")[2] for key in columns.column("row_key").to_pylist()]
            found |= {key: tags[0] for key, tags in zip(keys, columns.column("top_index").to_pylist(), strict=True)}
    return [found[key] for key in sorted(found)]
