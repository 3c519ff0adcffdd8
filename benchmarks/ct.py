"""CT slices in a memory-mapped array through a small U-Net INT8 into a worklist: `python benchmarks/ct.py`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import unet
from benchmarks.arrays import CORES, array_case, derive, entrants
from benchmarks.builds import int8_case
from benchmarks.harness import Benchmark, Case, main
from benchmarks.photos import DAY, first_values

AIR, BONE = -1024, 3071  # Hounsfield units, as 12 bits hold them


def prepare(work: Path, args: argparse.Namespace) -> Case:
    from gpu_runtime.datasets.array_folder import ArrayFolderSource
    from gpu_runtime.specs import ModelSpec, TensorSpec, TorchSource

    rows, side = (8, 64) if args.smoke else (500, 1024)
    folder = work / "ct"
    path = folder / "days" / DAY / "part-0.npy"
    if not path.exists():
        _write_slices(path, rows, side)
    inputs = (TensorSpec("slice", "int16", (side, side), AIR, BONE),)
    spec = ModelSpec("ct", "1", TorchSource("benchmarks.unet:build"), inputs, ("pixels", "score"), max_batch=4)
    engine = int8_case(spec, ArrayFolderSource(str(folder / "days"), inputs), DAY, 8, folder / "store")
    weights = sum(weight.numel() for weight in unet.build().parameters())
    return {
        **array_case(engine, path),
        "facts": {
            "input": f"one .npy file, int16 [{rows}, {side}, {side}], {path.stat().st_size / 2**20:.0f} MiB, in the "
            "page cache; ours looks at every value's range",
            "model": f"a U-Net of {unet.WIDTHS} channels at its levels, {weights:,} random weights, INT8, which takes "
            "half of FP32's CPU time; the same OpenVINO engine file for all",
            "output": f"pixels and highest score of {unet.CLASSES} classes a slice; ours: the Delta table; peers: one "
            "Parquet file",
        },
    }


def _write_slices(path: Path, rows: int, side: int) -> None:
    path.parent.mkdir(parents=True)
    rng, partial = np.random.default_rng(0), path.with_name("_partial.npy")
    array = np.lib.format.open_memmap(partial, "w+", np.int16, (rows, side, side))
    for row in range(rows):
        array[row] = synthetic_slice(rng, side)
    array.flush()
    partial.replace(path)


def synthetic_slice(rng: np.random.Generator, side: int) -> npt.NDArray[np.int16]:
    """A body of soft tissue in air, with organs and bones as discs: int16 `[side, side]`."""
    import cv2

    noise: npt.NDArray[Any] = rng.normal(0, 60, (side // 16, side // 16)).astype(np.float32)
    pixels = cv2.resize(noise, (side, side), interpolation=cv2.INTER_CUBIC)
    inside = np.zeros((side, side), np.float32)
    cv2.circle(inside, (side // 2, side // 2), int(side * rng.uniform(0.3, 0.45)), 1.0, cv2.FILLED)
    for value in rng.uniform(-800, 1500, 12):
        x, y = (int(place) for place in rng.uniform(0.3, 0.7, 2) * side)
        disc = np.zeros((side, side), np.float32)
        cv2.circle(disc, (x, y), max(1, int(side * rng.uniform(0.01, 0.08))), float(value), cv2.FILLED)
        pixels += disc
    return np.where(inside > 0, pixels, AIR).clip(AIR, BONE).astype(np.int16)


def answers(out: Path, case: Case) -> list[float]:
    return first_values(out, "pixels")


BENCHMARK = Benchmark(
    name="ct",
    title="CT slices → U-Net INT8 → worklist",
    prepare=prepare,
    entrants=entrants(
        tuple({"batch": batch, "streams": CORES, "threads": 1} for batch in (1, 2)),
        tuple({"batch": batch, "threads": CORES} for batch in (1, 2)),
    ),
    answers=answers,
    derive=derive,
    tolerance=64,  # pixels of a million: rounding moves those between two classes
    rounds=3,
    repeats=1,
    tuning_repeats=1,
)

if __name__ == "__main__":
    main(BENCHMARK)
