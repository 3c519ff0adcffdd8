"""Where tables and receipts lie: a folder on disk, or a prefix of an object store.

Files go through the same storage library as delta-rs (the object_store crate), so that one URI and one set of
options serve both. Every write here is whole or not there at all.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BUFFER_NBYTES = 8 << 20
COMMIT_TRIES = 100
"""Writers that meet: a try fails only if another's succeeded, so this many others may be at it at once."""
_UNFINISHED = "*#[0-9]*"
"""What the storage library calls a file on disk until it is complete; it lists none of them."""
_OF_THE_CLIENT = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "randomize_addresses",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
"""Options of the HTTP client; delta-rs takes them among those of the store, obstore apart from them."""


@dataclass(frozen=True)
class StoredFile:
    """`name` is relative to the folder; `modified` is the storage's clock, not ours."""

    name: str
    nbytes: int
    modified: datetime.datetime


class Folder:
    """Files under `uri`: a local path, or `s3://bucket/prefix`, `gs://…`, `az://…`.

    `options` are delta-rs' storage options (`AWS_REGION`, `AWS_ENDPOINT_URL`, …). Credentials that the environment
    holds need not be among them; none of them is ever written anywhere or shown.
    """

    def __init__(self, uri: str | Path, options: Mapping[str, str] | None = None) -> None:
        self.local = None if "://" in str(uri) else Path(uri).absolute()
        self.uri = str(self.local or uri).rstrip("/")
        self.options = dict(options or {})
        self._opened: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to open it again."""
        return {**vars(self), "_opened": None}

    def folder(self, name: str) -> Folder:
        return Folder(f"{self.uri}/{name}", self.options)

    @property
    def _store(self) -> Any:
        if self._opened is None:
            import obstore.store

            if self.local is not None:
                self._opened = obstore.store.LocalStore(self.local, mkdir=True)
            else:
                self._opened = _open_store(self.uri, self.options)
        return self._opened

    def read(self, name: str) -> bytes | None:
        """The file's bytes, or None when there is no such file."""
        import obstore

        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Readers see the old file or the new one, whole."""
        import obstore

        obstore.put(self._store, name, data)
        self._flush(name)

    def writer(self, name: str) -> FileWriter:
        """A file that appears, whole, when it is closed."""
        return FileWriter(self, name)

    def list(self, prefix: str = "") -> Sequence[StoredFile]:
        """Every file below the folder `prefix`, in no order."""
        import obstore

        found = obstore.list(self._store, prefix or None).collect()
        return [StoredFile(one["path"], one["size"], one["last_modified"]) for one in found]

    def digest(self, name: str) -> str | None:
        """SHA-256 (hex) of the file's bytes, or None when there is no such file."""
        import obstore

        made = hashlib.sha256()
        try:
            for chunk in obstore.get(self._store, name).stream(_BUFFER_NBYTES):
                made.update(chunk)
        except FileNotFoundError:
            return None
        return made.hexdigest()

    def copy(self, name: str, other: str) -> None:
        """The same bytes under another name, as new as a file just written. Raises FileNotFoundError."""
        import obstore

        obstore.copy(self._store, name, other)
        if self.local is not None:
            os.utime(self.local / other)  # a hard link: as old as the first one, it might be vacuumed before its commit
            self._flush(other)

    def delete(self, names: Sequence[str]) -> None:
        """Remove files; one that is gone already is no error."""
        import obstore

        for name in names:
            if self.local is not None:  # the library does not see files that were never finished
                (self.local / name).unlink(missing_ok=True)
                continue
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, name)

    def sweep(self, folder: str, marker: str, spare: Container[str] = ()) -> Sequence[str]:
        """Remove what lies in `folder` and has `marker` in its name, but not `spare`; returns what was removed.

        On disk that includes files that were never finished. Of those an object store shows nothing: let a
        lifecycle rule of the bucket end multipart uploads that nobody completes.
        """
        names = [file.name for file in self.list(folder)]
        if self.local is not None:
            names += [path.relative_to(self.local).as_posix() for path in (self.local / folder).glob(_UNFINISHED)]
        gone = [name for name in names if marker in name and name not in spare]
        self.delete(gone)
        return gone

    def sweep_unfinished(self, age_s: float) -> Sequence[str]:
        """Remove files on disk that were never finished and have not grown for so long; returns their names."""
        if self.local is None:
            return []
        latest, gone = time.time() - age_s, []
        for path in self.local.rglob(_UNFINISHED):
            with contextlib.suppress(FileNotFoundError):  # finished meanwhile
                if path.stat().st_mtime <= latest:
                    path.unlink()
                    gone.append(path.relative_to(self.local).as_posix())
        return gone

    def _flush(self, name: str) -> None:
        """To the disk, not only to the kernel: a receipt must never outlive its file when the power goes."""
        if self.local is not None:
            for path, flags in ((self.local / name, os.O_RDONLY), ((self.local / name).parent, os.O_DIRECTORY)):
                handle = os.open(path, flags)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)


