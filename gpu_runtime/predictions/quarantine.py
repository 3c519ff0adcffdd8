"""The quarantine table: rows that were not scored, by publication. Written before the day is published."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from gpu_runtime.predictions.receipts import QuarantinedRow
from gpu_runtime.predictions.storage import Folder, append_rows, open_table

_FIELDS = ("row_key", "source_file", "source_position", "stage", "reason", "exception")


def append_quarantine(table: Folder, day: str, publication: str, run_id: str, rows: Sequence[QuarantinedRow]) -> None:
    """Add the rows under a publication id; they count once a day's publication of that id is committed."""
    import pyarrow as pa

    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in _FIELDS}
    shared = {"date": datetime.date.fromisoformat(day), "publication": publication, "run_id": run_id}
    columns |= {name: [value] * len(rows) for name, value in shared.items()}
    data = pa.table(columns, schema=quarantine_schema())
    append_rows(table, data, [on_day(day), ("publication", "=", publication)])


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


def read_quarantine(table: Folder, day: str, publication: str) -> Any:
    """The rows of one publication, as a pandas frame."""
    import pandas as pd

    opened = open_table(table)
    if opened is None:
        return pd.DataFrame(columns=["date", "publication", *_FIELDS])
    return opened.to_pandas(filters=[on_day(day), ("publication", "=", publication)])


def on_day(day: str) -> tuple[str, str, datetime.date]:
    """The filter that reads one day's partition."""
    return ("date", "=", datetime.date.fromisoformat(day))
