"""Runs of a real model in real processes, killed on the way; and what must be true afterwards.

Used by the tests beside it and by `soak.py`.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from inference_resources import ArtifactStoreResource, DatasetResource, GpuResource, PredictionTableResource
from onnx import helper, numpy_helper

from gpu_runtime.device.host import cpu_class
from gpu_runtime.faults import FaultPlan, no_faults
from gpu_runtime.predictions.delta_table import PredictionTable
from gpu_runtime.promotion.store import PromotionStore
from inference_dags import InferencePipeline
from inference_dags.assets.lifecycle import build_lifecycle

HERE = Path(__file__).parent
DAGSTER = Path(sys.executable).parent / "dagster"
DAY, GATE_DAY = "2026-01-03", "2026-01-01"
SHARDS, ROWS, BATCH, WIDTH = 24, 400, 32, 6  # a shard is a file
BATCHES = SHARDS * -(-ROWS // BATCH)
BAD_EVERY = 50  # rows with a null
LEASE_S = 1.0

SETTINGS: dict[str, Any] = {
    "model_spec": {
        "version": "v1",
        "onnx": "model.onnx",
        "inputs": [{"name": "x", "dtype": "float32", "shape": [WIDTH]}],
        "outputs": ["score"],
        "max_batch": BATCH,
    },
    "dataset": {
        "name": "rows",
        "format": "parquet",
        "first_day": "2026-01-01",
        "last_day": "2026-01-31",
        "columns": {"x": list("abcdef")},
        "row_key": "id",
        "label": "label",
        "rows_per_shard": ROWS,
    },
    "calibration": {"days": GATE_DAY, "rows": 100},
    "int8": [{"scheme": "vnni", "keep_first_float": True}],
    "gate": {
        "metric": "auc",
        "output": "score",
        "max_drop": 0.5,
        "min_speedup": 0,
        "rows": {"days": GATE_DAY, "rows": 200},
    },
    "backends": ["onnxruntime"],
    "benchmark": {
        "batches": [BATCH],
        "rounds": 1,
        "round_s": 0.01,
        "probe_s": 0.01,
        "trial_rounds": 1,
        "trial_s": 0.01,
    },
    "max_quarantined_fraction": 0.5,
}


def make_home(root: Path) -> "Home":
    """A promoted model and one day of `SHARDS` files, not yet scored."""
    (root / "tiny").mkdir(parents=True)
    (root / "tiny" / "settings.yaml").write_text(yaml.safe_dump(SETTINGS))
    _write_model(root / "tiny" / "model.onnx")
    for day, shards in ((GATE_DAY, 1), (DAY, SHARDS)):
        folder = root / "data" / "rows" / day
        folder.mkdir(parents=True)
        for shard in range(shards):
            _write_shard(folder / f"{shard:03}.parquet", f"{day}-{shard:03}", shard)
    home = Home(root)
    home.promote()
    return home


def definitions(root: Path, faults: FaultPlan = no_faults, stage_timeout_s: float = 120) -> dg.Definitions:
    """The code location of that home, its device and its tables with the fault plan."""

    class Gpu(GpuResource):
        def fault_plan(self) -> FaultPlan:
            return faults

    class Tables(PredictionTableResource):
        def table(self, model: str) -> PredictionTable:
            return PredictionTable(f"{self.root}/{model}", lease_s=LEASE_S, faults=faults)

    settings = yaml.safe_load((root / "tiny" / "settings.yaml").read_text())
    resources = {
        "artifacts": ArtifactStoreResource(root=str(root / "artifacts")),
        "dataset": DatasetResource(root=str(root / "data")),
        "predictions": Tables(root=str(root / "tables")),
        "gpu": Gpu(device="cpu"),
    }
    lifecycle = build_lifecycle(InferencePipeline(**settings, stage_timeout_s=stage_timeout_s).pipeline(root / "tiny"))
    return dg.Definitions.merge(lifecycle, dg.Definitions(resources=resources))


def change_one_weight(home: "Home") -> None:
    """The same architecture, one number of it another."""
    path = home.root / "tiny" / "model.onnx"
    model = onnx.load(str(path))
    weights = next(one for one in model.graph.initializer if one.name == "w3")
    values = numpy_helper.to_array(weights).copy()
    values[0] += 1
    weights.CopyFrom(numpy_helper.from_array(values, "w3"))
    onnx.save(model, str(path))


@dataclass(frozen=True)
class Day:
    """What a day's publication says, in an order of its own."""

    scores: tuple[tuple[str, float], ...]
    quarantined: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Home:
    root: Path

    def copy(self, root: Path) -> "Home":
        shutil.copytree(self.root, root)
        return Home(root)

    def start(self, select: str = "tiny/predictions", day: str = DAY, **faults: str) -> "subprocess.Popen[str]":
        """`dagster asset materialize` in a process group of its own."""
        environment = {k: v for k, v in os.environ.items() if k != "DAGSTER_HOME"}
        environment |= {"FAULTS_ROOT": str(self.root), "FAULTS_LOG": str(self.root / "log")}
        environment |= {f"FAULTS_{name.upper()}": point for name, point in faults.items()}
        command = [str(DAGSTER), "asset", "materialize", "-f", str(HERE / "location.py"), "--select", select]
        return subprocess.Popen(
            [*command, "--partition", day],
            env=environment,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def materialize(self, select: str = "tiny/predictions", day: str = DAY, **faults: str) -> Any:
        """Run to the end, whatever it is; `stderr` holds all that was printed."""
        (self.root / "log").unlink(missing_ok=True)
        process = self.start(select, day, **faults)
        printed, _ = process.communicate(timeout=180)
        return subprocess.CompletedProcess(process.args, process.returncode, "", printed)

    def promote(self) -> None:
        """Run the lifecycle up to the serving plan, in this process: what is killed comes after it."""
        stages = ("rows", "onnx_model", "calibration", "int8_model", "engine", "benchmark", "serving_plan")
        made = definitions(self.root)
        with dg.DagsterInstance.ephemeral() as instance:
            for stage in stages:
                dg.materialize(
                    list(made.assets or ()),  # type: ignore[arg-type]
                    selection=[dg.AssetKey(["tiny", stage])],
                    resources=made.resources,
                    instance=instance,
                    partition_key=GATE_DAY if stage == "rows" else None,
                )

    def slots(self) -> int:
        """How many batches the executor's ring holds."""
        plan = PromotionStore(self.root / "artifacts").current("tiny", cpu_class()).plan
        return max(3, 2 * plan.streams)

    def log(self) -> list[str]:
        path = self.root / "log"
        return path.read_text().splitlines() if path.exists() else []

    def batches(self) -> int:
        """Batches that were handed to the engine since the log was last removed."""
        return self.log().count("batch")

    def receipts(self) -> int:
        return len(list((self.root / "tables" / "tiny" / "receipts").glob(f"{DAY}/*.json")))

    def attempts_ended(self) -> list[bool]:
        """For each attempt on record: whether it came to an end of its own."""
        records = (self.root / "tables" / "tiny" / "attempts").glob("*/*.json")
        return [json.loads(path.read_text())["ended"] for path in records]

    @property
    def table(self) -> PredictionTable:
        return PredictionTable(self.root / "tables" / "tiny")

    def day(self) -> Day:
        rows, bad = self.table.read_day(DAY), self.table.read_quarantine(DAY)
        return Day(
            tuple(sorted(zip(rows["row_key"], rows["score"], strict=True))),
            tuple(sorted(zip(bad["row_key"], bad["reason"], strict=True))),
        )

    def leftovers(self) -> list[str]:
        """Files, rows and records that belong to no publication in force."""
        table = self.table
        tiny = self.root / "tables" / "tiny"
        held = {Path(uri).name for uri in _delta(tiny / "predictions").file_uris()}
        found = [p.name for p in (tiny / "predictions").glob("date=*/*") if p.name not in held]
        found += [p.name for p in (tiny / "attempts").glob("*/*")]
        current = table.current_publication(DAY)
        for name in ("quarantine", "runs"):
            found += [f"{name} {p}" for p in set(_delta(tiny / name).to_pandas()["publication"]) - {current}]
        return found


def _delta(path: Path) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(path)


@dataclass
class Tally:
    """What a soak found. `recomputed` counts batches that reached the engine more often than once a row needs."""

    runs: int = 0
    kills: int = 0
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    recomputed: int = 0
    most_recomputed: int = 0
    days: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)


