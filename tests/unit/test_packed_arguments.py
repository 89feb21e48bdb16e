"""``cu_seqlens_q`` and ``cu_seqlens_kv`` as arguments: refusals and their messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import dispatch
from cuflash.planning.problem import MAX_SEQLEN

from .fake_device import FakeDevice, fake_device
from .packed_case import arrays, int32, offsets

__all__ = ["fake_device"]

_VALUE, _TYPE, _UNSUPPORTED = (
    cuflash.ArgumentValueError,
    cuflash.ArgumentTypeError,
    cuflash.UnsupportedError,
)
_NAMES = "cu_seqlens_q", "cu_seqlens_kv"
_of_names = pytest.mark.parametrize("name", _NAMES)


def _refused(change: dict[str, Any], error: Any, match: str) -> None:
    """Both passes, the vjp and the plan refuse the change before anything is computed."""
    ran: list[Any] = []
    given = {name: value for name, value in (arrays() | change).items() if value is not None}
    q, v = given["q"], given["v"]
    lse = np.zeros((*q.shape[:-3], *q.shape[-2:-4:-1]), q.dtype)
    out = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    with dispatch.observe(ran.append):
        for call in (cuflash.attention, cuflash.attention_vjp, cuflash.explain):
            with pytest.raises(error, match=match):
                call(**given)
        with pytest.raises(error, match=match):
            cuflash.attention_backward(out, out=out, lse=lse, **given)
    assert not ran


@_of_names
@pytest.mark.parametrize("kind", ["int64", "uint32", "uint8", "float32", "float64", "bool"])
def test_offsets_are_int32(name: str, kind: str) -> None:
    _refused({name: np.ones(8, kind)}, _TYPE, f"^{name}: got dtype {kind}; expected int32$")


@_of_names
@pytest.mark.parametrize("kind", ["int16", "complex64", "S1", "object"])
def test_what_no_array_of_a_call_holds_is_refused(name: str, kind: str) -> None:
    _refused({name: np.zeros(8, kind)}, _TYPE, f"^{name}: got")


@_of_names
@pytest.mark.parametrize("shape", [(), (0,), (8, 1), (1, 8), (2, 2, 2), (0, 8)], ids=str)
def test_offsets_have_one_axis_and_are_not_empty(name: str, shape: tuple[int, ...]) -> None:
    given = rf"\({', '.join(map(str, shape))},?\)"
    _refused({name: np.zeros(shape, np.int32)}, _VALUE, rf"^{name}: got shape {given}; expected")


def test_offsets_of_no_rows_are_not_empty_either() -> None:
    empty = {name: int32() for name in _NAMES} | {"q": np.zeros((0, 4, 8))}
    _refused(empty, _VALUE, r"^cu_seqlens_q: got shape \(0,\); expected one offset or more")


@_of_names
@pytest.mark.parametrize("value", [(0, 9), [0, 9], 9, np.int32(9), True], ids=str)
def test_what_is_no_array_is_no_offsets(name: str, value: Any) -> None:
    with pytest.raises(_TYPE, match=f"^{name}: got"):
        cuflash.attention(**arrays() | {name: value})


@_of_names
def test_one_alone_is_refused(name: str) -> None:
    (other,) = {*_NAMES} - {name}
    _refused({name: None}, _VALUE, f"^{name}: got None beside {other}; expected both or neither")


@pytest.mark.parametrize("count", [1, 7, 9])
def test_both_are_as_long(count: int) -> None:
    match = rf"^cu_seqlens_kv: got shape \({count},\); expected \(8,\)"
    _refused({"cu_seqlens_kv": np.zeros(count, np.int32)}, _VALUE, match)
    match = rf"^cu_seqlens_kv: got shape \(8,\); expected \({count},\)"
    _refused({"cu_seqlens_q": np.zeros(count, np.int32)}, _VALUE, match)


@pytest.mark.parametrize("layout", [None, "bshd", "bhsd", "hsd", "sd"])
def test_rows_stand_before_heads(layout: str | None) -> None:
    """Arrays with a batch, with heads first, or without heads are not packed."""
    shape = {"hsd": (4, 9, 8), "sd": (9, 8), "bhsd": (1, 4, 9, 8)}.get(str(layout), (1, 9, 4, 8))
    call = dict.fromkeys("qkv", np.zeros(shape)) | {"layout": layout}
    match = f"^cu_seqlens_q: got one beside layout='{layout or 'bshd'}'; expected layout='shd'"
    _refused(call, _VALUE, match)


def test_three_axes_still_need_a_layout() -> None:
    _refused({"layout": None}, _VALUE, "^layout: got None for arrays of 3 axes; expected")


_BESIDE: dict[str, tuple[str, Any]] = {
    "seqused_q": ("used_lengths", int32(3)),
    "seqused_kv": ("used_lengths", int32(3)),
    "bias": ("bias", np.zeros((1, 1))),
    "mask": ("mask", np.ones((1, 1), bool)),
    "block_mask": ("block_mask", cuflash.BlockMask(np.ones((1, 1), bool), (128, 128))),
}


@pytest.mark.parametrize("argument", [*_BESIDE])
def test_what_has_pairs_or_lengths_is_refused_beside_them(argument: str) -> None:
    feature, value = _BESIDE[argument]
    _refused({argument: value}, _UNSUPPORTED, f"packed_lengths with {feature}: ")


@pytest.mark.parametrize("sequences", [1, 7])
def test_slopes_of_every_sequence_are_refused(sequences: int) -> None:
    """Slopes with a batch axis of one entry are refused too: slopes have no axis for sequences."""
    _refused({"alibi_slopes": np.zeros((sequences, 4))}, _VALUE, "^alibi_slopes: got shape")


def test_slopes_have_no_gradient_there() -> None:
    call = arrays() | {"alibi_slopes": np.ones(4)}
    out, lse = cuflash.attention(**call, return_lse=True)
    match = "packed_lengths with gradient of alibi_slopes: "
    with pytest.raises(_UNSUPPORTED, match=match):
        cuflash.attention_backward(out, out=out, lse=lse, **call, wrt=("q", "alibi_slopes"))
    with pytest.raises(_UNSUPPORTED, match=match):
        cuflash.explain(**call, wrt=("alibi_slopes",), operation="backward")
    with pytest.raises(_UNSUPPORTED, match=match):
        cuflash.attention_vjp(**call, wrt=("alibi_slopes",))


@pytest.mark.parametrize("describe", ["explain", "prepare"])
@_of_names
def test_a_dtype_alone_does_not_say_how_many_there_are(
    fake_device: FakeDevice, name: str, describe: str
) -> None:
    shapes: dict[str, Any] = {"q": (9, 4, 64), "k": (9, 4, 64), "v": (9, 4, 64)}
    shapes |= dict.fromkeys(_NAMES, (3,)) | {"layout": "shd", "dtype": "float16"}
    given = shapes | {name: np.int32}
    with pytest.raises(_VALUE, match=f"^{name}: got the dtype .* alone; expected a shape"):
        getattr(cuflash, describe)(**given)
    getattr(cuflash, describe)(**shapes)
    getattr(cuflash, describe)(**shapes | {name: ((3,), np.int32)})


def test_sequences_that_no_workspace_could_number_are_refused() -> None:
    """Padded to whole tiles, the sequences would have more rows than 32 bits can count."""
    shapes: dict[str, Any] = {"q": (9, 4, 64), "k": (9, 4, 64), "v": (9, 4, 64)}
    shapes |= {"layout": "shd", "dtype": "float16", "backend": "numpy"}
    for count, fits in ((MAX_SEQLEN // 127 - 2, True), (MAX_SEQLEN // 127 + 2, False)):
        shapes |= dict.fromkeys(_NAMES, (count,))
        if fits:
            cuflash.explain(**shapes)
        else:
            with pytest.raises(_UNSUPPORTED, match="packed sequences of 9 queries: in whole"):
                cuflash.explain(**shapes)


@_of_names
def test_offsets_have_no_gradient(name: str) -> None:
    call = arrays()
    out, lse = cuflash.attention(**call, return_lse=True)
    match = rf"^wrt: got .*'{name}'.*; expected some of 'q', 'k', 'v', 'alibi_slopes'"
    with pytest.raises(_VALUE, match=match):
        cuflash.attention_backward(out, out=out, lse=lse, **call, wrt=(name,))
    with pytest.raises(_VALUE, match=match):
        cuflash.attention_vjp(**call, wrt=("q", name))


@_of_names
def test_a_destination_over_the_offsets_is_refused(name: str) -> None:
    call = arrays()
    rows, heads, _ = call["q"].shape
    memory = np.zeros(rows * heads * 6)
    shared = memory.view(np.int32)[:8]
    shared[:] = offsets()[name]
    with pytest.raises(_VALUE, match=f"out: got memory that {name} uses"):
        cuflash.attention(**call | {name: shared}, out=memory.reshape(rows, heads, 6))


def test_offsets_may_lie_at_any_strides() -> None:
    call = arrays()
    expected = cuflash.attention(**call)
    for turned in (lambda a: np.repeat(a, 3)[::3], lambda a: a[::-1].copy()[::-1]):
        found = cuflash.attention(**call | {name: turned(call[name]) for name in _NAMES})
        assert found.tobytes() == expected.tobytes()
