"""``seqused_q`` and ``seqused_kv`` as arguments, and on the tiled NumPy code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch, reference

_VALUE, _TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError
_NAMES = ("seqused_q", "seqused_kv")
#: (batch, heads_q, seqlen_q, seqlen_kv) of the call below, which has two kv heads.
_SIZES = (3, 4, 40, 50)
_of_names = pytest.mark.parametrize("name", _NAMES)
_of_algorithms = pytest.mark.parametrize("algorithm", ["fa1", "fa2"])


def _int32(*lengths: int) -> Any:
    return np.array(lengths, np.int32)


def _arrays(dtype: Any = np.float64) -> dict[str, Any]:
    random = np.random.default_rng(0)
    batch, heads, rows, keys = _SIZES
    shapes = {"q": (batch, rows, heads, 8), "k": (batch, keys, 2, 8), "v": (batch, keys, 2, 6)}
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def _both(call: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Results of both passes of the NumPy backend, where dout and dlse are ones.

    All results are written into arrays that hold NaN before.
    """
    given = {**call, "backend": "numpy"}
    out, lse = (np.full_like(made, np.nan) for made in cuflash.attention(**given, return_lse=True))
    cuflash.attention(**given, out=out, lse_out=lse, return_lse=True)
    wrt = ("q", "k", "v", *(name for name in ("alibi_slopes", "bias", "sinks") if name in call))
    saved = {"out": out, "lse": lse, "dout": np.ones_like(out), "dlse": np.ones_like(lse)}
    saved |= options
    grads = tuple(np.full_like(call[name], np.nan) for name in wrt)
    cuflash.attention_backward(**saved, **given, wrt=wrt, grads=grads)
    names = ("out", "lse", *(f"d{name}" for name in wrt))
    return dict(zip(names, (out, lse, *grads), strict=True))


def _expected(call: dict[str, Any]) -> dict[str, Any]:
    given = {n: a for n, a in call.items() if n not in ("algorithm", "blocks")}
    out, lse = reference.attention(**given)
    grads = reference.attention_backward(np.ones(out.shape), dlse=np.ones(lse.shape), **given)
    names = [name for name in ("alibi_slopes", "bias", "sinks") if name in call]
    named = ("out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in names))
    return dict(zip(named, (out, lse, *grads), strict=True))


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, got in found.items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-9, atol=1e-10, err_msg=name)


def _refused(given: dict[str, Any], error: Any, match: str) -> None:
    """Check that both passes and the vjp refuse the arguments before they compute anything."""
    ran: list[Any] = []
    given = {**_arrays(), **given, "backend": "numpy"}
    batch, heads, rows, _ = _SIZES
    out, lse = np.zeros((batch, rows, heads, 6)), np.zeros((batch, heads, rows))
    passes: list[Callable[..., Any]] = [cuflash.attention, cuflash.attention_vjp]
    with dispatch.observe(ran.append):
        for call in passes:
            with pytest.raises(error, match=match):
                call(**given)
        with pytest.raises(error, match=match):
            cuflash.attention_backward(out=out, dout=out, lse=lse, **given)
    assert not ran


@_of_names
@pytest.mark.parametrize("kind", ["int64", "uint32", "uint8", "float32", "float64", "bool"])
def test_lengths_are_int32(name: str, kind: str) -> None:
    _refused({name: np.ones(3, kind)}, _TYPE, f"^{name}: got dtype {kind}; expected int32$")


@_of_names
@pytest.mark.parametrize("kind", ["int16", "complex64", "S1", "object"])
def test_what_no_array_of_a_call_holds_is_refused(name: str, kind: str) -> None:
    _refused({name: np.zeros(3, kind)}, _TYPE, f"^{name}: got")


@_of_names
@pytest.mark.parametrize("shape", [(), (2,), (4,), (1,), (0,), (3, 1), (1, 3), (3, 4)], ids=str)
def test_there_is_a_length_for_every_entry(name: str, shape: tuple[int, ...]) -> None:
    match = rf"^{name}: got shape \({', '.join(map(str, shape))},?\); expected \(3,\) \(batch\)$"
    _refused({name: np.zeros(shape, np.int32)}, _VALUE, match)


