"""Files on disk and on an object store: whole or not there at all, and no credential anywhere."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError

from gpu_runtime.errors import PublicationConflictError
from gpu_runtime.predictions.delta_table import PredictionTable
from gpu_runtime.predictions.storage import Folder, open_table

LARGE = 20 << 20  # more than a writer keeps in memory

# Writes LARGE bytes to the file and waits to be killed.
UNFINISHED = """
import json, sys, time
from gpu_runtime.predictions.storage import Folder
root, options, name, nbytes = json.loads(sys.argv[1])
writer = Folder(root, options).writer(name)
for _ in range(nbytes >> 20):
    writer.write(bytes(1 << 20))
print("written", flush=True)
time.sleep(600)
"""


def killed_writer(root: str, options: dict[str, str], name: str) -> None:
    command = [sys.executable, "-c", UNFINISHED, json.dumps([root, options, name, LARGE])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)


@pytest.fixture
def folder(place: Any) -> Folder:
    return Folder(place.root, place.options)


def names(folder: Folder, prefix: str = "") -> list[str]:
    return sorted(file.name for file in folder.list(prefix))


def test_files_are_written_read_listed_copied_and_deleted(folder: Folder) -> None:
    assert (folder.read("a/one"), folder.digest("a/one"), names(folder, "a")) == (None, None, [])
    folder.write("a/one", b"first")
    folder.write("a/one", b"second")
    folder.write("ab/two", b"2")
    assert folder.read("a/one") == b"second"
    assert folder.digest("a/one") == hashlib.sha256(b"second").hexdigest()
    assert names(folder) == ["a/one", "ab/two"]
    assert [(file.name, file.nbytes) for file in folder.list("a")] == [("a/one", 6)]
    assert folder.folder("a").read("one") == b"second"
    folder.copy("a/one", "b/three")
    folder.delete(["a/one", "a/one", "never/there"])
    assert names(folder) == ["ab/two", "b/three"]
    assert folder.read("b/three") == b"second"
    with pytest.raises(FileNotFoundError):
        folder.copy("a/one", "c")


def test_a_copy_is_as_new_as_a_file_just_written(disk: Any) -> None:
    """Else a vacuum could take it for a leftover before the commit that names it."""
    folder = Folder(disk.root)
    folder.write("old", b"x")
    os.utime(Path(disk.root) / "old", (1, 1))
    folder.copy("old", "new")
    (new,) = [file for file in folder.list() if file.name == "new"]
    assert abs(new.modified.timestamp() - time.time()) < 60


@pytest.mark.parametrize("nbytes", [0, 1, LARGE])
def test_a_file_appears_whole_when_it_is_committed(folder: Folder, nbytes: int) -> None:
    data = os.urandom(nbytes)
    writer = folder.writer("day/file.parquet")
    for start in range(0, nbytes, 3 << 20):
        writer.write(data[start : start + (3 << 20)])
        assert writer.tell() == min(nbytes, start + (3 << 20))
    writer.close()  # as pyarrow does, also after an error
    assert (names(folder), folder.read("day/file.parquet")) == ([], None)
    assert writer.commit() == (nbytes, hashlib.sha256(data).hexdigest())
    assert folder.read("day/file.parquet") == data
    assert folder.digest("day/file.parquet") == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("nbytes", [1, LARGE])
def test_a_writer_that_is_dropped_leaves_nothing(folder: Folder, nbytes: int) -> None:
    folder.write("day/other.parquet", b"x")
    writer = folder.writer("day/file.parquet")
    writer.write(bytes(nbytes))
    del writer
    gc.collect()
    assert names(folder) == ["day/other.parquet"]


def test_the_file_of_a_killed_writer_never_shows_and_is_swept(folder: Folder, place: Any) -> None:
    folder.write("day/part-mine.parquet", b"x")
    folder.write("day/part-yours.parquet", b"x")
    folder.write("night/part-mine.parquet", b"x")
    killed_writer(place.root, place.options, "day/part-0-mine.parquet")
    assert names(folder, "day") == ["day/part-mine.parquet", "day/part-yours.parquet"]
    assert folder.digest("day/part-0-mine.parquet") is None
    removed = folder.sweep("day", "mine")
    assert names(folder) == ["day/part-yours.parquet", "night/part-mine.parquet"]
    if folder.local is not None:
        assert sorted(removed) == ["day/part-0-mine.parquet#1", "day/part-mine.parquet"]
        assert [path.name for path in (folder.local / "day").iterdir()] == ["part-yours.parquet"]
    assert folder.sweep("day", "mine") == folder.sweep("never", "mine") == []


def test_unfinished_files_are_swept_when_they_are_old(disk: Any) -> None:
    folder = Folder(disk.root)
    folder.write("receipts/day/1.json", b"x")
    litter = Path(disk.root) / "receipts/day/1.json#7"
    litter.write_bytes(b"half")
    assert folder.sweep_unfinished(3600) == []
    os.utime(litter, (1, 1))
    assert folder.sweep_unfinished(3600) == ["receipts/day/1.json#7"]
    assert [path.name for path in litter.parent.iterdir()] == ["1.json"]


# Options and credentials


@pytest.mark.parametrize(
    "more",
    [
        {"AWS_S3_ALLOW_UNSAFE_RENAME": "true", "AWS_S3_LOCKING_PROVIDER": "dynamodb", "DELTA_DYNAMO_TABLE_NAME": "t"},
        {"timeout": "30s", "connect_timeout": "5s", "max_retries": "3", "OBJECT_STORE_CONCURRENCY_LIMIT": "4"},
        {"AWS_CONDITIONAL_PUT": "etag", "AWS_FORCE_CREDENTIAL_LOAD": "true", "copy_if_not_exists": "multipart"},
    ],
)
def test_options_of_delta_rs_do_not_upset_the_files(s3: Any, more: dict[str, str]) -> None:
    folder = Folder(s3.uri(), s3.options | more)
    folder.write("a", b"x")
    assert folder.read("a") == b"x"


def test_plain_http_only_where_it_is_allowed(s3: Any) -> None:
    folder = Folder(s3.uri(), s3.options | {"AWS_ALLOW_HTTP": "false"})
    with pytest.raises(Exception, match="builder error"):
        folder.write("a", b"x")


def test_the_environment_alone_suffices(s3: Any, days: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.options.items():
        monkeypatch.setenv(name, value)
    table = PredictionTable(s3.uri())
    days.publish(table, "2026-03-02", [0.5], rotten=(days.rotten,))
    assert table.count_day("2026-03-02") == (1, 1)
    timed = Folder(s3.uri(), {"timeout": "20s"})  # an option for the client leaves the environment in force
    timed.write("a", b"x")
    assert timed.read("a") == b"x"


def test_no_credential_is_written_or_shown(s3: Any, days: Any) -> None:
    secret, key_id = s3.options["AWS_SECRET_ACCESS_KEY"], s3.options["AWS_ACCESS_KEY_ID"]
    uri, shown = s3.uri(), []
    table = PredictionTable(uri, s3.options)
    days.publish(table, "2026-03-02", [0.5], rotten=(days.rotten,), report={"run": 1})
    with days.killed(table, "2026-03-02"):
        pass
    for attempt in (
        lambda: days.publish(table, "2026-03-02", [0.5], previous="stale"),
        lambda: Folder("s3://no-such-bucket/x", s3.options).write("a", b"x"),
        lambda: Folder("s3://no-such-bucket/x", s3.options).list(),
        lambda: days.publish(PredictionTable("s3://no-such-bucket/x", s3.options), "2026-03-02", [0.5]),
        lambda: Folder(uri, s3.options | {"AWS_CONDITIONAL_PUT": "nonsense"}).read("a"),
        lambda: open_table(Folder(uri, s3.options | {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "max_retries": "0"})),
    ):
        with pytest.raises(Exception) as error:
            attempt()
        shown.append("".join(traceback.format_exception(error.value)))
    with table.attempt("2026-03-02", "run") as held:
        shown += [repr(one) for one in (table, table.root, table.root._store, table.receipts, held)]
        shown += [repr(table.published("2026-03-02"))]
        shown += [repr(open_table(folder)) for folder in (table.predictions, table.quarantine, table.runs)]
        written = table.root.list()
        assert {file.name.partition("/")[0] for file in written} == {
            "predictions",
            "quarantine",
            "runs",
            "receipts",
            "attempts",
        }
        shown += [table.root.read(file.name).decode("latin-1") for file in written]
    assert not [text for text in shown if secret in text or key_id in text]


def test_a_conflict_names_the_day_and_what_to_do(place: Any, days: Any) -> None:
    table = place.table()
    first = days.publish(table, "2026-03-02", [0.5])
    with pytest.raises(PublicationConflictError, match=f"2026-03-02.*Expected publication stale.*{first}.*Next: "):
        days.publish(table, "2026-03-02", [0.5], previous="stale")


def test_the_loopback_server_answers_one_of_two_creators(s3: Any) -> None:
    """The tests of conflicts rest on this."""
    store = Folder(s3.uri(), s3.options)._store
    obstore.put(store, "file", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "file", b"second", mode="create")
