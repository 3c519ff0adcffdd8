"""Which plan is in force, and what was learnt about its engine since.

    <root>/promotions/<model>/<device class>/000001.json     created only if absent; the highest is current
    <root>/ceilings/<device class>/<engine digest>.json      how many rows fit on the device

Two promoters cannot both create a number; rolling back appends an old plan under a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_runtime.artifacts import write_atomically
from gpu_runtime.device.protocol import DeviceClass
from gpu_runtime.errors import PlanError
from gpu_runtime.promotion.plan import ServingPlan
from gpu_runtime.specs import to_plain


@dataclass(frozen=True)
class Promotion:
    number: int
    plan: ServingPlan


class PromotionStore:
    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def history(self, model: str, device_class: DeviceClass) -> Sequence[Promotion]:
        """Every promotion of the model on this class of device, oldest first."""
        folder = self._folder(model, device_class)
        return [
            Promotion(int(path.stem), ServingPlan.from_plain(json.loads(path.read_text())))
            for path in sorted(folder.glob("[0-9]*.json"))
        ]

    def current(self, model: str, device_class: DeviceClass) -> Promotion:
        """The plan in force. Raises `PlanError`, saying what to do, when there is none."""
        history = self.history(model, device_class)
        if not history:
            raise PlanError(
                "no serving plan for this device",
                stage="serving plan",
                item=model,
                expected=f"a plan promoted on {device_class.kind} {device_class.name} ({device_class.id})",
                got="none",
                next_step=f"materialize {model}/benchmark and {model}/serving_plan on this machine; if they ran, "
                "the gate refused every engine: read the benchmark's reasons",
            )
        return history[-1]

    def promote(self, plan: ServingPlan) -> Promotion:
        """Put `plan` in force; the same plan as the current one is not promoted again."""
        folder = self._folder(plan.model, plan.device_class)
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            history = self.history(plan.model, plan.device_class)
            if history and history[-1].plan.digest == plan.digest:
                return history[-1]
            number = history[-1].number + 1 if history else 1
            if _create(folder / f"{number:06}.json", json.dumps(to_plain(plan), indent=1).encode()):
                return Promotion(number, plan)

    def _folder(self, model: str, device_class: DeviceClass) -> Path:
        return self.root / "promotions" / model / device_class.id


class CeilingStore:
    """How many rows an engine was found to have room for, where that is less than its plan's batch.

    A newly built engine starts without one; delete the file to try the plan's batch again.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def find(self, engine_digest: str, device_class: DeviceClass) -> int | None:
        try:
            return int(json.loads(self._path(engine_digest, device_class).read_text())["rows"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None  # none, or one that cannot be read: it will be found again

    def lower(self, engine_digest: str, device_class: DeviceClass, rows: int) -> None:
        with contextlib.suppress(OSError):  # a store that cannot be written costs the next run another try
            write_atomically(self._path(engine_digest, device_class), json.dumps({"rows": rows}).encode())

    def _path(self, engine_digest: str, device_class: DeviceClass) -> Path:
        return self.root / "ceilings" / device_class.id / f"{engine_digest}.json"


def _create(path: Path, data: bytes) -> bool:
    """Write `path` whole unless it exists; False when somebody else created it first."""
    temporary = path.with_name(f".{uuid.uuid4().hex}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)  # fails if the name is taken, and never shows half a file
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True
