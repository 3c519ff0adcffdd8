"""A small real model with its whole lifecycle: an ONNX file, labelled Parquet days, a Dagster instance."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from inference_resources import ArtifactStoreResource, DatasetResource, GpuResource, PredictionTableResource
from onnx import TensorProto, helper, numpy_helper

from gpu_runtime.backends.onnxruntime_backend import OnnxRuntimeContext
from gpu_runtime.backends.openvino_backend import OpenVinoContext
from gpu_runtime.predictions.delta_table import PredictionTable
from inference_dags import InferencePipeline
from inference_dags.assets.lifecycle import build_lifecycle

WIDTH, HIDDEN, ROWS = 6, 64, 200
LIFECYCLE = ("onnx_model", "calibration", "int8_model", "engine", "benchmark", "serving_plan")

SETTINGS = """
model_spec:
  version: v1
  onnx: model.onnx
  inputs:
    - {name: x, dtype: float32, shape: [6]}
  outputs: [score]
  max_batch: 64
dataset:
  name: rows
  format: parquet
  first_day: "2026-01-01"
  last_day: "2026-01-31"
  columns: {x: [a, b, c, d, e, f]}
  row_key: id
  label: label
calibration: {days: "2026-01-01", rows: 100}
int8:
  - {scheme: vnni, keep_first_float: true}
  - {scheme: vnni}
gate:
  metric: auc
  output: score
  max_drop: 0.05
  min_speedup: 0
  rows: {days: "2026-01-02", rows: 200}
backends: [onnxruntime, openvino]
benchmark: {batches: [64], rounds: 1, round_s: 0.01, probe_s: 0.01, trial_rounds: 1, trial_s: 0.01}
"""


def write_model(path: Path, seed: int = 0) -> None:
    """An MLP 6 → 64 → 1 with a sigmoid, as ONNX; another seed gives other weights of the same shape."""
    rng = np.random.default_rng(seed)
    constants = {
        "w1": rng.standard_normal((WIDTH, HIDDEN)),
        "b1": np.zeros(HIDDEN),
        "w2": rng.standard_normal((HIDDEN, 1)),
        "b2": np.zeros(1),
        "last": np.asarray([-1]),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["z"], "second"),
        helper.make_node("Sigmoid", ["z"], ["p"], "sigmoid"),
        helper.make_node("Squeeze", ["p", "last"], ["score"], "squeeze"),
    ]
    initializers = [
        numpy_helper.from_array(v.astype(np.int64 if k == "last" else np.float32), k) for k, v in constants.items()
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["n"])],
        initializers,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), str(path))


def write_day(folder: Path, day: str, *, rows: int = ROWS, null_rows: int = 0, shift: float = 0.0) -> None:
    """One Parquet file; the label follows the first feature, so an engine that works has an AUC far from ½."""
    folder.mkdir(parents=True, exist_ok=True)
    values = day_values(day, rows) + np.float32(shift)
    columns: dict[str, Any] = {"id": [f"{day}-{i}" for i in range(rows)]}
    columns |= {name: pa.array(values[:, i], mask=np.arange(rows) < null_rows) for i, name in enumerate("abcdef")}
    columns["label"] = (values[:, 0] > 0).astype(np.int8)
    pq.write_table(pa.table(columns), folder / "rows.parquet")


def day_values(day: str, rows: int = ROWS) -> Any:
    """The day's features, `[rows, 6]`."""
    rng = np.random.default_rng(datetime.date.fromisoformat(day).toordinal())
    return rng.standard_normal((rows, WIDTH)).astype(np.float32)


@dataclass(frozen=True)
class DayState:
    """What Dagster shows of a day's predictions."""

    status: str
    causes: list[str]
    checks: dict[str, str]
    tags: dict[str, str]
    metadata: dict[str, Any]
    materializations: int


