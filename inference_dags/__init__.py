"""The lifecycle of a model in Dagster: one folder with a `defs.yaml` a model."""

from inference_dags.components.inference_pipeline import InferencePipeline

__all__ = ["InferencePipeline"]
