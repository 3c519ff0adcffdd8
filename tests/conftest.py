"""A loopback S3 server, and days of predictions made by hand, for every suite that asks for them."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_runtime.datasets.partition import origins_of
from gpu_runtime.predictions.attempts import Attempt
from gpu_runtime.predictions.delta_table import DayRecord, PredictionTable
from gpu_runtime.predictions.receipts import QuarantinedRow, Receipt
from gpu_runtime.predictions.shard_file import PredictionSchema, Provenance
from gpu_runtime.specs import TensorSpec

# moto looks for a key and then puts it; only one request at a time makes that what S3 promises of If-None-Match.
# In a process of its own: deltalake holds the interpreter's lock while it waits for some answers.
_SERVER = """
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
import logging
logging.getLogger("werkzeug").setLevel(logging.ERROR)
app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, app, request_handler=MotoRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()
"""

SECRET = "a-secret-that-nobody-may-see"


@dataclass(frozen=True)
class LoopbackS3:
    """A server with one bucket, and delta-rs' options for it."""

    endpoint: str
    bucket = "bucket"

    @property
    def options(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "a-key-id",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ALLOW_HTTP": "true",
        }

    def uri(self) -> str:
        """A prefix that nobody has used."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def s3() -> Iterator[LoopbackS3]:
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            made = LoopbackS3(f"http://127.0.0.1:{int(server.stdout.readline())}")
            urllib.request.urlopen(urllib.request.Request(f"{made.endpoint}/{made.bucket}", method="PUT")).close()
            yield made
        finally:
            server.kill()


@dataclass(frozen=True)
class Place:
    """Where a test keeps its files."""

    root: str
    options: dict[str, str]

    def folder(self, name: str) -> Place:
        return Place(f"{self.root}/{name}", self.options)

    def table(self, **settings: Any) -> PredictionTable:
        return PredictionTable(self.root, self.options, **settings)


@pytest.fixture
def disk(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "place"), {})


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest) -> Place:
    """A folder on the local disk, and a prefix on the loopback S3 server."""
    if request.param == "disk":
        return request.getfixturevalue("disk")
    s3: LoopbackS3 = request.getfixturevalue("s3")
    return Place(s3.uri(), s3.options)


class Killed(BaseException):
    """Where a process would have ended."""


@dataclass(frozen=True)
class HandmadeDays:
    """Shards, records and publications as scoring makes them, without a model."""

    Killed = Killed
    schema = PredictionSchema((TensorSpec("score", "float32"),), {})
    rotten = QuarantinedRow("key-x", "a.parquet", 9, "input", "column 'a' is null", "ValueError")

    def shard(
        self,
        table: PredictionTable,
        attempt: Attempt,
        scores: list[float],
        *,
        shard: int = 0,
        rotten: tuple[QuarantinedRow, ...] = (),
        schema: PredictionSchema = schema,
        outputs: Mapping[str, Any] | None = None,
    ) -> Receipt:
        """A shard's file as scoring leaves it, and its receipt, which is not written."""
        count = len(scores)
        writer = table.shard_writer(schema, shard, attempt.ticket, Provenance("model", "engine", attempt.ticket.run_id))
        if count:
            keys = [f"key-{shard}-{i}" for i in range(count)]
            writer.append(origins_of(keys, "a.parquet", range(count)), outputs or {"score": np.asarray(scores)})
        nbytes, sha256 = writer.finish()
        return Receipt(
            attempt.day,
            shard,
            f"key-{shard}",
            attempt.ticket.run_id,
            writer.file,
            nbytes,
            sha256,
            count + len(rotten),
            count,
            rotten,
        )

    def record(self, attempt: Attempt, receipts: tuple[Receipt, ...], report: Mapping[str, Any]) -> DayRecord:
        return DayRecord(
            day_key="day key",
            provenance=Provenance("model", "engine", attempt.ticket.run_id),
            rows_in=sum(one.rows_in for one in receipts),
            scored=sum(one.rows for one in receipts),
            quarantined=sum(len(one.quarantined) for one in receipts),
            report=report,
        )

    def commit(
        self,
        table: PredictionTable,
        attempt: Attempt,
        *receipts: Receipt,
        previous: str | None = None,
        schema: PredictionSchema = schema,
        report: Mapping[str, Any] | None = None,
    ) -> str:
        return table.publish(schema, attempt, receipts, self.record(attempt, receipts, report or {}), previous)

    def publish(
        self,
        table: PredictionTable,
        day: str,
        *scores: list[float],
        run: str = "run",
        rotten: tuple[QuarantinedRow, ...] = (),
        previous: str | None = None,
        report: Mapping[str, Any] | None = None,
        clean_up: bool = True,
    ) -> str:
        """A whole run of the day: one shard for each list of scores, with `rotten` rows in the first."""
        with table.attempt(day, run) as attempt:
            receipts = [
                self.shard(table, attempt, part, shard=number, rotten=() if number else rotten)
                for number, part in enumerate(scores)
            ]
            for receipt in receipts:
                table.receipts.write(receipt)
            number = self.commit(table, attempt, *receipts, previous=previous, report=report)
            if clean_up:
                table.clean_up(attempt)
        return number

    @contextmanager
    def killed(self, table: PredictionTable, day: str, run: str = "dead") -> Iterator[Attempt]:
        """An attempt whose signs of life stop at the end of the block, and nobody ends it."""
        attempt = table.attempt(day, run).__enter__()
        with suppress(Killed):
            yield attempt
        attempt._ended.set()
        attempt._thread.join()


@pytest.fixture(scope="session")
def days() -> HandmadeDays:
    return HandmadeDays()
