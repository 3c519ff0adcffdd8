"""The code location: every model under `defs/`, and the resources they share."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
from dagster.components import load_defs
from inference_resources import ArtifactStoreResource, DatasetResource, GpuResource, PredictionTableResource

import inference_dags.defs


@dg.definitions
def defs() -> dg.Definitions:
    """`INFERENCE_DAGS_HOME` is where data, artifacts and predictions live (default: `storage` in the current
    folder); `INFERENCE_DAGS_DEVICE` is auto, cpu or cuda:N."""
    home = Path(os.environ.get("INFERENCE_DAGS_HOME", "storage")).absolute()
    resources = {
        "artifacts": ArtifactStoreResource(root=str(home / "artifacts")),
        "dataset": DatasetResource(root=str(home / "data")),
        "predictions": PredictionTableResource(root=str(home / "tables")),
        "gpu": GpuResource(device=os.environ.get("INFERENCE_DAGS_DEVICE", "auto")),
    }
    # Not `load_from_defs_folder`: it wants a pyproject.toml above the package, and an installed package has none.
    models = load_defs(inference_dags.defs, project_root=Path(__file__).parents[1])
    return dg.Definitions.merge(models, dg.Definitions(resources=resources))
