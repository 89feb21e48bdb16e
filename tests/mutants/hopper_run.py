"""Runs a list of problems with FlashAttention-3 as it is in this tree, bugs included.

``python -m tests.mutants.hopper_run LIST`` runs a list of ``hopper_problems`` with the plain
kernel, and again with the kernel that waits a random time at every barrier, which shows an order
that no barrier enforces. The exit code is a member of :class:`End`; the last line says more.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np

import cuflash
from cuflash import calls

from ..device.common import Gradients, Problem, hold
from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays, raise_scores
from ..kit.few import any_lengths
from ..kit.oracle import judge
from ..kit.parts import parts_forced
from ..kit.runners import ApiRunner
from .hopper_problems import LISTS, Listed

__all__ = ["BUILT", "End"]

#: Printed when the kernels are compiled and problems begin.
BUILT = "the kernels are compiled"
#: Seconds after which a kernel counts as waiting for ever. All problems together need a few.
PATIENCE = 25.0
#: The number of passes in a row, and of passes in each of two concurrent streams or graphs.
PASSES = 10


class End(enum.IntEnum):
    """How a run ended."""

    RIGHT = 0
    WRONG = 10
    NO_PROGRAM = 11
    ENDLESS = 12


def few(listed: Listed) -> None:
    """All results of a small problem, and of one whose maxima rise all the time."""
    case = listed.few
    runner = ApiRunner("cuda", "fa3", options=tuple(listed.options.items()))
    for rising in (False, True):
        x = arrays(case, "q", "k", "v")
        if rising:
            raise_scores(x, runner.tiles(case)[1], 5.0)
        truth = judge(case, x)
        for name, got in zip(("out", "lse"), runner.forward(case, *x.values()), strict=True):
            compare(truth, name, got).check()


def dead(listed: Listed) -> None:
    """Keys that kill every row of a batch entry, beside values that are not finite."""
    case = listed.few
    runner = ApiRunner("cuda", "fa3", options=tuple(listed.options.items()))
    x = arrays(case, "q", "k", "v")
    x["q"][..., 0] = 1
    x["k"][0, :, :, 0] = -np.inf
    x["v"][0, 70:] = np.inf
    out, lse = runner.forward(case, *x.values())
    assert (out[0] == 0).all(), "out of dead rows is not 0"
    assert (lse[0] == -np.inf).all(), "lse of dead rows is not minus infinity"
    assert np.isfinite(out[1].astype(np.float32)).all(), "dead rows beside these made them NaN"


def many(listed: Listed) -> None:
    """Blocks with and without a second tile: passes in a row, on two streams, in graphs."""
    import cupy

    problems = [Problem(cupy, case, **listed.options) for case in (listed.few, listed.many)]
    firsts = [problem.first() for problem in problems]
    for array in (*problems[0].typed(firsts[0]), *problems[1].typed(firsts[1])):
        assert not np.isnan(array.get().astype(np.float32)).any(), "a part was not written"
    both = list(zip(problems, firsts, strict=True))
    # Each problem runs beside the other: few tiles, which leave multiprocessors free, beside many.
    lanes = [
        [
            (problem, problem.destinations(), first)
            for problem, first in order
            for _ in range(PASSES)
        ]
        for order in (both, both[::-1])
    ]
    for beside in (_one_after_the_other, _on_two_streams, _in_two_graphs):
        for problem, bits, _ in (*lanes[0], *lanes[1]):
            problem.poison(bits)
        cupy.cuda.Device().synchronize()
        beside(cupy, lanes)
        cupy.cuda.Device().synchronize()
        wrong = sum(p.differ(bits, first) for p, bits, first in (*lanes[0], *lanes[1]))
        assert int(wrong) == 0, f"{int(wrong)} elements differ{beside.__name__.replace('_', ' ')}"


def few_gradients(listed: Listed) -> None:
    """All gradients of a small problem."""
    case, runner = listed.few, ApiRunner("cuda", "fa3")
    x = arrays(case, *_INPUTS)
    _check_gradients(case, x, x, runner.forward(case, x["q"], x["k"], x["v"]))


def dead_gradients(listed: Listed) -> None:
    """Keys that no query sees; dead queries that hold anything, and a key that holds anything."""
    case, runner = replace(listed.few, q_offset=-40), ApiRunner("cuda", "fa3")
    x = arrays(case, *_INPUTS)
    saved = runner.forward(case, x["q"], x["k"], x["v"])
    other = {name: array.copy() for name, array in x.items()}
    other["q"][:, :40] = np.nan
    other["dout"][:, :40] = np.inf
    _check_gradients(case, x, other, saved)
    for name in "kv":  # dead queries of a tile beside keys that others alone see
        other[name][:, 30] = np.inf
    grads = runner.backward(
        case, *(other[n] for n in ("dout", "q", "k", "v")), *saved, other["dlse"]
    )
    assert (grads[0][:, :40] == 0).all(), "dq of dead queries is not 0"


def many_gradients(listed: Listed) -> None:
    """More tiles than multiprocessors, ten times: dk and dv have the same bits, and dq is right.

    Where dq is summed in order, it has the same bits too.
    """
    import cupy

    gradients = Gradients(cupy, listed.many, listed.ordered)
    first, again = gradients.first(), gradients.destinations()
    for array in first:
        assert not np.isnan(array.view(listed.many.storage).get().astype(np.float32)).any(), (
            "a part was not written"
        )
    for _ in range(PASSES):
        gradients.poison(again)
        gradients.launch(again)
        wrong = int(gradients.differ(again, first))
        assert wrong == 0, f"{wrong} elements differ one after the other"
    gradients.check("dq", gradients.last("dq", again[0]))


def dead_heads(listed: Listed) -> None:
    """Keys that kill every query of a batch entry, without a mask, beside infinite values."""
    case, runner = replace(listed.few, causal=False), ApiRunner("cuda", "fa3")
    x = arrays(case, *_INPUTS)
    x["q"][..., 0] = 1
    x["k"][0, :, :, 0] = -np.inf
    x["v"][0, 70:] = np.inf
    saved = runner.forward(case, x["q"], x["k"], x["v"])
    grads = runner.backward(case, *(x[n] for n in ("dout", "q", "k", "v")), *saved, x["dlse"])
    for name, array in zip(("dq", "dk", "dv"), grads, strict=True):
        assert (array[0] == 0).all(), f"{name} of dead queries is not 0"
        assert np.isfinite(array[1].astype(np.float32)).all(), f"{name} is not finite"


_INPUTS = ("q", "k", "v", "dout", "dlse")


def _check_gradients(
    case: Case, x: dict[str, np.ndarray], given: dict[str, np.ndarray], saved: Any
) -> None:
    """The gradients of ``given`` are those of ``x``."""
    runner = ApiRunner("cuda", "fa3")
    inputs = (given[name] for name in ("dout", "q", "k", "v"))
    grads, truth = runner.backward(case, *inputs, *saved, given["dlse"]), judge(case, x)
    for name, got in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(truth, name, got).check()


#: Passes of a stream: a problem, what it writes and what it should write.
_Lane = list[tuple[Problem, Any, Any]]


def _one_after_the_other(cp: Any, lanes: list[_Lane]) -> None:
    for problem, bits, _ in (*lanes[0], *lanes[1]):
        problem.launch(bits)


def _on_two_streams(cp: Any, lanes: list[_Lane]) -> None:
    streams = [cp.cuda.Stream(non_blocking=True) for _ in lanes]
    hold(cp, streams)
    for both in zip(*lanes, strict=True):
        for stream, (problem, bits, _) in zip(streams, both, strict=True):
            with stream:
                problem.launch(bits)
    cp.cuda.Device().synchronize()


def _in_two_graphs(cp: Any, lanes: list[_Lane]) -> None:
    """A graph of each lane, both captured from one stream."""
    streams = [cp.cuda.Stream(non_blocking=True) for _ in lanes]
    prepared = {problem: problem.prepare() for problem, _, _ in lanes[0]}
    size = max(one.workspace_bytes for one in prepared.values())
    workspaces, graphs = [cp.full(size, 255, np.uint8) for _ in lanes], []
    cp.cuda.Device().synchronize()
    for lane, workspace in zip(lanes, workspaces, strict=True):
        with streams[0]:
            streams[0].begin_capture()
            for problem, bits, _ in lane:
                given = zip(("q", "k", "v", "out", "lse"), (*problem.inputs, *bits), strict=True)
                pointers = {name: array.data.ptr for name, array in given}
                prepared[problem].run(pointers, streams[0].ptr, workspace.data.ptr)
            graphs.append(streams[0].end_capture())
    hold(cp, streams)
    for stream, graph in zip(streams, graphs, strict=True):
        graph.launch(stream)
    cp.cuda.Device().synchronize()


CHECKS = (few, dead, many)
GRADIENT_CHECKS = (few_gradients, dead_gradients, dead_heads, many_gradients)


def build(listed: Listed) -> None:
    """Compile the chosen kernel."""
    shapes = [listed.few.shape(name) for name in "qkv"]
    named: dict[str, Any] = {"dtype": listed.few.dtype, "causal": listed.few.causal}
    named |= {"algorithm": "fa3", **listed.options}
    cuflash.prepare(*shapes, **named)
    if listed.backward:
        for causal in (True, False):
            named |= {"causal": causal}
            for operation in ("forward", "backward"):
                cuflash.prepare(*shapes, operation=operation, **named)
        if listed.ordered:
            named |= {"causal": listed.few.causal, "deterministic": True}
            cuflash.prepare(*shapes, operation="backward", **named)


def choose(jitter: bool) -> None:
    """Choose the kernel that calls run from now on."""
    os.environ["CUFLASH_JITTER"] = str(int(jitter))
    calls.forget()


def end(how: End, said: str) -> None:
    """Print the end and exit at once: an orderly exit would wait for a kernel that never ends."""
    print(said.splitlines()[0][:200] if said else how.name, flush=True)
    os._exit(how)


def main() -> None:
    """Compile, then compute."""
    listed = LISTS[sys.argv[1]]
    with parts_forced(listed.parts), any_lengths():
        _run(listed)


def _run(listed: Listed) -> None:
    try:
        for jitter in (True, False):
            choose(jitter)
            build(listed)
    except (cuflash.CompileError, cuflash.UnsupportedError) as error:
        end(End.NO_PROGRAM, " ".join(str(error).split())[-200:])
    print(BUILT, flush=True)
    watch = threading.Timer(PATIENCE, end, (End.ENDLESS, f"did not end in {PATIENCE:.0f} s"))
    watch.daemon = True
    watch.start()
    try:
        for jitter in (False, True):
            choose(jitter)
            for check in GRADIENT_CHECKS if listed.backward else CHECKS:
                check(listed)
    except Exception as error:
        end(End.WRONG, f"{type(error).__name__}: {error}")
    end(End.RIGHT, "all right")


if __name__ == "__main__":
    main()
