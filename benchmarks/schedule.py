"""How much of the slowest unit's speed the ring of slots keeps, by number of slots: `python benchmarks/schedule.py`.

The real executor runs on the simulated device's virtual clock. The rates below are assumed, not measured, so the
numbers say how well the schedule overlaps its stages, not how fast any hardware is; they are the same on every machine.
Each batch moves a few real bytes, at rates scaled so that its copies take as long as the batch that is described.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu_runtime.artifacts import write_atomically
from gpu_runtime.backends.protocol import EngineFile, EngineOptions
from gpu_runtime.device.host import cpu_class
from gpu_runtime.device.protocol import Stream
from gpu_runtime.device.simulated import SimulatedDevice
from gpu_runtime.device.virtual_clock import Rates, UnitName, VirtualClock
from gpu_runtime.executor.pipeline import ScoredBatch, StreamExecutor
from gpu_runtime.specs import TensorSpec

RESULTS = Path(__file__).parent / "results"
BATCHES, SLOTS, DEFAULT_SLOTS = 200, range(1, 7), 3
LINK_BYTES_PER_S = 57e9  # assumed: 90 % of the 63 GB/s of PCIe 5.0 x16
ROW = TensorSpec("x", "float32", (4,))
UNITS: tuple[UnitName, ...] = ("decode", "copy_in", "compute", "copy_out", "write")


@dataclass(frozen=True)
class Case:
    """One kind of batch. `decode_s`: seconds of one worker for a whole batch."""

    bound_by: UnitName
    what: str
    nbytes_in: int
    nbytes_out: int
    compute_s: float
    decode_s: float
    write_s: float

    @property
    def rates(self) -> Rates:
        return Rates(
            decode_s=self.decode_s,
            decode_pieces=64,
            decode_workers=16,
            copy_in_bytes_per_s=LINK_BYTES_PER_S * ROW.nbytes(1) / self.nbytes_in,
            compute_s=self.compute_s,
            copy_out_bytes_per_s=LINK_BYTES_PER_S * ROW.nbytes(1) / self.nbytes_out,
            write_s=self.write_s,
        )


PHOTOS_IN, PHOTOS_OUT = 64 * 224 * 224 * 3, 64 * 1000 * 4  # uint8 pixels, float32 scores of 1,000 classes
VOLUMES = 8 * 160**3  # voxels
CASES = (
    Case("compute", "64 photos, 1 ms of decoding each", PHOTOS_IN, PHOTOS_OUT, 0.010, 0.064, 0.001),
    Case("copy_in", "8 volumes of 160³ float32, uint8 masks back", 4 * VOLUMES, VOLUMES, 0.0015, 0.016, 0.0005),
    Case("decode", "64 photos, 5 ms of decoding each", PHOTOS_IN, PHOTOS_OUT, 0.010, 0.320, 0.001),
)


class Doubling:
    """An engine that is its own context."""

    options = EngineOptions()
    file = EngineFile(
        Path("doubling"),
        "",
        "numpy",
        "1",
        "fp32",
        "fp32",
        None,
        cpu_class(),
        "",
        (ROW,),
        (TensorSpec("y", "float32", (4,)),),
        1,
        0,
    )

    def create_context(self) -> Doubling:
        return self

    def enqueue(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Stream) -> None:
        stream.launch(lambda: np.multiply(inputs["x"], 2, out=outputs["y"]))

    def close(self) -> None:
        pass


class Counting:
    """A shard whose row `i` holds `i`."""

    rows, lengths = BATCHES, None

    def pieces(self, start: int, stop: int, staging: Mapping[str, Any]) -> Sequence[Any]:
        def fill() -> list[Any]:
            staging["x"][:] = start
            return []

        return [fill]


def simulate(case: Case, slots: int) -> VirtualClock:
    """The clock after a run whose every value was right."""
    written: list[float] = []

    def write(scored: ScoredBatch) -> None:
        written.append(float(scored.outputs["y"][0, 0]))

    device = SimulatedDevice(case.rates)
    engine: Any = Doubling()  # no more of an engine and a shard than the executor uses
    shard: Any = Counting()
    with StreamExecutor(engine, device, batch=1, slots=slots, decode_workers=2) as executor:
        executor.run(executor.batches(0, shard), write)
    if written != [2 * i for i in range(BATCHES)]:
        raise RuntimeError(f"{case.what}, {slots} slots: wrong values, so the schedule means nothing")
    return device.clock


def swept(case: Case) -> dict[str, Any]:
    clocks = {slots: simulate(case, slots) for slots in SLOTS}
    one = clocks[DEFAULT_SLOTS]
    seconds = {name: one.busy_s[name] / one.units[name].width / BATCHES for name in UNITS}
    if max(seconds, key=seconds.__getitem__) != case.bound_by:
        raise ValueError(f"{case.what}: expected to be bound by {case.bound_by}, got {seconds}")
    return {
        "bound_by": case.bound_by,
        "batch": case.what,
        "assumed": {
            **{name: value for name, value in asdict(case).items() if name not in ("bound_by", "what")},
            "link_bytes_per_s": LINK_BYTES_PER_S,
            "decode_workers": one.units["decode"].width,
        },
        "ms_per_batch": {name: round(s * 1e3, 6) for name, s in seconds.items()},
        "slots": {
            str(slots): {
                "makespan_s": round(clock.makespan_s, 9),
                "bound_s": round(clock.bound_s, 9),
                "efficiency": round(clock.efficiency, 6),
            }
            for slots, clock in clocks.items()
        },
    }


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    heads = [
        "bound by",
        "batch",
        *(f"{name.replace('_', ' ')}, ms" for name in UNITS),
        *(f"{s} slots" if s > 1 else "1 slot" for s in SLOTS),
    ]
    rows = [
        [
            case["bound_by"].replace("_", " "),
            case["batch"],
            *(f"{case['ms_per_batch'][name]:.3g}" for name in UNITS),
            *(f"{found['efficiency']:.3f}" for found in case["slots"].values()),
        ]
        for case in cases
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows])


def report(cases: Sequence[Mapping[str, Any]]) -> str:
    return f"""# Schedule

