"""A code location whose runs can be told to kill themselves at a fault point; for `dagster … -f location.py`.

Its folder, data and fault come from the environment:

    FAULTS_ROOT   the folder with the model, the data and the tables
    FAULTS_LOG    a file to which a line is added for each batch that is handed to the engine
    FAULTS_KILL   `<point>`, e.g. `after receipt`: SIGKILL there, at the third shard or later, with two batches or
                  more in the ring; not set: the run is left alone
    FAULTS_STALL  `<point>`: hang there for ever, at the third shard or later; a stage may then take 3 s, otherwise 120
    FAULTS_SLOW   seconds that each batch's write takes longer
"""

import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

_LATE = ("quarantine", "commit", "clean-up")  # once a day, after the last shard


class Killer:
    """A fault plan that ends this process, or hangs."""

    def __init__(self) -> None:
        self._kill, self._stall = os.environ.get("FAULTS_KILL"), os.environ.get("FAULTS_STALL")
        self._slow_s = float(os.environ.get("FAULTS_SLOW", "0"))
        self._log = os.open(os.environ["FAULTS_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, point: str) -> None:
        if point == "before write" and self._slow_s:
            time.sleep(self._slow_s)
        with self._lock:
            self._seen[point] += 1
            if point == "before enqueue":
                os.write(self._log, b"batch\n")
            if point in (self._kill, self._stall) and self._due(point):
                os.write(self._log, f"killed {point} in flight {self._in_flight}\n".encode())
                if point == self._kill:
                    os.kill(os.getpid(), signal.SIGKILL)
            else:
                return
        threading.Event().wait()

    @property
    def _in_flight(self) -> int:
        """Slots taken and not yet given back."""
        return self._seen["before decode"] - self._seen["after write"]

    def _due(self, point: str) -> bool:
        if point.split(" ", 1)[1] in _LATE:
            return True
        return self._seen["after receipt"] >= 2 and self._in_flight >= 2


sys.path.insert(0, str(Path(__file__).parent))
from crashes import definitions  # noqa: E402

defs = definitions(Path(os.environ["FAULTS_ROOT"]), Killer(), 3 if "FAULTS_STALL" in os.environ else 120)
