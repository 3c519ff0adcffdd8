"""The same rows as one Parquet file, as ten thousand, and as 1, 10 and 100 shards: `python benchmarks/scale.py`.

The network is small on purpose: what a file and a shard cost is not to hide behind it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.credit import write_mlp
from benchmarks.engines import open_engine
from benchmarks.harness import OURS, Benchmark, Case, Entrant, Result, Run, Setting, main
from gpu_runtime.device.host import usable_cores

DAY = "2026-01-01"
FEATURES = [f"f{i}" for i in range(8)]
BACKEND, LAYERS = "onnxruntime", (len(FEATURES), 128, 64, 1)
ROWS_PER_FILE, GROUPS, GOAL = 20, 100, 0.7
CORES = usable_cores()


def prepare(work: Path, args: argparse.Namespace) -> Case:
    from gpu_runtime.artifacts import ArtifactStore
    from gpu_runtime.backends.engine_set import build_engines
    from gpu_runtime.device.host import cpu_class
    from gpu_runtime.export.onnx_export import export_model
    from gpu_runtime.specs import ModelSpec, OnnxSource, TensorSpec

    rows = 2_000 if args.smoke else 200_000
    folder, files = work / "scale", rows // ROWS_PER_FILE
    if not (folder / "many").exists():
        _write_rows(folder, rows)
    write_mlp(folder / "mlp.onnx", LAYERS)
    store = ArtifactStore(folder / "store")
    inputs = (TensorSpec("x", "float32", (len(FEATURES),)),)
    source = OnnxSource(str(folder / "mlp.onnx"))
    exported = export_model(ModelSpec("scale", "1", source, inputs, ("score",), max_batch=65_536), store)
    engines = build_engines("scale", [exported.graph()], [BACKEND], cpu_class(), store)
    keys = {file.backend: key for key, file in engines.engines.items()}
    return {
        "rows": rows,
        "files": files,
        "facts": {
            "input": f"{rows:,} rows × {len(FEATURES)} float32 in Parquet, as one file of {GROUPS} row groups and as "
            f"{files:,} files of {ROWS_PER_FILE} rows, in the page cache",
            "model": "-".join(map(str, LAYERS)) + ", FP32, ONNX Runtime",
            "work": "a day is listed, scored and published; every figure holds all three unless it says otherwise",
        },
        "one": str(folder / "one"),
        "many": str(folder / "many"),
        "store": str(store.root),
        "engine_set": engines.digest,
        "engine_keys": keys,
        "engine": str(engines.engines[keys[BACKEND]].path),
    }


def _write_rows(folder: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    table = pa.table({name: rng.integers(0, 12, rows).astype(np.float32) for name in FEATURES})
    one, many = folder / "one" / DAY, folder / ".many" / DAY
    one.mkdir(parents=True, exist_ok=True)
    many.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, one / "part-00000.parquet", row_group_size=rows // GROUPS)
    for file in range(rows // ROWS_PER_FILE):
        pq.write_table(table.slice(file * ROWS_PER_FILE, ROWS_PER_FILE), many / f"part-{file:05}.parquet")
    many.parent.replace(folder / "many")


def answers(out: Path, case: Case) -> Sequence[float]:
    """Every 97th row's score, in the order of the files and their rows."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

    root = next(path.parent for path in sorted(out.rglob("_delta_log")) if path.parent.name in ("predictions", "table"))
    tables = [pq.ParquetFile(uri.removeprefix("file://")).read() for uri in DeltaTable(str(root)).file_uris()]
    rows, scores = [], []
    for table in tables:
        if "row" in table.column_names:
            rows.append(table.column("row").to_numpy())
        else:
            file = pc.utf8_slice_codeunits(table.column("source_file"), 5, 10).cast("int64").to_numpy()
            rows.append(file * ROWS_PER_FILE + table.column("source_position").to_numpy())
        scores.append(table.column("score").to_numpy())
    row, score = np.concatenate(rows), np.concatenate(scores)
    if sorted(row) != list(range(case["rows"])):
        raise RuntimeError(f"{len(row)} rows written, {len(set(row))} of them different, of {case['rows']}")
    return score[np.argsort(row)][::97].tolist()  # type: ignore[no-any-return]