@dataclass
class Project:
    """One model folder, one home for data and tables, one Dagster instance."""

    root: Path
    instance: dg.DagsterInstance
    settings: dict[str, Any]

    @property
    def home(self) -> Path:
        return self.root / "home"

    def definitions(self) -> dg.Definitions:
        folder = self.root / "tiny"
        lifecycle = build_lifecycle(InferencePipeline(**self.settings).pipeline(folder))
        return dg.Definitions.merge(lifecycle, dg.Definitions(resources=self.resources()))

    def resources(self) -> dict[str, Any]:
        return {
            "artifacts": ArtifactStoreResource(root=str(self.home / "artifacts")),
            "dataset": DatasetResource(root=str(self.home / "data")),
            "predictions": PredictionTableResource(root=str(self.home / "tables")),
            "gpu": GpuResource(device="cpu"),
        }

    def materialize(
        self,
        *assets: str,
        day: str | None = None,
        days: tuple[str, str] | None = None,
        instance: Any = None,
        force: bool = False,
    ) -> dg.ExecuteInProcessResult:
        tags = {}
        if days:
            tags = {"dagster/asset_partition_range_start": days[0], "dagster/asset_partition_range_end": days[1]}
        definitions = self.definitions()
        return dg.materialize(
            list(definitions.assets or ()),  # type: ignore[arg-type]
            selection=[dg.AssetKey(["tiny", asset]) for asset in assets],
            resources=definitions.resources,
            instance=instance or self.instance,
            partition_key=day,
            tags=tags,
            run_config={"ops": {"tiny__predictions": {"config": {"force": True}}}} if force else None,
            raise_on_error=False,
        )

    def lifecycle(self) -> None:
        for asset in LIFECYCLE:
            result = self.materialize(asset)
            assert result.success, asset

    def write_day(self, day: str, **how: Any) -> None:
        write_day(self.day_folder(day), day, **how)

    def day_folder(self, day: str) -> Path:
        return self.home / "data" / "rows" / day

    def table(self) -> PredictionTable:
        return PredictionTable(self.home / "tables" / "tiny")

    def metadata(self, asset: str) -> dict[str, Any]:
        event = self.instance.get_latest_materialization_event(dg.AssetKey(["tiny", asset]))
        assert event is not None and event.asset_materialization is not None
        return {name: value.value for name, value in event.asset_materialization.metadata.items()}

    def state(self, day: str) -> DayState:
        """Dagster has no public way to ask for what its UI shows; only this function reaches for it."""
        from dagster._core.definitions.data_version import CachingStaleStatusResolver
        from dagster._core.loader import LoadingContextForTest

        key, graph = dg.AssetKey(["tiny", "predictions"]), self.definitions().get_repository_def().asset_graph
        resolver = CachingStaleStatusResolver(self.instance, graph, LoadingContextForTest(self.instance))
        checks = {}
        for check in (found for found in graph.asset_check_keys if found.asset_key == key):
            history = self.instance.event_log_storage.get_asset_check_execution_history(check, limit=1000)
            checks[check.name] = next((one.status.value for one in history if one.partition == day), "NONE")
        records = self.instance.fetch_materializations(dg.AssetRecordsFilter(key, asset_partitions=[day]), 100).records
        event = records[0].asset_materialization if records else None
        return DayState(
            resolver.get_status(key, day).value,
            [
                f"{one.reason}: {one.dependency.asset_key.to_user_string()}"
                for one in resolver.get_stale_causes(key, day)
                if one.dependency
            ],
            checks,
            dict(event.tags or {}) if event else {},
            {name: value.value for name, value in event.metadata.items()} if event else {},
            len(records),
        )


@contextlib.contextmanager
def new_project(root: Path) -> Iterator[Project]:
    (root / "tiny").mkdir()
    write_model(root / "tiny" / "model.onnx")
    with dg.DagsterInstance.ephemeral() as instance:
        made = Project(root, instance, yaml.safe_load(SETTINGS))
        for day in ("2026-01-01", "2026-01-02", "2026-01-03"):
            made.write_day(day)
        yield made


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with new_project(tmp_path) as made:
        yield made


@pytest.fixture
def promoted(project: Project) -> Project:
    """A project whose lifecycle has run: a plan is in force."""
    project.lifecycle()
    return project


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A promoted project for tests that use days of their own and change nothing else."""
    with new_project(tmp_path_factory.mktemp("shared")) as made:
        made.lifecycle()
        yield made


@pytest.fixture
def engine_saw(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The first feature of each row that reaches an engine from now on."""
    seen: list[float] = []
    for context in (OnnxRuntimeContext, OpenVinoContext):

        def watched(self: Any, inputs: Any, outputs: Any, stream: Any, enqueue: Any = context.enqueue) -> None:
            seen.extend(value for value in inputs["x"][:, 0].tolist() if value)  # padding is zero
            enqueue(self, inputs, outputs, stream)

        monkeypatch.setattr(context, "enqueue", watched)
    return seen


@pytest.fixture
def first_feature() -> Callable[[str], list[float]]:
    """What `engine_saw` holds once a whole day was scored."""
    return lambda day: [float(value) for value in day_values(day)[:, 0]]


@pytest.fixture
def new_weights() -> Callable[[Project], None]:
    """Replaces the model file by one of the same shape with other weights."""
    return lambda project: write_model(project.root / "tiny" / "model.onnx", seed=1)


@pytest.fixture
def failure_text() -> Callable[[dg.ExecuteInProcessResult], str]:
    """The failed steps' errors, with their causes."""

    def text(result: dg.ExecuteInProcessResult) -> str:
        errors = [event.step_failure_data.error for event in result.all_events if event.is_step_failure]
        return "\n".join(error.to_string() for error in errors if error)

    return text
