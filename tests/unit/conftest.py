"""Small models and days, made the same way for every unit test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.backends.engine_set import build_engines
from gpu_runtime.backends.onnxruntime_backend import ReferenceSession
from gpu_runtime.datasets.parquet import ParquetSource
from gpu_runtime.device.host import cpu_class
from gpu_runtime.export.onnx_export import ExportedModel, export_model
from gpu_runtime.predictions.delta_table import PredictionSchema
from gpu_runtime.promotion.plan import ServingPlan
from gpu_runtime.quantize.calibration import calibrate
from gpu_runtime.specs import ModelSpec, OnnxSource, TensorSpec

ELEMENT = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "uint8": TensorProto.UINT8}


@dataclass(frozen=True)
class GraphMaker:
    """ONNX files from nodes, constants and specs."""

    opset: int = 17

    def __call__(
        self,
        path: Path,
        nodes: Sequence[onnx.NodeProto],
        constants: dict[str, Any],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        batch: int | str = "N",
        weights_as_inputs: bool = False,
    ) -> Path:
        def values(specs: Sequence[TensorSpec]) -> list[Any]:
            return [helper.make_tensor_value_info(t.name, ELEMENT[t.dtype], [batch, *t.shape]) for t in specs]

        held = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
        taken = values(inputs)
        if weights_as_inputs:
            taken += [helper.make_tensor_value_info(h.name, h.data_type, list(h.dims)) for h in held]
        model = helper.make_model(
            helper.make_graph(list(nodes), "model", taken, values(outputs), held),
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=3 if weights_as_inputs else 9,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)
        return path


@dataclass(frozen=True)
class Flights:
    """A table of flights and a small network that scores it: four numbers and a carrier → a probability."""

    inputs = (TensorSpec("numbers", "float32", (4,)), TensorSpec("carrier", "int32", (), 0, 2))
    outputs = (TensorSpec("probability", "float32"),)
    columns = {"numbers": ("a", "b", "c", "d"), "carrier": ("carrier",)}  # noqa: RUF012
    vocabularies = {"carrier": ("AA", "DL", "UA")}  # noqa: RUF012
    schema = PredictionSchema((TensorSpec("probability", "float32"),), {})

    def spec(self, folder: Path, seed: int = 0, named: bool = True) -> ModelSpec:
        rng = np.random.default_rng(seed)

        def weights(*shape: int) -> Any:
            return rng.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))

        def node(op: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
            return helper.make_node(op, inputs, [output], name=f"{output}_node" if named else "", **attributes)

        path = GraphMaker()(
            folder / f"flights-{seed}.onnx",
            [
                node("Gather", ["embedding", "carrier"], "embedded"),
                node("Concat", ["numbers", "embedded"], "joined", axis=1),
                node("Gemm", ["joined", "w1", "b1"], "hidden"),
                node("Relu", ["hidden"], "active"),
                node("Gemm", ["active", "w2", "b2"], "wide"),
                node("Relu", ["wide"], "wide_active"),
                node("Gemm", ["wide_active", "w3", "b3"], "logit"),
                node("Sigmoid", ["logit"], "column"),
                node("Squeeze", ["column", "axis"], "probability"),
            ],
            {
                "embedding": weights(3, 4),
                "w1": weights(8, 16),
                "b1": weights(16),
                "w2": weights(16, 16),
                "b2": weights(16),
                "w3": weights(16, 1),
                "b3": weights(1),
                "axis": np.asarray([1], np.int64),
            },
            self.inputs,
            self.outputs,
        )
        return ModelSpec("flights", str(seed), OnnxSource(str(path)), self.inputs, ("probability",), max_batch=8)

    def rows(self, count: int, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        numbers = rng.standard_normal((count, 4)).astype(np.float32)
        return {"numbers": numbers, "carrier": rng.integers(0, 3, count).astype(np.int32)}

    def table(self, count: int, seed: int = 0, **changes: Any) -> pa.Table:
        """A day's columns; `changes` replace or add some, None leaves one out."""
        rows = self.rows(count, seed)
        columns: dict[str, Any] = {name: rows["numbers"][:, i] for i, name in enumerate("abcd")}
        columns["carrier"] = [self.vocabularies["carrier"][i] for i in rows["carrier"]]
        columns["id"] = [f"flight-{seed}-{i}" for i in range(count)]
        columns["late"] = (rows["numbers"][:, 0] > 0).astype(np.int64)
        columns |= changes
        return pa.table({name: values for name, values in columns.items() if values is not None})

    def write_day(
        self,
        root: Path,
        day: str,
        count: int,
        seed: int = 0,
        file: str = "part-0.parquet",
        group: int = 1_000,
        **changes: Any,
    ) -> Path:
        path = root / day / file
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(self.table(count, seed, **changes), path, row_group_size=group)
        return path

    def source(self, root: Path, **settings: Any) -> ParquetSource:
        defaults: dict[str, Any] = {
            "inputs": self.inputs,
            "columns": self.columns,
            "vocabularies": self.vocabularies,
            "row_key": "id",
            "label": "late",
        }
        return ParquetSource(str(root), **{**defaults, **settings})


