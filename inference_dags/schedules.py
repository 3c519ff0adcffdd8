"""The nightly job of a model."""

from __future__ import annotations

from typing import Any

import dagster as dg

from inference_dags.pipeline import Pipeline


def daily_job(pipeline: Pipeline) -> tuple[Any, Any]:
    """A job that lands (or registers) a day and scores it, and its schedule: the tick of a night asks for the
    day before, never for a model to be rebuilt."""
    job = dg.define_asset_job(
        f"{pipeline.name}_daily",
        selection=dg.AssetSelection.assets(pipeline.input_key, pipeline.key("predictions")),
        description=f"Land one day and score it with the {pipeline.name} plan in force.",
    )
    return job, dg.build_schedule_from_partitioned_job(
        job, name=f"{pipeline.name}_nightly", hour_of_day=pipeline.hour_of_day
    )
