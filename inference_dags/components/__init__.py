from inference_dags.components.inference_pipeline import InferencePipeline

__all__ = ["InferencePipeline"]
