"""The parts of a bad call: a good one, and the ways to break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash

__all__ = [
    "BACKWARD",
    "BadCall",
    "Call",
    "alias",
    "both",
    "converted",
    "foreign_order",
    "give",
    "good_call",
    "like",
    "make",
    "on",
    "out_in_workspace",
    "overlapping_out",
    "read_only",
    "same_grads",
]

Call = dict[str, Any]

#: Arguments of attention_backward that are positional.
BACKWARD = ("dout", "q", "k", "v", "out", "lse")


def good_call(xp: Any, operation: str = "forward", dtype: str = "float32") -> Call:
    """A correct call on the arrays of ``xp``."""
    rng = np.random.default_rng(5)

    def normal(*shape: int) -> Any:
        return xp.asarray(rng.standard_normal(shape).astype(dtype))

    call: Call = {"q": normal(2, 5, 4, 8), "k": normal(2, 7, 2, 8), "v": normal(2, 7, 2, 6)}
    call["causal"] = True
    if operation == "backward":
        call["out"], call["lse"] = cuflash.attention(**call, return_lse=True)
        call["dout"] = normal(2, 5, 4, 6)
    return call


def make(call: Call) -> Any:
    """Call attention, or its gradient if there is a ``dout``."""
    if "dout" in call:
        rest = {name: value for name, value in call.items() if name not in BACKWARD}
        return cuflash.attention_backward(*(call[name] for name in BACKWARD), **rest)
    return cuflash.attention(**call)


@dataclass(frozen=True)
class BadCall:
    """One fault in a good call.

    ``break_it(call, xp)`` breaks it. The message must start with ``argument``, which is empty if
    the fault belongs to no single argument, and must contain all of ``says``.
    """

    name: str
    break_it: Callable[[Call, Any], None]
    error: type[cuflash.CuflashError]
    argument: str
    says: tuple[str, ...] = ()
    operation: str = "forward"
    host_only: bool = False
    device_only: bool = False

    def is_said_by(self, error: Exception) -> bool:
        """Whether the message names the argument and contains all it should."""
        start = f"{self.argument}: got " if self.argument else ""
        return str(error).startswith(start) and all(part in str(error) for part in self.says)


def give(**changes: Any) -> Callable[[Call, Any], None]:
    return lambda call, xp: call.update(changes)


def on(name: str, change: Callable[[Any], Any]) -> Callable[[Call, Any], None]:
    return lambda call, xp: call.update({name: change(call[name])})


def like(name: str, *shape: int, dtype: str = "float32") -> Callable[[Call, Any], None]:
    return lambda call, xp: call.update({name: xp.ones(shape, dtype)})


def alias(name: str, source: str, columns: int) -> Callable[[Call, Any], None]:
    def change(call: Call, xp: Any) -> None:
        call[name] = call[source][..., :columns]

    return change


def overlapping_out(call: Call, xp: Any) -> None:
    rows = xp.ones((2, 1, 4, 6), "float32")
    strides = (rows.strides[0], 0, *rows.strides[2:])
    call["out"] = xp.lib.stride_tricks.as_strided(rows, (2, 5, 4, 6), strides)


def read_only(call: Call, xp: Any) -> None:
    call["out"] = xp.ones((2, 5, 4, 6), "float32")
    call["out"].flags.writeable = False


def same_grads(call: Call, xp: Any) -> None:
    one = xp.ones((2, 7, 2, 8), "float32")
    call["grads"] = (xp.ones((2, 5, 4, 8), "float32"), one, one[..., :6])


def foreign_order(call: Call, xp: Any) -> None:
    call["grads"] = tuple(xp.ones(call[name].shape, ">f4") for name in "qkv")


def out_in_workspace(call: Call, xp: Any) -> None:
    call["workspace"] = xp.zeros(1 << 20, "uint8")
    call["out"] = call["workspace"][4096:][: 240 * 4].view("float32").reshape(2, 5, 4, 6)


def converted(*names: str, dtype: str) -> Callable[[Call, Any], None]:
    return lambda call, xp: call.update({name: call[name].astype(dtype) for name in names})


def both(*changes: Callable[[Call, Any], None]) -> Callable[[Call, Any], None]:
    def change(call: Call, xp: Any) -> None:
        for each in changes:
            each(call, xp)

    return change
