"""Cases of the CPU bench, and their implementations: the library, whole matrices, torch, JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CASES", "CpuCase", "implementations"]

Call = Callable[[], Any]


@dataclass(frozen=True)
class CpuCase:
    """One pass over one batch entry, on (heads, seqlen, head_dim) arrays."""

    kind: str  # long, small or decoding
    dtype: str
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    causal: bool
    op: str  # forward, or forward and backward
    head_dim: int = 64

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a stored row."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def _both(*case: Any) -> list[CpuCase]:
    return [CpuCase(*case, op) for op in ("forward", "forward and backward")]


CASES: dict[str, list[CpuCase]] = {
    "8192": _both("long", "float32", 4, 4, 8192, 8192, False),
    "2048": _both("long", "float32", 8, 8, 2048, 2048, False)
    + _both("long", "float32", 8, 8, 2048, 2048, True),
    "float16": _both("long", "float16", 8, 8, 1024, 1024, False),
    "bfloat16": _both("long", "bfloat16", 8, 8, 1024, 1024, False),
    "decoding": [CpuCase("decoding", "float32", 32, 8, 1, 8192, False, "forward")],
    "small": _both("small", "float32", 8, 8, 128, 128, False)
    + _both("small", "float32", 8, 8, 512, 512, True),
}


def _draw(case: CpuCase) -> list[np.ndarray]:
    import ml_dtypes

    dtype = ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype
    rng = np.random.default_rng(0)
    q = (case.heads_q, case.seqlen_q, case.head_dim)
    kv = (case.heads_kv, case.seqlen_kv, case.head_dim)
    return [rng.standard_normal(shape).astype(dtype) for shape in (q, kv, kv, q)]


def implementations(case: CpuCase) -> dict[str, tuple[str, Call]]:
    """Version and call of every implementation of a case, by name; ours come first."""
    q, k, v, dout = _draw(case)
    makers = {
        "cuflash": _ours,
        "cuflash jit": _our_jit,
        "whole matrix": _whole,
        "torch": _torch,
        "jax.nn jit": _jax,
    }
    found = {}
    for name, make in makers.items():
        try:
            version, call = make(case, q, k, v, dout)
            call()
        except Exception as error:  # a peer may fail in any way; it is then left out
            if name == "cuflash":
                raise
            print(f"left out: {name}: {str(error).splitlines()[0][:120]}")
        else:
            found[name] = version, call
    return found


def _ours(case: CpuCase, q: Any, k: Any, v: Any, dout: Any) -> tuple[str, Call]:
    import cuflash

    options: dict[str, Any] = {"layout": "hsd", "backend": "numpy", "causal": case.causal}
    if case.op == "forward":
        return cuflash.__version__, lambda: cuflash.attention(q, k, v, **options)
    return cuflash.__version__, lambda: cuflash.attention_vjp(q, k, v, **options)[1](dout)


def _whole(case: CpuCase, *arrays: Any) -> tuple[str, Call]:
    """Attention as a user writes it in NumPy, on the whole score matrix, in float32."""

    def call() -> Any:
        q, k, v, dout = (np.asarray(a, np.float32) for a in arrays)
        rows = (case.heads_kv, -1, case.head_dim)  # stacks the query heads of a group
        q, dout = q.reshape(rows), dout.reshape(rows)
        out, p = _whole_forward(q, k, v, case.causal)
        if case.op != "forward":
            return [a.astype(arrays[0].dtype) for a in _whole_backward(q, k, v, out, p, dout)]
        return out.astype(arrays[0].dtype)

    return f"numpy {np.__version__}", call


def _whole_forward(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    scores = np.matmul(q, k.swapaxes(-1, -2))
    scores *= np.float32(q.shape[-1] ** -0.5)
    if causal:
        hidden = np.triu(np.ones(scores.shape[-2:], bool), 1)
        np.copyto(scores, -np.inf, where=hidden)
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return np.matmul(scores, v), scores


def _whole_backward(q: Any, k: Any, v: Any, out: Any, p: Any, dout: Any) -> tuple[Any, Any, Any]:
    dv = np.matmul(p.swapaxes(-1, -2), dout)
    ds = np.matmul(dout, v.swapaxes(-1, -2))
    ds -= (dout * out).sum(-1, keepdims=True)
    ds *= p
    ds *= np.float32(q.shape[-1] ** -0.5)
    return np.matmul(ds, k), np.matmul(ds.swapaxes(-1, -2), q), dv


def _torch(case: CpuCase, *arrays: Any) -> tuple[str, Call]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    kind = getattr(torch, case.dtype)
    q, k, v, dout = (torch.from_numpy(a.astype(np.float32))[None].to(kind) for a in arrays)
    options = {"is_causal": case.causal, "enable_gqa": case.heads_q != case.heads_kv}

    def forward() -> Any:
        with torch.no_grad():
            return scaled_dot_product_attention(q, k, v, **options)

    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def both() -> Any:
        return torch.autograd.grad(scaled_dot_product_attention(*inputs, **options), inputs, dout)

    return f"torch {torch.__version__}", forward if case.op == "forward" else both


def _jax(case: CpuCase, *arrays: Any) -> tuple[str, Call]:
    import jax

    return _jitted(case, jax.nn.dot_product_attention, *arrays)


def _our_jit(case: CpuCase, *arrays: Any) -> tuple[str, Call]:
    import cuflash.jax

    return _jitted(case, cuflash.jax.attention, *arrays)


def _jitted(case: CpuCase, attention: Callable[..., Any], *arrays: Any) -> tuple[str, Call]:
    import jax
    import jax.numpy as jnp

    device = jax.devices("cpu")[0]
    on_cpu = [jax.device_put(jnp.asarray(a.swapaxes(0, 1))[None], device) for a in arrays]

    def forward(q: Any, k: Any, v: Any, _: Any) -> Any:
        return attention(q, k, v, is_causal=case.causal)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        _, pullback = jax.vjp(lambda *qkv: attention(*qkv, is_causal=case.causal), q, k, v)
        return pullback(dout)

    compiled = jax.jit(forward if case.op == "forward" else both)
    return f"jax {jax.__version__}", lambda: jax.block_until_ready(compiled(*on_cpu))
