"""The folder under which each dataset has its own, with a folder a day inside."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from gpu_runtime.datasets.declaration import DatasetSpec
from gpu_runtime.datasets.partition import Source
from gpu_runtime.specs import ModelSpec


class DatasetResource(dg.ConfigurableResource):
    root: str

    def source(self, dataset: DatasetSpec, model: ModelSpec) -> Source:
        return dataset.source(Path(self.root), model)

    def day_folder(self, dataset: DatasetSpec, day: str) -> Path:
        """Where the day's files belong; it need not exist yet."""
        return Path(self.root) / dataset.name / day
