"""Every array of both passes takes the documented dtypes; an error names it for any other dtype."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash

_DTYPES: dict[str, Any] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "int32": np.int32,
}
_STORAGE = [name for name in _DTYPES if name != "int32"]
_ROWS = ("lse", "dlse", "lse_out")


def _allowed(storage: str, output: str) -> dict[str, set[str]]:
    """The documented dtypes of every array, if q has dtype ``storage`` and out ``output``."""
    allowed = {name: {storage} for name in ("k", "v", "dq", "dk", "dv")}
    rows = "float64" if storage == "float64" else "float32"
    allowed |= {name: {rows} for name in _ROWS}
    narrow = storage in ("float16", "bfloat16")
    allowed["out"] = {storage, "float32"} if narrow else {storage}
    allowed["dout"] = {storage, output}
    return allowed


def _array(name: str, dtype: str) -> Any:
    shape = (1, 2, 3) if name in _ROWS else (1, 3, 2, 8)
    return np.ones(shape, _DTYPES[dtype])


def _call(dtypes: dict[str, str]) -> Any:
    """Call the pass that takes all of these arrays."""
    arrays = {name: _array(name, dtype) for name, dtype in dtypes.items()}
    if "dout" not in arrays:
        return cuflash.attention(**arrays, return_lse=True, backend="numpy")
    grads = tuple(arrays.pop(name) for name in ("dq", "dk", "dv"))
    return cuflash.attention_backward(**arrays, grads=grads, backend="numpy")


@pytest.mark.parametrize("wide", [False, True], ids=["out of q's dtype", "out of float32"])
@pytest.mark.parametrize("storage", _STORAGE)
@pytest.mark.parametrize(
    "names",
    [
        ("q", "k", "v", "out", "lse_out"),
        ("dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv"),
    ],
    ids=["forward", "backward"],
)
def test_a_dtype_is_taken_or_refused_by_name(
    names: tuple[str, ...], storage: str, wide: bool
) -> None:
    output = "float32" if wide and storage != "float64" else storage
    allowed = _allowed(storage, output)
    plain = {name: storage if storage in allowed.get(name, {storage}) else "" for name in names}
    plain = {name: dtype or next(iter(allowed[name])) for name, dtype in plain.items()}
    plain["out"] = output
    _call(plain)
    for name in names:
        if name == "q":  # its dtype decides which others are right
            continue
        for dtype in _DTYPES:
            if dtype in allowed[name]:
                _call(plain | {name: dtype})
                continue
            with pytest.raises(cuflash.ArgumentTypeError, match=f"^{name}: "):
                _call(plain | {name: dtype})
