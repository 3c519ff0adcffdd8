"""A memory-mapped array through EfficientNet-Lite0 INT8 into a table: `python benchmarks/tensors.py`.

The bound is the engine alone, on one batch that never leaves its place, tuned for itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import batches_of, in_order, joined, open_engine, open_queue, run_over
from benchmarks.harness import OURS, Benchmark, Case, Entrant, Result, Run, Setting, main
from benchmarks.photos import BACKEND, DAY, SIDE, engine_case, first_tags, our_decoder, write_tags
from gpu_runtime.device.host import usable_cores

CORES = usable_cores()


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
        **engine,
        "rows": rows,
        "facts": {
            "input": f"one .npy file, uint8 [{rows}, {SIDE}, {SIDE}, 3], in the page cache",
            "model": "EfficientNet-Lite0, INT8, top 5; the same OpenVINO engine file for all",
            "output": "ours: the Delta table; peers: one Parquet file",
        },
        "days": str(path.parent.parent),
        "data": str(path),
    }


def answers(out: Path, case: Case) -> list[float]:
    return first_tags(out)


@contextmanager
def ours(case: Case, setting: Setting) -> Iterator[Run]:
    from benchmarks.ours import scoring
    from gpu_runtime.datasets.array_folder import ArrayFolderSource
    from gpu_runtime.specs import TensorSpec

    source = ArrayFolderSource(case["days"], (TensorSpec("image", "uint8", (SIDE, SIDE, 3)),))
    with scoring(case, {"backend": BACKEND, **setting}, source) as run:
        yield run


@contextmanager
def plain_loop(case: Case, setting: Setting) -> Iterator[Run]:
    infer = open_engine(case["engine"], BACKEND, setting["threads"])

    def run(out: Path) -> None:
        array = np.load(case["data"], mmap_mode="r")
        found = [infer(np.array(array[start:stop])) for start, stop in batches_of(len(array), setting["batch"])]
        write_tags(out, keys_of(len(array)), joined(found, 0), joined(found, 1))

    yield run


@contextmanager
def queue(case: Case, setting: Setting) -> Iterator[Run]:
    """OpenVINO's own queue of requests, fed straight from the mapped file."""
    requests = open_queue(case["engine"], BACKEND, setting["streams"], setting["threads"])

    def run(out: Path) -> None:
        array = np.load(case["data"], mmap_mode="c")
        ranges = batches_of(len(array), setting["batch"])
        places, keep = in_order(len(ranges))
        for place, (start, stop) in enumerate(ranges):
            requests.submit(array[start:stop], keep(place))
        requests.wait()
        write_tags(out, keys_of(len(array)), joined(places, 0), joined(places, 1))

    yield run


class Mapped:
    """A torch dataset: the mapped file's rows."""

    def __init__(self, path: str) -> None:
        self._rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        return np.array(self._rows[row])


@contextmanager
def data_loader(case: Case, setting: Setting) -> Iterator[Run]:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(Mapped(case["data"]), setting["batch"], num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    infer = open_engine(case["engine"], BACKEND, setting["threads"])

    def run(out: Path) -> None:
        found = [infer(batch.numpy()) for batch in loader]
        write_tags(out, keys_of(case["rows"]), joined(found, 0), joined(found, 1))

    yield run


def keys_of(rows: int) -> list[str]:
    return [f"part-0.npy#{row}" for row in range(rows)]


@contextmanager
def engine_alone(case: Case, setting: Setting) -> Iterator[Run]:
    requests = open_queue(case["engine"], BACKEND, setting["streams"], setting["threads"])
    batch = np.array(np.load(case["data"], mmap_mode="r")[: setting["batch"]])
    yield lambda out: run_over(requests, batch, case["rows"])


def derive(results: Mapping[str, Result], case: Case) -> Mapping[str, float]:
    alone, ours = results["engine alone"].seconds, results[OURS].seconds
    return {
        "engine alone, rows/s": case["rows"] / alone,
        "ours, rows/s": case["rows"] / ours,
        "share of engine alone": alone / ours,
        "share of engine alone at our setting": results["engine alone, our setting"].seconds / ours,
    }


SETTINGS = tuple(
    {"batch": batch, "streams": streams, "threads": CORES // streams}
    for batch, streams in ((8, CORES), (4, CORES), (16, CORES), (32, CORES), (8, 1), (32, 1))
)
SYNCHRONOUS = tuple({"batch": batch, "threads": threads} for threads in (CORES, 1) for batch in (8, 16, 32))

BENCHMARK = Benchmark(
    name="tensors",
    title="A mapped array → EfficientNet-Lite0 INT8 → table",
    prepare=prepare,
    entrants=(
        Entrant(OURS, "score_partition", ours, "ours", SETTINGS),
        Entrant("loop", "one batch after the other", plain_loop, settings=SYNCHRONOUS),
        Entrant("queue", "OpenVINO's queue, by hand", queue, settings=SETTINGS),
        Entrant("data loader", "torch DataLoader, 2 workers", data_loader, settings=SYNCHRONOUS),
        Entrant("engine alone", "OpenVINO's queue on one batch in memory", engine_alone, "part", SETTINGS),
        Entrant("engine alone, our setting", "the same at our setting", engine_alone, "part", SETTINGS[:1], OURS),
    ),
    answers=answers,
    derive=derive,
)

if __name__ == "__main__":
    main(BENCHMARK)
