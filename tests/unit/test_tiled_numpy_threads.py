"""Threads of the tiled NumPy backend: their number, side effects, and the same bits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

from cuflash import tiled_numpy
from cuflash.planning.device import HostLimits
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.tiled_numpy import threads
from cuflash.tiled_numpy.blocks import Blocks

from ..kit.blas import forget_control
from .tiled_case import ALGORITHMS, GIVEN, WANTED, Array, destinations, draw, problem

COUNTS = (1, 2, 5)
SITUATIONS: dict[str, dict[str, Any]] = {
    "one head": {"batch": 1, "heads_q": 1, "heads_kv": 1},
    "causal": {"mask": "causal", "q_offset": 0},
    "causal, dead rows": {"mask": "causal", "q_offset": -9, "heads_q": 4},
    "grouped": {"heads_q": 6, "heads_kv": 2},
}


@pytest.fixture(autouse=True)
def _enough_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that the machine has cores for as many threads as any plan here has."""
    monkeypatch.setattr(threads, "usable_cores", lambda: 64)
    forget_control()
    with threadpool_limits(8, user_api="blas"):
        yield


def blas_threads() -> set[int]:
    """Thread counts of NumPy's own BLAS; other packages, such as SciPy, may bring another BLAS."""
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    own = [one for one in found if "numpy" in Path(one.filepath).parent.name]
    return {one.num_threads for one in own or found}


def divided(chosen: Plan, count: int, parts: int = 3) -> Plan:
    return replace(chosen, tile=replace(chosen.tile, parts=parts, threads=count))


def solve(
    p: AttentionProblem, given: dict[str, Array], count: int, **choice: Any
) -> dict[str, Array]:
    into = destinations(p)
    limits = HostLimits(1 << 20)
    q, k, v, dout, dlse = (given[n] for n in GIVEN)
    out, lse, dq, dk, dv = (into[n] for n in WANTED)
    tiled_numpy.forward(divided(plan(p, limits, **choice), count), q, k, v, out, lse)
    backward = divided(plan(replace(p, operation="backward"), limits, **choice), count)
    tiled_numpy.backward(backward, dout, q, k, v, out, lse, dlse, dq, dk, dv)
    return into


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("common", [0.0, 300.0])
def test_the_same_bits_with_any_number_of_threads(
    situation: str, algorithm: str, common: float
) -> None:
    p = problem(storage="float32", seqlen_q=70, seqlen_kv=61, **SITUATIONS[situation])
    given = draw(p)
    given["k"] += np.float32(common)
    answers = [
        solve(p, given, count, algorithm=algorithm, blocks=(8, 16))
        for count in COUNTS
        for _ in range(3)
    ]
    for answer in answers[1:]:
        for name in WANTED:
            assert answer[name].tobytes() == answers[0][name].tobytes(), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_parts_give_the_gradients_of_the_whole(algorithm: str) -> None:
    p = problem(seqlen_q=70, seqlen_kv=61, mask="causal", q_offset=0, heads_q=4)
    given = draw(p)
    limits = HostLimits(1 << 20)
    into, whole = solve(p, given, 2, algorithm=algorithm, blocks=(8, 16)), destinations(p)
    q, k, v, dout, dlse = (given[n] for n in GIVEN)
    out, lse, dq, dk, dv = (whole[n] for n in WANTED)
    choice: dict[str, Any] = {"algorithm": algorithm, "blocks": (8, 16)}
    tiled_numpy.forward(plan(p, limits, **choice), q, k, v, out, lse)
    chosen = plan(replace(p, operation="backward"), limits, **choice)
    tiled_numpy.backward(chosen, dout, q, k, v, out, lse, dlse, dq, dk, dv)
    for name in WANTED:
        np.testing.assert_allclose(into[name], whole[name], atol=1e-13, err_msg=name)


def watch(monkeypatch: pytest.MonkeyPatch, note: Callable[[], None]) -> None:
    """Call ``note`` in every tile."""
    apply_mask = Blocks.apply_mask

    def noted(self: Blocks, *arguments: Any) -> None:
        note()
        apply_mask(self, *arguments)

    monkeypatch.setattr(Blocks, "apply_mask", noted)


