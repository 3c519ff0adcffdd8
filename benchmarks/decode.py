"""Ways to turn a JPEG into the model's pixels: what each costs and how far it is from the reference:
`python benchmarks/decode.py --photos DIR --labelled DIR`.

The reference takes the centre square of the picture decoded whole and resizes it with Pillow's antialiasing. What a
difference in pixels means to a model is told by its right answers on labelled photos, which stay where they are.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import batches_of
from benchmarks.harness import OURS, Benchmark, Case, Entrant, Result, Run, Setting, main
from benchmarks.photos import CROP, DAY, MAX_BATCH, SIDE, Pixels, opencv_decoder, our_decoder, photo_files, tags_spec
from gpu_runtime.device.host import usable_cores

CORES = usable_cores()
REFERENCE = "pillow whole"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--photos", type=Path, metavar="DIR", help="JPEGs; the model's own sample where left out")
    parser.add_argument("--labelled", type=Path, metavar="DIR", help="JPEGs and labels.csv: file, imagenet_index")
    parser.add_argument("--large", action="store_true", help="the photos four times as wide and high, as decode-large")


def prepare(work: Path, args: argparse.Namespace) -> Case:
    count = 12 if args.smoke else 500
    files = photo_files(work, args.photos, work / "decode" / DAY, count)
    if args.large:
        files = _enlarged(files[: 4 if args.smoke else 25], work / "decode" / "large") * 4
    labels = _labels(args.labelled)[: 8 if args.smoke else None] if args.labelled else []
    kib = sum(Path(file).stat().st_size for file in files) / len(files) / 1024
    return {
        "name": "decode-large" if args.large else "decode",
        "rows": len(files),
        "facts": {
            "input": f"{len(files)} JPEG files, {kib:.0f} KiB each on average, in the page cache",
            "output": f"{SIDE} × {SIDE} pixels, RGB: the centre square, {CROP} of the shorter side",
            "difference": "of 255, to the reference: Pillow, decoded whole, resized with antialiasing",
            **({"top-1": f"EfficientNet-Lite0 FP32 on {len(labels)} labelled photos"} if labels else {}),
        },
        "files": files,
        "differences": {name: _difference(decode, files) for name, decode in DECODERS.items() if name != REFERENCE},
        "top-1": _top_1(labels, work) if labels else {},
    }


def _enlarged(files: Sequence[str], folder: Path) -> list[str]:
    """What a camera would have given of the same scenes, more or less: photos of several megapixels."""
    import cv2

    folder.mkdir(parents=True, exist_ok=True)
    made = [folder / Path(file).name for file in files]
    for file, target in zip(files, made, strict=True):
        large = cv2.resize(cv2.imread(file), None, fx=4, fy=4, interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(target), large, [cv2.IMWRITE_JPEG_QUALITY, 90])
    return [str(path) for path in made]


def _labels(folder: Path) -> list[tuple[str, int]]:
    with (folder / "labels.csv").open(newline="") as rows:
        return [(str(folder.resolve() / row["file"]), int(row["imagenet_index"])) for row in csv.DictReader(rows)]


def _difference(decode: Callable[[str], Pixels], files: Sequence[str]) -> tuple[float, float]:
    """The mean and the largest, over all values of all pictures."""
    found = [np.abs(decode(file).astype(np.int16) - reference(file)) for file in files]
    return float(np.mean([one.mean() for one in found])), float(max(one.max() for one in found))


def _top_1(labels: Sequence[tuple[str, int]], work: Path) -> dict[str, float]:
    """The share of right answers with each decoder."""
    import onnxruntime

    from gpu_runtime.artifacts import ArtifactStore
    from gpu_runtime.export.onnx_export import export_model

    graph = export_model(tags_spec(), ArtifactStore(work / "photos" / "store")).graph()
    session: Any = onnxruntime.InferenceSession(str(graph.path), providers=["CPUExecutionProvider"])

    def right(decode: Callable[[str], Pixels]) -> int:
        found = 0
        for start, stop in batches_of(len(labels), MAX_BATCH):
            (tags,) = session.run(["top_index"], {"image": np.stack([decode(file) for file, _ in labels[start:stop]])})
            found += int((tags[:, 0] == [label for _, label in labels[start:stop]]).sum())
        return found

    return {name: right(decode) / len(labels) for name, decode in DECODERS.items()}


def reference(path: str) -> Pixels:
    from PIL import Image

    with Image.open(path) as image:
        return _box(image.convert("RGB"))


def draft(path: str) -> Pixels:
    """Decoded at the smallest scale of the JPEG that is no smaller than the result."""
    from PIL import Image

    with Image.open(path) as image:
        whole = round(SIDE / CROP)
        image.draft("RGB", (whole, whole))
        return _box(image.convert("RGB"))


def _box(image: Any) -> Pixels:
    from PIL import Image

    side = min(image.size) * CROP
    left, top = ((length - side) / 2 for length in image.size)
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))


DECODERS: Mapping[str, Callable[[str], Pixels]] = {
    OURS: our_decoder,
    REFERENCE: reference,
    "pillow draft": draft,
    "opencv": opencv_decoder,
}
_WHAT = {
    OURS: "simplejpeg at a reduced scale, then OpenCV's areas",
    REFERENCE: "Pillow, whole, then resize(box=)",
    "pillow draft": "Pillow at a reduced scale, then resize(box=)",
    "opencv": "OpenCV, whole, then areas",
}


@contextmanager
def decoder(case: Case, setting: Setting, name: str, threads: int) -> Iterator[Run]:
    from gpu_runtime.datasets.decode import open_decoders

    open_decoders()
    with ThreadPoolExecutor(threads) as pool:
        yield lambda out: [None for _ in pool.map(DECODERS[name], case["files"])]


def derive(results: Mapping[str, Result], case: Case) -> Mapping[str, float]:
    return {
        **{f"{name}: CPU-ms per picture": 1e3 * one.cpu_s / case["rows"] for name, one in results.items()},
        **{f"{name}: mean difference": mean for name, (mean, _) in case["differences"].items()},
        **{f"{name}: largest difference": largest for name, (_, largest) in case["differences"].items()},
        **{f"{name}: top-1": share for name, share in case["top-1"].items()},
    }


BENCHMARK = Benchmark(
    name="decode",
    title="JPEG → pixels",
    prepare=prepare,
    entrants=tuple(
        Entrant(
            name if threads == CORES else f"{name}, {threads} thread",
            f"{_WHAT[name]}; on {threads} thread{'s' if threads > 1 else ''}",
            partial(decoder, name=name, threads=threads),
            "ours" if name == OURS else "peer",
        )
        for name in DECODERS
        for threads in sorted({1, CORES}, reverse=True)
    ),
    answers=lambda out, case: None,
    derive=derive,
    arguments=arguments,
)

if __name__ == "__main__":
    main(BENCHMARK)
