"""What the executor's tests run on: a strict engine in numpy, a shard in memory, and a limit on every run.

Row `i` has x = [1 + i % 7, 1 + i % 5, 1 + i % 3]; the engine gives y = [i + sum(x), i / 2] and twice = 2 i.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gpu_runtime.backends.protocol import EngineFile, EngineOptions
from gpu_runtime.datasets.partition import RowFailure, origins_of
from gpu_runtime.device.host import HostDevice, cpu_class
from gpu_runtime.device.protocol import Device, Stream
from gpu_runtime.errors import RowError
from gpu_runtime.executor import pipeline
from gpu_runtime.executor.stage_clock import RunStats
from gpu_runtime.specs import TensorSpec

LIMIT_S = 20.0
BATCH = 4
INPUTS = (TensorSpec("x", "float32", (3,), minimum=1.0), TensorSpec("id", "int32", minimum=0, maximum=9_999))
OUTPUTS = (TensorSpec("y", "float32", (2,)), TensorSpec("twice", "int32"))
Arrays = Mapping[str, npt.NDArray[Any]]
Edit = tuple[str, str]  # a passage of the source, and what replaces it


def x_of(ids: Sequence[int]) -> npt.NDArray[Any]:
    rows = np.asarray(ids)
    return np.stack([1 + rows % 7, 1 + rows % 5, 1 + rows % 3], axis=1).astype("float32")


@dataclass
class StrictEngine:
    """Takes exactly what its file declares and nothing else; a context runs one batch at a time.

    `during(ids)` is called inside the work, on the stream; `queueing()` inside `enqueue`, on the caller's
    thread, when `offered` says how many rows it got. `spoil(ids, outputs)` may change what was computed.
    """

    streams: int = 1
    during: Callable[[list[int]], None] = lambda ids: None
    queueing: Callable[[], None] = lambda: None
    queued: Callable[[], None] = lambda: None
    spoil: Callable[[list[int], Arrays], None] = lambda ids, outputs: None
    outputs: tuple[TensorSpec, ...] = OUTPUTS
    working: int = 0
    offered: int = 0
    seen: list[list[int]] = field(default_factory=list)  # ids of each batch, padding included
    taken: list[npt.NDArray[Any]] = field(default_factory=list)  # x of each batch
    handed: list[Arrays] = field(default_factory=list)  # the inputs of each batch, as they were offered

    def __post_init__(self) -> None:
        self.options = EngineOptions(streams=self.streams)
        self.file = EngineFile(
            Path("engine"), "", "numpy", "1", "fp32", "fp32", None, cpu_class(), "", INPUTS, self.outputs, 8, 0
        )

    def create_context(self) -> StrictContext:
        return StrictContext(self)

    def close(self) -> None:
        pass


@dataclass
class StrictContext:
    engine: StrictEngine
    busy: threading.Lock = field(default_factory=threading.Lock)

    def enqueue(self, inputs: Arrays, outputs: Arrays, stream: Stream) -> None:
        self.engine.offered = rows = len(inputs["id"])
        self.engine.handed.append(inputs)
        assert 1 <= rows <= self.engine.file.max_batch
        for arrays, specs in ((inputs, INPUTS), (outputs, OUTPUTS)):
            assert list(arrays) == [spec.name for spec in specs]
            for spec in specs:
                array = arrays[spec.name]
                assert (array.dtype, array.shape) == (spec.numpy_dtype, spec.batch_shape(rows))
                assert array.flags.c_contiguous
        self.engine.queueing()
        stream.launch(lambda: self._run(inputs, outputs))
        self.engine.queued()

    def _run(self, inputs: Arrays, outputs: Arrays) -> None:
        assert self.busy.acquire(blocking=False), "two batches at once in one context"
        self.engine.working += 1
        try:
            ids = inputs["id"].tolist()
            self.engine.seen.append(ids)
            self.engine.taken.append(inputs["x"].copy())
            self.engine.during(ids)
            assert all((inputs[spec.name] >= spec.minimum).all() for spec in INPUTS), "outside the declared range"
            outputs["y"][:, 0] = inputs["id"] + inputs["x"].sum(axis=1)
            outputs["y"][:, 1] = inputs["id"] / 2
            outputs["twice"][:] = 2 * inputs["id"]
            self.engine.spoil(ids, outputs)
        finally:
            self.engine.working -= 1
            self.busy.release()


@dataclass
class MemoryShard:
    """Rows `ids`, `piece_rows` to a piece. `during(id)` runs before each row is filled; a `RowError` from it
    fails that row, anything else is the decoder's own failure. `spoil(id, row, staging)` runs after it."""

    ids: Sequence[int]
    during: Callable[[int], None] = lambda id: None
    piece_rows: int = 2
    spoil: Callable[[int, int, Arrays], None] = lambda id, row, staging: None
    working: int = 0
    lengths: None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rows(self) -> int:
        return len(self.ids)

    def origins(self, start: int, stop: int) -> Any:
        return origins_of([str(id) for id in self.ids[start:stop]], "memory", range(start, stop))

    def labels(self) -> None:
        return None

    def view(self, start: int, stop: int) -> Any:
        return None

    def pieces(self, start: int, stop: int, staging: Arrays) -> Any:
        assert all(staging[spec.name].shape == spec.batch_shape(stop - start) for spec in INPUTS)
        cuts = range(start, stop, self.piece_rows)
        return [
            lambda first=first: self._fill(first, min(first + self.piece_rows, stop), start, staging) for first in cuts
        ]

    def _fill(self, first: int, last: int, start: int, staging: Arrays) -> list[RowFailure]:
        with self._lock:
            self.working += 1
        try:
            failures = []
            for row in range(first, last):
                try:
                    self.during(self.ids[row])
                except RowError as error:
                    failures.append(RowFailure(row - start, error.stage, error.reason, "RowError"))
                    continue
                staging["id"][row - start] = self.ids[row]
                staging["x"][row - start] = x_of([self.ids[row]])[0]
                self.spoil(self.ids[row], row - start, staging)
            return failures
        finally:
            with self._lock:
                self.working -= 1


