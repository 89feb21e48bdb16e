"""Problems for the tiled NumPy backend, and attention written out in float64 to judge it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from cuflash import tiled_numpy
from cuflash.planning.device import HostLimits
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

Array = np.ndarray[Any, np.dtype[Any]]

ALGORITHMS = ("fa1", "fa2")
LIMITS = HostLimits(1 << 20)
DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
GIVEN = ("q", "k", "v", "dout", "dlse")
WANTED = ("out", "lse", "dq", "dk", "dv")


def problem(**changes: Any) -> AttentionProblem:
    base = AttentionProblem(
        operation="forward",
        batch=2,
        heads_q=2,
        heads_kv=2,
        seqlen_q=19,
        seqlen_kv=23,
        head_dim=8,
        head_dim_v=8,
        storage="float64",
        output="float64",
        mask="full",
        scale=0.3,
        q_offset=4,
    )
    if "storage" in changes:
        changes.setdefault("output", changes["storage"])
    return replace(base, **changes)


def shapes(p: AttentionProblem) -> dict[str, tuple[int, ...]]:
    q = (p.batch, p.seqlen_q, p.heads_q)
    kv = (p.batch, p.seqlen_kv, p.heads_kv)
    row = (p.batch, p.heads_q, p.seqlen_q)
    shape = {"q": (*q, p.head_dim), "k": (*kv, p.head_dim), "v": (*kv, p.head_dim_v)}
    shape |= {"out": (*q, p.head_dim_v), "dout": (*q, p.head_dim_v), "lse": row, "dlse": row}
    return shape | {f"d{name}": shape[name] for name in "qkv"}


def dtype_of(p: AttentionProblem, name: str) -> np.dtype[Any]:
    if name in ("lse", "dlse"):
        return DTYPES[p.statistics]
    return DTYPES[p.output if name in ("out", "dout") else p.storage]


def draw(p: AttentionProblem, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(shapes(p)[n]).astype(dtype_of(p, n)) for n in GIVEN}


@dataclass
class Answer:
    """Outputs of one backend, or of the definition."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None = None


def visible(p: AttentionProblem) -> Array:
    query, key = np.arange(p.seqlen_q)[:, None], np.arange(p.seqlen_kv)
    seen = np.ones((p.seqlen_q, p.seqlen_kv), bool)
    if p.mask in ("causal", "band"):
        seen &= key <= query + p.q_offset
    if p.mask in ("left", "band"):
        seen &= key >= query + p.q_first
    return seen


def definition(p: AttentionProblem, given: dict[str, Array], seen: Array | None = None) -> Answer:
    """Attention and gradients by whole float64 matrices; ``seen`` replaces the problem's mask."""
    seen = visible(p) if seen is None else seen
    q, k, v, dout = (given[n].astype(np.float64).swapaxes(1, 2) for n in GIVEN[:4])
    k, v = (np.repeat(x, p.group, axis=1) for x in (k, v))
    scores = np.where(seen, p.scale * (q @ k.swapaxes(-1, -2)), -np.inf)
    highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(highest == -np.inf, 0, highest))
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    weights /= np.where(total == 0, 1, total)
    dlse = np.where(lse == -np.inf, 0, given["dlse"])
    dsinks = None
    if "sinks" in given:
        sinks = given["sinks"].astype(np.float64)[:, None]
        dlse = np.where(sinks == -np.inf, dlse, given["dlse"])
        of_keys, lse = lse, np.logaddexp(lse, sinks)
        weights *= np.exp(np.where(of_keys == -np.inf, 0, of_keys - lse))[..., None]
    out = weights @ v
    delta = (dout * out).sum(axis=-1) - dlse
    if "sinks" in given:
        of_sink = np.exp(np.where(sinks == -np.inf, -np.inf, sinks - lse))
        dsinks = -(of_sink * delta).sum(axis=(0, 2))
    dscores = p.scale * weights * (dout @ v.swapaxes(-1, -2) - delta[..., None])
    by_group = (p.batch, p.heads_kv, p.group, p.seqlen_kv)
    dk = (dscores.swapaxes(-1, -2) @ q).reshape(*by_group, p.head_dim).sum(axis=2)
    dv = (weights.swapaxes(-1, -2) @ dout).reshape(*by_group, p.head_dim_v).sum(axis=2)
    out, dq, dk, dv = (x.swapaxes(1, 2) for x in (out, dscores @ k, dk, dv))
    return Answer(out, lse, dq, dk, dv, dsinks)


def destinations(p: AttentionProblem) -> dict[str, Array]:
    """Arrays for the results, filled with a number that no result contains."""
    return {n: np.full(shapes(p)[n], 77, dtype_of(p, n)) for n in WANTED}


def run(
    p: AttentionProblem, given: dict[str, Array], into: dict[str, Array], **choice: Any
) -> None:
    """Run both passes; warnings are errors."""
    q, k, v, dout, dlse = (given[n] for n in GIVEN)
    out, lse, dq, dk, dv = (into[n] for n in WANTED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiled_numpy.forward(plan(p, LIMITS, **choice), q, k, v, out, lse)
        backward = plan(replace(p, operation="backward"), LIMITS, **choice)
        tiled_numpy.backward(backward, dout, q, k, v, out, lse, dlse, dq, dk, dv)


def solve(p: AttentionProblem, given: dict[str, Array], **choice: Any) -> Answer:
    into = destinations(p)
    run(p, given, into, **choice)
    return Answer(**into)


def check(got: Answer, wanted: Answer, tolerance: float, least: float = 0) -> None:
    """Check that infinities and NaN are in the same places, and that other numbers are close.

    The bound is relative to the largest number of an array, or to ``least`` if that is larger: the
    few numbers of a small array may all be small, but have the rounding of their larger terms.
    """
    for name in WANTED:
        a, b = (getattr(x, name).astype(np.float64) for x in (got, wanted))
        finite = np.isfinite(b)
        np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=name)
        size = np.abs(b[finite]).max(initial=least)
        error = np.abs(a[finite] - b[finite]).max(initial=0)
        assert error <= tolerance * size, f"{name}: {error} of {size}"