@_of_names
@pytest.mark.parametrize("lengths", [[1, 2, 3], (3,), 3, "int32", np.int32(3), True], ids=str)
def test_what_is_no_array_is_no_lengths(name: str, lengths: Any) -> None:
    _refused({name: lengths}, _TYPE, f"^{name}: got")


@_of_names
def test_lengths_have_no_gradient(name: str) -> None:
    call = {**_arrays(), name: _int32(1, 2, 3), "backend": "numpy"}
    out, lse = cuflash.attention(**call, return_lse=True)
    match = rf"^wrt: got .*'{name}'.*; expected some of 'q', 'k', 'v', 'alibi_slopes'"
    with pytest.raises(_VALUE, match=match):
        cuflash.attention_backward(out, out=out, lse=lse, **call, wrt=(name,))
    with pytest.raises(_VALUE, match=match):
        cuflash.attention_vjp(**call, wrt=("q", name))


@_of_names
def test_a_destination_over_the_lengths_is_refused(name: str) -> None:
    memory = np.zeros(3 * 40 * 4 * 6, np.float64)
    lengths = memory.view(np.int32)[:3]
    with pytest.raises(_VALUE, match=f"out: got memory that {name} uses"):
        cuflash.attention(
            **_arrays(), **{name: lengths}, out=memory.reshape(3, 40, 4, 6), backend="numpy"
        )


@pytest.mark.parametrize("layout", ["shd", "hsd", "sd"])
def test_one_entry_without_an_axis_has_one_length(layout: str) -> None:
    shape = {"shd": (9, 2, 4), "hsd": (2, 9, 4), "sd": (9, 4)}[layout]
    x = np.random.default_rng(1).standard_normal(shape)
    call = {"q": x, "k": x, "v": x, "layout": layout, "causal": True}
    call |= {"seqused_q": _int32(5), "seqused_kv": _int32(7)}
    _compare(_both(call), _expected(call))
    with pytest.raises(_VALUE, match=r"^seqused_q: got shape \(9,\); expected \(1,\)"):
        cuflash.attention(**{**call, "seqused_q": _int32(*[5] * 9)}, backend="numpy")