def _source(case: Case, files: str, shards: int) -> Any:
    from gpu_runtime.datasets.parquet import ParquetSource
    from gpu_runtime.specs import TensorSpec

    inputs = (TensorSpec("x", "float32", (len(FEATURES),)),)
    return ParquetSource(case[files], inputs, {"x": tuple(FEATURES)}, rows_per_shard=case["rows"] // shards)


@contextmanager
def ours(files: str, shards: int, case: Case, setting: Setting) -> Iterator[Run]:
    """`shards` of the one file; small files are cut by their number, too."""
    from benchmarks.ours import scoring

    with scoring(case, {"backend": BACKEND, **setting}, _source(case, files, shards)) as run:
        yield run


@contextmanager
def listing(case: Case, setting: Setting) -> Iterator[Run]:
    source = _source(case, "many", 1)
    yield lambda out: source.partition(DAY)


@contextmanager
def dataset_loop(files: str, case: Case, setting: Setting) -> Iterator[Run]:
    """pyarrow reads files ahead, on all cores; one batch after the other goes through the engine."""
    import pyarrow as pa
    import pyarrow.dataset as ds
    from deltalake import write_deltalake

    infer = open_engine(case["engine"], BACKEND, CORES)

    def run(out: Path) -> None:
        dataset = ds.dataset(f"{case[files]}/{DAY}", format="parquet")
        table = dataset.to_table(columns=FEATURES)
        found = [
            infer(np.stack([column.to_numpy() for column in batch.columns], axis=1))[0]
            for batch in table.combine_chunks().to_batches(setting["batch"])
        ]
        scores = np.concatenate(found)
        write_deltalake(str(out / "table"), pa.table({"row": np.arange(len(scores)), "score": scores}))

    yield run


@contextmanager
def files_alone(case: Case, setting: Setting) -> Iterator[Run]:
    import pyarrow.dataset as ds

    yield lambda out: ds.dataset(f"{case['many']}/{DAY}", format="parquet").to_table(columns=FEATURES)


def derive(results: Mapping[str, Result], case: Case) -> Mapping[str, float]:
    one, many = results[OURS].seconds, results[MANY].seconds
    file_s, row_s = (many - one) / case["files"], one / case["rows"]
    label = f"{case['files']:,} files"
    return {
        f"{label} ÷ one file, goal {GOAL}": one / many,
        f"{label} ÷ one file, pyarrow": results["pyarrow"].seconds / results[f"pyarrow, {MANY_FILES}"].seconds,
        f"a file more, ms, of which {1e3 * results['listing alone'].seconds / case['files']:.2f} listing": 1e3 * file_s,
        f"rows a file from which {GOAL} is reached with this network": file_s / row_s / (1 / GOAL - 1),
        "10 shards ÷ 1 shard": one / results["ours, 10 shards"].seconds,
        "100 shards ÷ 1 shard": one / results["ours, 100 shards"].seconds,
        "a shard more, ms": 1e3 * (results["ours, 100 shards"].seconds - one) / 99,
    }


MANY_FILES = "many files"
MANY = f"ours, {MANY_FILES}"
OUR_SETTING = ({"batch": 8_192, "streams": CORES, "threads": 1},)
LOOP_SETTINGS = ({"batch": 8_192}, {"batch": 32_768})

BENCHMARK = Benchmark(
    name="scale",
    title="Many files and many shards: Parquet → MLP → Delta",
    prepare=prepare,
    entrants=(
        Entrant(OURS, "one file, one shard", partial(ours, "one", 1), "ours", OUR_SETTING),
        Entrant("ours, 10 shards", "the one file", partial(ours, "one", 10), "ours", OUR_SETTING),
        Entrant("ours, 100 shards", "the one file", partial(ours, "one", 100), "ours", OUR_SETTING),
        Entrant(MANY, f"files of {ROWS_PER_FILE} rows", partial(ours, "many", 1), "ours", OUR_SETTING),
        Entrant("pyarrow", "a dataset of the one file", partial(dataset_loop, "one"), settings=LOOP_SETTINGS),
        Entrant(
            f"pyarrow, {MANY_FILES}", "a dataset of the files", partial(dataset_loop, "many"), settings=LOOP_SETTINGS
        ),
        Entrant("listing alone", "the many files and their footers", listing, "part"),
        Entrant("reading alone", "a pyarrow dataset of the many files", files_alone, "part"),
    ),
    answers=answers,
    derive=derive,
)

if __name__ == "__main__":
    main(BENCHMARK)
