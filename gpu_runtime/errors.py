"""Every error this package raises on purpose.

    InferenceError
    ├── SpecError                a ModelSpec or another declaration contradicts itself
    ├── ArtifactError            an artifact is missing, truncated or not what its digest says
    ├── ExportError              the model does not become a faithful, batch-dynamic ONNX graph
    ├── QuantizationError        calibration or Q/DQ insertion gave nothing usable
    ├── BuildError               a backend refused to build an engine
    ├── EngineMismatchError      an engine file does not fit this device or backend version
    ├── DeviceError              a device is absent or failed
    │   └── DeviceUnavailableError
    ├── StalledError             a stage of a run hangs
    ├── DatasetError             a day or a file of it cannot be read as declared
    ├── PlanError                no serving plan, or one that cannot be used
    ├── GateError                a plan was asked for without a passed gate
    ├── TooManyQuarantinedError  more rows were quarantined than the model allows
    └── PublicationConflictError another run published the same day meanwhile

`RowError` stands apart: it concerns one row, is caught by the scoring path and becomes a line in the
quarantine table.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class InferenceError(Exception):
    """What happened, on which item, what was expected, what came, and what to do next.

    Texts never contain cell values, tags or other personal data: only names, positions, types and counts.
    """

    def __init__(
        self,
        what: str,
        *,
        stage: str,
        item: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what, self.stage, self.item = what, stage, item
        self.expected, self.got, self.next_step = expected, got, next_step
        head = f"[{stage}] {item}: {what}" if item else f"[{stage}] {what}"
        parts = [head.rstrip(".") + "."]
        if expected is not None:
            parts.append(f"Expected {expected}.")
        if got is not None:
            parts.append(f"Got {got}.")
        if next_step is not None:
            parts.append(f"Next: {next_step}.")
        super().__init__(" ".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is made again from its text alone, which fails in the process that receives it.
        facts = {name: getattr(self, name) for name in ("stage", "item", "expected", "got", "next_step")}
        return partial(type(self), self.what, **facts), ()


class SpecError(InferenceError):
    pass


class ArtifactError(InferenceError):
    pass


class ExportError(InferenceError):
    pass


class QuantizationError(InferenceError):
    pass


class BuildError(InferenceError):
    pass


class EngineMismatchError(InferenceError):
    pass


class DeviceError(InferenceError):
    pass


class DeviceUnavailableError(DeviceError):
    pass


class StalledError(InferenceError):
    pass


class DatasetError(InferenceError):
    pass


class PlanError(InferenceError):
    pass


class GateError(InferenceError):
    pass


class TooManyQuarantinedError(InferenceError):
    pass


class PublicationConflictError(InferenceError):
    pass


class RowError(Exception):
    """One row cannot be scored. `reason` names the column or file and the rule, never the value."""

    def __init__(self, stage: str, reason: str) -> None:
        self.stage, self.reason = stage, reason
        super().__init__(f"[{stage}] {reason}")
