"""The code location: every model under `defs/`, and the resources they share."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
from inference_resources import ArtifactStoreResource, DatasetResource, GpuResource, PredictionTableResource


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
    models = dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
    return dg.Definitions.merge(models, dg.Definitions(resources=resources))
