"""FlashAttention-3's kernels give the same bits, whatever runs beside or before them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.cuda import compile as compiling

from ..kit.case import Case
from .common import Hog, Problem, hold, jitter, skip_without

HEAD_DIMS = (64, 128, 256)
#: (head_dim, seqlen_kv): tiles of short sequences and of long ones, with and without turns.
JITTERED = ((64, 600), (64, 2500), (128, 500), (128, 1500), (256, 600))


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    skip_without("fa3")


def _busy(head_dim: int, causal: bool = True, seqlen_kv: int = 1333) -> Case:
    """Ragged, grouped, several kv tiles, and more q tiles than an H200 has multiprocessors."""
    lengths = (1100, seqlen_kv)
    return Case(3, 12, 3, *lengths, head_dim, head_dim, "bfloat16", causal=causal, seed=1)


def _small(head_dim: int) -> Case:
    """Fewer tiles than a third of the multiprocessors."""
    return Case(1, 4, 2, 300, 400, head_dim, head_dim, "bfloat16", causal=True, seed=1)


def _busy_problem(cp: Any, case: Case) -> Problem:
    problem = Problem(cp, case)
    plan = problem.prepare().plan
    tiles = case.batch * case.heads_q * -(-case.seqlen_q // plan.tile.block_q)
    sms = cp.cuda.Device().attributes["MultiProcessorCount"]
    assert plan.launches[0].grid == sms < tiles, "no block would draw a second tile"
    return problem


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bits_are_the_same_beside_copies(cp: Any, hog: Hog, head_dim: int) -> None:
    problem = _busy_problem(cp, _busy(head_dim))
    first, again = problem.first(), problem.destinations()
    wrong = cp.zeros((), np.int64)
    for _ in range(200):
        hog.copy()
        problem.poison(again)
        problem.launch(again)
        wrong += problem.differ(again, first)
    assert int(wrong) == 0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_two_streams_at_once(cp: Any, head_dim: int) -> None:
    """Small passes run entirely at the same time; larger ones overlap at their ends."""
    problems = [Problem(cp, _small(head_dim)), _busy_problem(cp, _busy(head_dim))]
    firsts = [problem.first() for problem in problems]
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    work = [
        (problem, first, [problem.destinations() for _ in streams])
        for problem, first in zip(problems, firsts, strict=True)
        for _ in range(50)
    ]
    for problem, _, targets in work:
        for bits in targets:
            problem.poison(bits)
    cp.cuda.Device().synchronize()
    hold(cp, streams)
    for problem, _, targets in work:
        for stream, bits in zip(streams, targets, strict=True):
            with stream:
                problem.launch(bits)
    cp.cuda.Device().synchronize()
    for problem, first, targets in work:
        for bits in targets:
            assert int(problem.differ(bits, first)) == 0


def test_problems_one_after_the_other_share_a_counter(cp: Any) -> None:
    """Problems with fewer and with more tiles than the device has blocks, on one stream."""
    problems = [
        _busy_problem(cp, _busy(64)),
        Problem(cp, _small(64)),
        _busy_problem(cp, _busy(128, causal=False)),
    ]
    firsts = [problem.first() for problem in problems]
    targets = [problem.destinations() for problem in problems]
    wrong = cp.zeros((), np.int64)
    for _ in range(30):
        for problem, bits in zip(problems, targets, strict=True):
            problem.poison(bits)
        for problem, bits in zip(problems, targets, strict=True):
            problem.launch(bits)
        for problem, bits, first in zip(problems, targets, firsts, strict=True):
            wrong += problem.differ(bits, first)
    assert int(wrong) == 0


def test_threads_on_their_default_streams(cp: Any) -> None:
    problem = _busy_problem(cp, _busy(64))
    first, start = problem.first(), threading.Barrier(8)
    results = [[problem.destinations() for _ in range(20)] for _ in range(8)]
    for one in results:
        for bits in one:
            problem.poison(bits)
    cp.cuda.Device().synchronize()
    faults: list[str] = []

    def work(mine: list[Any]) -> None:
        try:
            cp.cuda.Stream.ptds.use()
            start.wait(60)
            for bits in mine:
                problem.launch(bits)
            cp.cuda.Stream.ptds.synchronize()
        except Exception as error:  # in a thread, where pytest would not see it
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(one,)) for one in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for one in results:
        for bits in one:
            assert int(problem.differ(bits, first)) == 0


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("call", ["prepared", "attention"])
def test_graphs_of_one_stream_run_at_once(cp: Any, call: str, head_dim: int) -> None:
    problem = _busy_problem(cp, _busy(head_dim))
    first, prepared = problem.first(), problem.prepare()
    targets = [problem.destinations() for _ in range(2)]
    workspaces = [cp.full(prepared.workspace_bytes, 255, np.uint8) for _ in targets]
    captured, graphs = cp.cuda.Stream(non_blocking=True), []
    cp.cuda.Device().synchronize()
    for bits, workspace in zip(targets, workspaces, strict=True):
        with captured:
            captured.begin_capture()
            if call == "attention":
                problem.launch(bits)
            else:
                arrays = zip(("q", "k", "v", "out", "lse"), (*problem.inputs, *bits), strict=True)
                pointers = {name: array.data.ptr for name, array in arrays}
                prepared.run(pointers, captured.ptr, workspace.data.ptr)
            graphs.append(captured.end_capture())
    streams = [cp.cuda.Stream(non_blocking=True) for _ in graphs]
    wrong = [cp.zeros((), np.int64) for _ in graphs]
    cp.cuda.Device().synchronize()
    for _ in range(20):
        for stream, bits in zip(streams, targets, strict=True):
            with stream:
                problem.poison(bits)
        hold(cp, streams, 4_000_000)
        for stream, graph in zip(streams, graphs, strict=True):
            graph.launch(stream)
        for stream, bits, count in zip(streams, targets, wrong, strict=True):
            with stream:
                count += problem.differ(bits, first)
    cp.cuda.Device().synchronize()
    assert [int(count) for count in wrong] == [0, 0]


@pytest.fixture(scope="module")
def _both_builds(cp: Any) -> None:
    """Compile both kernels of the test in parallel."""

    def compile_all() -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda both: _prepare(*both), product(JITTERED, (False, True))))

    skip_without("fa3")
    compile_all()
    with jitter():
        compile_all()


def _prepare(sizes: tuple[int, int], causal: bool) -> cuflash.Prepared:
    case = _busy(sizes[0], causal, sizes[1])
    shapes = [case.shape(name) for name in "qkv"]
    return cuflash.prepare(*shapes, dtype=case.dtype, algorithm="fa3", causal=causal)


@pytest.mark.usefixtures("_both_builds")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", JITTERED, ids=str)
def test_bits_are_the_same_with_jitter(cp: Any, sizes: tuple[int, int], causal: bool) -> None:
    problem = _busy_problem(cp, _busy(sizes[0], causal, sizes[1]))
    config = problem.prepare().plan.launches[0].config
    first, late = problem.first(), problem.destinations()
    wrong = cp.zeros((), np.int64)
    with jitter():
        for _ in range(5):
            problem.poison(late)
            problem.launch(late)
            wrong += problem.differ(late, first)
        assert any(key[0] == config and key[-1] is True for key in compiling._kernels._values)
    assert int(wrong) == 0
