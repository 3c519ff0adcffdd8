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

    count = len(rows)
    columns: dict[str, Any] = {name: pa.array([getattr(r, name) for r in rows], _type(name)) for name in _FIELDS}
    columns["date"] = pa.array([datetime.date.fromisoformat(day)] * count, pa.date32())
    columns["publication"] = pa.array([publication] * count, pa.string())
    columns["run_id"] = pa.array([run_id] * count, pa.string())
    write_deltalake(uri, pa.table(columns), mode="append", partition_by=["date"])


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


def _type(name: str) -> Any:
    import pyarrow as pa

    return pa.int64() if name == "source_position" else pa.string()
