"""The folder, or the object store's prefix, under which each model has its tables."""

from __future__ import annotations

import dagster as dg
from pydantic import Field

from gpu_runtime.faults import FaultPlan, no_faults
from gpu_runtime.predictions.delta_table import PredictionTable


class PredictionTableResource(dg.ConfigurableResource):
    """`root`: a local folder or a URI (`s3://bucket/tables`). `storage_options` are delta-rs' (`AWS_REGION`, …); give
    secrets as `EnvVar`, or leave them to the environment, which is read too."""

    root: str
    storage_options: dict[str, str] = Field(default={})

    def fault_plan(self) -> FaultPlan:
        """None; a test's subclass may bring one."""
        return no_faults

    def table(self, model: str) -> PredictionTable:
        return PredictionTable(f"{self.root.rstrip('/')}/{model}", self.storage_options, faults=self.fault_plan())
