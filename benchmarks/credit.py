"""A million rows of a Parquet file through a small network into a Delta table: `python benchmarks/credit.py`."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from benchmarks.engines import batches_of, in_order, joined, open_engine, open_queue, run_over
from benchmarks.harness import OURS, Benchmark, Case, Entrant, Result, Run, Setting, main
from gpu_runtime.device.host import usable_cores

DAY = "2026-01-01"
FEATURES = [f"f{i:02}" for i in range(32)]
LAYERS = (32, 128, 64, 1)
CORES = usable_cores()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fp32", action="store_true", help="the engines in FP32 instead of INT8, as credit-fp32")


def prepare(work: Path, args: argparse.Namespace) -> Case:
    from gpu_runtime.artifacts import ArtifactStore
    from gpu_runtime.backends.engine_set import build_engines
    from gpu_runtime.device.host import cpu_class
    from gpu_runtime.export.onnx_export import export_model
    from gpu_runtime.quantize.calibration import calibrate
    from gpu_runtime.quantize.int8 import Int8Recipe, quantize
    from gpu_runtime.specs import ModelSpec, OnnxSource, TensorSpec

    rows = 20_000 if args.smoke else 1_000_000
    folder = work / "credit"
    data, model = folder / "days" / DAY / "part-0.parquet", folder / "mlp.onnx"
    if not data.exists():
        _write_rows(data, rows)
    write_mlp(model, LAYERS)
    store = ArtifactStore(folder / "store")
    inputs = (TensorSpec("x", "float32", (32,)),)
    exported = export_model(
        ModelSpec("credit", "1", OnnxSource(str(model)), inputs, ("score",), max_batch=65_536), store
    )
    graph = exported.graph()
    if not args.fp32:
        ranges = calibrate(exported, [{"x": _values(2_000)}], "seeded", store)
        (graph,) = quantize(exported, ranges, (Int8Recipe("vnni"),), store).graphs()
    engines = build_engines("credit", [graph], ["openvino", "onnxruntime"], cpu_class(), store)
    keys = {file.backend: key for key, file in engines.engines.items()}
    return {
        "name": "credit-fp32" if args.fp32 else "credit",
        "rows": rows,
        "facts": {
            "input": f"one Parquet file, {rows:,} rows × 32 float32, snappy, {data.stat().st_size / 2**20:.0f} MiB",
            "model": f"32-128-64-1, {'FP32' if args.fp32 else 'INT8'}; the same engine files for all",
            "output": "a Delta table; ours has each row's key, file, position and provenance, the peers' position only",
        },
        "days": str(folder / "days"),
        "data": str(data),
        "store": str(store.root),
        "engine_set": engines.digest,
        "engine_keys": keys,
        "engines": {backend: str(engines.engines[key].path) for backend, key in keys.items()},
    }


def _write_rows(path: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(dict(zip(FEATURES, np.ascontiguousarray(_values(rows).T), strict=True)))
    partial = path.with_name(".partial")
    pq.write_table(table, partial, row_group_size=131_072)
    partial.replace(path)


def _values(rows: int) -> Any:
    """Counts, ages, amounts: they repeat, as in such tables, so that a column is a dictionary and small numbers."""
    return np.random.default_rng(0).integers(0, 12, (rows, len(FEATURES))).astype(np.float32)


def write_mlp(path: Path, layers: Sequence[int]) -> None:
    """`x` (float32 `[n, layers[0]]`) to `score` (float32 `[n]`), with seeded weights."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(1)
    nodes, weights, x = [], [], "x"
    for i, (wide, narrow) in enumerate(itertools.pairwise(layers)):
        values = (rng.normal(size=(wide, narrow)) / np.sqrt(wide) / (6 if i == 0 else 1)).astype(np.float32)
        weights += [
            numpy_helper.from_array(values, f"w{i}"),
            numpy_helper.from_array(np.zeros(narrow, np.float32), f"b{i}"),
        ]
        last = i == len(layers) - 2
        nodes.append(helper.make_node("Gemm", [x, f"w{i}", f"b{i}"], [f"g{i}"]))
        x = f"a{i}"
        nodes.append(helper.make_node("Sigmoid" if last else "Relu", [f"g{i}"], [x]))
    weights.append(numpy_helper.from_array(np.array([1]), "axes"))
    nodes.append(helper.make_node("Squeeze", [x, "axes"], ["score"]))  # [n, 1] → [n]: a column of numbers, not of lists
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", layers[0]])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["n"])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))


