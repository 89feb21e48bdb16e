"""What a call leaves out is as its default, and nothing else is taken for it."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import pytest

import cuflash

from .call_case import ROWS, SHAPE, Decided, decided, qkv
from .fake_device import ADDRESS, FakeDevice, device_array, fake_device

__all__ = ["decided", "fake_device"]

PASSES: dict[str, Any] = {"forward": cuflash.attention, "backward": cuflash.attention_backward}


def _needed(operation: str) -> dict[str, Any]:
    if operation == "forward":
        return qkv()
    more = {n: device_array(SHAPE, address=ADDRESS * at) for n, at in (("dout", 80), ("out", 81))}
    return {**more, **qkv(), "lse": device_array(ROWS, np.float32, ADDRESS * 82)}


def _optional(operation: str) -> dict[str, Any]:
    parameters = inspect.signature(PASSES[operation]).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


@pytest.mark.parametrize("operation", PASSES)
def test_a_default_may_be_given(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Each default alone, and all of them, make the same call as nothing."""
    seen: list[Any] = []
    monkeypatch.setattr(
        f"cuflash.api.{operation}.call",
        lambda *given: seen.append(given) or dict.fromkeys(("out", "lse")),
    )
    optional = _optional(operation)
    needed = _needed(operation)
    for some in ({}, *({name: value} for name, value in optional.items()), optional):
        PASSES[operation](**needed, **some)
    assert all(given == seen[0] for given in seen)
    assert len(seen) == len(optional) + 2


@pytest.mark.parametrize("operation", PASSES)
def test_a_plain_call_looks_at_nothing_else(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Most calls give few arguments; every keyword takes time."""
    monkeypatch.setattr(
        f"cuflash.api.{operation}.call",
        lambda _, arrays, keywords: {"out": {*arrays}, "lse": [*keywords]},
    )
    needed = _needed(operation)
    if operation == "forward":
        made = cuflash.attention(**needed, causal=True, return_lse=True)
        assert made == ({*needed}, ["return_lse", "causal"])
    else:
        assert cuflash.attention_backward(**needed, causal=True) == ({*needed}, ["causal"])


@pytest.mark.parametrize("operation", PASSES)
def test_a_repeated_call_enters_few_functions(fake_device: FakeDevice, operation: str) -> None:
    """Each function takes time on the host, which is most of a short call's time."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("cuflash."):
            entered.append(frame.f_code.co_name)

    import cupy

    needed, memory = _needed(operation), fake_device.allocate(1 << 20)
    cupy.cuda.set_allocator(lambda nbytes: memory)  # the same addresses again
    for _ in range(2):
        PASSES[operation](**needed, causal=True)
    sys.setprofile(note)
    try:
        PASSES[operation](**needed, causal=True)
    finally:
        sys.setprofile(None)
    assert entered[0] == PASSES[operation].__name__
    assert len(entered[: entered.index("launch")]) <= 10
    assert "_make" not in entered


_ALONE = [(of, name) for of in PASSES for name in _optional(of)]


@pytest.mark.parametrize(("operation", "name"), _ALONE)
def test_an_argument_that_is_given_alone_is_noticed(
    fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, operation: str, name: str
) -> None:
    """It comes to the call, or is refused before."""
    something, seen = object(), list[Any]()

    def call(_: str, arrays: Any, keywords: Any) -> Any:
        seen.extend(one.get(name) for one in (arrays, keywords))
        return dict.fromkeys(("out", "lse"))

    monkeypatch.setattr(f"cuflash.api.{operation}.call", call)
    try:
        PASSES[operation](**_needed(operation), **{name: something})
    except cuflash.CuflashError as error:
        seen.append(something if f"{name}: got" in str(error) else error)
    assert something in seen


ODD = {
    "causal": [None, 0, "", np.bool_],
    "return_lse": [None, 0],
    "deterministic": [None, 0, ""],
    "backend": [None, "", False],
    "algorithm": [None, "", "automatic"],
    "wrt": [None, (), ""],
}


@pytest.mark.parametrize(
    ("operation", "name"), [(of, name) for of in PASSES for name in ODD if name in _optional(of)]
)
def test_nothing_is_mistaken_for_a_default(
    fake_device: FakeDevice, operation: str, name: str
) -> None:
    for _ in range(2):
        PASSES[operation](**_needed(operation))
        for value in ODD[name]:
            with pytest.raises(cuflash.CuflashError, match=f"{name}: got"):
                PASSES[operation](**_needed(operation), **{name: value})


def test_equal_names_of_choices_are_the_same(fake_device: FakeDevice, decided: Decided) -> None:
    """Also a string that is another object than the default."""
    another = "".join(["au", "to"])
    for _ in range(2):
        cuflash.attention(**qkv(), backend=another, algorithm=another)  # type: ignore[arg-type]
        cuflash.attention(**qkv(), backend=another)  # type: ignore[arg-type]
        cuflash.attention(**qkv())
    first, *others = (one.tobytes() for one in fake_device.launched)
    assert len({len(first), *map(len, others)}) == 1
    assert decided.count <= 3


#: Two keywords with the same value.
KEYWORDS = [
    ("forward", {"q_offset": 64}, {"kv_chunk": 64}),
    ("forward", {"scale": 0.5}, {"softcap": 0.5}),
    ("backward", {"scale": 0.5}, {"softcap": 0.5}),
    ("backward", {"window_size": (64, 128)}, {"blocks": (64, 128)}),
]


@pytest.mark.parametrize(("operation", "first", "second"), KEYWORDS)
def test_a_keyword_is_not_taken_for_another(
    fake_device: FakeDevice, decided: Decided, operation: str, first: Any, second: Any
) -> None:
    told: list[Any] = []
    needed, launched = _needed(operation), fake_device.launched
    for _ in range(2):
        for keywords in (first, second):
            before = len(launched)
            PASSES[operation](**needed, causal=True, **keywords)
            told.append([one.dtype for one in launched[before:]])
    assert decided.count == 2
    assert told[:2] == told[2:]


#: Two arrays of one shape and dtype.
ARRAYS = [("seqused_q", "seqused_kv", np.int32, 2), ("alibi_slopes", "sinks", np.float32, 4)]


@pytest.mark.parametrize(("first", "second", "dtype", "length"), ARRAYS)
def test_an_array_is_not_taken_for_another(
    fake_device: FakeDevice, decided: Decided, first: str, second: str, dtype: Any, length: int
) -> None:
    array = device_array((length,), dtype, ADDRESS * 90)
    for _ in range(2):
        for name in (first, second):
            cuflash.attention(**qkv(), **{name: array})
    assert decided.count == 2
