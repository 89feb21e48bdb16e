"""What ``resume`` takes and refuses, and what a call with it returns."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.limits import REFERENCE_UNITS, UNIT

Q, KV = (2, 5, 4, 8), (2, 9, 2, 8)
OUT, LSE = Q, (2, 4, 5)
VALUE, TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError


def _inputs(dtype: str = "float16", seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in (Q, KV, KV))
    return q, k, v


def _state(dtype: str = "float32") -> tuple[Any, Any]:
    rng = np.random.default_rng(9)
    return rng.standard_normal(OUT).astype(dtype), rng.standard_normal(LSE).astype(dtype)


def _near(got: Any, expected: Any) -> bool:
    """Whether float64 arrays differ by no more than rounding."""
    room = REFERENCE_UNITS * UNIT["float64"] * max(1, abs(expected).max())
    return bool(abs(got - expected).max() <= room)


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


_Changed = Callable[[Any, Any], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda o, n: {"resume": o}, TYPE, "resume: got numpy.ndarray; expected a pair"),
        (lambda o, n: {"resume": True}, TYPE, "resume: got "),
        (lambda o, n: {"resume": (o,)}, VALUE, "resume: got 1 arrays; expected a pair"),
        (lambda o, n: {"resume": (o, n, n)}, VALUE, "resume: got 3 arrays"),
        (lambda o, n: {"resume": (o, None)}, TYPE, "resume[1]: got builtins.NoneType"),
        (lambda o, n: {"resume": (o.astype("f2"), n)}, TYPE, "resume[0]: got dtype float16"),
        (lambda o, n: {"resume": (o, n.astype("f8"))}, TYPE, "resume[1]: got dtype float64"),
        (lambda o, n: {"resume": (o[:1], n)}, VALUE, "resume[0]: got shape (1, 5, 4, 8)"),
        (lambda o, n: {"resume": (o, n[..., :1])}, VALUE, "resume[1]: got shape (2, 4, 1)"),
        (lambda o, n: {"resume": (n, o)}, VALUE, "resume[0]: got shape (2, 4, 5)"),
        (
            lambda o, n: {"out_dtype": "float16"},
            VALUE,
            "out_dtype: got 'float16'",
        ),
        (lambda o, n: {"out": np.zeros(OUT, "f2")}, TYPE, "out: got dtype float16"),
        (lambda o, n: {"lse_out": np.zeros(LSE, "f8")}, TYPE, "lse_out: got dtype float64"),
        (lambda o, n: {"out": np.zeros((2, 5, 4, 7), "f4")}, VALUE, "out: got shape (2, 5, 4, 7)"),
        (lambda o, n: {"out": o[:, ::-1]}, VALUE, "out: got memory that resume[0] uses"),
        (lambda o, n: {"lse_out": n[::-1]}, VALUE, "lse_out: got memory that resume[1] uses"),
        (lambda o, n: {"lse_out": o.reshape(-1)[:40].reshape(LSE)}, VALUE, "lse_out: got memory"),
        (lambda o, n: {"resume": (_read_only(o), n), "out": o}, VALUE, "out: got a read-only"),
        (lambda o, n: {"return_lse": 1}, TYPE, "return_lse: got 1"),
        (lambda o, n: {"workspace": np.zeros(8, "u1")}, VALUE, "workspace: got an array"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_is_refused_before_anything_is_written(
    change: _Changed, kind: type, says: str
) -> None:
    out, lse = _state()
    given: dict[str, Any] = {"resume": (out, lse), **change(out, lse)}
    before = out.copy(), lse.copy()
    with pytest.raises(kind, match=f"^{re.escape(says)}"):
        cuflash.attention(*_inputs(), **given, backend="numpy")
    assert (out == before[0]).all()
    assert (lse == before[1]).all()


def test_states_are_of_the_dtype_that_sums_are_formed_in() -> None:
    for dtype, wide in (("float16", "float32"), ("float32", "float32"), ("float64", "float64")):
        for out_dtype in (None, wide):
            made = cuflash.attention(
                *_inputs(dtype), resume=_state(wide), return_lse=True, out_dtype=out_dtype
            )
            assert [array.dtype for array in made] == [wide, wide]
    with pytest.raises(TYPE, match=r"^resume\[0\]: got dtype float32; expected float64 beside q"):
        cuflash.attention(*_inputs("float64"), resume=_state())


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("where", ["out", "lse", "both", "elsewhere"])
def test_destinations_may_be_the_state_itself(where: str, return_lse: bool) -> None:
    state, given = _state(), {}
    expected = cuflash.attention(*_inputs(), resume=_state(), return_lse=True)
    if where in ("out", "both"):
        given["out"] = state[0]
    if where in ("lse", "both"):
        given["lse_out"] = state[1]
    if where == "elsewhere":
        given = {"out": np.full(OUT, np.nan, "f4"), "lse_out": np.full(LSE, np.nan, "f4")}
    made = cuflash.attention(*_inputs(), resume=state, return_lse=return_lse, **given)
    out, lse = made if return_lse else (made, given.get("lse_out", expected[1]))
    assert out is given.get("out", out)
    assert lse is given.get("lse_out", lse)
    assert out.tobytes() == expected[0].tobytes()
    assert lse.tobytes() == expected[1].tobytes()
    untouched = [a for a in state if not any(a is b for b in given.values())]
    kept = [b for a, b in zip(state, _state(), strict=True) if any(a is c for c in untouched)]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(untouched, kept, strict=True))


def test_it_is_the_merge_of_both() -> None:
    """The state comes first; the call's own output is merged before it is rounded."""
    q, k, v = _inputs()
    state = _state()
    own = cuflash.attention(q, k, v, causal=True, return_lse=True, out_dtype="float32")
    expected = cuflash.merge([state[0], own[0]], [state[1], own[1]])
    made = cuflash.attention(q, k, v, causal=True, resume=list(state), return_lse=True)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(made, expected, strict=True))


