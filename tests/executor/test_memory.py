"""The ring bounds the memory of a run, however much data passes through it and however slow the writer is; shards
bound that of a day.

Measured in a process of its own, as RssAnon + RssShmem: mapped files come and go as the system likes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper, numpy_helper

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.engine_set import build_engines
from gpu_runtime.device.host import cpu_class
from gpu_runtime.export.onnx_export import export_model
from gpu_runtime.specs import ModelSpec, OnnxSource, TensorSpec

BOUND_MIB = 16
"""Measured: 0 to 3 MiB of growth as it stands, 230 to 430 MiB where slots do not hold the source back."""

PROGRAM = """
import json, sys, time
from pathlib import Path
import numpy as np
from gpu_runtime.device.host import HostDevice, cpu_class
from gpu_runtime.backends.protocol import EngineFile, EngineOptions
from gpu_runtime.executor import pipeline
from gpu_runtime.specs import TensorSpec

BATCHES, ROWS, VALUES = 600, 8, 1 << 15  # 1 MiB a batch
edits = json.loads(sys.argv[1])
source = Path(pipeline.__file__).read_text()
for old, new in edits:
    assert source.count(old) == 1, f"the source no longer holds exactly one {old!r}: bring this test up to date"
    source = source.replace(old, new)
exec(compile(source, pipeline.__file__, "exec"), pipeline.__dict__)

class Sums:
    options = EngineOptions(streams=2)
    file = EngineFile(
        Path("engine"), "", "numpy", "1", "fp32", "fp32", None, cpu_class(), "",
        (TensorSpec("x", "float32", (VALUES,)),), (TensorSpec("sum", "float32"),), ROWS, 0,
    )
    def create_context(self):
        return self
    def enqueue(self, inputs, outputs, stream):
        stream.launch(lambda: np.sum(inputs["x"], axis=1, out=outputs["sum"]))

class Shard:
    rows, lengths = BATCHES * ROWS, None
    def view(self, start, stop):
        return None
    def pieces(self, start, stop, staging):
        # What a source holds on to for a batch until it is decoded: the batch's own bytes.
        values = np.full((stop - start, VALUES), start % 7, np.float32)
        return [lambda: staging["x"].__setitem__(slice(None), values) or []]

def resident_mib():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024

at_50, most = [], 0.0
def write(scored):
    global most
    number = scored.batch.start // ROWS
    assert (scored.outputs["sum"] == scored.batch.start % 7 * VALUES).all()
    if number == 50:
        at_50.append(resident_mib())
    if number >= 50:
        most = max(most, resident_mib())
    time.sleep(0.003)  # slower than all before it: what nothing holds back piles up

with HostDevice() as device, pipeline.StreamExecutor(Sums(), device, batch=ROWS, decode_workers=2) as executor:
    stats = executor.run(executor.batches(0, Shard()), write)
print(json.dumps([stats.batches, BATCHES * ROWS * VALUES * 4 / 2**20, *at_50, most, resident_mib()]))
"""

NO_SLOTS = [  # memory for each batch anew, as in an executor that has no ring
    (
        "                slot = self._free.get()\n",
        "                first = executor._slots[0]\n"
        "                slot = allocate_slot("
        "executor.engine.file, executor.device, executor.ceiling.batching.shapes, first.context, first.compute)\n",
    ),
    ("            self._free.put(flight.slot)\n", ""),
]


@pytest.mark.parametrize(("edits", "bounded"), [([], True), (NO_SLOTS, False)], ids=["ring", "no ring"])
def test_memory_does_not_grow_with_the_data(alone: Any, edits: list[tuple[str, str]], bounded: bool) -> None:
    ended = alone(PROGRAM, json.dumps(edits))
    assert ended.returncode == 0, ended.stderr
    batches, passed_mib, at_50, most, at_the_end = json.loads(ended.stdout)
    print(  # noqa: T201
        f"{passed_mib:.0f} MiB in {batches} batches: {at_50:.1f} MiB resident after 50, "
        f"{most:.1f} at most after that, {at_the_end:.1f} at the end"
    )
    assert batches == 600 and passed_mib > 500
    assert (most - at_50 < BOUND_MIB) is bounded
    assert not bounded or at_the_end - at_50 < BOUND_MIB


DAY, DAY_NBYTES, DAY_BOUND_MIB, WIDTH = "2026-03-01", 3 * 10**9, 1000, 256
"""A row is 256 float32, 1 KiB."""

DAY_PROGRAM = """
import json, sys
from pathlib import Path
from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.engine_set import KIND, EngineSet
from gpu_runtime.datasets.array_folder import ArrayFolderSource
from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.device.host import HostDevice, cpu_class
from gpu_runtime.predictions.delta_table import PredictionTable
from gpu_runtime.predictions.shard_file import PredictionSchema
from gpu_runtime.promotion.plan import ServingPlan
from gpu_runtime.scoring import Scorer, ScoringPolicy, score_partition

