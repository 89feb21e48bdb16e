"""Resumed attention on the emulated device: a kernel merges the given state and the new one."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import states

from ..kit.caches import same_bits
from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..property.test_resume import part_by_part, splits
from .build import compiler
from .host_cupy import HostCupy, host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_CASE = Case(2, 4, 2, 37, 90, 16, 16, "float16", causal=True, q_offset=53, seed=3)
_ODD = replace(_CASE, layout="bhsd", dtype="float64", head_dim=24, head_dim_v=40, seed=4)


def _check(case: Case, parts: Any, in_place: bool, **more: Any) -> None:
    x = arrays(case, "q", "k", "v")
    truth = judge(case, x)
    with host_cupy(num_sms=1 if more.get("algorithm") == "fa3" else None) as host:
        given_ = {name: host.array(array) for name, array in x.items()}
        out, lse = part_by_part(case, given_, parts, in_place, host.call, **more)
        assert out.dtype == lse.dtype == case.statistics
        compare(truth, "out", out.peek()).check()
        compare(truth, "lse", lse.peek()).check()


@settings(max_examples=12)
@given(st.data(), st.booleans())
def test_any_split_of_the_keys(data: Any, in_place: bool) -> None:
    case = replace(_CASE, seed=data.draw(st.integers(0, 2**20)))
    case = replace(case, q_offset=data.draw(st.integers(-3, 90)))
    _check(case, data.draw(splits(case.seqlen_kv)), in_place, algorithm="fa2")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("case", "algorithm"),
    [(_CASE, "fa1"), (_CASE, "fa3"), (_ODD, "fa2"), (replace(_ODD, dtype="float32"), "fa1")],
    ids=["fa1", "fa3", "float64", "float32"],
)
def test_three_parts(case: Case, algorithm: str, in_place: bool) -> None:
    """The second part has no keys (one for fa3); only the last queries see the third."""
    second = [(40, 41), (41, 90)] if algorithm == "fa3" else [(40, 40), (40, 90)]
    _check(case, [(0, 40), *second], in_place, algorithm=algorithm)


def _state(host: HostCupy, lse: float, out: float) -> tuple[Any, Any]:
    shapes = _CASE.shape("out"), _CASE.shape("lse")
    numbers = zip(shapes, (out, lse), strict=True)
    return tuple(host.array(np.full(shape, number, np.float32)) for shape, number in numbers)


def _numbers_like(array: Any, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(array.shape).astype(array.dtype)


def test_states_of_no_key_do_not_count() -> None:
    """The result has the bits of the other state, whatever a state without keys holds."""
    x = arrays(_CASE, "q", "k", "v")
    with host_cupy() as host:
        qkv = [host.array(x[name]) for name in "qkv"]
        options: dict[str, Any] = {"algorithm": "fa2", "causal": True, "return_lse": True}
        plain = host.call(cuflash.attention, *qkv, **options, q_offset=0, out_dtype="float32")
        dead = _state(host, -np.inf, np.nan)
        made = host.call(cuflash.attention, *qkv, **options, q_offset=0, resume=dead)
        assert all(same_bits(a.peek(), b.peek()) for a, b in zip(made, plain, strict=True))
        again = host.call(cuflash.attention, *qkv, **options, q_offset=-99, resume=made)
        assert all(same_bits(a.peek(), b.peek()) for a, b in zip(again, plain, strict=True))
        out, lse = host.call(cuflash.attention, *qkv, **options, q_offset=-99, resume=dead)
        assert not out.peek().any()
        assert (lse.peek() == -np.inf).all()


@pytest.mark.parametrize("of", ["lse", "out"])
def test_what_is_not_finite_of_a_state_that_counts_is_passed_on(of: str) -> None:
    x = arrays(_CASE, "q", "k", "v")
    with host_cupy() as host:
        qkv = [host.array(x[name]) for name in "qkv"]
        options: dict[str, Any] = {"algorithm": "fa2", "return_lse": True}
        for number in (np.nan, np.inf):
            state = _state(host, *((number, 1.0) if of == "lse" else (0.0, number)))
            out, lse = host.call(cuflash.attention, *qkv, **options, resume=state)
            expected = np.nan if of == "lse" else number
            assert np.array_equal(out.peek(), np.full(out.shape, expected), equal_nan=True)
            assert np.isfinite(lse.peek()).all() == (of == "out")


def test_a_state_is_where_q_is() -> None:
    x = arrays(_CASE, "q", "k", "v")
    with host_cupy() as host:
        qkv = [host.array(x[name]) for name in "qkv"]
        out, lse = _state(host, 0.0, 0.0)
        for state, where in (((out.peek(), lse), 0), ((out, host.array(lse.peek(), device=1)), 1)):
            place = "host memory" if where == 0 else "CUDA device 1"
            says = rf"^resume\[{where}\]: got an array in {place}; expected CUDA device 0, where q"
            with pytest.raises(cuflash.ArgumentValueError, match=says):
                host.call(cuflash.attention, *qkv, resume=state)


def test_arrays_of_any_strides() -> None:
    """Arrays with gaps between columns are copied; the gaps of destinations do not change."""
    x = arrays(_CASE, "q", "k", "v")
    truth = judge(_CASE, x)
    with host_cupy() as host:
        qkv = [host.array(x[name]) for name in "qkv"]
        options: dict[str, Any] = {"algorithm": "fa2", "causal": True}
        first = [array[:, :50] for array in qkv[1:]]
        keywords = {**options, "q_offset": 53, "return_lse": True, "out_dtype": "float32"}
        out, lse = host.call(cuflash.attention, qkv[0], *first, **keywords)
        raw = [np.full((*a.shape[:-1], 2 * a.shape[-1]), np.nan, np.float32) for a in (out, lse)]
        for array, values in zip(raw, (out, lse), strict=True):
            array[..., ::2] = values.peek()
        wide = [host.array(array) for array in raw]
        state = tuple(array[..., ::2] for array in wide)
        last = [array[:, 50:] for array in qkv[1:]]
        to = {"out": state[0], "lse_out": state[1]}
        made = host.call(
            cuflash.attention, qkv[0], *last, **options, q_offset=3, resume=state, **to
        )
        assert made is state[0]
        compare(truth, "out", state[0].peek()).check()
        compare(truth, "lse", state[1].peek()).check()
        assert all(np.isnan(array.peek()[..., 1::2]).all() for array in wide)


def test_a_graph_runs_when_the_call_is_long_over() -> None:
    """Replays work in place on other numbers; memory that a graph keeps is not reused."""
    states._kept_for_graphs.clear()
    with host_cupy() as host:
        runtime = host.runtime
        with runtime.on_stream(77, 0):
            x = arrays(_CASE, "q", "k", "v")
            qkv = [host.array(x[name]) for name in "qkv"]
            options: dict[str, Any] = {"algorithm": "fa2", "return_lse": True}
            out, lse = _state(host, 0.0, 0.0)
            keywords = {**options, "resume": (out, lse), "out": out, "lse_out": lse}
            with runtime.capture(77) as steps:
                host.call(cuflash.attention, *qkv, **keywords)
            gc.collect()
            sizes = {b.nbytes for b in runtime.memory.blocks if b.stream == 77}
            taken = [host.cupy.empty(size, np.uint8) for size in sizes for _ in range(4)]
            for seed in (5, 6, 5):
                x = arrays(replace(_CASE, seed=seed), "q", "k", "v")
                state = [_numbers_like(a, seed) for a in (out, lse)]
                for array, values in zip((*qkv, out, lse), (*x.values(), *state), strict=True):
                    array.set(values)
                for step in steps:
                    step()
                resume = tuple(host.array(array) for array in state)
                expected = host.call(cuflash.attention, *qkv, **options, resume=resume)
                for got, one in zip((out, lse), expected, strict=True):
                    assert same_bits(got.peek(), one.peek())
            del taken
    states._kept_for_graphs.clear()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_graph_keeps_a_log_sum_exp_that_nobody_asked_for(in_place: bool) -> None:
    states._kept_for_graphs.clear()
    with host_cupy() as host:
        runtime = host.runtime
        with runtime.on_stream(77, 0):
            x = arrays(_CASE, "q", "k", "v")
            qkv = [host.array(x[name]) for name in "qkv"]
            out, lse = _state(host, 0.5, 0.0)
            before = out.peek().copy(), lse.peek().copy()
            to = {"out": out} if in_place else {}
            with runtime.capture(77) as steps:
                found = host.call(cuflash.attention, *qkv, algorithm="fa2", resume=(out, lse), **to)
            gc.collect()
            sizes = {b.nbytes for b in runtime.memory.blocks if b.stream == 77}
            taken = [host.cupy.empty(size, np.uint8) for size in sizes for _ in range(4)]
            for array in taken:
                array.set(np.full(array.shape, 255, np.uint8))
            for _ in range(2):
                out.set(before[0])
                for step in steps:
                    step()
                resume = tuple(host.array(array) for array in before)
                expected = host.call(cuflash.attention, *qkv, algorithm="fa2", resume=resume)
                assert same_bits(found.peek(), expected.peek())
                assert same_bits(lse.peek(), before[1])
            assert all((array.peek() == 255).all() for array in taken)
            del taken
    states._kept_for_graphs.clear()


@pytest.mark.parametrize("shares", ["resume", "out"])
def test_a_workspace_that_shares_memory_is_refused(shares: str) -> None:
    with host_cupy() as host:
        x = arrays(_CASE, "q", "k", "v")
        qkv = [host.array(x[name]) for name in "qkv"]
        out, lse = _state(host, 0.0, 0.0)
        memory = host.array(np.zeros(out.size, np.float32))
        place = memory.reshape(out.shape)
        given = (
            {"resume": (place, lse)} if shares == "resume" else {"resume": (out, lse), "out": place}
        )
        name = r"resume\[0\]" if shares == "resume" else "out"
        with pytest.raises(cuflash.ArgumentValueError, match=f"workspace: got memory that {name}"):
            host.call(
                cuflash.attention, *qkv, algorithm="fa2", workspace=memory.view(np.uint8), **given
            )
