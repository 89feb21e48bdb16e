"""What a user would run instead, each as a maker of calls on CuPy arrays."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cases import Case

__all__ = ["PEERS", "Inputs", "Peer"]


@dataclass(frozen=True)
class Inputs:
    """The arrays of a case, (batch, seqlen, heads, head_dim) on the device."""

    q: Any
    k: Any
    v: Any
    dout: Any


@dataclass(frozen=True)
class Peer:
    """One implementation.

    ``prepare(case, inputs)`` gives the call that is timed; it returns the
    output, or for the backward pass the gradients, as CuPy arrays.
    """

    name: str
    version: Callable[[], str]
    supports: Callable[[Case], bool]
    prepare: Callable[[Case, Inputs], Callable[[], Any]]


def _version(package: str) -> Callable[[], str]:
    return lambda: importlib.metadata.version(package)


def _cuflash_version() -> str:
    import cuflash

    return cuflash.__version__


def _cuflash(case: Case, inputs: Inputs) -> Callable[[], Any]:
    import cuflash

    q, k, v = inputs.q, inputs.k, inputs.v
    options = {"causal": case.causal, **case.options}
    if case.op == "forward":
        return lambda: cuflash.attention(q, k, v, **options)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    return lambda: cuflash.attention_backward(inputs.dout, q, k, v, out, lse, **options)


def _by_hand(case: Case, inputs: Inputs) -> Callable[[], Any]:
    """Attention as CuPy users write it: the whole matrix, in place where they would."""
    import cupy

    q, k, v = (a.swapaxes(1, 2) for a in (inputs.q, inputs.k, inputs.v))
    q, k, v = (cupy.ascontiguousarray(a).reshape(-1, *a.shape[2:]) for a in (q, k, v))
    scale = q.dtype.type(case.head_dim**-0.5)

    def call() -> Any:
        scores = cupy.matmul(q, k.swapaxes(-1, -2))
        scores *= scale
        scores -= scores.max(-1, keepdims=True)
        cupy.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        out = cupy.matmul(scores, v)
        return out.reshape(case.batch, case.heads_q, *out.shape[1:]).swapaxes(1, 2)

    return call


#: Implementations by name; ours first.
PEERS = {
    peer.name: peer
    for peer in (
        Peer("cuflash", _cuflash_version, lambda case: True, _cuflash),
        Peer(
            "cupy by hand",
            _version("cupy-cuda13x"),
            lambda case: case.op == "forward" and not case.causal and case.blocks is None,
            _by_hand,
        ),
    )
}