folder, engine_set, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
store = ArtifactStore(folder / "store")
engines = EngineSet(store.get(KIND, engine_set))
(file,) = engines.engines.values()
plan = ServingPlan(
    model="sum", model_version="1", declaration="", device_class=cpu_class(), engine=file.key, engine_set=engine_set,
    engine_digest=file.digest, model_digest=file.graph_digest, batch=4096, streams=2, threads=1, decode_workers=2,
    gate_set="", report="", reason="for a test", engine_rows_per_s=1.0, value=1.0, reference=1.0,
)
(spec,) = file.inputs
if settings is None:
    source = ArrayFolderSource(str(folder / "days"), (spec,))
else:
    columns = tuple(f"c{i:03}" for i in range(spec.shape[0]))
    source = ParquetSource(str(folder / "days"), (spec,), {spec.name: columns}, **settings)

def resident_mib():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024

most = 0.0
def watch(point):
    global most
    if point == "before write":
        most = max(most, resident_mib())

table = PredictionTable(folder / "table")
with HostDevice() as device, Scorer(plan, store, device, ScoringPolicy(), watch) as scorer:
    assert scorer.executor
    loaded = resident_mib()
    day = source.partition("2026-03-01")
    made = score_partition(scorer, day, source, PredictionSchema(file.outputs, {}), table, "run")
print(json.dumps([made.published, made.shards, loaded, most]))
"""


@pytest.fixture(scope="module")
def summing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a store, in which there is an engine that sums up a row; and its engine set."""
    folder = tmp_path_factory.mktemp("summing")
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "axes"], ["sum"], keepdims=0)],
        "sum",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("sum", TensorProto.FLOAT, ["n"])],
        [numpy_helper.from_array(np.array([1]), "axes")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "sum.onnx")
    store = ArtifactStore(folder / "store")
    inputs = (TensorSpec("x", "float32", (WIDTH,)),)
    spec = ModelSpec("sum", "1", OnnxSource(str(folder / "sum.onnx")), inputs, ("sum",), max_batch=4096)
    built = build_engines("sum", [export_model(spec, store).graph()], ["onnxruntime"], cpu_class(), store)
    return folder, built.digest


def land_arrays(day: Path, rows: int) -> None:
    np.lib.format.open_memmap(day / "part-0.npy", "w+", np.float32, (rows, WIDTH)).flush()  # sparse: all zeros


def land_tables(day: Path, rows: int, files: int = 8) -> None:
    values = pa.array(np.arange(rows // files) % 7, pa.float32())
    table = pa.table({f"c{i:03}": values for i in range(WIDTH)})
    pq.write_table(table, day / "part-0.parquet", row_group_size=32_768)
    for file in range(1, files):
        shutil.copy(day / "part-0.parquet", day / f"part-{file}.parquet")


UNBOUNDED = {"nbytes_per_shard": 1 << 40}


@pytest.mark.parametrize(
    ("land", "settings", "bounded"),
    [
        pytest.param(land_arrays, None, True, id="arrays", marks=pytest.mark.slow),
        pytest.param(land_tables, {}, True, id="tables"),
        pytest.param(land_tables, UNBOUNDED, False, id="tables cut by rows alone", marks=pytest.mark.slow),
    ],
)
def test_a_day_of_three_gigabytes_is_scored_in_one(
    alone: Any, summing: tuple[Path, str], tmp_path: Path, land: Any, settings: Any, bounded: bool
) -> None:
    """Measured growth: 110 MiB for arrays, 400 for tables, 3200 for shards of a million rows of 1 KiB."""
    folder, engine_set = summing
    rows = DAY_NBYTES // (4 * WIDTH) // 8 * 8
    (tmp_path / "days" / DAY).mkdir(parents=True)
    (tmp_path / "store").symlink_to(folder / "store")
    land(tmp_path / "days" / DAY, rows)
    ended = alone(DAY_PROGRAM, str(tmp_path), engine_set, json.dumps(settings))
    assert ended.returncode == 0, ended.stderr
    published, shards, loaded, most = json.loads(ended.stdout)
    print(f"{shards} shards: {loaded:.0f} MiB resident once loaded, {most:.0f} at most after that")  # noqa: T201
    assert published == rows
    assert (most - loaded < DAY_BOUND_MIB * 1e6 / 2**20) is bounded
