"""One memory-mapped `.npy` file through one OpenVINO engine into a table: the entrants of every benchmark of arrays.

The bound is the engine alone, on one batch that never leaves its place, tuned for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import Array, batches_of, in_order, joined, open_engine, open_queue, run_over
from benchmarks.harness import OURS, Case, Entrant, Result, Run, Setting
from gpu_runtime.device.host import usable_cores

BACKEND = "openvino"
CORES = usable_cores()


def array_case(engine: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the entrants need to know: `engine` as `built_case` gives it, and the file in the day's folder."""
    return {**engine, "rows": len(np.load(path, mmap_mode="r")), "days": str(path.parent.parent), "data": str(path)}


@contextmanager
def ours(case: Case, setting: Setting) -> Iterator[Run]:
    from benchmarks.ours import scoring
    from gpu_runtime.datasets.array_folder import ArrayFolderSource
    from gpu_runtime.specs import tensor_specs

    source = ArrayFolderSource(case["days"], tensor_specs(case["inputs"]))
    with scoring(case, {"backend": BACKEND, **setting}, source) as run:
        yield run


@contextmanager
def plain_loop(case: Case, setting: Setting) -> Iterator[Run]:
    infer = open_engine(case["engine"], BACKEND, setting["threads"])

    def run(out: Path) -> None:
        array = np.load(case["data"], mmap_mode="r")
        found = [infer(np.array(array[start:stop])) for start, stop in batches_of(len(array), setting["batch"])]
        write_outputs(out, case, found)

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
        write_outputs(out, case, places)

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
    yield lambda out: write_outputs(out, case, [infer(batch.numpy()) for batch in loader])


@contextmanager
def engine_alone(case: Case, setting: Setting) -> Iterator[Run]:
    requests = open_queue(case["engine"], BACKEND, setting["streams"], setting["threads"])
    batch = np.array(np.load(case["data"], mmap_mode="r")[: setting["batch"]])
    yield lambda out: run_over(requests, batch, case["rows"])


def write_outputs(out: Path, case: Case, found: list[list[Array]]) -> None:
    """The peers' table: one Parquet file, a column for each output of the engine."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: list(joined(found, place)) for place, name in enumerate(case["outputs"])}
    table = pa.table({"row_key": [f"part-0.npy#{row}" for row in range(case["rows"])], **columns})
    pq.write_table(table, out / "part-0.parquet")


def derive(results: Mapping[str, Result], case: Case) -> Mapping[str, float]:
    alone, ours = results["engine alone"].seconds, results[OURS].seconds
    return {
        "engine alone, rows/s": case["rows"] / alone,
        "ours, rows/s": case["rows"] / ours,
        "share of engine alone": alone / ours,
        "share of engine alone at our setting": results["engine alone, our setting"].seconds / ours,
    }


def entrants(queued: tuple[Setting, ...], synchronous: tuple[Setting, ...]) -> tuple[Entrant, ...]:
    """`queued`: settings with batch, streams and threads of each; `synchronous`: with batch and threads."""
    return (
        Entrant(OURS, "score_partition", ours, "ours", queued),
        Entrant("loop", "one batch after the other", plain_loop, settings=synchronous),
        Entrant("queue", "OpenVINO's queue, by hand", queue, settings=queued),
        Entrant("data loader", "torch DataLoader, 2 workers", data_loader, settings=synchronous),
        Entrant("engine alone", "OpenVINO's queue on one batch in memory", engine_alone, "part", queued),
        Entrant("engine alone, our setting", "the same at our setting", engine_alone, "part", queued[:1], OURS),
    )