def answers(out: Path, case: Case) -> Sequence[float]:
    """Every 997th row's score."""
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

    root = next(path.parent for path in sorted(out.rglob("_delta_log")) if path.parent.name in ("predictions", "table"))
    columns: dict[str, list[Any]] = {"row": [], "score": []}
    for uri in DeltaTable(str(root)).file_uris():
        read = pq.ParquetFile(uri.removeprefix("file://")).read()
        position = "row" if "row" in read.column_names else "source_position"
        columns["row"].append(read.column(position).to_numpy())
        columns["score"].append(read.column("score").to_numpy())
    row, score = (np.concatenate(columns[name]) for name in ("row", "score"))
    if sorted(row) != list(range(case["rows"])):
        raise RuntimeError(f"{len(row)} rows written, {len(set(row))} of them different, of {case['rows']}")
    return score[np.argsort(row)][::997].tolist()  # type: ignore[no-any-return]


def engine_of(case: Case, setting: Setting) -> Any:
    return open_engine(case["engines"][setting["backend"]], setting["backend"], CORES)


@contextmanager
def ours(case: Case, setting: Setting) -> Iterator[Run]:
    from benchmarks.ours import scoring
    from gpu_runtime.datasets.parquet import ParquetSource
    from gpu_runtime.specs import TensorSpec

    inputs = (TensorSpec("x", "float32", (32,)),)
    source = ParquetSource(case["days"], inputs, {"x": tuple(FEATURES)})
    with scoring(case, setting, source) as run:
        yield run


@contextmanager
def pandas_loop(case: Case, setting: Setting) -> Iterator[Run]:
    import pandas as pd
    from deltalake import write_deltalake

    infer = engine_of(case, setting)

    def run(out: Path) -> None:
        frame = pd.read_parquet(case["data"])
        scores = [
            infer(np.ascontiguousarray(frame.iloc[start:stop].to_numpy()))[0]
            for start, stop in batches_of(len(frame), setting["batch"])
        ]
        write_deltalake(
            str(out / "table"), pd.DataFrame({"row": np.arange(len(frame)), "score": np.concatenate(scores)})
        )

    yield run


@contextmanager
def pyarrow_batches(case: Case, setting: Setting) -> Iterator[Run]:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from deltalake import write_deltalake

    infer, schema = engine_of(case, setting), pa.schema([("row", pa.int64()), ("score", pa.float32())])

    def run(out: Path) -> None:
        def scored() -> Iterator[Any]:
            start = 0
            for batch in pq.ParquetFile(case["data"]).iter_batches(setting["batch"]):
                scores = infer(np.stack([column.to_numpy() for column in batch.columns], axis=1))[0]
                yield pa.record_batch([np.arange(start, start + len(scores)), scores], schema=schema)
                start += len(scores)

        write_deltalake(str(out / "table"), pa.RecordBatchReader.from_batches(schema, scored()))

    yield run


@contextmanager
def polars_slices(case: Case, setting: Setting) -> Iterator[Run]:
    import polars as pl

    infer = engine_of(case, setting)

    def run(out: Path) -> None:
        frame = pl.read_parquet(case["data"])
        scores = [infer(part.to_numpy(order="c"))[0] for part in frame.iter_slices(setting["batch"])]
        pl.DataFrame({"row": np.arange(len(frame)), "score": np.concatenate(scores)}).write_delta(str(out / "table"))

    yield run


@contextmanager
def ray_data(case: Case, setting: Setting) -> Iterator[Run]:
    import ray
    from deltalake import convert_to_deltalake

    class Scores:
        def __init__(self) -> None:
            self.infer = engine_of(case, setting)

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            x = np.stack([batch[name] for name in FEATURES], axis=1)
            return {"row": batch["row"], "score": self.infer(x)[0]}

    ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    numbered = _numbered(case)

    def run(out: Path) -> None:
        # One actor on a share of a core: a pool of as many actors as cores leaves none to read with, and hangs.
        scored = ray.data.read_parquet(numbered).map_batches(
            Scores, batch_size=setting["batch"], compute=ray.data.ActorPoolStrategy(size=1), num_cpus=0.5
        )
        scored.write_parquet(str(out / "table"))
        convert_to_deltalake(str(out / "table"))

    yield run
    ray.shutdown()


