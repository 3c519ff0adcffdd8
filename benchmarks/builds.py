"""The engines that a benchmark's entrants share, made as this project's lifecycle makes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_runtime.datasets.partition import Source
    from gpu_runtime.specs import ModelSpec


def int8_case(spec: ModelSpec, source: Source, day: str, calibration_rows: int, store_root: Path) -> dict[str, Any]:
    """Exported, calibrated on rows of `day`, quantized for x86 CPUs, built with OpenVINO; as entries of a case."""
    from gpu_runtime.artifacts import ArtifactStore
    from gpu_runtime.backends.engine_set import build_engines
    from gpu_runtime.datasets.sample import sample_rows
    from gpu_runtime.device.host import cpu_class
    from gpu_runtime.export.onnx_export import export_model
    from gpu_runtime.quantize.calibration import calibrate
    from gpu_runtime.quantize.int8 import Int8Recipe, quantize
    from gpu_runtime.specs import to_plain

    store = ArtifactStore(store_root)
    exported = export_model(spec, store)
    sample = sample_rows(source, [day], calibration_rows, 0)
    ranges = calibrate(exported, sample.batches(min(16, spec.max_batch)), sample.digest, store)
    graphs = quantize(exported, ranges, (Int8Recipe("vnni"),), store).graphs()
    engines = build_engines(spec.name, graphs, ["openvino"], cpu_class(), store)
    ((key, file),) = engines.engines.items()
    return {
        "store": str(store.root),
        "engine_set": engines.digest,
        "engine_keys": {"openvino": key},
        "engine": str(file.path),
        "inputs": to_plain(spec.inputs),
        "outputs": [output.name for output in file.outputs],
    }