@pytest.mark.parametrize("count", [1, 3])
def test_blas_has_one_thread_in_every_tile_and_its_own_afterwards(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    watch(monkeypatch, lambda: seen.update(blas_threads()))
    before = blas_threads()
    assert before == {8}
    p = problem(seqlen_q=70)
    solve(p, draw(p), count, blocks=(32, 16))
    assert seen == {1}
    assert blas_threads() == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_errors_of_any_thread_reach_the_caller(
    count: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def fail() -> None:
        started.append(threading.current_thread().name)
        raise error("in a tile")

    watch(monkeypatch, fail)
    p = problem(seqlen_q=70)
    with pytest.raises(error, match="in a tile"):
        solve(p, draw(p), count, blocks=(8, 16))
    assert blas_threads() == {8}
    assert len(started) <= count, "no task begins after an error"


def test_nothing_runs_when_an_error_has_been_raised() -> None:
    """The call waits for a helper that runs a task, since that writes to the caller's arrays."""
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait()
        done.set()

    def fail() -> None:
        begun.wait()
        threading.Timer(0.05, go_on.set).start()
        raise KeyboardInterrupt

    caller = threading.current_thread()

    def either() -> None:
        (fail if threading.current_thread() is caller else slow)()

    with pytest.raises(KeyboardInterrupt):
        threads.run_tasks([either, either], 2)
    assert done.is_set()


@pytest.mark.parametrize("count", COUNTS)
def test_no_more_threads_than_the_plan_says(count: int) -> None:
    lock, now, most = threading.Lock(), 0, 0
    pause = threading.Event()

    def task() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        pause.wait(0.01)
        with lock:
            now -= 1

    threads.run_tasks([task] * 20, count)
    assert most <= count
    if count > 1:
        assert most > 1, "helpers take part"


def test_no_more_threads_than_the_process_may_have_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    names: set[str] = set()
    threads.run_tasks([lambda: names.add(threading.current_thread().name)] * 9, 5)
    assert names == {threading.current_thread().name}


def test_a_caller_who_gives_blas_one_thread_gets_one() -> None:
    names: set[str] = set()
    with threadpool_limits(1, user_api="blas"):
        threads.run_tasks([lambda: names.add(threading.current_thread().name)] * 9, 5)
        assert blas_threads() == {1}
    assert names == {threading.current_thread().name}


def test_calls_of_two_threads_at_once_do_not_mix() -> None:
    p = problem(storage="float32", seqlen_q=150, seqlen_kv=130, mask="causal", q_offset=0)
    inputs = [draw(p, seed) for seed in range(4)]
    wanted = [solve(p, given, 1, blocks=(8, 16)) for given in inputs]
    found: dict[int, list[dict[str, Array]]] = {}

    def calls(index: int) -> None:
        found[index] = [solve(p, inputs[index], 3, blocks=(8, 16)) for _ in range(4)]

    callers = [threading.Thread(target=calls, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for index, answers in found.items():
        for answer in answers:
            for name in WANTED:
                assert answer[name].tobytes() == wanted[index][name].tobytes(), name
    assert len(found) == 4
    assert blas_threads() == {8}, "restored by the last call"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_child_of_fork_computes_with_threads_of_its_own() -> None:
    p = problem(seqlen_q=70)
    given = draw(p)
    wanted = solve(p, given, 3, blocks=(8, 16))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            got = solve(p, given, 3, blocks=(8, 16))
            same = all(got[n].tobytes() == wanted[n].tobytes() for n in WANTED)
            status = 0 if same else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_child_forked_during_a_call_has_the_callers_blas() -> None:
    status: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if blas_threads() == {8} else 1)
        status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    threads.run_tasks([fork], 1)
    assert status == [0]


def test_the_plan_has_one_thread_for_small_problems() -> None:
    limits = HostLimits(1 << 20, threads=8)
    small = problem(storage="float32", heads_q=8, heads_kv=8, seqlen_q=64, seqlen_kv=64)
    assert plan(small, limits).tile.threads == 1
    large = replace(small, seqlen_q=2048, seqlen_kv=2048)
    assert plan(large, limits).tile.threads == 8
    assert "8 threads" in plan(large, limits).reason
    assert "threads" not in plan(small, limits).reason
    assert plan(large, replace(limits, threads=2)).tile.threads == 2


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_only_the_number_of_threads_depends_on_the_cores(operation: str) -> None:
    p = problem(operation=operation, storage="float32", seqlen_q=3000, seqlen_kv=3000)
    tiles = [plan(p, HostLimits(1 << 20, threads=n)).tile for n in (1, 2, 64)]
    assert len({replace(tile, threads=1) for tile in tiles}) == 1


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("seqlen", [1, 100, 2048, 5000])
def test_both_passes_have_the_same_blocks(seqlen: int, group: int, mask: str) -> None:
    p = problem(storage="float32", heads_q=2 * group, seqlen_q=seqlen, seqlen_kv=3000, mask=mask)
    limits = HostLimits(1 << 20)
    tiles = [plan(replace(p, operation=o), limits).tile for o in ("forward", "backward")]
    assert len({(tile.block_q, tile.block_kv) for tile in tiles}) == 1
