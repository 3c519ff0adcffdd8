"""The folder that holds artifacts and promotions."""

from __future__ import annotations

import dagster as dg

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.promotion.store import PromotionStore


class ArtifactStoreResource(dg.ConfigurableResource):
    root: str

    def store(self) -> ArtifactStore:
        return ArtifactStore(self.root)

    def promotions(self) -> PromotionStore:
        return PromotionStore(self.root)