@dataclass
class Record:
    """A `write` that keeps what it is given. `during(scored)` runs first, inside the write."""

    during: Callable[[Any], None] = lambda scored: None
    ids: list[int] = field(default_factory=list)  # of the rows scored, in the order written
    rows: list[tuple[float, float, int]] = field(default_factory=list)  # y and twice of those
    failures: dict[int, RowFailure] = field(default_factory=dict)  # id → why it was not scored
    spans: list[tuple[int, int, int]] = field(default_factory=list)  # (shard, start, stop) of each batch

    def __call__(self, scored: Any) -> None:
        self.during(scored)
        batch = scored.batch
        failed = [failure.row for failure in scored.failures]
        assert failed == sorted(set(failed)), "each failed row once, in order"
        assert all(len(values) == batch.stop - batch.start for values in scored.outputs.values())
        self.spans.append((batch.shard, batch.start, batch.stop))
        self.failures |= {batch.reader.ids[batch.start + f.row]: f for f in scored.failures}
        for row in range(batch.stop - batch.start):
            if row not in failed:
                self.ids.append(batch.reader.ids[batch.start + row])
                y = scored.outputs["y"][row]
                self.rows.append((float(y[0]), float(y[1]), int(scored.outputs["twice"][row])))

    @property
    def right(self) -> bool:
        """Every row written holds what the engine's formula gives for its id."""
        x = x_of(self.ids).sum(axis=1) if self.ids else []
        return self.rows == [(i + float(s), i / 2, 2 * i) for i, s in zip(self.ids, x, strict=True)]


