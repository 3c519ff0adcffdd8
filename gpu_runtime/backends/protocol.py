"""The seam between an ONNX graph and what runs it.

`Backend.build` turns a graph into an engine file for one class of device; `Backend.load` opens that file on a
device; an `Engine` hands out `Context`s, and each context runs one batch at a time on a stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gpu_runtime.artifacts import file_digest, write_atomically
from gpu_runtime.device.protocol import Array, Device, DeviceClass, Stream
from gpu_runtime.errors import EngineMismatchError
from gpu_runtime.specs import Graph, Precision, Scheme, TensorSpec, tensor_specs, to_plain


@dataclass(frozen=True)
class EngineOptions:
    """How a loaded engine uses its device: `streams` batches at a time, `threads` CPU threads for each."""

    streams: int = 1
    threads: int = 1


@dataclass(frozen=True)
class EngineFile:
    """What a backend built, with the sidecar that says for what: a mismatch on loading is an error, not a try."""

    path: Path
    digest: str
    backend: str
    backend_version: str
    variant: str
    precision: Precision
    scheme: Scheme | None
    device_class: DeviceClass
    graph_digest: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int
    nbytes: int
    notes: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None

    @property
    def key(self) -> str:
        """`backend:variant`, unique in an engine set."""
        return f"{self.backend}:{self.variant}"

    def sidecar(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        plain["path"] = self.path.name
        return plain

    def write_sidecar(self) -> None:
        write_atomically(
            self.path.with_suffix(self.path.suffix + ".json"), json.dumps(self.sidecar(), indent=1).encode()
        )

    @staticmethod
    def from_sidecar(plain: Mapping[str, Any], folder: Path) -> EngineFile:
        values = dict(plain)
        values["path"] = folder / values["path"]
        values["device_class"] = DeviceClass.from_plain(values["device_class"])
        values["inputs"], values["outputs"] = tensor_specs(values["inputs"]), tensor_specs(values["outputs"])
        return EngineFile(**values)


def describe(
    graph: Graph, path: Path, backend: str, version: str, device_class: DeviceClass, **notes: Any
) -> EngineFile:
    """The engine file for what a backend has just written to `path`, sidecar written."""
    file = EngineFile(
        path=path,
        digest=file_digest(path),
        backend=backend,
        backend_version=version,
        variant=graph.variant,
        precision=graph.precision,
        scheme=graph.scheme,
        device_class=device_class,
        graph_digest=graph.digest,
        inputs=graph.inputs,
        outputs=graph.outputs,
        max_batch=graph.max_batch,
        nbytes=path.stat().st_size,
        notes=notes,
        max_length=graph.max_length,
    )
    file.write_sidecar()
    return file


_REBUILD = "materialize engine, benchmark and serving_plan on this machine"


def check_fits(file: EngineFile, backend_version: str, device_class: DeviceClass) -> None:
    """Raise `EngineMismatchError` unless `file` is whole and was built for this backend version and device."""
    found = file_digest(file.path) if file.path.is_file() else "no file"
    for what, expected, got in (
        ("file", file.digest[:12], found[:12]),
        ("backend version", file.backend_version, backend_version),
        ("device class", str(file.device_class), str(device_class)),
    ):
        if expected != got:
            raise EngineMismatchError(
                f"the engine's {what} does not match",
                stage="load engine",
                item=file.key,
                expected=expected,
                got=got,
                next_step=_REBUILD,
            )


def cannot_open(file: EngineFile, error: Exception) -> EngineMismatchError:
    """For an engine file that fits by its sidecar and that the library refuses all the same."""
    return EngineMismatchError(
        f"the library cannot open the engine: {error}", stage="load engine", item=file.key, next_step=_REBUILD
    )


class Context(Protocol):
    """Runs one batch at a time. Not shared between streams."""

    def enqueue(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], stream: Stream) -> None:
        """Queue one batch; every array is `[n, *shape]` with the same n (and length), contiguous, and stays valid and
        untouched until the stream has passed this point."""


class Engine(Protocol):
    """A loaded engine; exists only inside a `with`."""

    @property
    def file(self) -> EngineFile: ...

    @property
    def options(self) -> EngineOptions: ...

    def create_context(self) -> Context:
        """At most `options.streams` contexts run well at once."""

    def close(self) -> None: ...

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exc: object) -> None: ...


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    def version(self) -> str:
        """The library's version, read from the installed library."""

    def supports(self, graph: Graph) -> str | None:
        """Why this backend will not take the graph, or None when it will."""

    def build(self, graph: Graph, folder: Path, device_class: DeviceClass) -> EngineFile:
        """Write the engine and its sidecar into `folder`. Raises `BuildError` with the library's own words."""

    def runs_here(self) -> str | None:
        """Why no engine of this backend can run on this machine, or None when it can."""

    def load(self, file: EngineFile, device: Device, options: EngineOptions) -> Engine:
        """Open an engine file, after `check_fits`."""