@contextmanager
def daft_batches(case: Case, setting: Setting) -> Iterator[Run]:
    import daft
    from deltalake import convert_to_deltalake

    # With `max_concurrency` it would run in a process of its own, which starts, and loads the engine, in every run.
    @daft.cls(use_process=False)
    class Scores:
        def __init__(self) -> None:
            self.infer, self.turn = engine_of(case, setting), Lock()

        @daft.method.batch(return_dtype=daft.DataType.float32(), batch_size=setting["batch"])  # type: ignore[untyped-decorator]
        def score(self, *columns: Any) -> Any:
            rows = np.stack([column.to_arrow().to_numpy() for column in columns], axis=1)
            with self.turn:  # Daft may call the one instance from several threads
                return self.infer(rows)[0]

    model, numbered = Scores(), _numbered(case)

    def run(out: Path) -> None:
        frame = daft.read_parquet(numbered)
        score = model.score(*(daft.col(name) for name in FEATURES)).alias("score")
        # Its own writer for Delta tables needs pyiceberg, of all things.
        frame.select(daft.col("row"), score).write_parquet(str(out / "table"))
        convert_to_deltalake(str(out / "table"))

    yield run


def _numbered(case: Case) -> str:
    """The same file with each row's position as a column, for those that cannot number the rows they read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(case["data"]).with_name("_numbered.parquet")  # a name that our source passes over
    if not path.exists():
        read = pq.read_table(case["data"], partitioning=None)
        partial = path.with_name("_numbered.partial")
        pq.write_table(read.append_column("row", pa.array(np.arange(len(read)))), partial, row_group_size=131_072)
        partial.replace(path)
    return str(path)


@contextmanager
def read_alone(case: Case, setting: Setting) -> Iterator[Run]:
    import pyarrow.parquet as pq

    yield lambda out: pq.ParquetFile(case["data"]).read()


@contextmanager
def pack_alone(case: Case, setting: Setting) -> Iterator[Run]:
    """Columns in memory to the rows that the engine takes."""
    import pyarrow.parquet as pq

    columns = [c.to_numpy() for c in pq.ParquetFile(case["data"]).read(columns=FEATURES).combine_chunks().columns]
    rows = np.empty((setting["batch"], len(columns)), np.float32)

    def run(out: Path) -> None:
        for start, stop in batches_of(case["rows"], setting["batch"]):
            for place, column in enumerate(columns):
                rows[: stop - start, place] = column[start:stop]

    yield run


@contextmanager
def compute_alone(case: Case, setting: Setting) -> Iterator[Run]:
    backend = setting["backend"]
    queue = open_queue(case["engines"][backend], backend, setting["streams"], setting["threads"])
    batch = np.random.default_rng(0).integers(0, 12, (setting["batch"], 32)).astype(np.float32)
    yield lambda out: run_over(queue, batch, case["rows"])


@contextmanager
def write_alone(case: Case, setting: Setting) -> Iterator[Run]:
    import pyarrow as pa
    from deltalake import write_deltalake

    scores = np.random.default_rng(0).random(case["rows"], np.float32)
    table = pa.table({"row": np.arange(case["rows"]), "score": scores})
    yield lambda out: write_deltalake(str(out / "table"), table)


@contextmanager
def write_ours_alone(case: Case, setting: Setting) -> Iterator[Run]:
    """The columns that ours has: each row's key, file, position, score and provenance, with a checksum."""
    from gpu_runtime.datasets.partition import Places, keys_of, origins_of
    from gpu_runtime.predictions.shard_file import PredictionSchema, Provenance, ShardWriter
    from gpu_runtime.predictions.storage import Folder
    from gpu_runtime.specs import TensorSpec

    scores: Any = np.random.default_rng(0).random(case["rows"], np.float32)
    schema = PredictionSchema((TensorSpec("score", "float32"),), {})
    digest = "0123456789abcdef" * 4

    def run(out: Path) -> None:
        writer = ShardWriter(Folder(out / "table"), schema, DAY, 0, "alone", Provenance(digest, digest, digest))
        places = Places(["part-0.parquet"], [case["rows"]])
        for start, stop in batches_of(case["rows"], setting["batch"]):
            files, positions = places.of(start, stop)
            writer.append(origins_of(keys_of(files, positions), files, positions), {"score": scores[start:stop]})
        writer.finish()

    yield run


