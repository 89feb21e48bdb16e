"""Times the cases and stores what was seen."""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .cases import Case, select
from .peers import PEERS, Inputs
from .timing import median_ratio, rested, turns
from .verify import worst_ratio

__all__ = ["RESULTS", "run"]

RESULTS = Path(__file__).parent / "results"


def run(names: str, protocols: str, output: Path | None = None) -> list[dict[str, Any]]:
    """Time the sets of cases, print a line each, and append the rows to the GPU's file."""
    from cuflash.cuda.available import require_device

    require_device()
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    gpu = properties["name"].decode()
    now = datetime.datetime.now(datetime.timezone.utc)
    common = {
        "run": now.strftime("%Y%m%d-%H%M%S"),
        "date": now.date().isoformat(),
        "gpu": gpu,
    }
    rows: list[dict[str, Any]] = []
    for case in select(names):
        measured = _measure(case, protocols.split(","))
        rows += [{**common, **row} for row in measured]
        for row in measured:
            print(_line(case, row), flush=True)
    path = output or RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}.json"
    store(path, rows)
    return rows


def store(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a results file, one row a line; the file is whole at every moment."""
    known = json.loads(path.read_text()) if path.exists() else []
    text = "[\n" + ",\n".join(json.dumps(row) for row in known + rows) + "\n]\n"
    partial = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(text)
    partial.replace(path)


def _measure(case: Case, protocols: list[str]) -> list[dict[str, Any]]:
    inputs = _inputs(case)
    calls: dict[str, Callable[[], Any]] = {}
    ratios: dict[str, float] = {}
    for name, peer in PEERS.items():
        if peer.supports(case):
            call = peer.prepare(case, inputs)
            ratios[name] = worst_ratio(case, inputs, call())
            calls[name] = call
    rows = []
    for protocol in protocols:
        times = {"rested": rested, "turns": turns}[protocol](calls)
        for name in calls:
            others = [n for n in calls if n != name]
            best = min(others, key=lambda n: statistics.median(times[n])) if others else None
            row = _row(case, name, protocol, times[name], ratios[name])
            if best:
                row["ratio"], row["ratio_low"] = median_ratio(times[name], times[best])
            rows.append(row)
    return rows


def _inputs(case: Case) -> Inputs:
    import cupy

    generator = cupy.random.default_rng(1)

    def normal(seqlen: int, heads: int, dim: int) -> Any:
        shape = (case.batch, seqlen, heads, dim)
        return generator.standard_normal(shape, dtype=np.float32).astype(case.dtype)

    return Inputs(
        normal(case.seqlen_q, case.heads_q, case.head_dim),
        normal(case.seqlen_kv, case.heads_kv, case.head_dim),
        normal(case.seqlen_kv, case.heads_kv, case.head_dim_v),
        normal(case.seqlen_q, case.heads_q, case.head_dim_v),
    )


def _row(case: Case, name: str, protocol: str, times: list[float], ratio: float) -> dict[str, Any]:
    milliseconds = statistics.median(times)
    ours = name == "cuflash"
    return {
        "sources": _sources(case) if ours else None,
        "impl": name,
        "version": PEERS[name].version(),
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
        "options": case.options if ours else {},
        "plan": _plan(case) if ours else None,
        "protocol": protocol,
        "ms": round(milliseconds, 5),
        "spread": round((max(times) - min(times)) / milliseconds, 4),
        "tflops": round(case.flops / milliseconds / 1e9, 2),
        "ratio": None,
        "ratio_low": None,
        "worst_ratio": round(ratio, 4),
    }


def _sources(case: Case) -> str:
    from cuflash.cuda.source import find_sources, source_digest

    return source_digest(find_sources(), case.algorithm, case.op)


def _plan(case: Case) -> str:
    import cuflash

    q = (case.batch, case.seqlen_q, case.heads_q, case.head_dim)
    k = (case.batch, case.seqlen_kv, case.heads_kv, case.head_dim)
    said = cuflash.explain(
        q,
        k,
        (*k[:3], case.head_dim_v),
        dtype=case.dtype,
        causal=case.causal,
        operation=case.op,  # type: ignore[arg-type]
        **case.options,
    )
    return f"{said.algorithm} {said.block_q}x{said.block_kv}"


def _line(case: Case, row: dict[str, Any]) -> str:
    ratio = f"  {row['ratio']:.2f} of the best other" if row["ratio"] else ""
    return (
        f"{case!s:<52} {row['protocol']:<7} {row['impl']:<13} {row['ms']:>9.3f} ms "
        f"{row['tflops']:>7.1f} TFLOP/s  error {row['worst_ratio']:.2f}{ratio}"
    )
