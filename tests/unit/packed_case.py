"""Packed calls of the NumPy backend, and a loop over their sequences by the reference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import cuflash
from cuflash import reference

__all__ = [
    "LENGTHS",
    "arrays",
    "both",
    "compare",
    "int32",
    "looped",
    "offsets",
    "pulled",
    "rows_of",
]

_Arrays = dict[str, Any]
#: Queries and keys of every sequence. Some have none of either. Some lengths fill blocks of
#: 16, and some are one longer.
LENGTHS = ((17, 20), (0, 0), (1, 9), (5, 0), (0, 3), (16, 33), (7, 2))
#: Numbers of rows after the last sequence: of q, and of k and v.
_BEHIND = (3, 5)
_NAMES = "cu_seqlens_q", "cu_seqlens_kv"
_DIFFERENTIABLE = ("alibi_slopes", "sinks")


def int32(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def offsets(lengths: Any = LENGTHS) -> _Arrays:
    """The offsets of sequences of these lengths."""
    ends = np.cumsum([(0, 0), *lengths], axis=0).astype(np.int32)
    return dict(zip(_NAMES, ends.T.copy(), strict=True))


def arrays(lengths: Any = LENGTHS, dtype: Any = np.float64, seed: int = 0) -> _Arrays:
    """A call whose rows after the last sequence are NaN; it has two kv heads."""
    random = np.random.default_rng(seed)
    ends = [int(at[-1]) for at in offsets(lengths).values()]
    rows, keys = (end + more for end, more in zip(ends, _BEHIND, strict=True))
    shapes = {"q": (rows, 4, 8), "k": (keys, 2, 8), "v": (keys, 2, 6)}
    made: _Arrays = {
        name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()
    }
    for name, array in made.items():
        array[ends[name != "q"] :] = np.nan
    return made | offsets(lengths) | {"layout": "shd", "backend": "numpy"}


def pulled(out: Any, lse: Any) -> _Arrays:
    """Gradients for out and lse that differ from element to element."""
    places = (np.arange(1.0, one.size + 1).reshape(one.shape) for one in (out, lse))
    return {
        name: np.cos(place * place).astype(one.dtype)
        for name, place, one in zip(("dout", "dlse"), places, (out, lse), strict=True)
    }


def both(call: _Arrays, **saved: Any) -> _Arrays:
    """Results of both passes; :func:`pulled` gives the gradients of out and lse.

    All results are written to memory that holds NaN. ``saved`` replaces the results of the forward
    pass in the backward pass.
    """
    out, lse = (np.full_like(made, np.nan) for made in cuflash.attention(**call, return_lse=True))
    cuflash.attention(**call, out=out, lse_out=lse, return_lse=True)
    wrt = ("q", "k", "v", *(("sinks",) if "sinks" in call else ()))
    given = {"out": out, "lse": lse} | pulled(out, lse) | saved
    grads = tuple(np.full_like(call[name], np.nan) for name in wrt)
    cuflash.attention_backward(**given, **call, wrt=wrt, grads=grads)
    names = ("out", "lse", *(f"d{name}" for name in wrt))
    return dict(zip(names, (out, lse, *grads), strict=True))


def rows_of(at: Any, total: int) -> list[slice]:
    """The rows of every sequence, and then the rows after all sequences.

    A sequence ends at the largest offset up to its own end, or at the end of the array if that
    comes first. The next sequence begins there.
    """
    ends = [min(max(0, *at[1 : entry + 2]), total) for entry in range(len(at) - 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise([0, *ends, total])]


def looped(call: _Arrays) -> _Arrays:
    """The reference's results, with one call for each sequence."""
    rows, keys = (rows_of(call[n], len(call[x])) for n, x in zip(_NAMES, "qk", strict=True))
    left_out = {"algorithm", "blocks", "backend", *_NAMES}
    given = {name: value for name, value in call.items() if name not in left_out}
    q, k, v = (call[name] for name in "qkv")
    found = {"out": np.zeros((*q.shape[:2], v.shape[2])), "lse": np.full(q.shape[1::-1], -np.inf)}
    found |= {f"d{name}": np.zeros(call[name].shape) for name in ("q", "k", "v", *_DIFFERENTIABLE)
              if name in call}  # fmt: skip
    of = pulled(found["out"], found["lse"])
    for i, j in zip(rows[:-1], keys[:-1], strict=True):
        own = given | {"q": q[i], "k": k[j], "v": v[j]}
        out, lse = reference.attention(**own)
        found["out"][i], found["lse"][:, i] = out, lse
        grads = reference.attention_backward(of["dout"][i], dlse=of["dlse"][:, i], **own)
        found["dq"][i], found["dk"][j], found["dv"][j] = grads[:3]
        named = [name for name in _DIFFERENTIABLE if name in call]
        for name, grad in zip(named, grads[3:], strict=True):
            found[f"d{name}"] += grad
    return found


def compare(found: _Arrays, expected: _Arrays) -> None:
    for name, got in found.items():
        np.testing.assert_allclose(got, expected[name], rtol=1e-9, atol=1e-10, err_msg=name)
