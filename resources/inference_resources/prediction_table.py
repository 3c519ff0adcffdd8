"""The folder under which each model has its tables."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from gpu_runtime.predictions.delta_table import PredictionTable


class PredictionTableResource(dg.ConfigurableResource):
    root: str

    def table(self, model: str) -> PredictionTable:
        return PredictionTable(Path(self.root) / model)
