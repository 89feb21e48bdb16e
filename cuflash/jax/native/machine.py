"""Memory and functions by their addresses, for code that Numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "call",
    "call_for_word",
    "compiled",
    "exchange",
    "load",
    "load32",
    "place_of",
    "room",
    "store",
    "store32",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_WORD, _HALF = ir.IntType(64), ir.IntType(32)


def compiled(function: _Function) -> _Function:
    """Return the function compiled to machine code."""
    made: _Function = numba.njit(function)
    return made


def _at(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(context: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.load(_at(builder, given[0], _WORD))

    return types.int64(types.int64), code


def _load32(context: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.zext(builder.load(_at(builder, given[0], _HALF)), _WORD)

    return types.int64(types.int64), code


def _store(context: Any, address: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        builder.store(given[1], _at(builder, given[0], _WORD))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


def _store32(context: Any, address: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        builder.store(builder.trunc(given[1], _HALF), _at(builder, given[0], _HALF))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


def _exchange(context: Any, address: Any, expected: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = _at(builder, given[0], _WORD)
        both = builder.cmpxchg(place, given[1], given[2], "seq_cst", "seq_cst")
        return builder.extract_value(both, 0)

    return types.int64(types.int64, types.int64, types.int64), code


#: Read the word at an address, and the unsigned number in 32 bits.
load: Callable[[int], int] = intrinsic(_load)
load32: Callable[[int], int] = intrinsic(_load32)
store: Callable[[int, int], None] = intrinsic(_store)
store32: Callable[[int, int], None] = intrinsic(_store32)
#: Replaces the expected value at an address by another one, atomically; returns the old value.
exchange: Callable[[int, int, int], int] = intrinsic(_exchange)


def room(nbytes: int) -> Any:
    """Return a function that reserves bytes on its caller's stack and returns their address."""

    def given(context: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            with builder.goto_entry_block():
                made = builder.alloca(ir.IntType(8), ir.Constant(_WORD, nbytes))
                made.align = 64
            return builder.ptrtoint(made, _WORD)

        return types.int64(), code

    return intrinsic(given)


def place_of(name: str) -> Any:
    """Return a function that returns the address of a word in the compiled code, at first 0.

    Only one compiled function may use it: another would get a different word.
    """

    def given(context: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            module = builder.module
            word = module.globals.get(name)
            if word is None:
                word = ir.GlobalVariable(module, _WORD, name)
                word.linkage = "internal"
                word.initializer = ir.Constant(_WORD, 0)
            return builder.ptrtoint(word, _WORD)

        return types.int64(), code

    return intrinsic(given)


def _words(context: Any, builder: Any, kinds: Any, given: Any) -> list[Any]:
    values = cgutils.unpack_tuple(builder, given)
    pairs = zip(values, kinds, strict=True)
    return [context.cast(builder, value, kind, types.int64) for value, kind in pairs]


def _call(context: Any, address: Any, given: Any) -> Any:
    kinds = tuple(types.unliteral(kind) for kind in given)

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        words = _words(context, builder, kinds, values[1])
        kind = ir.FunctionType(_HALF, [_WORD] * len(words))
        return builder.zext(builder.call(_at(builder, values[0], kind), words), _WORD)

    return types.int64(types.int64, types.Tuple(kinds)), code


def _call_for_word(context: Any, address: Any, argument: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD])
        return builder.call(_at(builder, given[0], kind), given[1:])

    return types.int64(types.int64, types.int64), code


#: Calls the C function at an address with a tuple of words or pointers; returns its 32 bits.
call: Callable[[int, tuple[int, ...]], int] = intrinsic(_call)
#: Calls the C function at an address with one word; returns its 64 bits.
call_for_word: Callable[[int, int], int] = intrinsic(_call_for_word)
