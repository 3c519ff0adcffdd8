"""The quarantine table: rows that were not scored, by publication. Written before the day is published."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_runtime.predictions.receipts import QuarantinedRow

_FIELDS = ("row_key", "source_file", "source_position", "stage", "reason", "exception")


def append_quarantine(uri: Path, day: str, publication: str, run_id: str, rows: Sequence[QuarantinedRow]) -> None:
    """Add the rows under a publication id; they count once a day's publication of that id is committed."""
    import pyarrow as pa
    from deltalake import write_deltalake

    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in _FIELDS}
    shared = {"date": datetime.date.fromisoformat(day), "publication": publication, "run_id": run_id}
    columns |= {name: [value] * len(rows) for name, value in shared.items()}
    write_deltalake(uri, pa.table(columns, schema=quarantine_schema()), mode="append", partition_by=["date"])


def quarantine_schema() -> Any:
    """The table's columns, as Arrow fields."""
    import pyarrow as pa

    text = ("row_key", "source_file", "stage", "reason", "exception", "publication", "run_id")
    return pa.schema(
        [
            pa.field("date", pa.date32()),
            *(pa.field(name, pa.string()) for name in text),
            pa.field("source_position", pa.int64()),
        ]
    )


def read_quarantine(uri: Path, day: str, publication: str) -> Any:
    """The rows of one publication, as a pandas frame."""
    import pandas as pd
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(str(uri)):
        return pd.DataFrame(columns=["date", "publication", *_FIELDS])
    return DeltaTable(uri).to_pandas(filters=[on_day(day), ("publication", "=", publication)])


def on_day(day: str) -> tuple[str, str, datetime.date]:
    """The filter that reads one day's partition."""
    return ("date", "=", datetime.date.fromisoformat(day))