def soak(
    unscored: Home,
    expected: Day,
    work: Path,
    *,
    seed: int,
    kills: int = sys.maxsize,
    minutes: float = float("inf"),
    told: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Score the day again and again, each time killing runs until one gets through, and compare what it published.

    Every kill is at a random moment of scoring, of the whole process group or of the step's process alone.
    """
    rng, tally, until = random.Random(seed), Tally(), time.monotonic() + minutes * 60
    while tally.kills < kills and time.monotonic() < until:
        home = unscored.copy(work / f"soak-{tally.days}")
        batches, killed, finished = 0, 0, False
        while not finished and tally.kills < kills and time.monotonic() < until:
            # A run that gets through early would end the day: the first ones are killed within the first shards.
            how = kill_from_outside(home, rng, longest_s=0.2 if killed < 8 else 2.0)
            finished, batches, tally.runs = how == "finished", batches + home.batches(), tally.runs + 1
            if finished:
                continue
            tally.kills, killed = tally.kills + 1, killed + 1
            tally.by_kind[how] += 1
            if home.table.current_publication(DAY) is not None and home.day() != expected:
                tally.wrong += 1
            told(tally)
        time.sleep(1.2 * LEASE_S)
        last = home.materialize()  # nobody disturbs it
        batches, tally.runs, tally.days = batches + home.batches(), tally.runs + 1, tally.days + 1
        got = home.day()
        wanted, found = [key for key, _ in expected.scores], [key for key, _ in got.scores]
        tally.lost += len(set(wanted) - set(found))
        tally.duplicated += len(found) - len(set(found))
        scored_twice = finished and home.batches() > 0
        tally.wrong += got != expected or last.returncode != 0 or scored_twice or bool(home.leftovers())
        again = batches - BATCHES
        tally.recomputed += again
        if killed:
            tally.most_recomputed = max(tally.most_recomputed, -(-again // killed))
        shutil.rmtree(home.root)
        told(tally)
    return tally


def kill_from_outside(home: Home, rng: random.Random, longest_s: float) -> str:
    """Start a run and kill it somewhere while it scores; returns what was killed, or `finished` when it was too fast.

    `group` is the run's whole process group, `step` the step's own process alone.
    """
    (home.root / "log").unlink(missing_ok=True)
    process = home.start()
    how = rng.choice(("group", "step"))
    while process.poll() is None and not home.batches():  # scoring has begun, or the run is over
        time.sleep(0.01)
    time.sleep(rng.uniform(0, longest_s))
    killed = False
    if process.poll() is None:
        if how == "group":
            os.killpg(process.pid, signal.SIGKILL)
            killed = True
        else:
            for pid in step_processes(process.pid):
                os.kill(pid, signal.SIGKILL)
                killed = True
    process.communicate(timeout=180)
    return how if killed and process.returncode != 0 else "finished"


def signal_while_scoring(home: Home, number: int, *, group: bool) -> Any:
    """Start a slow run and send it a signal once it scores; returns how it ended."""
    (home.root / "log").unlink(missing_ok=True)
    process = home.start(slow="0.05")
    while process.poll() is None and home.receipts() < 2:
        time.sleep(0.02)
    (os.killpg if group else os.kill)(process.pid, number)
    printed, _ = process.communicate(timeout=180)
    return subprocess.CompletedProcess(process.args, process.returncode, "", printed)


def step_processes(run: int) -> list[int]:
    """The processes in which Dagster executes the run's steps: descendants that came out of a spawn."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == run:
                command = (entry / "cmdline").read_bytes()
                found += [int(entry.name)] if b"spawn_main" in command else []
                found += step_processes(int(entry.name))
    return found


def _write_model(path: Path) -> None:
    rng = np.random.default_rng(0)
    hidden = 256
    constants = {
        "w1": rng.standard_normal((WIDTH, hidden)),
        "w2": rng.standard_normal((hidden, hidden)),
        "w3": rng.standard_normal((hidden, 1)) / hidden,
        "last": np.asarray([-1]),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h1"], "first"),
        helper.make_node("Relu", ["h1"], ["r1"], "relu1"),
        helper.make_node("MatMul", ["r1", "w2"], ["h2"], "second"),
        helper.make_node("Relu", ["h2"], ["r2"], "relu2"),
        helper.make_node("MatMul", ["r2", "w3"], ["z"], "third"),
        helper.make_node("Sigmoid", ["z"], ["p"], "sigmoid"),
        helper.make_node("Squeeze", ["p", "last"], ["score"], "squeeze"),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("score", onnx.TensorProto.FLOAT, ["n"])],
        [numpy_helper.from_array(v.astype(np.int64 if k == "last" else np.float32), k) for k, v in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))


def _write_shard(path: Path, prefix: str, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)
    bad = np.arange(ROWS) % BAD_EVERY == BAD_EVERY - 1
    columns: dict[str, Any] = {"id": [f"{prefix}-{row:05}" for row in range(ROWS)]}
    columns |= {name: pa.array(values[:, i], mask=bad) for i, name in enumerate("abcdef")}
    columns["label"] = (values[:, 0] > 0).astype(np.int8)
    pq.write_table(pa.table(columns), path)
