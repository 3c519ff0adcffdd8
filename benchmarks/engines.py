"""Engine files run with nothing but their own library: what a careful person writes by hand, for peers and bounds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Queue(Protocol):
    """Up to `streams` batches at once. `done` gets the outputs, in the graph's order, on any thread."""

    def submit(self, batch: Array, done: Callable[[list[Array]], None]) -> None: ...

    def wait(self) -> None: ...


def open_queue(engine: str, backend: str, streams: int, threads: int) -> Queue:
    """`threads` for each stream. Both libraries get the settings that our backends give them."""
    queues: dict[str, Callable[[Path, int, int], Queue]] = {"openvino": OpenVinoQueue, "onnxruntime": OnnxRuntimeQueue}
    return queues[backend](Path(engine), streams, threads)


def open_engine(engine: str, backend: str, threads: int) -> Callable[[Array], list[Array]]:
    """One batch at a time, on `threads` threads."""
    queue = open_queue(engine, backend, 1, threads)

    def infer(batch: Array) -> list[Array]:
        found: list[list[Array]] = []
        queue.submit(batch, found.append)
        queue.wait()
        return found[0]

    return infer


def run_over(queue: Queue, batch: Array, rows: int) -> None:
    """The engine alone: as many rows as there are, from memory that stays where it is."""
    for _ in range(-(-rows // len(batch))):
        queue.submit(batch, lambda outputs: None)
    queue.wait()


class OpenVinoQueue:
    def __init__(self, engine: Path, streams: int, threads: int) -> None:
        import openvino

        settings = {
            "NUM_STREAMS": streams,
            "INFERENCE_NUM_THREADS": streams * threads,
            "INFERENCE_PRECISION_HINT": "f32",
        }
        compiled = openvino.Core().import_model(engine.read_bytes(), "CPU", settings)
        self._queue: Any = openvino.AsyncInferQueue(compiled, streams)
        self._queue.set_callback(self._finished)

    @staticmethod
    def _finished(request: Any, work: tuple[Array, Callable[[list[Array]], None]]) -> None:
        work[1]([tensor.data.copy() for tensor in request.output_tensors])

    def submit(self, batch: Array, done: Callable[[list[Array]], None]) -> None:
        # Its input is shared, not copied, and nothing in there keeps it alive: it goes along with what is to be done.
        self._queue.start_async({0: batch}, (batch, done), share_inputs=True)

    def wait(self) -> None:
        self._queue.wait_all()


class OnnxRuntimeQueue:
    def __init__(self, engine: Path, streams: int, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # done when built
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        self._session: Any = onnxruntime.InferenceSession(str(engine), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        self._pool, self._free = ThreadPoolExecutor(streams), threading.Semaphore(2 * streams)
        self._running: list[Future[None]] = []

    def submit(self, batch: Array, done: Callable[[list[Array]], None]) -> None:
        def run() -> None:
            try:
                done(self._session.run(None, {self._input: batch}))
            finally:
                self._free.release()

        self._free.acquire()
        self._running.append(self._pool.submit(run))

    def wait(self) -> None:
        running, self._running = self._running, []
        for one in running:
            one.result()


def batches_of(rows: int, batch: int) -> list[tuple[int, int]]:
    """Half-open ranges."""
    edges = [*range(0, rows, batch), rows]
    return list(itertools.pairwise(edges))


def in_order(count: int) -> tuple[list[Any], Callable[[int], Callable[[list[Array]], None]]]:
    """A place for each batch's outputs, and what puts them there."""
    places: list[Any] = [None] * count

    def keep(place: int) -> Callable[[list[Array]], None]:
        return lambda outputs: places.__setitem__(place, outputs)

    return places, keep


def joined(places: list[Any], output: int) -> Array:
    return np.concatenate([outputs[output] for outputs in places])
