"""A memory-mapped array through EfficientNet-Lite0 INT8 into a table: `python benchmarks/tensors.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.arrays import CORES, array_case, derive, entrants
from benchmarks.harness import Benchmark, Case, main
from benchmarks.photos import DAY, SIDE, engine_case, first_values, our_decoder


def prepare(work: Path, args: argparse.Namespace) -> Case:
    rows, calibration = (64, 8) if args.smoke else (2_000, 100)
    engine, path = engine_case(work / "photos", calibration), work / "tensors" / DAY / "part-0.npy"
    if not path.exists():
        photos = sorted((work / "photos" / "calibration" / DAY).glob("*.jpg"))
        pixels = np.stack([our_decoder(str(photo)) for photo in photos])
        path.parent.mkdir(parents=True)
        array = np.lib.format.open_memmap(path, "w+", np.uint8, (rows, SIDE, SIDE, 3))
        for row in range(rows):
            np.copyto(array[row], pixels[row % len(pixels)])
        array.flush()
    return {
        **array_case(engine, path),
        "facts": {
            "input": f"one .npy file, uint8 [{rows}, {SIDE}, {SIDE}, 3], in the page cache",
            "model": "EfficientNet-Lite0, INT8, top 5; the same OpenVINO engine file for all",
            "output": "ours: the Delta table; peers: one Parquet file",
        },
    }


def answers(out: Path, case: Case) -> list[float]:
    return first_values(out, "top_index")


BENCHMARK = Benchmark(
    name="tensors",
    title="A mapped array → EfficientNet-Lite0 INT8 → table",
    prepare=prepare,
    entrants=entrants(
        tuple(
            {"batch": batch, "streams": streams, "threads": CORES // streams}
            for batch, streams in ((8, CORES), (4, CORES), (16, CORES), (32, CORES), (8, 1), (32, 1))
        ),
        tuple({"batch": batch, "threads": threads} for threads in (CORES, 1) for batch in (8, 16, 32)),
    ),
    answers=answers,
    derive=derive,
    rounds=3,
    repeats=2,
    tuning_repeats=1,
)

if __name__ == "__main__":
    main(BENCHMARK)
