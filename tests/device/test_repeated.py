"""Repeated calls on the device are right on every stream, thread and device, and in graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from .common import hold, skip_without

OPERATIONS = ("forward", "backward")


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make a call fail if it needs a new decision."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("decided again")

    return lambda: monkeypatch.setattr(dispatch, "run", refuse)


class Passes:
    """Calls of one kind over several sets of arrays, and the first results of each."""

    def __init__(self, cp: Any, operation: str, algorithm: Any, sets: int = 4) -> None:
        skip_without(algorithm)
        self._cp, self.operation = cp, operation
        rng = np.random.default_rng(5)
        self.options: dict[str, Any] = {"causal": True, "algorithm": algorithm}
        self._inputs = []
        for _ in range(sets):
            q, k, v = (
                cp.asarray(rng.standard_normal((2, n, h, 64)).astype(np.float16))
                for n, h in ((300, 4), (333, 2), (333, 2))
            )
            self._inputs.append((q, k, v))
        if operation == "backward":
            self.options["deterministic"] = algorithm != "fa1"
            saved = [self._saved(*qkv) for qkv in self._inputs]
            self._inputs = [
                (out, *qkv, out, lse) for qkv, (out, lse) in zip(self._inputs, saved, strict=True)
            ]
        self.expected = [self.bits(self(number)) for number in range(sets)]

    def _saved(self, *qkv: Any) -> Any:
        return cuflash.attention(*qkv, causal=True, return_lse=True)

    def __call__(self, number: int, **memory: Any) -> tuple[Any, ...]:
        """One call on the current stream; nothing waits for it."""
        inputs = self._inputs[number % len(self._inputs)]
        if self.operation == "forward":
            return (cuflash.attention(*inputs, **self.options, **memory),)
        return cuflash.attention_backward(*inputs, **self.options, **memory)

    def bits(self, results: tuple[Any, ...]) -> bytes:
        """The bits of results that have been queued."""
        return b"".join(array.get().tobytes() for array in results)

    def check(self, number: int, results: tuple[Any, ...]) -> None:
        assert self.bits(results) == self.expected[number % len(self.expected)], number

    def destinations(self) -> dict[str, Any]:
        """``out`` or ``grads``, and a workspace that is large enough."""
        made = [self._cp.full_like(array, np.nan) for array in self(0)]
        named: dict[str, Any] = {"out": made[0]} if self.operation == "forward" else {}
        return (named or {"grads": tuple(made)}) | {
            "workspace": self._cp.full(1 << 22, 255, np.uint8)
        }


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_repeated_calls_are_bit_equal(
    cp: Any, undecided: Callable[[], None], operation: str, algorithm: str
) -> None:
    """Calls on one stream, while results and workspaces are allocated and freed."""
    passes = Passes(cp, operation, algorithm)
    undecided()
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    hold(cp, [stream])
    with stream:
        kept = {number: passes(number) for number in range(40) if passes(number + 1)}
        stream.synchronize()
        for number, results in kept.items():
            passes.check(number, results)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("own", [True, False])
def test_a_graph_of_repeated_calls_replays_bit_equal(
    cp: Any, operation: str, algorithm: str, own: bool
) -> None:
    """Results lie in the caller's memory, or in memory that the graph keeps."""
    passes = Passes(cp, operation, algorithm)
    memory = passes.destinations() if own else {}
    passes(0, **memory)
    passes(0, **memory)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        results = passes(0, **memory)
        graph = stream.end_capture()
        for _ in range(3):
            for array in results:
                array.fill(np.nan)
            passes(1)  # others use memory meanwhile
            graph.launch()
            passes(2)
            stream.synchronize()
            passes.check(0, results)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_threads_on_streams_of_their_own(
    cp: Any, undecided: Callable[[], None], operation: str
) -> None:
    """New threads without a context, on their own streams, the per-thread and the null stream."""
    passes = Passes(cp, operation, "auto", sets=8)
    undecided()
    cp.cuda.Device().synchronize()
    faults: list[Any] = []

    def work(number: int, stream: Any) -> None:
        try:
            with stream() if callable(stream) else stream:
                for _ in range(50):
                    results = passes(number)
                    cp.cuda.get_current_stream().synchronize()
                    passes.check(number, results)
        except BaseException as error:  # a thread would only print it
            faults.append(error)

    new, own = (lambda: cp.cuda.Stream(non_blocking=True)), cp.cuda.Stream.ptds
    streams = [new, new, new, own, own, own, cp.cuda.Stream.null, cp.cuda.Stream.null]
    threads = [threading.Thread(target=work, args=each) for each in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_prepared_run_in_a_new_thread(cp: Any, problem: dict[str, Any]) -> None:
    """The thread has not called CUDA before, so it has no context."""
    expected = cuflash.attention(**problem)
    prepared, out = cuflash.prepare(*problem.values()), cp.full_like(expected, np.nan)
    workspace = cp.empty(prepared.workspace_bytes + 256, np.uint8)
    pointers = {name: array.data.ptr for name, array in {**problem, "out": out}.items()}
    stream = cp.cuda.Stream(non_blocking=True)
    prepared.run(pointers, stream.ptr, workspace.data.ptr)  # this makes the counter of the stream
    stream.synchronize()
    out.fill(np.nan)
    cp.cuda.Device().synchronize()
    faults: list[Any] = []

    def work() -> None:
        try:
            prepared.run(pointers, stream.ptr, workspace.data.ptr)
        except Exception as error:
            faults.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    stream.synchronize()
    assert not faults
    assert bool((out == expected).all())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_repeated_calls_of_another_device_run_there(cp: Any, operation: str) -> None:
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second CUDA device")
    here = Passes(cp, operation, "auto")
    with cp.cuda.Device(1):
        there = Passes(cp, operation, "auto")
    for number in range(8):
        results = there(number)
        assert all(array.device.id == 1 for array in results)
        there.check(number, results)
        here.check(number, here(number))
        assert cp.cuda.Device().id == 0


@pytest.mark.parametrize("operation", OPERATIONS)
def test_ten_thousand_repeated_calls_hold_no_more_memory(cp: Any, operation: str) -> None:
    passes = Passes(cp, operation, "auto", sets=16)
    recent: list[Any] = [None] * 5
    pool, totals = cp.get_default_memory_pool(), []
    for number in range(11_000):
        recent[number % 5] = passes(number)
        if number in (1000, 10_999):
            cp.cuda.Device().synchronize()
            totals.append((pool.total_bytes(), pool.used_bytes()))
    assert totals[0] == totals[1]
