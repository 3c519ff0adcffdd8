"""The same pictures as one array and as ten thousand files of one: `python benchmarks/files.py`.

Beside `scale.py`, whose network hides nothing of what a file costs: what is left of it beside an engine that works.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks import arrays
from benchmarks.harness import OURS, Benchmark, Case, Entrant, Result, Run, Setting, main
from benchmarks.photos import DAY, SIDE, engine_case, our_decoder

GOAL = 0.7
MANY = "ours, many files"
OUR_SETTING = ({"batch": 16, "streams": arrays.CORES, "threads": 1, "slots": 3 * arrays.CORES},)


def prepare(work: Path, args: argparse.Namespace) -> Case:
    rows, calibration = (64, 8) if args.smoke else (10_000, 100)
    engine, folder = engine_case(work / "photos", calibration), work / "files"
    one, many = folder / "one" / DAY / "part-0.npy", folder / "many" / DAY
    if not one.exists():
        _write_pictures(sorted((work / "photos" / "calibration" / DAY).glob("*.jpg")), rows, one, many)
    return {
        **arrays.array_case(engine, one),
        "many": str(many.parent),
        "facts": {
            "input": f"{rows:,} pictures, uint8 [{SIDE}, {SIDE}, 3] each, as one .npy file and as {rows:,} files of "
            "one, in the page cache",
            "model": "EfficientNet-Lite0, INT8, top 5; the same OpenVINO engine file for both",
            "work": "a day is listed, scored and published",
        },
    }


def _write_pictures(photos: list[Path], rows: int, one: Path, many: Path) -> None:
    pixels = [our_decoder(str(photo)) for photo in photos]
    one.parent.mkdir(parents=True)
    many.mkdir(parents=True, exist_ok=True)
    partial = one.with_name("_partial.npy")
    array = np.lib.format.open_memmap(partial, "w+", np.uint8, (rows, SIDE, SIDE, 3))
    for row in range(rows):
        array[row] = pixels[row % len(pixels)]
        np.save(many / f"{row:05}.npy", array[row : row + 1])
    array.flush()
    partial.replace(one)


@contextmanager
def many_files(case: Case, setting: Setting) -> Iterator[Run]:
    with arrays.ours({**case, "days": case["many"]}, setting) as run:
        yield run


def answers(out: Path, case: Case) -> list[float]:
    """The most likely class of each picture, whichever file it lies in."""
    from gpu_runtime.predictions.delta_table import PredictionTable

    day = PredictionTable(out / "table").read_day(DAY)
    many = day["source_file"].nunique() > 1
    ordered = day.sort_values("source_file" if many else "source_position")
    return [float(classes[0]) for classes in ordered["top_index"]]


def derive(results: Mapping[str, Result], case: Case) -> Mapping[str, float]:
    one, many = results[OURS].seconds, results[MANY].seconds
    return {
        f"{case['rows']:,} files ÷ one file, goal {GOAL}": one / many,
        "one file, rows/s": case["rows"] / one,
        "many files, rows/s": case["rows"] / many,
        "a file more, CPU-ms": 1e3 * (results[MANY].cpu_s - results[OURS].cpu_s) / case["rows"],
    }


BENCHMARK = Benchmark(
    name="files",
    title="Pictures in one array and in many files → EfficientNet-Lite0 INT8 → table",
    prepare=prepare,
    entrants=(
        Entrant(OURS, "one file", arrays.ours, "ours", OUR_SETTING),
        Entrant(MANY, "a file for each picture", many_files, "ours", OUR_SETTING),
    ),
    answers=answers,
    derive=derive,
    rounds=2,
    repeats=1,
    tuning_repeats=1,
)

if __name__ == "__main__":
    main(BENCHMARK)
