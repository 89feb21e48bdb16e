"""Calls with one thing wrong, and the error each of them must raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash

Call = dict[str, Any]

#: Arguments of attention_backward that are positional.
BACKWARD = ("dout", "q", "k", "v", "out", "lse")


def good_call(xp: Any, operation: str = "forward", dtype: str = "float32") -> Call:
    """A call with nothing wrong, on the arrays of ``xp``."""
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
    """One thing wrong with a good call.

    ``break_it(call, xp)`` breaks it; ``argument`` is what the message must
    start with; ``says`` must all be in it.
    """

    name: str
    break_it: Callable[[Call, Any], None]
    error: type[cuflash.CuflashError]
    argument: str
    says: tuple[str, ...] = ()
    operation: str = "forward"
    host_only: bool = False


def _set(**changes: Any) -> Callable[[Call, Any], None]:
    return lambda call, xp: call.update(changes)


def _map(name: str, change: Callable[[Any], Any]) -> Callable[[Call, Any], None]:
    return lambda call, xp: call.update({name: change(call[name])})


def _like(name: str, *shape: int, dtype: str = "float32") -> Callable[[Call, Any], None]:
    return lambda call, xp: call.update({name: xp.ones(shape, dtype)})


def _alias(name: str, source: str, columns: int) -> Callable[[Call, Any], None]:
    def change(call: Call, xp: Any) -> None:
        call[name] = call[source][..., :columns]

    return change


def _overlapping_out(call: Call, xp: Any) -> None:
    rows = xp.ones((2, 1, 4, 6), "float32")
    strides = (rows.strides[0], 0, *rows.strides[2:])
    call["out"] = xp.lib.stride_tricks.as_strided(rows, (2, 5, 4, 6), strides)


def _read_only(call: Call, xp: Any) -> None:
    call["out"] = xp.ones((2, 5, 4, 6), "float32")
    call["out"].flags.writeable = False


def _same_grads(call: Call, xp: Any) -> None:
    one = xp.ones((2, 7, 2, 8), "float32")
    call["grads"] = (xp.ones((2, 5, 4, 8), "float32"), one, one[..., :6])


_VALUE, _TYPE = cuflash.ArgumentValueError, cuflash.ArgumentTypeError

BAD_CALLS = [
    BadCall("q of 3 axes", _map("q", lambda a: a[0]), _VALUE, "layout", ("'shd'", "'hsd'")),
    BadCall("q of 5 axes", _map("q", lambda a: a[None]), _VALUE, "q", ("5 axes", "4, 3 or 2")),
    BadCall("q of 1 axis", _map("q", lambda a: a[0, 0, 0]), _VALUE, "q", ("1 axes",)),
    BadCall("k of other rank", _map("k", lambda a: a[0]), _VALUE, "k", ("3 axes", "as q has")),
    BadCall("rank against layout", _set(layout="shd"), _VALUE, "q", ("3 axes", "layout='shd'")),
    BadCall("unknown layout", _set(layout="sbhd"), _VALUE, "layout", ("'sbhd'", "'bshd'")),
    BadCall("integers", _map("q", lambda a: a.astype("int32")), _TYPE, "q", ("int32", "'float16'")),
    BadCall("complex", _map("v", lambda a: a.astype("complex64")), _TYPE, "v", ("complex64",)),
    BadCall("mixed dtypes, k", _map("k", lambda a: a.astype("float64")), _TYPE, "k", ("float64",)),
    BadCall("mixed dtypes, v", _map("v", lambda a: a.astype("float16")), _TYPE, "v", ("float32",)),
    BadCall("a list", _set(q=[[1.0]]), _TYPE, "q", ("builtins.list", "DLPack")),
    BadCall("None", _set(k=None), _TYPE, "k", ("NoneType",)),
    BadCall("k of other batch", _map("k", lambda a: a[:1]), _VALUE, "k", ("batch 1", "2, as q")),
    BadCall("v of other batch", _map("v", lambda a: a[:1]), _VALUE, "v", ("batch 1", "2, as q")),
    BadCall("k of other width", _map("k", lambda a: a[..., :7]), _VALUE, "k", ("head_dim 7", "8")),
    BadCall("v of other length", _map("v", lambda a: a[:, :6]), _VALUE, "v", ("seqlen_kv 6", "7")),
    BadCall("v of other heads", _map("v", lambda a: a[:, :, :1]), _VALUE, "v", ("heads_kv 1", "2")),
    BadCall(
        "heads that do not divide", _map("q", lambda a: a[:, :, :3]), _VALUE, "k", ("2 heads",)
    ),
    BadCall(
        "heads of k gone",
        lambda c, xp: (
            _map("k", lambda a: a[:, :, :0])(c, xp),
            _map("v", lambda a: a[:, :, :0])(c, xp),
        ),
        _VALUE,
        "k",
        ("0 heads",),
    ),
    BadCall(
        "head_dim 0",
        lambda c, xp: (
            _map("q", lambda a: a[..., :0])(c, xp),
            _map("k", lambda a: a[..., :0])(c, xp),
        ),
        _VALUE,
        "q",
        ("head_dim 0", "1 to 256"),
    ),
    BadCall(
        "head_dim 257",
        lambda c, xp: (_like("q", 2, 5, 4, 257)(c, xp), _like("k", 2, 7, 2, 257)(c, xp)),
        _VALUE,
        "q",
        ("head_dim 257", "1 to 256"),
    ),
    BadCall("head_dim_v 300", _like("v", 2, 7, 2, 300), _VALUE, "v", ("head_dim 300",)),
    BadCall("scale 0", _set(scale=0.0), _VALUE, "scale", ("0.0", "finite positive")),
    BadCall("scale negative", _set(scale=-1), _VALUE, "scale", ("-1",)),
    BadCall("scale NaN", _set(scale=float("nan")), _VALUE, "scale", ("nan",)),
    BadCall("scale infinite", _set(scale=float("inf")), _VALUE, "scale", ("inf",)),
    BadCall("scale text", _set(scale="0.5"), _TYPE, "scale", ("'0.5'",)),
    BadCall("scale bool", _set(scale=True), _TYPE, "scale", ("True",)),
    BadCall("q_offset 1.5", _set(q_offset=1.5), _TYPE, "q_offset", ("1.5", "integer")),
    BadCall("causal 1", _set(causal=1), _TYPE, "causal", ("1", "True or False")),
    BadCall("causal text", _set(causal="yes"), _TYPE, "causal", ("'yes'",)),
    BadCall("return_lse 1", _set(return_lse=1), _TYPE, "return_lse", ("1",)),
    BadCall("unknown algorithm", _set(algorithm="fa9"), _VALUE, "algorithm", ("'fa9'", "'fa1'")),
    BadCall("unknown backend", _set(backend="metal"), _VALUE, "backend", ("'metal'", "'cuda'")),
    BadCall("blocks negative", _set(blocks=(-16, 16)), _VALUE, "blocks", ("(-16, 16)",)),
    BadCall("blocks zero", _set(blocks=(0, 16)), _VALUE, "blocks", ("(0, 16)",)),
    BadCall("blocks of one", _set(blocks=(16,)), _TYPE, "blocks", ("(16,)",)),
    BadCall("blocks of floats", _set(blocks=(16.0, 16.0)), _TYPE, "blocks", ("16.0",)),
    BadCall("blocks not a pair", _set(blocks=16), _TYPE, "blocks", ("16",)),
    BadCall(
        "out_dtype wide", _set(out_dtype="float64"), _TYPE, "out_dtype", ("float64", "float32")
    ),
    BadCall("out_dtype unknown", _set(out_dtype="int8"), _TYPE, "out_dtype", ("int8",)),
    BadCall("out_dtype nonsense", _set(out_dtype="floaty"), _TYPE, "out_dtype", ("floaty",)),
    BadCall("out of wrong shape", _like("out", 2, 5, 4, 7), _VALUE, "out", ("(2, 5, 4, 6)",)),
    BadCall("out of wrong rank", _like("out", 5, 4, 6), _VALUE, "out", ("(2, 5, 4, 6)",)),
    BadCall(
        "out of wrong dtype",
        _like("out", 2, 5, 4, 6, dtype="float64"),
        _TYPE,
        "out",
        ("float64", "float32"),
    ),
    BadCall("lse_out of wrong shape", _like("lse_out", 2, 5, 4), _VALUE, "lse_out", ("(2, 4, 5)",)),
    BadCall("lse_out of wrong dtype", _like("lse_out", 2, 4, 5, dtype="float64"), _TYPE, "lse_out"),
    BadCall("out over q", _alias("out", "q", 6), _VALUE, "out", ("memory that q uses",)),
    BadCall("out over itself", _overlapping_out, _VALUE, "out", ("share memory",)),
    BadCall("out read-only", _read_only, _VALUE, "out", ("read-only",), host_only=True),
    BadCall(
        "workspace for NumPy",
        _like("workspace", 9),
        _VALUE,
        "workspace",
        ("NumPy",),
        host_only=True,
    ),
    BadCall(
        "dout of wrong shape",
        _like("dout", 2, 5, 4, 5),
        _VALUE,
        "dout",
        ("(2, 5, 4, 6)",),
        operation="backward",
    ),
    BadCall(
        "dout of wrong dtype",
        _map("dout", lambda a: a.astype("float64")),
        _TYPE,
        "dout",
        ("float64", "float32"),
        operation="backward",
    ),
    BadCall(
        "out of wrong shape, backward",
        _map("out", lambda a: a[:, :4]),
        _VALUE,
        "out",
        ("(2, 4, 4, 6)",),
        operation="backward",
    ),
    BadCall(
        "lse transposed",
        _map("lse", lambda a: a.swapaxes(1, 2)),
        _VALUE,
        "lse",
        ("(2, 5, 4)", "(2, 4, 5)"),
        operation="backward",
    ),
    BadCall(
        "lse of wrong dtype",
        _map("lse", lambda a: a.astype("float64")),
        _TYPE,
        "lse",
        operation="backward",
    ),
    BadCall("dlse of wrong shape", _like("dlse", 2, 4, 6), _VALUE, "dlse", operation="backward"),
    BadCall("deterministic 1", _set(deterministic=1), _TYPE, "deterministic", operation="backward"),
    BadCall(
        "grads of two", _set(grads=(1, 2)), _TYPE, "grads", ("three arrays",), operation="backward"
    ),
    BadCall(
        "grads with None",
        _set(grads=(None, None, None)),
        _VALUE,
        "grads",
        ("None",),
        operation="backward",
    ),
    BadCall(
        "grads over each other",
        _same_grads,
        _VALUE,
        "dv",
        ("memory that dk uses",),
        operation="backward",
    ),
]
