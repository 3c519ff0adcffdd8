"""The ring bounds the memory of a run, however much data passes through it and however slow the writer is.

Measured in a process of its own, as RssAnon + RssShmem: mapped files come and go as the system likes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

BOUND_MIB = 16
"""Measured: 0 to 3 MiB of growth as it stands, 230 to 430 MiB where slots do not hold the source back."""

PROGRAM = """
import json, sys, time
from pathlib import Path
import numpy as np
from gpu_runtime.device.host import HostDevice, cpu_class
from gpu_runtime.backends.protocol import EngineFile, EngineOptions
from gpu_runtime.executor import pipeline
from gpu_runtime.specs import TensorSpec

BATCHES, ROWS, VALUES = 600, 8, 1 << 15  # 1 MiB a batch
edits = json.loads(sys.argv[1])
source = Path(pipeline.__file__).read_text()
for old, new in edits:
    assert source.count(old) == 1, f"the source no longer holds exactly one {old!r}: bring this test up to date"
    source = source.replace(old, new)
exec(compile(source, pipeline.__file__, "exec"), pipeline.__dict__)

class Sums:
    options = EngineOptions(streams=2)
    file = EngineFile(
        Path("engine"), "", "numpy", "1", "fp32", "fp32", None, cpu_class(), "",
        (TensorSpec("x", "float32", (VALUES,)),), (TensorSpec("sum", "float32"),), ROWS, 0,
    )
    def create_context(self):
        return self
    def enqueue(self, inputs, outputs, stream):
        stream.launch(lambda: np.sum(inputs["x"], axis=1, out=outputs["sum"]))

class Shard:
    rows, lengths = BATCHES * ROWS, None
    def view(self, start, stop):
        return None
    def pieces(self, start, stop, staging):
        # What a source holds on to for a batch until it is decoded: the batch's own bytes.
        values = np.full((stop - start, VALUES), start % 7, np.float32)
        return [lambda: staging["x"].__setitem__(slice(None), values) or []]

def resident_mib():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024

at_50, most = [], 0.0
def write(scored):
    global most
    number = scored.batch.start // ROWS
    assert (scored.outputs["sum"] == scored.batch.start % 7 * VALUES).all()
    if number == 50:
        at_50.append(resident_mib())
    if number >= 50:
        most = max(most, resident_mib())
    time.sleep(0.003)  # slower than all before it: what nothing holds back piles up

with HostDevice() as device, pipeline.StreamExecutor(Sums(), device, batch=ROWS, decode_workers=2) as executor:
    stats = executor.run(executor.batches(0, Shard()), write)
print(json.dumps([stats.batches, BATCHES * ROWS * VALUES * 4 / 2**20, *at_50, most, resident_mib()]))
"""

NO_SLOTS = [  # memory for each batch anew, as in an executor that has no ring
    (
        "                slot = self._free.get()\n",
        "                first = executor._slots[0]\n"
        "                slot = allocate_slot("
        "executor.engine.file, executor.device, executor.ceiling.batching.shapes, first.context, first.compute)\n",
    ),
    ("            self._free.put(flight.slot)\n", ""),
]


@pytest.mark.parametrize(("edits", "bounded"), [([], True), (NO_SLOTS, False)], ids=["ring", "no ring"])
def test_memory_does_not_grow_with_the_data(alone: Any, edits: list[tuple[str, str]], bounded: bool) -> None:
    ended = alone(PROGRAM, json.dumps(edits))
    assert ended.returncode == 0, ended.stderr
    batches, passed_mib, at_50, most, at_the_end = json.loads(ended.stdout)
    print(  # noqa: T201
        f"{passed_mib:.0f} MiB in {batches} batches: {at_50:.1f} MiB resident after 50, "
        f"{most:.1f} at most after that, {at_the_end:.1f} at the end"
    )
    assert batches == 600 and passed_mib > 500
    assert (most - at_50 < BOUND_MIB) is bounded
    assert not bounded or at_the_end - at_50 < BOUND_MIB