@contextmanager
def by_hand(case: Case, setting: Setting) -> Iterator[Run]:
    """What a specialist writes: batches read ahead on a thread, several at the engine at once, no dictionary."""
    from concurrent.futures import ThreadPoolExecutor

    import pyarrow as pa
    import pyarrow.parquet as pq
    from deltalake import convert_to_deltalake

    backend = setting["backend"]
    queue = open_queue(case["engines"][backend], backend, CORES, 1)

    def run(out: Path) -> None:
        (out / "table").mkdir()
        places, keep = in_order(len(batches_of(case["rows"], setting["batch"])))
        with ThreadPoolExecutor(1) as reader, pq.ParquetFile(case["data"]) as file:
            groups, place = range(file.num_row_groups), 0
            ahead = [reader.submit(file.read_row_group, 0)]
            for group in groups:
                columns = [c.to_numpy() for c in ahead.pop().result().columns]
                ahead += [reader.submit(file.read_row_group, group + 1)] if group + 1 in groups else []
                for start, stop in batches_of(len(columns[0]), setting["batch"]):
                    queue.submit(np.stack([column[start:stop] for column in columns], axis=1), keep(place))
                    place += 1
            queue.wait()
        scores = joined(places, 0)
        table = pa.table({"row": np.arange(len(scores)), "score": scores})
        pq.write_table(table, out / "table" / "part-0.parquet", use_dictionary=False)
        convert_to_deltalake(str(out / "table"))

    yield run


def derive(results: Mapping[str, Result], case: Case) -> Mapping[str, float]:
    """On cores that the stages share, the bound is their CPU-seconds ÷ cores."""
    alone = {name: results[name].cpu_s / CORES for name in ("read alone", "pack alone", "compute alone", "write alone")}
    ours = results[OURS].seconds
    bound = sum(alone.values()) - alone["pack alone"]
    whole = bound - alone["write alone"] + alone["pack alone"] + results["write ours alone"].cpu_s / CORES
    return {
        "ours, s": ours,
        "bound of read + compute + write, s": bound,
        "share of that bound": bound / ours,
        "bound with columns packed to rows and all of our columns written, s": whole,
        "share of the bound with both": whole / ours,
    }


def grid(*batches: int) -> tuple[Setting, ...]:
    return tuple({"backend": backend, "batch": batch} for backend in ("openvino", "onnxruntime") for batch in batches)


OUR_SETTINGS = tuple(
    {"backend": backend, "batch": batch, "streams": streams, "threads": CORES // streams, "slots": 3 * streams}
    for backend, batch, streams in (
        ("openvino", 16_384, CORES),
        ("openvino", 8_192, CORES),
        ("openvino", 16_384, 1),
        ("openvino", 32_768, 1),
        ("onnxruntime", 16_384, CORES),
        ("onnxruntime", 8_192, CORES),
    )
)

BENCHMARK = Benchmark(
    name="credit",
    title="Credit scoring: Parquet → MLP → Delta",
    prepare=prepare,
    entrants=(
        Entrant(OURS, "score_partition", ours, "ours", OUR_SETTINGS),
        Entrant("pandas", "a loop over slices of a frame", pandas_loop, settings=grid(1_024, 8_192, 131_072)),
        Entrant("pyarrow", "a stream of record batches", pyarrow_batches, settings=grid(8_192, 32_768, 131_072)),
        Entrant("by hand", "reading ahead, several batches at once", by_hand, settings=grid(8_192, 16_384, 32_768)),
        Entrant("polars", "slices of a frame", polars_slices, settings=grid(8_192, 32_768, 131_072)),
        Entrant("ray", "Ray Data, map_batches on one actor", ray_data, settings=grid(8_192, 32_768, 131_072)),
        Entrant("daft", "a batch function", daft_batches, settings=grid(8_192, 32_768, 131_072)),
        Entrant("read alone", "the file into Arrow columns", read_alone, "part"),
        Entrant("pack alone", "columns in memory into rows", pack_alone, "part", OUR_SETTINGS[:1], OURS),
        Entrant("compute alone", "the engine at our setting", compute_alone, "part", OUR_SETTINGS[:1], OURS),
        Entrant("write alone", "position and score into Delta", write_alone, "part"),
        Entrant("write ours alone", "all of our columns into a file", write_ours_alone, "part", OUR_SETTINGS[:1], OURS),
    ),
    answers=answers,
    derive=derive,
    arguments=arguments,
)

if __name__ == "__main__":
    main(BENCHMARK)
