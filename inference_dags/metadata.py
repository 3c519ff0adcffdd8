"""How results look in the Dagster UI."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from gpu_runtime.artifacts import Artifact
from gpu_runtime.benchmark.report import BenchmarkReport, frontier_rows, table_rows, trial_rows
from gpu_runtime.datasets.partition import DatasetPartition
from gpu_runtime.scoring import Predictions

Metadata = dict[str, Any]

_RUN_FIGURES = (
    "rows_per_s",
    "engine_rows_per_s",
    "of_engine_only",
    "of_shared_cpu_bound",
    "latency_p50_ms",
    "latency_p90_ms",
    "latency_p99_ms",
    "peak_memory_mib",
    "padding",
    "cost_per_million_rows",
)
"""Of a day's report; the whole of it is there as JSON."""


def artifact_metadata(artifact: Artifact) -> Metadata:
    """Identity and place of an artifact: what downstream looks up and verifies."""
    return {"digest": artifact.digest, "uri": dg.MetadataValue.path(artifact.uri), "bytes": artifact.nbytes}


def table(rows: Sequence[Mapping[str, Any]]) -> dg.TableMetadataValue:
    """Rows of plain values as a Dagster table; None is an empty cell."""
    columns = list(rows[0]) if rows else []
    kinds = {name: _column_type([row[name] for row in rows]) for name in columns}
    return dg.MetadataValue.table(
        records=[dg.TableRecord(dict(row)) for row in rows],
        schema=dg.TableSchema([dg.TableColumn(name, kinds[name]) for name in columns]),
    )


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "(none)"
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    lines += ["| " + " | ".join("–" if v is None else str(v) for v in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def benchmark_metadata(report: BenchmarkReport) -> Metadata:
    rows = table_rows(report)
    measured = [row for row in rows if row["rows_per_s"]]
    return {
        "engines": table(rows),
        "frontier": table(frontier_rows(report)),
        "trials": table(trial_rows(report)),
        "rows_per_s": bars([(row["rows_per_s"], row["gate"] == "passed") for row in measured]),
        "reference": report.reference,
        "passed": len(report.passed),
        "refused": sum(row["gate"].startswith("refused") for row in rows),
        "not_run_here": sum(row["rows_per_s"] is None for row in rows),
        "environment": dg.MetadataValue.json(report.artifact.metadata["environment"]),
        **artifact_metadata(report.artifact),
    }


def bars(values: Sequence[tuple[float, bool]]) -> dg.MarkdownMetadataValue:
    """A small inline bar chart: green where true, grey where false, scaled to the largest.

    Stays below the 1,000 characters up to which the UI shows Markdown in place.
    """
    top = max((value for value, _ in values), default=1.0) or 1.0
    shown = values[:20]
    paths = {True: "", False: ""}
    for i, (value, good) in enumerate(shown):
        paths[good] += f"M0 {6 + 10 * i}h{max(1, round(200 * value / top))}"
    svg = f"<svg xmlns='http://www.w3.org/2000/svg' width='200' height='{10 * len(shown) + 2}' stroke-width='8'>"
    for good, colour in ((True, "#2a8"), (False, "#bbb")):
        if paths[good]:
            svg += f"<path stroke='{colour}' d='{paths[good]}'/>"
    image = base64.b64encode((svg + "</svg>").encode()).decode()
    return dg.MetadataValue.md(f"![rows per second](data:image/svg+xml;base64,{image})")


def inputs_metadata(partition: DatasetPartition) -> Metadata:
    return {
        "inputs": partition.digest,
        "files": partition.files,
        "bytes": partition.nbytes,
        "shards": len(partition.shards),
        "dagster/row_count": sum(shard.rows for shard in partition.shards),
    }


def predictions_metadata(predictions: Predictions) -> Metadata:
    report = predictions.report
    metadata: Metadata = {
        "dagster/row_count": predictions.scored,
        "rows_in": predictions.rows_in,
        "quarantined": predictions.quarantined,
        "shards": predictions.shards,
        "resumed_shards": predictions.resumed_shards,
        "reused": predictions.reused,
        "publication": predictions.publication,
        "engine": report["engine"],
    }
    if predictions.left_behind is not None:
        metadata["leftovers_not_removed"] = predictions.left_behind
    if predictions.stats is not None and predictions.stats.rows:
        metadata |= {name: report[name] for name in _RUN_FIGURES if report[name] is not None}
        metadata["report"] = dg.MetadataValue.json(report)
        metadata |= {"bottleneck": f"{report['bottleneck']}: {report['relief']}"}
        metadata["stages"] = table(
            [
                {
                    "stage": name,
                    "busy_s": round(stage.busy_s, 4),
                    "waited_for_s": round(stage.wait_s, 4),
                    "workers": stage.width,
                    "occupancy": round(stage.occupancy, 3),
                }
                for name, stage in predictions.stats.stages.items()
            ]
        )
    return metadata


def _column_type(values: Sequence[Any]) -> str:
    known = [value for value in values if value is not None]
    if known and all(isinstance(value, int) and not isinstance(value, bool) for value in known):
        return "int"
    return "float" if known and all(isinstance(value, int | float) for value in known) else "string"