class FileWriter:
    """A file being written, as pyarrow takes it. Nothing shows before `commit`."""

    closed = False

    def __init__(self, folder: Folder, name: str) -> None:
        import obstore

        self._folder, self._name = folder, name
        self._target = obstore.open_writer(folder._store, name, buffer_size=_BUFFER_NBYTES)
        self._digest = hashlib.sha256()
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._target.write(bytes(data))
        self.nbytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        pass

    def close(self) -> None:
        """pyarrow closes what it writes to, also after an error: that alone must not make the file appear."""

    def commit(self) -> tuple[int, str]:
        """Put the file in place; returns its size and SHA-256."""
        self._target.close()
        self._folder._flush(self._name)
        return self.nbytes, self._digest.hexdigest()


def open_table(folder: Folder) -> Any:
    """The Delta table that lies there; None when there is none."""
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    try:
        return DeltaTable(folder.uri, storage_options=folder.options)
    except TableNotFoundError:
        return None


def append_rows(folder: Folder, rows: Any, only: Sequence[tuple[str, str, Any]]) -> None:
    """Add an Arrow table's rows to the Delta table, whoever else adds or removes some at the same time.

    `only` is the filter that finds just these rows: what seems to fail may have been stored.
    """
    from deltalake import CommitProperties, write_deltalake
    from deltalake.exceptions import CommitFailedError

    for left in reversed(range(COMMIT_TRIES)):
        try:
            write_deltalake(
                folder.uri,
                rows,
                mode="append",
                schema_mode="merge",
                partition_by=["date"],
                storage_options=folder.options,
                commit_properties=CommitProperties(max_commit_retries=COMMIT_TRIES),
            )
            return
        except CommitFailedError:  # deltalake takes an append for a reader of rows that somebody deletes
            if len(open_table(folder).to_pandas(filters=list(only))):
                return
            if not left:
                raise


def delete_rows(folder: Folder, predicate: str) -> None:
    """Remove the rows of a Delta table that fit; starts again when somebody else changes it meanwhile."""
    from deltalake.exceptions import CommitFailedError

    for left in reversed(range(COMMIT_TRIES)):
        try:
            open_table(folder).delete(predicate)
            return
        except CommitFailedError:
            if not left:
                raise


def _open_store(uri: str, options: Mapping[str, str]) -> Any:
    """The store with those of delta-rs' options that are its own; the others make it raise, or worse, panic."""
    import obstore.store
    from obstore.exceptions import UnknownConfigurationKeyError

    def knows(name: str) -> bool:
        try:
            obstore.store.from_url(uri, config={name: options[name]})  # type: ignore[call-overload]
        except UnknownConfigurationKeyError:
            return False
        except Exception:  # it lacks the other options
            return True
        return True

    config, client = {}, {}
    for name, value in options.items():
        bare = name.lower().removeprefix("aws_")
        if bare in _OF_THE_CLIENT:
            client[bare] = value
        elif knows(name):
            config[name] = value
    if client:  # with any option for the client, obstore leaves the environment's out
        client.setdefault("allow_http", os.environ.get("AWS_ALLOW_HTTP", "false"))
    return obstore.store.from_url(
        uri,
        config=config,
        client_options=client or None,
    )  # type: ignore[call-overload]
