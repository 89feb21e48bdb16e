"""Captured calls, replayed after the caller has dropped its arrays, on the emulated device."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from .build import compiler
from .host_cupy import HostCupy, host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_CASE = Case(2, 4, 2, 70, 100, 64, 64, "float16", causal=True, seed=1)


def _others_take_the_memory(host: HostCupy, stream: int) -> list[Any]:
    """New arrays of every size in use on the stream, full of NaN: free blocks are taken."""
    gc.collect()
    sizes = {block.nbytes for block in host.runtime.memory.blocks if block.stream == stream}
    return [host.cupy.empty(size, np.uint8) for size in sizes for _ in range(4)]


@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_graph_runs_when_the_call_is_long_over(algorithm: Any, seen_before: bool) -> None:
    """Replays read other inputs at the same places; memory that a graph keeps is not reused."""
    first, second = (arrays(Case(**{**vars(_CASE), "seed": seed})) for seed in (1, 2))
    options = {**_CASE.options, "algorithm": algorithm}
    dispatch._kept_for_graphs.clear()
    with host_cupy(num_sms=1 if algorithm == "fa3" else None) as host:
        runtime = host.runtime
        with runtime.on_stream(77, 0):
            given = {name: host.array(first[name]) for name in "qkv"}
            if not seen_before:  # a call that copies is not repeated
                given["k"] = host.array(np.repeat(first["k"], 2, axis=-1))[..., ::2]
            dout = host.array(first["dout"])
            if seen_before:
                saved = host.call(cuflash.attention, **given, return_lse=True, **options)
                host.call(cuflash.attention_backward, dout, *given.values(), *saved, **options)
                del saved
            with runtime.capture(77) as steps:
                out, lse = host.call(cuflash.attention, **given, return_lse=True, **options)
            plans = [host.auditor.plan]
            with runtime.capture(77) as more:
                grads = host.call(
                    cuflash.attention_backward, dout, *given.values(), out, lse, **options
                )
            taken = _others_take_the_memory(host, 77)
            results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
            plans.append(host.auditor.plan)
            for seed, x in ((1, first), (2, second), (1, first)):
                for name, array in (*given.items(), ("dout", dout)):
                    array.set(x[name])
                for host.auditor.plan, captured in zip(plans, (steps, more), strict=True):
                    for step in captured:
                        step()
                truth = judge(Case(**{**vars(_CASE), "seed": seed}), x)
                for name, array in results.items():
                    compare(truth, name, array.peek()).check()
            del taken
    dispatch._kept_for_graphs.clear()


def test_streams_that_take_turns_have_counters_of_their_own() -> None:
    """Graphs that are captured from one stream have counters of their own too."""
    case = _CASE
    x = arrays(case, "q", "k", "v")
    truth = judge(case, {**x, "dout": np.zeros(case.shape("out"), case.storage)})
    with host_cupy(num_sms=1) as host:
        given = {name: host.array(x[name]) for name in "qkv"}
        for stream in (0, 77, 78, 0, 77):
            with host.runtime.on_stream(stream, 0):
                out = host.call(cuflash.attention, **given, algorithm="fa3", **case.options)
            compare(truth, "out", out.peek()).check()
        assert len({streams.copy().pop() for streams in host.auditor.counters.values()}) == 3


def test_a_capture_refuses_what_a_graph_could_not_repeat() -> None:
    x = arrays(_CASE, "q", "k", "v")
    with (
        host_cupy(make=lambda config: lambda *numbers: None) as host,
        host.runtime.on_stream(77, 0),
        host.runtime.capture(77) as steps,
    ):
        with pytest.raises(cuflash.ArgumentTypeError, match="graph is captured"):
            cuflash.attention(**x, backend="cuda", algorithm="fa2")
        assert not steps
