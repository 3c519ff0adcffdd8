"""How close the ring comes to the slowest unit alone, on the simulated device's virtual clock: no wall time in here.

A batch is 4 rows: 64 bytes in, 48 bytes out, each in two tensors.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gpu_runtime.device.simulated import SimulatedDevice
from gpu_runtime.device.virtual_clock import Rates, VirtualClock

BATCHES, ROWS = 200, 4
BYTES_IN, BYTES_OUT = 64, 48
PHOTOS_IN_S = 64 * 224 * 224 * 3 / 57e9  # 64 photos of 224 × 224 × 3 bytes at PCIe 5.0 x16's 57 GB/s: 0.17 ms


def rates(copy_in_s: float, copy_out_s: float, **others: Any) -> Rates:
    """Rates at which one batch's copies take so long."""
    return Rates(copy_in_bytes_per_s=BYTES_IN / copy_in_s, copy_out_bytes_per_s=BYTES_OUT / copy_out_s, **others)


BALANCED = rates(0.006, 0.003, decode_s=0.016, decode_workers=4, decode_pieces=4, compute_s=0.010, write_s=0.002)
BOUND_BY: dict[str, Rates] = {
    "compute": rates(PHOTOS_IN_S, 0.0001, decode_s=0.024, decode_workers=4, decode_pieces=64, compute_s=0.010),
    "copy_in": replace(BALANCED, copy_in_bytes_per_s=BYTES_IN / 0.010, compute_s=0.006),
    "copy_out": replace(BALANCED, copy_out_bytes_per_s=BYTES_OUT / 0.010, compute_s=0.006),
    "decode": rates(PHOTOS_IN_S, 0.0001, decode_s=0.040, decode_workers=4, decode_pieces=64, compute_s=0.006),
    "write": replace(BALANCED, write_s=0.010, compute_s=0.006),
}


@pytest.fixture
def clock_of(bench: Any, shard: Any, record: Any) -> Callable[..., VirtualClock]:
    """The device's clock after a run of `BATCHES` batches in which every row was written, in order and right."""

    def run(given: Rates, slots: int | None = None, batches: int = BATCHES, jitter_s: float = 0, **others: Any) -> Any:
        def sleep(*_: Any) -> None:
            if jitter_s:
                time.sleep(random.random() * jitter_s)

        device, ids, written = SimulatedDevice(given), list(range(1, batches * ROWS + 1)), record(sleep)
        opened = bench(slots=slots, device=device, during=sleep, queued=sleep, **others)
        opened.run([shard(ids, sleep)], written)
        assert written.ids == ids and written.right
        return device.clock

    return run


@pytest.mark.parametrize("unit", BOUND_BY)
def test_with_its_default_slots_the_ring_runs_at_the_rate_of_the_slowest_unit(clock_of: Any, unit: str) -> None:
    clock = clock_of(BOUND_BY[unit])
    assert clock.bound_s == pytest.approx(BATCHES * 0.010) == clock.busy_s[unit] / clock.units[unit].width
    assert 0.97 <= clock.efficiency <= 1


def test_what_is_not_the_bound_shows_only_before_the_first_batch_and_after_the_last(clock_of: Any) -> None:
    clock = clock_of(BALANCED)
    assert clock.makespan_s == pytest.approx(0.004 + 0.006 + BATCHES * 0.010 + 0.003 + 0.002)


def test_one_slot_takes_the_sum_of_everything(clock_of: Any) -> None:
    """In whole seconds, which add up exactly; each batch is decoded and written once, for all its tensors."""
    clock = clock_of(rates(4.0, 3.0, decode_s=8.0, decode_workers=2, compute_s=16.0, write_s=2.0), slots=1)
    each = {"decode": 8.0, "copy_in": 4.0, "compute": 16.0, "copy_out": 3.0, "write": 2.0}
    assert clock.busy_s == {unit: BATCHES * seconds for unit, seconds in each.items()}
    assert clock.makespan_s == BATCHES * sum(each.values())


def test_each_slot_lets_one_more_batch_on_its_way_until_the_slowest_unit_never_pauses(clock_of: Any) -> None:
    serial_s = 0.004 + 0.006 + 0.010 + 0.003 + 0.002
    found = [clock_of(BALANCED, slots=slots).efficiency for slots in range(1, 7)]
    assert found == sorted(found)
    for slots, efficiency in enumerate(found, 1):
        assert efficiency == pytest.approx(min(1.0, slots * 0.010 / serial_s), abs=0.02)


def test_two_streams_that_share_a_device_keep_it_as_busy_as_one(clock_of: Any) -> None:
    one, two = (clock_of(BALANCED, slots=slots, streams=streams) for slots, streams in ((4, 1), (None, 2)))
    assert (two.makespan_s, two.busy_s) == (one.makespan_s, one.busy_s)
    assert two.efficiency >= 0.97


@pytest.mark.parametrize(("slots", "streams"), [(1, 1), (3, 1), (4, 2)])
def test_the_threads_of_this_machine_change_no_number(clock_of: Any, slots: int, streams: int) -> None:
    """Decoding, queueing, computing and writing take random real times; every bit stays."""
    found = {
        (clock.makespan_s, *clock.busy_s.values())
        for jitter_s in (0, 0.0005, 0.002, 0.002)
        for clock in [clock_of(BALANCED, slots=slots, batches=16, jitter_s=jitter_s, streams=streams)]
    }
    assert len(found) == 1


def test_a_second_run_follows_the_first(bench: Any, shard: Any, record: Any) -> None:
    device = SimulatedDevice(rates(4.0, 3.0, decode_s=8.0, compute_s=16.0, write_s=2.0))
    opened = bench(slots=1, device=device)
    for runs in (1, 2):
        opened.run([shard(range(1, 9))], record())
        assert device.clock.makespan_s == runs * 2 * 33.0


SEND = "                self._send(flight)\n"
COPIES = "self._copy_in, self._copy_out = device.stream(), device.stream()"
SLOW: dict[str, tuple[str, str]] = {
    "the next batch waits for the results of the last": (SEND, SEND + "                flight.finish()\n"),
    "copies in queue behind copies out": (COPIES, "self._copy_in = self._copy_out = device.stream()"),
    "copies in queue behind the computation": (
        "self._compute = [device.stream() for _ in range(streams)]",
        "self._compute = [self._copy_in for _ in range(streams)]",
    ),
    "too few slots": ("slots or max(3, 2 * streams)", "slots or 2 * streams"),
}


@pytest.mark.parametrize("slip", SLOW)
def test_a_slip_that_spoils_no_value_shows_in_the_schedule(clock_of: Any, executor_module: Any, slip: str) -> None:
    assert clock_of(BALANCED, module=executor_module([])).efficiency >= 0.97
    assert clock_of(BALANCED, module=executor_module([SLOW[slip]])).efficiency < 0.9


def test_a_device_without_rates_takes_no_time(clock_of: Any) -> None:
    clock = clock_of(None, batches=4)
    assert (clock.makespan_s, clock.bound_s, clock.efficiency) == (0, 0, 0)


@pytest.mark.parametrize("wrong", [{"compute_s": -1}, {"copy_in_bytes_per_s": 0}, {"decode_workers": 0}])
def test_rates_that_no_hardware_has_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Rates(**wrong)
