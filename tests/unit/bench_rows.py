"""Made-up rows of results."""

from __future__ import annotations

from typing import Any

from bench.cases import Case, select

__all__ = ["row", "rows_of"]


def row(case: Case, impl: str, rate: float, **more: Any) -> dict[str, Any]:
    """A row of the implementation ``impl``; "cuflash" is this library."""
    ours = impl == "cuflash"
    return {
        "run": "20300101-000000",
        "date": "2030-01-01",
        "gpu": "NVIDIA Abacus",
        "sources": "0" * 16 if ours else None,
        "impl": impl,
        "version": "1",
        "op": case.op,
        "dtype": case.dtype,
        "batch": case.batch,
        "heads_q": case.heads_q,
        "heads_kv": case.heads_kv,
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim_v,
        "seqlen_q": case.seqlen_q,
        "seqlen_kv": case.seqlen_kv,
        "causal": case.causal,
        "options": case.options if ours else case.peer_options,
        "plan": f"{case.algorithm} 64x64" if ours else None,
        "protocol": "turns",
        "ms": 1.0,
        "spread": 0.1,
        "tflops": rate,
        **({"gb_per_s": 10 * rate} if case.rotated else {}),
        "ratio": 0.5,
        "ratio_low": 0.4,
        "worst_ratio": 0.3,
        **more,
    }


def rows_of(name: str, *peers: str, **more: Any) -> list[dict[str, Any]]:
    """Rows for every case of a set: cuflash at 100 TFLOP/s, companions at 50, and peers at 200."""
    found = []
    for case in select(name):
        found.append(row(case, "cuflash", 100.0, **more))
        found += [row(one, "cuflash", 50.0, **more) for one in case.companions]
        found += [row(case, peer, 200.0, **more) for peer in peers]
    return found
