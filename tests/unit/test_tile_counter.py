"""Launches share a tile counter exactly if they run one after the other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cuflash.cuda import tile_counter
from cuflash.cuda.tile_counter import counter_of_launch

WORKSPACE = 1 << 16
PER_THREAD = 2


class FakeCupy:
    """A stand-in of CuPy: streams that may be capturing, and arrays that have an address."""

    def __init__(self) -> None:
        self.stream = 0  # CuPy's current one
        self.capturing: set[int] = set()
        self.cleared: list[tuple[int, ...]] = []
        self.made: list[tuple[Any, ...]] = []

    def get_current_stream(self, device_id: int) -> Any:
        return SimpleNamespace(ptr=self.stream)

    @contextlib.contextmanager
    def external_stream(self, stream: int, device_id: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def is_capturing(self, stream: int) -> bool:
        assert stream != 0, "the driver does not answer for the null stream"
        return stream in self.capturing

    def clear(self, *arguments: int) -> None:
        self.cleared.append(arguments)

    def zeros(self, size: int, dtype: Any) -> Any:
        self.made.append((size, dtype, self.stream))
        time.sleep(0.01)  # so that other threads come meanwhile
        return SimpleNamespace(data=SimpleNamespace(ptr=4096 * len(self.made)))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    made = FakeCupy()
    monkeypatch.setattr(tile_counter, "_counters", {})
    monkeypatch.setattr(cupy, "zeros", made.zeros)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", made.get_current_stream)
    monkeypatch.setattr(cupy.cuda, "ExternalStream", made.external_stream)
    monkeypatch.setattr(cupy.cuda.runtime, "streamIsCapturing", made.is_capturing)
    monkeypatch.setattr(cupy.cuda.runtime, "memsetAsync", made.clear)
    return made


def _on(fake: FakeCupy, stream: int, device: int = 0) -> int:
    return counter_of_launch(device, stream, WORKSPACE)


def test_a_stream_keeps_its_counter(fake: FakeCupy) -> None:
    assert _on(fake, 0) == _on(fake, 0)
    assert _on(fake, 77) == _on(fake, 77)
    assert len(fake.made) == 2
    assert not fake.cleared  # a launch resets its counter


def test_other_streams_and_devices_have_others(fake: FakeCupy) -> None:
    found = {_on(fake, stream, device) for stream in (0, 1, 77, 78) for device in (0, 1)}
    assert len(found) == 8
    assert WORKSPACE not in found


@pytest.mark.parametrize("current", [0, 77])
def test_a_counter_is_one_zero_made_on_its_stream(fake: FakeCupy, current: int) -> None:
    """The zero is written in the order of the stream, so that the next kernel finds it."""
    import cupy

    fake.stream = current
    _on(fake, 77)
    assert fake.made == [(1, cupy.int32, 77)]
    assert fake.stream == current


@pytest.mark.parametrize(("stream", "shared"), [(0, True), (77, True), (PER_THREAD, False)])
def test_the_per_thread_stream_is_another_for_every_thread(
    fake: FakeCupy, stream: int, shared: bool
) -> None:
    found: list[list[int]] = []
    both = threading.Barrier(2)  # the identifier of an ended thread is used again

    def launch() -> None:
        found.append([_on(fake, stream) for _ in range(2)])
        both.wait()

    threads = [threading.Thread(target=launch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first, again), (other, other_again) = found
    assert (first, other) == (again, other_again)
    assert (first == other) == shared


def test_a_thread_does_not_inherit_from_one_that_has_ended(fake: FakeCupy) -> None:
    """The ended thread's work may still run, and the new thread may have its identifier."""
    found: list[int] = []
    for _ in range(4):
        thread = threading.Thread(target=lambda: found.append(_on(fake, PER_THREAD)))
        thread.start()
        thread.join()
    assert len(set(found)) == 4


def test_sixteen_threads_of_a_stream_make_one_counter(fake: FakeCupy) -> None:
    found: set[int] = set()
    start = threading.Barrier(16)

    def launch() -> None:
        start.wait()
        found.add(_on(fake, 77))

    threads = [threading.Thread(target=launch) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1


@pytest.mark.parametrize("stream", [77, PER_THREAD])
def test_a_captured_launch_counts_in_its_workspace(fake: FakeCupy, stream: int) -> None:
    """The graph itself sets the counter to 0, because the workspace's content is undefined."""
    before = _on(fake, stream)
    fake.capturing = {stream}
    assert _on(fake, stream) == WORKSPACE
    assert fake.cleared == [(WORKSPACE, 0, 4, stream)]
    assert _on(fake, 78) not in (before, WORKSPACE)
    fake.capturing = set()
    assert _on(fake, stream) == before
    assert len(fake.cleared) == 1


def test_nothing_is_made_while_capturing(fake: FakeCupy) -> None:
    """Memory made in a capture belongs to the graph."""
    fake.capturing = {77}
    assert _on(fake, 77) == WORKSPACE
    assert not fake.made


def test_who_gives_no_workspace_knows_that_nothing_is_captured(fake: FakeCupy) -> None:
    """Without a workspace, the driver is not asked whether the stream is capturing."""
    before = _on(fake, 77)
    fake.capturing = {77}
    assert counter_of_launch(0, 77, 0) == before
    assert not fake.cleared
