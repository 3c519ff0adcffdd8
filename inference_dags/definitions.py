"""The code location: every model under `defs/`, and the resources they share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from inference_resources import ArtifactStoreResource, DatasetResource, GpuResource, PredictionTableResource


def shared_resources() -> Mapping[str, Any]:
    """The four resources that every `InferencePipeline` asks for.

    `INFERENCE_DAGS_HOME` is where data, artifacts and tables live (default: `storage` in the current folder),
    `INFERENCE_DAGS_DEVICE` the device to run on (default: `auto`), `INFERENCE_DAGS_TABLES` a folder or an object
    store's URI for the tables alone (default: `tables` in the home).
    """
    home = Path(os.environ.get("INFERENCE_DAGS_HOME", "storage")).absolute()
    return {
        "artifacts": ArtifactStoreResource(root=str(home / "artifacts")),
        "dataset": DatasetResource(root=str(home / "data")),
        "predictions": PredictionTableResource(root=os.environ.get("INFERENCE_DAGS_TABLES", str(home / "tables"))),
        "gpu": GpuResource(device=os.environ.get("INFERENCE_DAGS_DEVICE", "auto")),
    }


@dg.definitions
def defs() -> dg.Definitions:
    models = dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
    return dg.Definitions.merge(models, dg.Definitions(resources=shared_resources()))
