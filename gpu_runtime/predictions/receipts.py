"""Receipts: what each finished shard left behind, so that no shard is scored twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpu_runtime.datasets.partition import ShardTask
from gpu_runtime.predictions.storage import Folder
from gpu_runtime.specs import digest_of, to_plain


@dataclass(frozen=True, slots=True)
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

    def failed_in(self, stage: str) -> bool:
        """Whether a row of the shard is in quarantine because of that stage."""
        return any(row.stage == stage for row in self.quarantined)

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Receipt:
        made = Receipt(**{**plain, "quarantined": tuple(QuarantinedRow(**row) for row in plain["quarantined"])})
        if made.rows_in != made.rows + len(made.quarantined) or type(made.nbytes) is not int:
            raise ValueError("its counts do not add up")
        return made


def resume_key(shard: ShardTask, scoring_key: str, schema: str) -> str:
    """Equal only if the shard's files, whatever changes a score, and the output schema are all the same."""
    return digest_of({"shard": shard.fingerprint, "scoring": scoring_key, "schema": schema})


def day_key(shards: Sequence[ShardTask], scoring_key: str, schema: str) -> str:
    """The resume key of a whole day: equal only if every shard's is."""
    return digest_of([resume_key(shard, scoring_key, schema) for shard in shards] or [scoring_key, schema])


class ReceiptStore:
    """Receipts of one model: `receipts/<day>/<resume key>.json`. A shard is found by what it is, not by its place in
    the day: a file that arrives late moves all that come after it.
    """

    def __init__(self, folder: Folder, table: Folder) -> None:
        self._folder, self._table = folder, table

    def write(self, receipt: Receipt) -> None:
        """After the data file is complete and stored; from here on the shard counts as done."""
        self._folder.write(_name(receipt.day, receipt.resume_key), json.dumps(to_plain(receipt)).encode())

    def find(self, day: str, shard: int, key: str) -> Receipt | None:
        """The receipt of that key, for the place that its shard has in the day now, if its data file is whole."""
        written = self._folder.read(_name(day, key))
        if written is None:
            return None
        try:
            receipt = Receipt.from_plain(json.loads(written))
        except (ValueError, KeyError, TypeError):
            return None  # it cannot be read: the shard is scored again
        if receipt.resume_key != key or self._table.digest(receipt.file) != receipt.sha256:
            return None
        return replace(receipt, shard=shard)

    def files(self, day: str) -> set[str]:
        """The data files that the day's receipts name: of shards that need not be scored again."""
        return {name for name in self._named(day).values() if name is not None}

    def withdraw(self, receipts: Iterable[Receipt]) -> None:
        """These shards count as not done."""
        self._folder.delete([_name(receipt.day, receipt.resume_key) for receipt in receipts])

    def remove_void(self) -> list[str]:
        """Remove receipts whose data file is gone; returns their names."""
        named = self._named()
        # Only now: what a live run's receipt names is there before the receipt is.
        files = {file.name for file in self._table.list()}
        void = [name for name, file in named.items() if file not in files]
        self._folder.delete(void)
        return void

    def _named(self, day: str = "") -> dict[str, str | None]:
        """Receipt → the data file that it names; None where it cannot be read."""
        named: dict[str, str | None] = {}
        for one in self._folder.list(day):
            try:
                named[one.name] = json.loads(self._folder.read(one.name) or b"")["file"]
            except (ValueError, KeyError, TypeError):
                named[one.name] = None
        return named


def _name(day: str, key: str) -> str:
    return f"{day}/{key}.json"