def within(work: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """What `work` returns or raises; fails the test when it takes too long."""
    outcome: dict[str, Any] = {}

    def body() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"hangs; alive: {sorted(t.name for t in threading.enumerate())}")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def threads_of_a_run() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name in ("fill", "dispatch", "write", "settle")]


@dataclass
class Bench:
    """An engine on a device under an executor, closed at the end of the test."""

    engine: StrictEngine
    device: Device
    executor: Any

    def run(self, shards: Sequence[MemoryShard], write: Callable[[Any], None]) -> RunStats:
        return self.run_source(
            (batch for number, shard in enumerate(shards) for batch in self.executor.batches(number, shard)), write
        )

    def run_source(self, source: Iterable[Any], write: Callable[[Any], None]) -> RunStats:
        return within(lambda: self.executor.run(source, write))

    def assert_idle_and_usable(self, *shards: MemoryShard) -> None:
        """Nothing of the run that ended still works, and a healthy run gives right results."""
        assert threads_of_a_run() == []
        assert self.engine.working == 0 and all(shard.working == 0 for shard in shards)
        seen = len(self.engine.seen)
        self.engine.during = self.engine.spoil = lambda *given: None
        self.engine.queueing = self.engine.queued = lambda: None
        record, ids = Record(), list(range(1000, 1030))
        self.run([MemoryShard(ids)], record)
        assert record.ids == ids and record.right and not record.failures
        assert all(min(batch) == 0 or min(batch) >= 1000 for batch in self.engine.seen[seen:]), "an old batch ran"


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """`bench(slots=…, decode_workers=…, device=…, module=…, options={executor's}, **engine)` opens a `Bench`."""
    opened: list[Bench] = []

    def make(
        *,
        slots: int | None = 3,
        decode_workers: int = 4,
        device: Device | None = None,
        module: Any = pipeline,
        batch: int = BATCH,
        options: Mapping[str, Any] = MappingProxyType({}),
        **engine: Any,
    ) -> Bench:
        numpy_engine, where = StrictEngine(**engine), device or HostDevice()
        executor = module.StreamExecutor(
            numpy_engine, where, batch=batch, slots=slots, decode_workers=decode_workers, **options
        )
        opened.append(Bench(numpy_engine, where, executor))
        return opened[-1]

    yield make
    for one in opened:
        within(one.executor.close)
        within(one.device.close)

    def left() -> list[str]:
        return threads_of_a_run() + [
            t.name for t in threading.enumerate() if t.name.startswith(("decode", "host-stream"))
        ]

    # At once, but for what a run had to abandon and the test let go only now.
    assert comes_true(lambda: not left(), 5.0 if any(one.executor._abandoned for one in opened) else 0.0), left()


@pytest.fixture
def executor_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Edit]], types.ModuleType]:
    """`gpu_runtime.executor.pipeline` compiled anew from its source, after edits that must each fit once."""
    numbers = itertools.count()

    def compiled(edits: list[Edit]) -> types.ModuleType:
        path = Path(pipeline.__file__)
        source = path.read_text()
        for old, new in edits:
            assert source.count(old) == 1, f"the source no longer holds exactly one {old!r}: bring this test up to date"
            source = source.replace(old, new)
        module = types.ModuleType(f"edited_pipeline_{next(numbers)}")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
        exec(compile(source, str(path), "exec"), module.__dict__)
        return module

    return compiled


@pytest.fixture
def shard() -> type[MemoryShard]:
    return MemoryShard


@pytest.fixture
def record() -> type[Record]:
    return Record


@pytest.fixture
def limited() -> Callable[..., Any]:
    return within


def comes_true(condition: Callable[[], bool], limit_s: float = 5.0) -> bool:
    """Whether a condition that other threads bring about comes true in time."""
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.fixture
def settled() -> Callable[..., bool]:
    return comes_true


@pytest.fixture
def alone() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program that can `import conftest` in a process of its own; one that does not end fails the test."""

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        here = Path(__file__).parent
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )

    return run
