"""Attempts: which runs work on a day right now, and which of them died.

An attempt is one run's work on one day. Its record, `attempts/<day>/<id>.json`, is renewed as long as the run lives;
everything that the run leaves behind carries the id. A record that is as old as the lease belongs to a dead run.
Ages are taken from the storage's own stamps, so no two machines' clocks are ever compared.

A run may be taken for dead though it only slept. So the record is a hint, and what counts is in the table: there the
attempt is entered once, either as published or as dead (see `PredictionTable.clean_up`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpu_runtime.errors import PublicationConflictError
from gpu_runtime.predictions.storage import Folder

_RENEWALS_PER_LEASE = 5
_GRACE_S = 10.0
_RECORD = re.compile(r"/[0-9a-f]{32}(\.dead)?\.json$")


@dataclass(frozen=True)
class DeadAttempt:
    """`publications` are those it noted; whether it committed one, the table knows."""

    day: str
    id: str
    publications: tuple[str, ...]


@dataclass(frozen=True)
class AttemptTicket:
    """What it takes to leave something behind in an attempt's name; plain values, for other processes too."""

    day: str
    run_id: str
    id: str

    @property
    def record(self) -> str:
        return f"{self.day}/{self.id}.json"


class Attempt:
    """A live attempt. Use it in a `with`; its record goes when the day was published, and otherwise tells the next
    run that there is something to clean."""

    def __init__(self, folder: Folder, day: str, run_id: str, lease_s: float) -> None:
        self.ticket = AttemptTicket(day, run_id, uuid.uuid4().hex)
        self._folder, self._lease = folder, datetime.timedelta(seconds=lease_s)
        self._publications: list[str] = []
        self._ended = threading.Event()
        self._over = False  # its record says so, whoever renews it after that
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep_alive, name="attempt", daemon=True)

    @property
    def day(self) -> str:
        return self.ticket.day

    @property
    def id(self) -> str:
        return self.ticket.id

    def __enter__(self) -> Attempt:
        self._write()
        if self._ended.is_set():  # nobody waits for it any more: storage hung for too long
            self._write(over=True)
        else:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._ended.set()
        # Storage that hangs, or fails, must not keep the run from ending: the lease tells the rest.
        last = threading.Thread(target=self._end, args=(kind is None,), name="attempt ends", daemon=True)
        last.start()
        last.join(_GRACE_S)

    def _end(self, published: bool) -> None:
        if self._thread.ident is None:
            return
        self._thread.join()
        with contextlib.suppress(Exception):  # the run's own outcome matters more; the next one reads the record
            if published:
                self._folder.delete([self.ticket.record])
            else:
                self._write(over=True)

    def note_publication(self, number: str) -> None:
        """Before anything is written under that number: whoever cleans up must find it."""
        self._publications.append(number)
        self.renew()

    def check_wanted(self) -> None:
        """Raises `PublicationConflictError` once the run has ended: storage hung for so long that it gave up."""
        if self._ended.is_set():
            raise PublicationConflictError(
                "its run has given up waiting", stage="publish", item=self.day, next_step="run the day again"
            )

    def renew(self) -> None:
        """A sign of life. Raises `PublicationConflictError` if another run took this one for dead and cleaned its
        files away: from then on it can publish nothing."""
        check_alive(self.ticket, self._folder)
        self._write()

    def dead_ones(self) -> Sequence[DeadAttempt]:
        """Other attempts, at any day, whose run has ended or has not renewed its record for a whole lease.

        Renews this one first: its own stamp is the clock by which the others are judged.
        """
        self.renew()
        records = {file.name: file for file in self._folder.list() if _RECORD.search(file.name)}
        own = records.pop(self.ticket.record, None)
        if own is None:
            raise taken_for_dead(self.ticket)
        found = []
        for name, file in records.items():
            written = self._folder.read(name)
            if written is None:
                continue  # cleaned by somebody else
            try:
                record = json.loads(written)
                ended, publications = bool(record["ended"]), tuple(record["publications"])
            except (ValueError, KeyError, TypeError):
                ended, publications = False, ()  # whoever wrote it is known by the file's name alone
            if ended or own.modified - file.modified > self._lease:
                found.append(
                    DeadAttempt(name.partition("/")[0], PurePosixPath(name).name.partition(".")[0], publications)
                )
        return found

    def forget(self, dead: DeadAttempt) -> None:
        """Nothing of it is left."""
        self._folder.sweep(dead.day, dead.id)

    def keep_in_mind(self, dead: DeadAttempt) -> None:
        """Only files of shards that it finished are left. Its own record goes: so it learns that it is dead."""
        record = {"id": dead.id, "publications": [], "ended": True}
        self._folder.write(f"{dead.day}/{dead.id}.dead.json", json.dumps(record).encode())
        self._folder.delete([f"{dead.day}/{dead.id}.json"])

    def _write(self, *, over: bool = False) -> None:
        with self._lock:  # around the record too: a renewal must not undo what was added meanwhile
            self._over = self._over or over
            publications = self._publications
            record = {"id": self.id, "run_id": self.ticket.run_id, "publications": publications, "ended": self._over}
            self._folder.write(self.ticket.record, json.dumps(record).encode())

    def _keep_alive(self) -> None:
        while not self._ended.wait(self._lease.total_seconds() / _RENEWALS_PER_LEASE):
            with contextlib.suppress(Exception):  # storage that fails for a moment: the next renewal may pass
                self.renew()


def check_alive(ticket: AttemptTicket, folder: Folder) -> None:
    """Raises `PublicationConflictError` when the attempt's record is gone from `folder`."""
    if folder.read(ticket.record) is None:
        raise taken_for_dead(ticket)


def taken_for_dead(ticket: AttemptTicket) -> PublicationConflictError:
    return PublicationConflictError(
        "another run took this one for dead and removed its files",
        stage="publish",
        item=ticket.day,
        expected="a sign of life before its lease ran out",
        got="none for longer than that: was the machine suspended?",
        next_step="run the day again",
    )
