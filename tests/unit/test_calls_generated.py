"""Repeated calls do what calls on an empty cache do, for every argument of public functions."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import ScoreMod, calls, dispatch
from cuflash.features.score_text import SLOTS
from cuflash.features.used_lengths import NAMES
from cuflash.options import check_dtype
from cuflash.score_mod import with_arrays

from ..emulator.host_cupy import host_cupy
from .call_recipes import MATTERS_NOT, PASSES, RECIPES, arguments_of, beside, made
from .told_calls import Teller, no_kernel

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")

_ARGUMENTS = [(pass_, name) for pass_ in PASSES for name in arguments_of(pass_)]


@pytest.fixture
def teller() -> Iterator[Teller]:
    with host_cupy(make=no_kernel) as host:
        yield Teller(host)


def _defaults(operation: str, **changed: Any) -> dict[str, Any]:
    return {name: values[0] for name, values in arguments_of(operation).items()} | changed


def _fresh(teller: Teller, operation: str, arguments: dict[str, Any]) -> Any:
    calls.forget()
    return teller.call(PASSES[operation], made(teller.host, arguments))


@pytest.mark.parametrize(("operation", "name"), _ARGUMENTS)
def test_an_argument_changes_the_call(teller: Teller, operation: str, name: str) -> None:
    """Calls alternate between two values, and do what each value does on an empty cache."""
    values = arguments_of(operation)[name]
    given_ = [{**beside(operation, name, value), name: value} for value in values]
    alone = [_fresh(teller, operation, _defaults(operation, **one)) for one in given_]
    calls.forget()
    for first in range(len(values)):
        for second in range(first + 1, len(values)):
            for at in (first, second, first, second):
                arguments = made(teller.host, _defaults(operation, **given_[at]))
                told = teller.call(PASSES[operation], arguments)
                assert told == alone[at], (name, at)
    different = {repr(told) for told in alone}
    same = len(alone) - len(different)
    arrays = callable(values[-1])  # calls with different arrays may act alike
    assert same == 0 or name in MATTERS_NOT or arrays, f"{name}: what is it for?"


@pytest.mark.parametrize("operation", PASSES)
def test_every_plain_keyword_does_something(teller: Teller, operation: str) -> None:
    for name, values in arguments_of(operation).items():
        plain = [value for value in values if not callable(value)]
        alone = {repr(_fresh(teller, operation, _defaults(operation, **{name: v}))) for v in plain}
        assert len(alone) > 1 or len(plain) < 2, name


@pytest.mark.parametrize("operation", PASSES)
@settings(max_examples=25)
@given(data=st.data())
def test_calls_in_any_order_are_as_fresh_ones(operation: str, data: Any) -> None:
    """Arguments, streams and devices change from call to call, and memory is reused."""
    every = arguments_of(operation)
    drawn = []
    for _ in range(data.draw(st.integers(2, 5))):
        some = data.draw(st.lists(st.sampled_from([*every]), max_size=3, unique=True))
        picked = {name: data.draw(st.integers(0, len(every[name]) - 1), name) for name in some}
        where = data.draw(st.sampled_from([(0, 0), (0, 77), (1, 0), (1, 78)]))
        drawn.append((picked, where))
    with host_cupy(make=no_kernel) as host:
        teller, told = Teller(host), {True: [], False: []}
        for cached in (True, False):
            calls.forget()
            for picked, (device, stream) in [*drawn, *drawn]:
                if not cached:
                    calls.forget()
                chosen = {name: every[name][i] for name, i in picked.items()}
                with host.runtime.on_device(device), host.runtime.on_stream(stream, 0):
                    arguments = made(host, _defaults(operation, **chosen))
                    told[cached].append(teller.call(PASSES[operation], arguments))
                    del arguments
        assert told[True] == told[False]


_SHARED = [n for n in inspect.signature(cuflash.attention_vjp).parameters if n not in "qkv"]
#: (pass, keyword of the vjp): the name of this keyword in the pass; None if it does not take it.
_NAMES: dict[tuple[str, str], str | None] = {
    ("forward", "residual_dtype"): "out_dtype",
    ("forward", "backward_blocks"): None,
    ("backward", "backward_blocks"): "blocks",
    ("backward", "blocks"): None,
    ("backward", "residual_dtype"): None,
}


def _name_in(operation: str, name: str) -> str | None:
    """The pass' name for a keyword of the vjp; None if the pass does not take it."""
    takes = name in inspect.signature(PASSES[operation]).parameters
    return _NAMES.get((operation, name), name if takes else None)