def test_a_sink_counts_once_if_the_last_call_has_it() -> None:
    q, k, v = _inputs("float64")
    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    whole = cuflash.attention(q, k, v, sinks=sinks, return_lse=True)
    first = cuflash.attention(q, k[:, :4], v[:, :4], return_lse=True)
    last = cuflash.attention(q, k[:, 4:], v[:, 4:], sinks=sinks, resume=first, return_lse=True)
    for one, other in zip(last, whole, strict=True):
        assert _near(one, other)


def test_queries_that_do_not_count_keep_their_state() -> None:
    state, used = _state(), np.array([3, 0], np.int32)
    out, lse = cuflash.attention(*_inputs(), resume=state, seqused_q=used, return_lse=True)
    for entry, count in enumerate(used):
        assert out[entry, count:].tobytes() == state[0][entry, count:].tobytes()
        assert (lse[entry, :, count:] == state[1][entry, :, count:]).all()
        assert (out[entry, :count] != state[0][entry, :count]).all()


@pytest.mark.parametrize("layout", ["shd", "hsd", "sd"])
def test_layouts_of_few_axes(layout: Any) -> None:
    rng = np.random.default_rng(3)
    sizes = {"s": 6, "h": 2, "d": 8}
    q, k, v = (rng.standard_normal([sizes[axis] for axis in layout]) for _ in range(3))
    along = layout.index("s")
    whole = cuflash.attention(q, k, v, layout=layout, return_lse=True)
    state = None
    for keys in ([0, 1], [2, 3, 4, 5]):
        part = (np.take(array, keys, along) for array in (k, v))
        state = cuflash.attention(q, *part, layout=layout, return_lse=True, resume=state)
    for one, other in zip(state, whole, strict=True):
        assert _near(one, other)


def test_packed_sequences() -> None:
    rng = np.random.default_rng(4)
    offsets = np.array([0, 3, 3, 7], np.int32)
    q, k, v = (rng.standard_normal((7, 2, 8)) for _ in range(3))
    packed: dict[str, Any] = {"layout": "shd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    state = cuflash.attention(q, k, v, **packed, return_lse=True)
    twice = cuflash.attention(q, k, v, **packed, resume=state, return_lse=True)
    assert _near(twice[0], state[0])  # every key counts twice
    assert _near(twice[1], state[1] + np.log(2))


def test_nothing_is_nothing() -> None:
    q, k, v = (np.zeros((2, 0, 4, 8), "f2"), *_inputs()[1:])
    state = np.zeros((2, 0, 4, 8), "f4"), np.zeros((2, 4, 0), "f4")
    out, lse = cuflash.attention(q, k, v, resume=state, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, (2, 4, 0))