Efficiency = busy time of the slowest unit ÷ makespan of {BATCHES} batches, on the simulated device's virtual clock.
Rates are assumed, not measured: this tells how well the ring overlaps its stages, not how fast any hardware is.
The executor's default is {DEFAULT_SLOTS} slots for one stream. Made by `python benchmarks/schedule.py`.

{table(cases)}
"""


def draw(cases: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.axhline(1, color="black", linestyle="--", linewidth=1, label="bound: the slowest unit alone")
    axes.axvline(DEFAULT_SLOTS, color="lightgrey", zorder=0, label="the executor's default")
    for case, marker in zip(cases, "os^", strict=True):
        efficiency = [found["efficiency"] for found in case["slots"].values()]
        axes.plot(
            list(SLOTS), efficiency, marker=marker, label=f"{case['bound_by'].replace('_', ' ')}: {case['batch']}"
        )
    axes.set(
        xlabel="slots (batches on their way at once)",
        ylabel="efficiency (share of the bound)",
        ylim=(0, 1.08),
        title=f"Real executor, simulated device, assumed rates, {BATCHES} batches",
    )
    axes.legend(loc="lower right", fontsize=9)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="keeps no result")
    smoke = parser.parse_args().smoke
    cases = [swept(case) for case in CASES]
    print(table(cases))
    if smoke:
        return
    write_atomically(
        RESULTS / "schedule.json", (json.dumps({"batches": BATCHES, "cases": cases}, indent=1) + "\n").encode()
    )
    write_atomically(RESULTS / "schedule.md", report(cases).encode())
    if importlib.util.find_spec("matplotlib"):
        draw(cases, RESULTS / "schedule.png")


if __name__ == "__main__":
    main()