@pytest.mark.parametrize("name", _SHARED)
def test_the_vjp_takes_a_keyword_to_both_passes(
    teller: Teller, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass gets the arrays, the keyword and its companions.

    Its other keywords have their defaults, except that ``return_lse`` is True.
    """
    given: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    run = dispatch.call

    def call(operation: Any, arrays: Any, keywords: Any) -> Any:
        given.append((operation, dict(keywords), dict(arrays)))
        return run(operation, arrays, keywords)

    monkeypatch.setattr("cuflash.api.forward.call", call)
    monkeypatch.setattr("cuflash.api.backward.call", call)
    for value in RECIPES[name]:
        given.clear()
        others = beside("", name, value)
        own_array = made(teller.host, {name: value, **others})
        passed = _passed(name, value)
        passed = own_array[name].parts[0] if isinstance(own_array[name], ScoreMod) else passed
        arrays = made(teller.host, {n: RECIPES[n][0] for n in "qkv"})
        try:
            out, pullback = teller.host.call(cuflash.attention_vjp, **arrays, **own_array)
            out = out[0] if isinstance(out, tuple) else out
            dout = teller.host.array(out.peek().astype(arrays["q"].dtype))
            dlse = made(teller.host, {"dlse": RECIPES["lse"][0]})["dlse"]
            teller.host.call(pullback, dout, dlse)
        except cuflash.CuflashError:
            _check_refused(teller, name, value, others)
            continue
        assert (given[1][2]["dout"], given[1][2]["dlse"]) == (dout, dlse)
        _check_arrays(given, own_array)
        is_array = inspect.isfunction(value) and name != "score_mod"
        for operation, keywords, of_pass in given:
            own = None if is_array else _name_in(operation, name)
            for keyword, default in _plain(operation, of_pass, keywords):
                asked = passed if keyword == own else others.get(keyword, default)
                asked = getattr(own_array.get(keyword), "block", asked)
                got = keywords.get(keyword, default)
                assert got == (keyword == "return_lse" or asked), (operation, keyword)
        assert [operation for operation, *_ in given] == ["forward", "backward"]


def _plain(operation: str, arrays: Any, keywords: Any) -> Iterator[tuple[str, Any]]:
    """The optional arguments of a pass that are no arrays of this call, and their defaults."""
    assert keywords.keys() <= inspect.signature(PASSES[operation]).parameters.keys()
    for name, parameter in inspect.signature(PASSES[operation]).parameters.items():
        optional = parameter.default is not inspect.Parameter.empty
        if optional and (name in keywords or name not in arrays):
            yield name, parameter.default


def _passed(name: str, value: Any) -> Any:
    """The value that the passes get for a value of a keyword of the vjp."""
    if name == "wrt":
        return tuple(value)
    return check_dtype(name, value) if name == "residual_dtype" else value


def _check_arrays(given: Any, own: dict[str, Any]) -> None:
    """Every pass gets the arrays of features of the call. A seed that is a number is a keyword."""
    for _, _, of_pass in given:
        for feature in (*("alibi_slopes", "bias", "mask", "sinks", "dropout_seed"), *NAMES):
            array = own.get(feature)
            assert of_pass.get(feature) is (None if isinstance(array, numbers.Number) else array)
        _, arrays = with_arrays(own.get("score_mod"))
        read = {slot: of_pass[slot] for slot in SLOTS if slot in of_pass}
        assert [*read] == [*arrays]
        assert all(read[slot] is array for slot, array in arrays.items())
        assert of_pass.get("block_mask") is getattr(own.get("block_mask"), "blocks", None)


def _check_refused(teller: Teller, name: str, value: Any, others: dict[str, Any]) -> None:
    """At least one pass refuses the keyword if it is called directly."""
    called = {p: _name_in(p, name) for p in PASSES}
    given_ = {p: _defaults(p, **others, **{own: value}) for p, own in called.items() if own}
    alone = [_fresh(teller, p, arguments) for p, arguments in given_.items()]
    assert "refused" in [told[0] for told in alone]


def test_every_keyword_of_preparing_is_that_of_the_call(teller: Teller) -> None:
    """``prepare`` plans what the call runs, for every keyword."""
    for name in inspect.signature(cuflash.prepare).parameters:
        if name in (*"qkv", "operation", "dtype", "device"):
            continue
        for operation in PASSES:
            if name not in arguments_of(operation):
                continue
            for value in RECIPES[name]:
                _check_prepared(teller, operation, name, value)


def _check_prepared(teller: Teller, operation: Any, name: str, value: Any) -> None:
    others = beside("", name, value)
    arguments = made(teller.host, _defaults(operation, **{name: value, **others}))
    plans: list[Any] = []
    with dispatch.observe(plans.append):
        told = teller.call(PASSES[operation], arguments)
    options = {n: arguments[n] for n in ("causal", name, *others)}
    qkv = [arguments[n] for n in "qkv"]
    refused = told[0] == "refused"
    copies = [] if refused else [q for q in told[1] if q[0] != "launch" and f"{name}[0]" in q]
    if refused or copies:  # a prepared run cannot copy arrays
        with pytest.raises(cuflash.CuflashError):
            cuflash.prepare(*qkv, operation=operation, **options)
    else:
        assert cuflash.prepare(*qkv, operation=operation, **options).plan == plans[-1], name