@_of_algorithms
@pytest.mark.parametrize("blocks", [None, (16, 16), (7, 11), (40, 50)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [
        {"seqused_q": _int32(40, 17, 3)},
        {"seqused_q": _int32(3, 15, 2), "seqused_kv": _int32(9, 30, 2)},
        {"seqused_kv": _int32(50, 16, 1)},
        {"seqused_q": _int32(16, 0, 33), "seqused_kv": _int32(0, 50, 32)},
        {"seqused_q": _int32(-1, 41, 2**31 - 1), "seqused_kv": _int32(51, -(2**31), 49)},
        {"seqused_q": _int32(0, 0, 0), "seqused_kv": _int32(0, 0, 0)},
    ],
    ids=str,
)
def test_against_the_reference(
    algorithm: str, blocks: tuple[int, int] | None, lengths: dict[str, Any]
) -> None:
    """The call has slopes, a shared bias, a mask, dropout, a block mask and sinks."""
    random = np.random.default_rng(2)
    call = {**_arrays(), **lengths, "algorithm": algorithm, "blocks": blocks, "causal": True}
    call |= {"alibi_slopes": random.standard_normal((3, 4)), "sinks": random.standard_normal(4)}
    call |= {
        "bias": random.standard_normal((4, 40, 50)),
        "mask": random.random((3, 1, 1, 50)) < 0.9,
    }
    call |= {"dropout_p": 0.3, "dropout_seed": 5}
    call |= {"block_mask": cuflash.BlockMask(np.array([[[[1]]], [[[0]]], [[[1]]]], bool), (64, 64))}
    _compare(_both(call), _expected(call))
    _compare(_both({**call, "q_offset": 4}), _expected({**call, "q_offset": 4}))


@_of_algorithms
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_what_does_not_count_is_not_read(algorithm: str, value: float) -> None:
    lengths = {"seqused_q": _int32(40, 17, 0), "seqused_kv": _int32(21, 50, 0)}
    bias, random = np.zeros((3, 1, 40, 50)), np.random.default_rng(3)
    call = {**_arrays(), **lengths, "bias": bias, "sinks": random.standard_normal(4)}
    call |= {"algorithm": algorithm, "window_size": (20, 20)}
    expected = _both(call)
    named = ("out", "lse")
    saved = {name: expected[name].copy() for name in named}
    saved |= {"dout": np.ones_like(saved["out"]), "dlse": np.ones_like(saved["lse"])}
    for entry, (rows, keys) in enumerate(zip((40, 17, 0), (21, 50, 0), strict=True)):
        bias[entry, :, rows:], bias[entry, :, :, keys:] = value, value
        call["k"][entry, keys:] = call["v"][entry, keys:] = call["q"][entry, rows:] = value
        saved["out"][entry, rows:] = saved["dout"][entry, rows:] = value
        saved["lse"][entry, :, rows:] = saved["dlse"][entry, :, rows:] = value
    for name, got in _both(call, **saved).items():
        assert got.tobytes() == expected[name].tobytes(), name


@_of_names
def test_a_length_that_is_left_out_is_that_of_the_array(name: str) -> None:
    """It is not the length of the other array, and not the one in the other argument."""
    call = {**_arrays(), "causal": True, name: _int32(30, 2, 40)}
    (other,) = {*_NAMES} - {name}
    full = _int32(*[_SIZES[2] if other == "seqused_q" else _SIZES[3]] * 3)
    for key, got in _both({**call, other: full}).items():
        assert got.tobytes() == _both(call)[key].tobytes(), key
    _compare(_both(call), _expected(call))


def test_the_vjp_takes_lengths_to_both_passes() -> None:
    call = {**_arrays(), "seqused_q": _int32(40, 17, 3), "seqused_kv": _int32(21, 50, 9)}
    out, pullback = cuflash.attention_vjp(**call, causal=True, backend="numpy")
    expected = _both({**call, "causal": True}, dlse=None)
    assert out.tobytes() == expected["out"].tobytes()
    for name, got in zip(("dq", "dk", "dv"), pullback(np.ones_like(out)), strict=True):
        assert got.tobytes() == expected[name].tobytes(), name


def test_results_have_the_same_bits_whatever_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(4)
    q, k = (random.standard_normal((4, rows, 2, 64)).astype(np.float32) for rows in (700, 900))
    call = {"q": q, "k": k, "v": k, "seqused_q": _int32(700, 300, 1, 650), "bias": np.zeros(900)}
    call |= {"seqused_kv": _int32(900, 10, 800, 513), "sinks": np.zeros(2, np.float32)}
    call["bias"] = call["bias"].astype(np.float32)
    found = []
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        found.append(_both(call))
    for name, got in found[0].items():
        assert got.tobytes() == found[1][name].tobytes(), name


def test_a_plan_says_that_there_are_lengths() -> None:
    shape = (3, 40, 4, 8)
    told = cuflash.explain(
        shape, shape, shape, seqused_q="int32", seqused_kv=(3,), dtype="float32", backend="numpy"
    )
    assert "used lengths from the end seqused_q int32 seqused_kv int32" in str(told)
    given = {"seqused_kv": (3,), "q_offset": 2, "dtype": "float32", "backend": "numpy"}
    assert "used lengths seqused_kv int32" in str(cuflash.explain(*[shape] * 3, **given))


@_of_names
@pytest.mark.parametrize(
    "wrong", [np.ones(3), np.ones(3, bool), np.ones(2, int), [1, 2, 3]], ids=str
)
def test_the_reference_refuses_what_is_no_lengths(name: str, wrong: Any) -> None:
    with pytest.raises(cuflash.CuflashError, match=f"^{name}: got"):
        reference.attention(**_arrays(), **{name: wrong})
    with pytest.raises(cuflash.CuflashError, match=f"^{name}: got"):
        reference.attention_backward(np.ones((3, 40, 4, 6)), **_arrays(), **{name: wrong})
