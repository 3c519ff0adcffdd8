"""Every graph of a model × every backend: built for this class of device, or the reason why not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_runtime.artifacts import Artifact, ArtifactStore
from gpu_runtime.backends.protocol import EngineFile
from gpu_runtime.backends.registry import get_backend, is_installed
from gpu_runtime.device.protocol import DeviceClass
from gpu_runtime.errors import BuildError
from gpu_runtime.specs import Graph, digest_of

KIND = "engine"


@dataclass(frozen=True)
class EngineSet:
    artifact: Artifact

    @property
    def digest(self) -> str:
        return self.artifact.digest

    @property
    def device_class(self) -> DeviceClass:
        """The class of device that the set was built on; an engine for a GPU names its own target."""
        return DeviceClass.from_plain(self.artifact.metadata["device_class"])

    @property
    def engines(self) -> dict[str, EngineFile]:
        """`backend:variant` → engine file."""
        return {
            key: EngineFile.from_sidecar(
                json.loads(self.artifact.file(f"{name}.json").read_text()), self.artifact.folder
            )
            for key, name in self.artifact.metadata["engines"].items()
        }

    @property
    def not_built(self) -> Mapping[str, str]:
        """`backend:variant` → why there is no engine."""
        not_built: Mapping[str, str] = self.artifact.metadata["not_built"]
        return not_built


def engine_recipe(graphs: Sequence[Graph], backends: Sequence[str], device_class: DeviceClass) -> str:
    """What decides whether engines can be reused: graphs with what their tensors can hold, backends' versions, the
    class of device."""
    versions = {name: get_backend(name).version() if is_installed(name) else None for name in backends}
    return digest_of(
        {
            "graphs": [
                (graph.variant, graph.digest, graph.inputs, graph.outputs, graph.max_batch, graph.max_length)
                for graph in graphs
            ],
            "backends": versions,
            "device_class": device_class,
            "v": 4,
        }
    )


def build_engines(
    model: str,
    graphs: Sequence[Graph],
    backends: Sequence[str],
    device_class: DeviceClass,
    store: ArtifactStore,
) -> EngineSet:
    """Build each graph with each backend. Raises `BuildError` only when not a single engine came out."""
    recipe = engine_recipe(graphs, backends, device_class)
    if found := store.find(KIND, recipe):
        return EngineSet(found)
    engines: dict[str, str] = {}
    not_built: dict[str, str] = {}
    with store.draft(KIND, [recipe]) as draft:
        for name in backends:
            for graph in graphs:
                key = f"{name}:{graph.variant}"
                try:
                    backend = get_backend(name)
                    if reason := backend.supports(graph):
                        not_built[key] = reason
                        continue
                    engines[key] = backend.build(graph, draft.folder, device_class).path.name
                except BuildError as error:
                    not_built[key] = str(error)
        if not engines:
            raise BuildError(
                "no engine could be built",
                stage="build engine",
                item=model,
                got="; ".join(f"{key}: {reason}" for key, reason in not_built.items()),
                next_step="install a backend, e.g. pip install 'inference-dags[cpu]'",
            )
        draft.metadata = {"model": model, "device_class": device_class, "engines": engines, "not_built": not_built}
    return EngineSet(draft.finished())
