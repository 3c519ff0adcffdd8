"""The GPU resource: one device, and the stream-pipelined executor on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import dagster as dg
from pydantic import PrivateAttr

from gpu_runtime.artifacts import ArtifactStore
from gpu_runtime.device.protocol import Device
from gpu_runtime.device.select import DeviceChoice, choose_device, open_device
from gpu_runtime.faults import FaultPlan, no_faults
from gpu_runtime.promotion.plan import ServingPlan
from gpu_runtime.scoring import Scorer, ScoringPolicy
from gpu_runtime.specs import digest_of


class GpuResource(dg.ConfigurableResource):
    """`device`: `auto` (looks for a usable GPU, takes the best device that this release executes on, and says which
    and why), `cpu`, or `cuda:N` (an error, never a silent CPU, where it cannot be used).

    The device is opened by the first use, never in set-up: a run's parent process and every step enter the
    resource, and most of them need no device. Leaving the run closes engines, threads and device memory.
    """

    device: str = "auto"
    _stack: contextlib.ExitStack = PrivateAttr(default_factory=contextlib.ExitStack)
    _device: Device | None = PrivateAttr(default=None)
    _scorers: dict[str, Scorer] = PrivateAttr(default_factory=dict)

    @contextlib.contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[GpuResource]:
        with self:
            yield self

    def __enter__(self) -> GpuResource:
        return self

    def __exit__(self, *exc: object) -> None:
        stack, self._stack = self._stack, contextlib.ExitStack()
        self._device, self._scorers = None, {}
        stack.close()

    def fault_plan(self) -> FaultPlan:
        """None; a test's subclass may bring one."""
        return no_faults

    def choice(self) -> DeviceChoice:
        """Which device will be used and why; opens nothing."""
        return choose_device(self.device)

    def open(self) -> Device:
        """The device, opened by the first call."""
        if self._device is None:
            self._device = self._stack.enter_context(open_device(self.choice()))
        return self._device

    def scorer(self, plan: ServingPlan, store: ArtifactStore, policy: ScoringPolicy) -> Scorer:
        """The executor with the plan's engine; loaded once, however many days are scored."""
        key = digest_of([plan.digest, policy])
        if key not in self._scorers:
            scorer = Scorer(plan, store, self.open(), policy, self.fault_plan())
            self._scorers[key] = self._stack.enter_context(scorer)
        return self._scorers[key]
