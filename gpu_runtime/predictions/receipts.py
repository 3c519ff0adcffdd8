"""Receipts: what each finished shard left behind, so that no shard is scored twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_runtime.artifacts import file_digest, write_atomically
from gpu_runtime.datasets.partition import ShardTask
from gpu_runtime.specs import digest_of, to_plain


@dataclass(frozen=True)
class QuarantinedRow:
    """A row that was not scored, and why. `reason` names columns, files and rules, never a cell's value."""

    row_key: str
    source_file: str
    source_position: int
    stage: str
    reason: str
    exception: str


@dataclass(frozen=True)
class Receipt:
    """`file` is relative to the predictions table; `rows_in` were read, `rows` scored and in the file."""

    day: str
    shard: int
    resume_key: str
    run_id: str
    file: str
    nbytes: int
    sha256: str
    rows_in: int
    rows: int
    quarantined: tuple[QuarantinedRow, ...]

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Receipt:
        return Receipt(**{**plain, "quarantined": tuple(QuarantinedRow(**row) for row in plain["quarantined"])})


def resume_key(shard: ShardTask, scoring_key: str, schema: str) -> str:
    """Equal only if the shard's files, whatever changes a score, and the output schema are all the same."""
    return digest_of({"shard": shard.fingerprint, "scoring": scoring_key, "schema": schema})


class ReceiptStore:
    """Receipts of one model: `<root>/<day>/<shard>.json`; a shard keeps its newest receipt only."""

    def __init__(self, root: Path, table: Path) -> None:
        self.root, self._table = root, table

    def write(self, receipt: Receipt) -> None:
        """After the data file is complete and on disk; from here on the shard counts as done."""
        write_atomically(self._path(receipt.day, receipt.shard), json.dumps(to_plain(receipt)).encode())

    def find(self, day: str, shard: int, key: str) -> Receipt | None:
        """The shard's receipt, if it is of the same key and its data file is whole.

        Rows that the engine failed on are tried again: the engine may have been to blame, or its device.
        """
        try:
            receipt = Receipt.from_plain(json.loads(self._path(day, shard).read_text()))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # none yet, or one that cannot be read: the shard is scored again
        file = self._table / receipt.file
        if receipt.resume_key != key or not file.is_file() or file_digest(file) != receipt.sha256:
            return None
        return None if any(row.stage == "engine" for row in receipt.quarantined) else receipt

    def _path(self, day: str, shard: int) -> Path:
        return self.root / day / f"{shard:06}.json"
