"""A folder of JPEGs through EfficientNet-Lite0 INT8 into a table: `python benchmarks/images.py --photos DIR`.

Each peer runs with the decoder that it would have by itself and with ours: what the decoder gains and what the pipeline
gains are different things. Without `--photos` the photos are those that the `photo_tags` model lands for itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from benchmarks.engines import batches_of, in_order, joined, open_engine, open_queue, run_over
from benchmarks.harness import OURS, Benchmark, Case, Entrant, Result, Run, Setting, main
from benchmarks.photos import (
    BACKEND,
    CROP,
    DAY,
    DECODERS,
    SIDE,
    engine_case,
    first_values,
    our_decoder,
    photo_files,
    write_tags,
)
from gpu_runtime.device.host import usable_cores

CORES = usable_cores()
USUAL = 1_000


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--photos", type=Path, metavar="DIR", help="JPEGs; the model's own sample where left out")
    parser.add_argument("--count", type=int, default=USUAL, metavar="N", help=f"files; default {USUAL}")


def prepare(work: Path, args: argparse.Namespace) -> Case:
    count, calibration = (24, 8) if args.smoke else (args.count, 100)
    engine, days = engine_case(work / "photos", calibration), work / "images"
    files = photo_files(work, args.photos, days / DAY, count)
    nbytes = sum(Path(file).stat().st_size for file in files)
    return {
        **engine,
        "name": "images" if count == USUAL or args.smoke else f"images-{count}",
        "rows": count,
        "facts": {
            "input": f"{count:,} JPEG files, {nbytes / count / 1024:.0f} KiB each on average, in the page cache",
            "model": "EfficientNet-Lite0, INT8, top 5; the same OpenVINO engine file for all",
            "output": "ours: the Delta table; peers: Parquet",
        },
        "days": str(days),
        "files": files,
    }


def answers(out: Path, case: Case) -> list[float]:
    return first_values(out, "top_index")


@contextmanager
def ours(case: Case, setting: Setting) -> Iterator[Run]:
    from benchmarks.ours import scoring
    from gpu_runtime.datasets.image_folder import ImageFolderSource
    from gpu_runtime.specs import TensorSpec

    source = ImageFolderSource(case["days"], (TensorSpec("image", "uint8", (SIDE, SIDE, 3)),), CROP)
    with scoring(case, {"backend": BACKEND, **setting}, source) as run:
        yield run


@contextmanager
def plain_loop(case: Case, setting: Setting, decoder: str) -> Iterator[Run]:
    infer, decode = open_engine(case["engine"], BACKEND, setting["threads"]), DECODERS[decoder]

    def run(out: Path) -> None:
        found = [
            infer(np.stack([decode(file) for file in case["files"][start:stop]]))
            for start, stop in batches_of(case["rows"], setting["batch"])
        ]
        write_tags(out, case["files"], joined(found, 0), joined(found, 1))

    yield run


class Photos:
    """A torch dataset."""

    def __init__(self, files: list[str], decoder: str) -> None:
        self._files, self._decoder = files, decoder

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> Any:
        return DECODERS[self._decoder](self._files[row])


@contextmanager
def data_loader(case: Case, setting: Setting, decoder: str) -> Iterator[Run]:
    import torch
    from torch.utils.data import DataLoader

    def stacked(rows: list[Any]) -> torch.Tensor:
        return torch.from_numpy(np.stack(rows))

    photos: Any = Photos(case["files"], decoder)
    loader: Any = DataLoader(
        photos, setting["batch"], num_workers=2, persistent_workers=True, collate_fn=stacked, prefetch_factor=2
    )
    infer = open_engine(case["engine"], BACKEND, setting["threads"])

    def run(out: Path) -> None:
        found = [infer(batch.numpy()) for batch in loader]
        write_tags(out, case["files"], joined(found, 0), joined(found, 1))

    yield run


@contextmanager
def threads(case: Case, setting: Setting, decoder: str) -> Iterator[Run]:
    """A pool that decodes, OpenVINO's queue for the engine: what a specialist writes."""
    queue, decode = open_queue(case["engine"], BACKEND, setting["streams"], setting["threads"]), DECODERS[decoder]

    def run(out: Path) -> None:
        ranges = batches_of(case["rows"], setting["batch"])
        places, keep = in_order(len(ranges))
        with ThreadPoolExecutor(CORES) as pool:
            decoded = pool.map(decode, case["files"])
            for place, (start, stop) in enumerate(ranges):
                queue.submit(np.stack([next(decoded) for _ in range(start, stop)]), keep(place))
            queue.wait()
        write_tags(out, case["files"], joined(places, 0), joined(places, 1))

    yield run


@contextmanager
def ray_data(case: Case, setting: Setting, decoder: str) -> Iterator[Run]:
    """One fused actor: it decodes and scores. Two actors on two cores hang more often than not."""
    import ray

    class Tags:
        def __init__(self) -> None:
            self.infer = open_engine(case["engine"], BACKEND, setting["threads"])
            self.pool = ThreadPoolExecutor(CORES)

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            pixels = np.stack(list(self.pool.map(DECODERS[decoder], batch["item"])))
            index, score = self.infer(pixels)
            return {"row_key": batch["item"], "top_index": index, "top_score": score}

    ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False

    def run(out: Path) -> None:
        files = ray.data.from_items(case["files"], override_num_blocks=2)
        tagged = files.map_batches(
            Tags, batch_size=setting["batch"], compute=ray.data.ActorPoolStrategy(size=1), num_cpus=1
        )
        tagged.map_batches(_listed).write_parquet(str(out / "table"))

    yield run
    ray.shutdown()


