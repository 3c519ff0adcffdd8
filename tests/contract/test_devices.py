"""What every device promises the executor, and what the simulated one promises beyond that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu_runtime.device.host import HostDevice
from gpu_runtime.device.protocol import Device
from gpu_runtime.device.simulated import POISON, SimulatedDevice
from gpu_runtime.specs import Dtype

LIMIT_S = 10.0


class Broken(Exception):
    pass


@pytest.fixture(params=[HostDevice, SimulatedDevice], ids=["host", "simulated"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with request.param() as opened:
        yield opened


def reached(event: Any) -> None:
    """Wait for the event and raise its failure; a test, not the whole run, ends when it never comes."""
    caught: list[BaseException] = []

    def body() -> None:
        try:
            event.synchronize()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "the event is never reached"
    if caught:
        raise caught[0]


def failing(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def recorded(device: Device, stream: Any) -> Any:
    event = device.event()
    stream.record(event)
    return event


def test_a_stream_runs_its_work_in_order(device: Device) -> None:
    stream, seen = device.stream(), []
    for i in range(100):
        stream.launch(lambda i=i: seen.append(i))
    reached(recorded(device, stream))
    assert seen == list(range(100))


def test_an_event_covers_what_was_queued_before_it(device: Device) -> None:
    stream, seen = device.stream(), []
    stream.launch(lambda: seen.append("before"))
    early = recorded(device, stream)
    stream.launch(lambda: seen.append("after"))
    reached(early)
    assert seen[0] == "before"
    reached(recorded(device, stream))
    assert seen == ["before", "after"]


def test_a_wait_orders_two_streams(device: Device) -> None:
    first, second = device.stream(), device.stream()
    first_runs, seen = threading.Event(), []
    first.launch(lambda: (first_runs.wait(0.05), seen.append("first")))  # late, where streams are threads
    done = recorded(device, first)
    second.wait(done)
    second.launch(lambda: seen.append("second"))
    reached(recorded(device, second))
    assert seen == ["first", "second"]


def test_waits_chain_over_three_streams(device: Device) -> None:
    streams, seen = [device.stream() for _ in range(3)], []
    for round_ in range(5):
        for i, stream in enumerate(streams):
            stream.launch(lambda entry=(round_, i): seen.append(entry))
            streams[(i + 1) % 3].wait(recorded(device, stream))
    reached(recorded(device, streams[0]))
    assert seen == [(round_, i) for round_ in range(5) for i in range(3)]


def test_an_event_never_recorded_counts_as_reached(device: Device) -> None:
    event, stream, seen = device.event(), device.stream(), []
    reached(event)
    stream.wait(event)
    stream.launch(lambda: seen.append("ran"))
    reached(recorded(device, stream))
    assert seen == ["ran"]


def test_an_event_can_be_recorded_again(device: Device) -> None:
    event, stream, seen = device.event(), device.stream(), []
    for i in range(3):
        stream.launch(lambda i=i: seen.append(i))
        stream.record(event)
        reached(event)
        assert seen == list(range(i + 1))


def test_a_failed_launch_skips_up_to_the_next_event_which_raises_it(device: Device) -> None:
    stream, seen, error = device.stream(), [], Broken("the launch")
    stream.launch(lambda: seen.append("before"))
    stream.launch(failing(error))
    stream.launch(lambda: seen.append("skipped"))
    failed = recorded(device, stream)
    stream.launch(lambda: seen.append("after"))
    healthy = recorded(device, stream)
    for _ in range(2):  # it says so to everybody who asks
        with pytest.raises(Broken) as caught:
            reached(failed)
        assert caught.value is error
    reached(healthy)
    assert seen == ["before", "after"]


def test_a_failure_older_than_the_recording_is_forgotten_by_the_event(device: Device) -> None:
    event, stream = device.event(), device.stream()
    stream.launch(failing(Broken()))
    stream.record(event)
    with pytest.raises(Broken):
        reached(event)
    stream.record(event)
    reached(event)


def test_streams_that_wait_inherit_a_failure_and_go_on_after_it(device: Device) -> None:
    streams, seen, error = [device.stream() for _ in range(3)], [], Broken()
    streams[0].launch(failing(error))
    events = [recorded(device, streams[0])]
    for number, stream in enumerate(streams[1:], start=1):
        stream.wait(events[-1])
        stream.launch(lambda number=number: seen.append(f"skipped {number}"))
        events.append(recorded(device, stream))
    for stream in streams:
        stream.launch(lambda: seen.append("after"))
    after = [recorded(device, stream) for stream in streams]
    for event in events:
        with pytest.raises(Broken) as caught:
            reached(event)
        assert caught.value is error
    for event in after:
        reached(event)
    assert seen == ["after"] * 3


def test_a_skipped_wait_does_not_hold_the_stream(device: Device) -> None:
    """Once a launch failed, what is behind it is skipped, waits for other streams' failures included."""
    first, second = device.stream(), device.stream()
    second.launch(failing(Broken("second")))
    other = recorded(device, second)
    first.launch(failing(Broken("first")))
    first.wait(other)
    with pytest.raises(Broken, match="first"):
        reached(recorded(device, first))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_a_stream_survives_whatever_its_work_raises(device: Device, error: BaseException) -> None:
    stream = device.stream()
    stream.launch(failing(error))
    with pytest.raises(type(error)):
        reached(recorded(device, stream))
    reached(recorded(device, stream))