@pytest.fixture(scope="session")
def make_graph() -> GraphMaker:
    return GraphMaker()


@pytest.fixture(scope="session")
def flights() -> Flights:
    return Flights()


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Spec → exported, its FP32 engine on ONNX Runtime, and a plan that serves it; one store for all."""
    folder = tmp_path_factory.mktemp("served")
    store = ArtifactStore(folder / "store")

    def make(spec: ModelSpec) -> SimpleNamespace:
        exported = export_model(spec, store)
        engines = build_engines(spec.name, [exported.graph()], ["onnxruntime"], cpu_class(), store)
        engine = engines.engines["onnxruntime:fp32"]
        plan = ServingPlan(
            model=spec.name,
            model_version=spec.version,
            declaration="declared",
            device_class=cpu_class(),
            engine=engine.key,
            engine_set=engines.digest,
            engine_digest=engine.digest,
            model_digest=exported.digest,
            batch=4,
            streams=1,
            threads=1,
            decode_workers=2,
            gate_set="gate",
            report="report",
            reason="for tests",
            engine_rows_per_s=1000.0,
            value=1.0,
            reference=1.0,
        )
        run = ReferenceSession(exported.graph().path)
        return SimpleNamespace(spec=spec, store=store, exported=exported, engines=engines, plan=plan, run=run)

    return make


@pytest.fixture(scope="session")
def served(serve: Any, flights: Flights, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The flights model, exported, built and with a plan."""
    made: SimpleNamespace = serve(flights.spec(tmp_path_factory.mktemp("flights")))
    return made


@pytest.fixture(scope="session")
def calibration(served: SimpleNamespace, flights: Flights) -> Any:
    rows = flights.rows(256, seed=5)
    batches = [{name: values[i : i + 32] for name, values in rows.items()} for i in range(0, 256, 32)]
    return calibrate(served.exported, batches, "flights-256", served.store)


@pytest.fixture
def write_jpeg() -> Any:
    """Write a picture whose left half and right half have their own colour."""

    def write(path: Path, left: Any = (200, 30, 30), right: Any = (30, 30, 200), size: int = 32, **save: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.empty((size, size, 3), np.uint8)
        pixels[:, : size // 2], pixels[:, size // 2 :] = left, right
        Image.fromarray(pixels).save(path, quality=95, **save)
        return path

    return write


@pytest.fixture
def replaced() -> Any:
    """`dataclasses.replace`, for plans and recipes."""
    return replace


@pytest.fixture
def reference_of() -> Any:
    """What an export's own graph gives for rows, run plainly."""

    def run(exported: ExportedModel, rows: dict[str, Any]) -> dict[str, Any]:
        return ReferenceSession(exported.graph().path)(rows)

    return run
