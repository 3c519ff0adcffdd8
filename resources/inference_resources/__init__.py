"""Dagster resources: thin, lazy wrappers around `gpu_runtime`. Nothing is opened before its first use."""

from inference_resources.artifact_store import ArtifactStoreResource
from inference_resources.dataset import DatasetResource
from inference_resources.gpu import GpuResource
from inference_resources.prediction_table import PredictionTableResource

__all__ = ["ArtifactStoreResource", "DatasetResource", "GpuResource", "PredictionTableResource"]
