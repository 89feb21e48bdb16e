"""The alternatives that a user has; each of them makes calls on CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import torch_peers
from .cases import Case
from .inputs import Inputs

__all__ = ["OURS", "PEERS", "Peer", "importable", "select_peers"]

OURS = "cuflash"


@dataclass(frozen=True)
class Peer:
    """One implementation.

    ``prepare(case, inputs)`` returns the timed call, and ``arrays`` makes CuPy arrays of its
    result: the output, or the gradients of q, k, v and the case's ``gradients``, in that order.
    ``version`` raises if the implementation cannot be imported.
    """

    name: str
    label: str  # in results and tables
    version: Callable[[], str]
    supports: Callable[[Case], bool]
    prepare: Callable[[Case, Inputs], Callable[[], Any]]
    arrays: Callable[[Any], Sequence[Any]]


def _cuflash_version() -> str:
    import cuflash

    return cuflash.__version__


def _cuflash(case: Case, inputs: Inputs) -> Callable[[], Any]:
    import cuflash

    options = inputs.asked(case)
    q, k, v, dout = inputs.matrices(case)
    if case.op == "forward":
        forward = cuflash.attention_with_kvcache if case.kvcache else cuflash.attention
        return lambda: forward(q, k, v, **options)
    of_this_pass = ("blocks", "deterministic")
    asked = {name: value for name, value in options.items() if name not in of_this_pass}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **asked)
    if case.gradients:
        options["wrt"] = ("q", "k", "v", *case.gradients)
    return lambda: cuflash.attention_backward(dout, q, k, v, out, lse, **options)


def _cupy_version() -> str:
    import cupy

    return str(cupy.__version__)


def _by_hand(case: Case, inputs: Inputs) -> Callable[[], Any]:
    """Attention as CuPy users write it: on whole matrices, in place where that is usual."""
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


#: The most elements of the score matrix in attention by hand; larger ones would only take time.
MOST_SCORES = 2**31


def _writable_by_hand(case: Case) -> bool:
    plain = case.op == "forward" and not case.causal and case.blocks is None
    return plain and not case.features and case.scores <= MOST_SCORES


def _as_tuple(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else (result,)


def _torch_peer(backend: torch_peers.Backend) -> Peer:
    return Peer(
        backend.name,
        backend.label,
        backend.version,
        backend.supports,
        backend.prepare,
        torch_peers.arrays,
    )


#: Implementations by name; ours first.
PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, OURS, _cuflash_version, lambda case: True, _cuflash, _as_tuple),
        Peer("by-hand", "cupy by hand", _cupy_version, _writable_by_hand, _by_hand, _as_tuple),
        *map(_torch_peer, torch_peers.BACKENDS),
    )
}


def select_peers(names: str | None) -> list[Peer]:
    """The peers in a comma-separated list, or all for None; cuflash is not one of them."""
    others = [name for name in PEERS if name != OURS]
    asked = others if names is None else [name for name in names.split(",") if name]
    unknown = [name for name in asked if name not in others]
    if unknown:
        raise SystemExit(f"--peers: no peer {unknown[0]!r}; there are {', '.join(others)}")
    return [PEERS[name] for name in asked]


def importable(peers: Sequence[Peer], say: Callable[[str], None]) -> list[Peer]:
    """The peers whose packages can be imported; prints a line for each one that cannot."""
    found = []
    for peer in peers:
        try:
            peer.version()
        except Exception as error:  # a package may raise anything while it is imported
            say(f"left out: {peer.label}: {error}")
        else:
            found.append(peer)
    return found