def test_copies_move_the_bytes_asked_for_in_and_out(device: Device) -> None:
    stream = device.stream()
    staging_in, staging_out = device.pinned(64), device.pinned(64)
    buffer = device.empty(staging_in)
    staging_in[:] = np.arange(64)
    device.copy_in(staging_in, buffer, 48, stream)
    reached(recorded(device, stream))
    assert (buffer[:48] == np.arange(48)).all()

    produced = device.empty(staging_out)
    stream.launch(lambda: produced.__setitem__(slice(None), np.arange(64, 128)))
    device.copy_out(produced, staging_out, 48, stream)
    reached(recorded(device, stream))
    assert (staging_out[:48] == np.arange(64, 112)).all()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096])
def test_memory_has_the_size_asked_for(device: Device, nbytes: int) -> None:
    staging = device.pinned(nbytes)
    assert (staging.dtype, staging.shape) == (np.uint8, (nbytes,))
    assert device.empty(staging).nbytes == nbytes


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (2, 3)), ("uint8", (24,)), ("int32", (2, 1, 3)), ("int64", ())]
)
def test_a_view_is_the_first_bytes_of_its_buffer(device: Device, dtype: Dtype, shape: tuple[int, ...]) -> None:
    buffer = device.empty(device.pinned(32))
    view = device.view(buffer, dtype, shape)
    assert (view.dtype, view.shape) == (np.dtype(dtype), shape)
    view[...] = 7
    assert (buffer[: view.nbytes].view(dtype) == 7).all()
    buffer[:] = 0
    assert (view == 0).all()


def test_an_identity_is_the_same_every_time(device: Device) -> None:
    assert device.device_class == device.device_class
    assert device.device_class.id.startswith(f"{device.device_class.kind}-")


def test_closing_twice_is_closing_once_and_ends_every_thread(device: Device) -> None:
    before = set(threading.enumerate())
    streams = [device.stream() for _ in range(3)]
    for stream in streams:
        stream.launch(lambda: None)
        reached(recorded(device, stream))
    streams[0].close()
    streams[0].close()
    device.close()
    device.close()
    assert set(threading.enumerate()) <= before


def test_a_host_stream_finishes_what_is_queued_before_it_closes() -> None:
    seen: list[int] = []
    with HostDevice() as device:
        stream = device.stream()
        for i in range(20):
            stream.launch(lambda i=i: seen.append(i))
    assert seen == list(range(20))


def test_host_memory_starts_on_a_cache_line_and_is_not_doubled() -> None:
    with HostDevice() as device:
        for nbytes in (1, 100, 4097):
            staging = device.pinned(nbytes)
            assert staging.ctypes.data % 64 == 0
            assert device.empty(staging) is staging


def test_a_host_stream_that_gets_no_thread_says_so_and_leaves_nothing_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with HostDevice() as device:
        stream, event, seen = device.stream(), device.event(), []
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                stream.record(event)
        reached(event)
        stream.launch(lambda: seen.append("ran"))
        stream.record(event)
        reached(event)
        assert seen == ["ran"]


def test_on_the_simulated_device_nothing_runs_before_somebody_waits() -> None:
    device, seen = SimulatedDevice(), []
    staging = device.pinned(8)
    buffer = device.empty(staging)
    staging[:] = 1
    stream, other = device.stream(), device.stream()
    device.copy_in(staging, buffer, 8, stream)
    stream.launch(lambda: seen.append("asked for"))
    event = recorded(device, stream)
    stream.launch(lambda: seen.append("behind the event"))
    other.launch(lambda: seen.append("on another stream"))
    assert seen == [] and (buffer == POISON).all()
    reached(event)
    assert seen == ["asked for"] and (buffer == 1).all()


def test_the_simulated_device_keeps_host_and_device_memory_apart() -> None:
    device = SimulatedDevice()
    staging = device.pinned(8)
    assert not np.shares_memory(staging, device.empty(staging))


def test_simulated_memory_is_poisoned_from_the_start_and_after_it_is_retired() -> None:
    device = SimulatedDevice()
    staging = device.pinned(16)
    buffer = device.empty(staging)
    for _ in range(2):
        for memory in (staging, buffer):
            assert np.isnan(device.view(memory, "float32", (4,))).all()
            assert np.isnan(device.view(memory, "float16", (8,))).all()
            assert (device.view(memory, "int32", (4,)) == -1).all()
            assert (device.view(memory, "uint8", (16,)) == 255).all()
            memory[:] = 5
        device.retire(staging, buffer)