def _listed(batch: dict[str, Any]) -> dict[str, Any]:
    """Ray's tensor columns as plain lists, which any reader of Parquet understands."""
    return {name: values if values.ndim == 1 else list(values) for name, values in batch.items()}


@contextmanager
def daft_batches(case: Case, setting: Setting, decoder: str) -> Iterator[Run]:
    import daft
    from daft import DataType

    tags = DataType.struct({"index": DataType.list(DataType.int32()), "score": DataType.list(DataType.float32())})

    # With `max_concurrency` it would run in a process of its own, which starts, and loads the engine, in every run.
    @daft.cls(use_process=setting["process"])
    class Tags:
        def __init__(self) -> None:
            self.infer = open_engine(case["engine"], BACKEND, CORES)
            self.pool, self.turn = ThreadPoolExecutor(CORES), Lock()

        @daft.method.batch(return_dtype=tags, batch_size=setting["batch"])  # type: ignore[untyped-decorator]
        def of(self, column: Any) -> Any:
            rows = column.to_pylist()
            pixels = rows if decoder == "daft" else list(self.pool.map(DECODERS[decoder], rows))
            with self.turn:  # Daft may call the one instance from several threads
                found = self.infer(np.stack(pixels))
            return [{"index": i, "score": s} for i, s in zip(found[0].tolist(), found[1].tolist(), strict=True)]

    model = Tags()

    def run(out: Path) -> None:
        frame, source = daft.from_pydict({"row_key": case["files"]}), daft.col("row_key")
        if decoder == "daft":  # it has no crop: the whole picture becomes a square
            source = source.download().decode_image(mode="RGB").resize(SIDE, SIDE)
        tagged = frame.with_column("tags", model.of(source))
        columns = [daft.col("tags").get("index").alias("top_index"), daft.col("tags").get("score").alias("top_score")]
        tagged.select(daft.col("row_key"), *columns).write_parquet(str(out / "table"))

    yield run


@contextmanager
def decode_alone(case: Case, setting: Setting, decoder: str = "ours") -> Iterator[Run]:
    with ThreadPoolExecutor(CORES) as pool:
        yield lambda out: [None for _ in pool.map(DECODERS[decoder], case["files"])]


@contextmanager
def compute_alone(case: Case, setting: Setting) -> Iterator[Run]:
    queue = open_queue(case["engine"], BACKEND, setting["streams"], setting["threads"])
    batch = np.stack([our_decoder(case["files"][i % case["rows"]]) for i in range(setting["batch"])])
    yield lambda out: run_over(queue, batch, case["rows"])


def derive(results: Mapping[str, Result], case: Case) -> Mapping[str, float]:
    """On cores that decoding and computing share: cores ÷ (their CPU-seconds per row), each measured alone."""
    decode, compute = (results[name].cpu_s / case["rows"] for name in ("decode alone", "compute alone"))
    bound, ours = CORES / (decode + compute), case["rows"] / results[OURS].seconds
    return {
        "decode, CPU-ms per row": 1e3 * decode,
        "compute, CPU-ms per row": 1e3 * compute,
        "bound, rows/s": bound,
        "ours, rows/s": ours,
        "share of the bound": ours / bound,
    }


PIPELINED = tuple(
    {"batch": batch, "streams": streams, "threads": CORES // streams}
    for batch, streams in ((8, CORES), (16, CORES), (32, CORES), (8, 1), (16, 1), (32, 1))
)
OUR_SETTINGS = tuple(
    {"batch": batch, "streams": streams, "threads": CORES // streams, "slots": slots}
    for batch, streams, slots in (
        (8, CORES, 3 * CORES),
        (16, CORES, 3 * CORES),
        (32, CORES, 3 * CORES),
        (8, CORES, 6 * CORES),
        (16, 1, 3),
        (32, 1, 3),
    )
)
SYNCHRONOUS = tuple({"batch": batch, "threads": threads} for threads in (CORES, 1) for batch in (8, 16, 32))

DAFT = tuple({"batch": batch, "process": process} for process in (False, True) for batch in (8, 16, 32))


def peer(
    name: str,
    what: str,
    entrant: Callable[..., AbstractContextManager[Run]],
    settings: tuple[Setting, ...],
    *decoders: str,
) -> list[Entrant]:
    return [
        Entrant(
            f"{name}, {decoder}", f"{what}; decoder: {decoder}", partial(entrant, decoder=decoder), "peer", settings
        )
        for decoder in decoders
    ]


BENCHMARK = Benchmark(
    name="images",
    title="JPEGs → EfficientNet-Lite0 INT8 → table",
    prepare=prepare,
    entrants=(
        Entrant(OURS, "score_partition", ours, "ours", OUR_SETTINGS),
        *peer("loop", "a plain loop", plain_loop, SYNCHRONOUS, "pillow", "ours"),
        *peer("data loader", "torch DataLoader, 2 workers", data_loader, SYNCHRONOUS, "pillow", "opencv", "ours"),
        *peer("threads", "a decode pool and OpenVINO's queue", threads, PIPELINED, "pillow", "opencv", "ours"),
        *peer("ray", "Ray Data, one fused actor", ray_data, SYNCHRONOUS, "pillow", "ours"),
        *peer("daft", "a batch function", daft_batches, DAFT, "daft", "ours"),
        Entrant("decode alone", f"our decoder on {CORES} threads", decode_alone, "part"),
        Entrant("compute alone", "the engine at our setting, one batch in memory", compute_alone, "part", like=OURS),
    ),
    answers=answers,
    derive=derive,
    arguments=arguments,
)

if __name__ == "__main__":
    main(BENCHMARK)
