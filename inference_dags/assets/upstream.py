"""What the stage before made: by the digest in Dagster's event log; where the log knows nothing (a CI job
with a temporary instance), by the recipe key in the store. Either way every byte is verified."""

from __future__ import annotations

from dataclasses import dataclass

import dagster as dg

from gpu_runtime.artifacts import Artifact, ArtifactStore
from gpu_runtime.backends.engine_set import KIND as ENGINE_KIND
from gpu_runtime.backends.engine_set import EngineSet, engine_recipe
from gpu_runtime.benchmark.report import KIND as BENCHMARK_KIND
from gpu_runtime.benchmark.report import BenchmarkReport, benchmark_recipe
from gpu_runtime.datasets.declaration import declaration_of
from gpu_runtime.datasets.partition import Source
from gpu_runtime.datasets.sample import RowSample, sample_digest, sample_rows
from gpu_runtime.device.protocol import DeviceClass
from gpu_runtime.errors import ArtifactError
from gpu_runtime.export.onnx_export import KIND as EXPORT_KIND
from gpu_runtime.export.onnx_export import ExportedModel
from gpu_runtime.quantize.calibration import KIND as CALIBRATION_KIND
from gpu_runtime.quantize.calibration import Calibration, calibration_recipe
from gpu_runtime.quantize.int8 import KIND as INT8_KIND
from gpu_runtime.quantize.int8 import QuantizedModel, quantize_recipe
from gpu_runtime.specs import Graph
from inference_dags.pipeline import Pipeline, RowsFrom


@dataclass(frozen=True)
class Upstream:
    context: dg.AssetExecutionContext
    pipeline: Pipeline
    store: ArtifactStore
    source: Source

    @property
    def declaration(self) -> str:
        return declaration_of(self.pipeline.model, self.source)

    def sample(self, rows: RowsFrom, *, labelled: bool = False) -> RowSample:
        return sample_rows(self.source, rows.days, rows.rows, rows.seed, labelled=labelled)

    def sample_digest(self, rows: RowsFrom) -> str:
        return sample_digest(self.source, rows.days, rows.rows, rows.seed)

    def exported(self) -> ExportedModel:
        exported = ExportedModel(
            self._latest("onnx_model", EXPORT_KIND)
            or self._found("onnx_model", EXPORT_KIND, self.pipeline.model.digest)
        )
        if exported.spec != self.pipeline.model.digest:
            raise self._stale("onnx_model", "an export of the model as declared now", "one of another declaration")
        return exported

    def calibration(self) -> Calibration:
        if latest := self._latest("calibration", CALIBRATION_KIND):
            return Calibration(latest)
        recipe = calibration_recipe(self.exported(), self.sample_digest(self.pipeline.calibration))
        return Calibration(self._found("calibration", CALIBRATION_KIND, recipe))

    def quantized(self) -> QuantizedModel:
        if latest := self._latest("int8_model", INT8_KIND):
            return QuantizedModel(latest)
        recipe = quantize_recipe(self.exported(), self.calibration(), self.pipeline.int8)
        return QuantizedModel(self._found("int8_model", INT8_KIND, recipe))

    def graphs(self) -> list[Graph]:
        exported, quantized = self.exported(), self.quantized()
        if quantized.export != exported.digest:
            raise self._stale("int8_model", f"export {exported.digest[:12]}", quantized.export[:12])
        recipes = sorted(recipe.variant for recipe in self.pipeline.int8)
        made = sorted(graph.variant for graph in quantized.graphs())
        if recipes != made:
            raise self._stale("int8_model", ", ".join(recipes), ", ".join(made))
        return [exported.graph(), *quantized.graphs()]

    def engines(self, device_class: DeviceClass) -> EngineSet:
        # The log's newest set may be of another host: engines are found for this class of device.
        latest, graphs = self._latest("engine", ENGINE_KIND), self.graphs()
        if latest and EngineSet(latest).device_class == device_class:
            engines = EngineSet(latest)
            known = {(one.digest, one.inputs, one.outputs, one.max_batch, one.max_length) for one in graphs}
            made = {
                (one.graph_digest, one.inputs, one.outputs, one.max_batch, one.max_length)
                for one in engines.engines.values()
            }
            if strange := made - known:
                raise self._stale("engine", "the graphs of the newest export", f"{len(strange)} of other graphs")
            built = {key.partition(":")[0] for key in (*engines.engines, *engines.not_built)}
            if built != set(self.pipeline.backends):
                raise self._stale("engine", ", ".join(self.pipeline.backends), ", ".join(sorted(built)))
            return engines
        recipe = engine_recipe(graphs, self.pipeline.backends, device_class)
        return EngineSet(self._found("engine", ENGINE_KIND, recipe))

    def report(self, device_class: DeviceClass) -> BenchmarkReport:
        latest = self._latest("benchmark", BENCHMARK_KIND)
        if latest and BenchmarkReport(latest).device_class == device_class:
            return BenchmarkReport(latest)
        gate_set = self.sample_digest(self.pipeline.gate_rows)
        recipe = benchmark_recipe(
            self.declaration, self.engines(device_class), gate_set, self.pipeline.gate, self.pipeline.objective
        )
        return BenchmarkReport(self._found("benchmark", BENCHMARK_KIND, recipe))

    def _latest(self, asset: str, kind: str) -> Artifact | None:
        event = self.context.instance.get_latest_materialization_event(self.pipeline.key(asset))
        materialization = event.asset_materialization if event else None
        digest = materialization.metadata.get("digest") if materialization else None
        return self.store.get(kind, str(digest.value)) if digest else None

    def _stale(self, asset: str, expected: str, got: str) -> ArtifactError:
        first, last = f"{self.pipeline.name}/onnx_model", f"{self.pipeline.name}/{asset}"
        return ArtifactError(
            "was made from something older",
            stage="upstream",
            item=last,
            expected=expected,
            got=got,
            next_step=f"materialize {last}" if first == last else f"materialize every stage from {first} to {last}",
        )

    def _found(self, asset: str, kind: str, recipe: str) -> Artifact:
        if found := self.store.find(kind, recipe):
            return found
        raise ArtifactError(
            "was never made from what is declared now",
            stage="upstream",
            item=f"{self.pipeline.name}/{asset}",
            expected="an artifact in the store",
            got="none",
            next_step=f"materialize {self.pipeline.name}/{asset}",
        )
