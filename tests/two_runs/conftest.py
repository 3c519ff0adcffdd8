"""Two processes that publish, and a model with a day for each of them to score."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from gpu_runtime.promotion.plan import ServingPlan
from gpu_runtime.promotion.store import PromotionStore
from gpu_runtime.specs import ModelSpec, OnnxSource, TensorSpec


@dataclass(frozen=True)
class Publishers:
    """Processes of their own, kept for many rounds."""

    processes: Sequence[subprocess.Popen[str]]

    def together(self, *commands: dict[str, Any]) -> list[dict[str, Any]]:
        """Give each process one command, wait until all have come to their stop, release them, and return what
        became of each. Nobody goes on before everybody is there."""
        pairs = list(zip(self.processes, commands, strict=True))
        for process, command in pairs:
            self._tell(process, json.dumps(command))
        for process, _ in pairs:
            arrived = self._hear(process)
            assert "at" in arrived, arrived
        for process, _ in pairs:
            self._tell(process, "go")
        return [self._hear(process) for process, _ in pairs]

    def _tell(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()

    def _hear(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        heard: dict[str, Any] = json.loads(process.stdout.readline())
        return heard


@pytest.fixture(scope="session")
def publishers() -> Iterator[Publishers]:
    command = [sys.executable, str(Path(__file__).parent / "publisher.py")]
    with ExitStack() as stack:
        made = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            )
            for _ in range(2)
        ]
        try:
            yield Publishers(made)
        finally:
            for process in made:
                process.kill()


@dataclass(frozen=True)
class Served:
    """A promoted plan's store, and days of 35 rows of which `rotten` cannot be scored."""

    store: str
    data: str
    rows = 35
    rotten = 3


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """score = the sum of two columns."""
    folder = tmp_path_factory.mktemp("served")
    axes = numpy_helper.from_array(np.asarray([1], np.int64), "axes")
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "axes"], ["score"], keepdims=0)],
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, ["N"])],
        [axes],
    )
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    store = ArtifactStore(folder / "store")
    inputs = (TensorSpec("x", "float32", (2,)),)
    exported = export_model(ModelSpec("model", "1", OnnxSource(str(path)), inputs, ("score",), max_batch=8), store)
    engines = build_engines("model", [exported.graph()], ["onnxruntime"], cpu_class(), store)
    engine = engines.engines["onnxruntime:fp32"]
    PromotionStore(store.root).promote(
        ServingPlan(
            model="model",
            model_version="1",
            declaration="declared",
            device_class=cpu_class(),
            engine=engine.key,
            engine_set=engines.digest,
            engine_digest=engine.digest,
            model_digest=exported.digest,
            batch=8,
            streams=1,
            threads=1,
            decode_workers=1,
            gate_set="gate",
            report="report",
            reason="for tests",
            engine_rows_per_s=1000.0,
            value=1.0,
            reference=1.0,
        )
    )
    for day in ("2026-03-02", "2026-03-03"):
        a = [None if row < Served.rotten else float(row) for row in range(Served.rows)]
        table = pa.table({"id": [f"{day}-{row}" for row in range(Served.rows)], "a": a, "b": [1.0] * Served.rows})
        (folder / "data" / day).mkdir(parents=True)
        pq.write_table(table, folder / "data" / day / "part.parquet", row_group_size=10)
    return Served(str(store.root), str(folder / "data"))
