"""Six checks without a reference: O(length) work beside the calls, so they suit any size.

Each makes its own data in the shapes, dtype, layout and strides of a case (the case's values do not
matter), calls a runner, and returns a :class:`Verdict` with limit 1. The bounds are those of
rounding, in ``limits``.

census     q = 0, so all visible keys have the same weight: exp(lse) is the number of visible keys,
           and with one column of v set for each key, the output counts the keys of a column.
one_hot    Logits that pick one key for each row: out_i is v_pi(i) to the bit.
shift      C is added to all logits: lse moves by C, out and dv by no more than C's rounding.
sum_dv     sum_j dv_j = sum_i dO_i over rows that see a key.
sum_dk     sum_j dk_j = 0: the rows of dS sum to 0.
q_dq       <q, dq> = <k, dk> for each kv head and its group.

With sinks the census counts their weight, rows of P lack that weight, and rows of dS sum to the
sink's part of delta; ``sum_ds`` checks the gradient of a sink against its rows. One-hot and shift
do not apply to sinks. With ALiBi the first three use slopes of zero, which change nothing. With
dropout the census counts the kept pairs, and one-hot and sum_dv do not apply.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from . import limits
from .case import Case
from .compare import REGISTRY, Verdict
from .data import tensor
from .dropped import left_of
from .identities import identities
from .verdict import verdict_of, worst_of

__all__ = ["Runner", "census", "identities", "one_hot", "require", "run_checks", "shift"]


class Runner(Protocol):
    """An implementation: arrays in the case's layout in and out, with the case's strides.

    Arrays in ``case.operands`` default to those of the case; the backward pass then returns their
    gradients too.
    """

    def forward(
        self,
        case: Case,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        **beside: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def backward(
        self,
        case: Case,
        dout: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        out: np.ndarray,
        lse: np.ndarray,
        dlse: np.ndarray | None = None,
        **beside: np.ndarray,
    ) -> tuple[np.ndarray, ...]: ...


def run_checks(runner: Any, case: Case) -> list[Verdict]:
    """All checks that apply to the case; their worst ratios are registered."""
    verdicts = [census(runner, case)]
    if not case.sinks and not case.softcap:
        verdicts += (
            [shift(runner, case)] if case.dropout else [one_hot(runner, case), shift(runner, case)]
        )
    verdicts += identities(runner, case)
    REGISTRY.add(case, "check", verdicts)
    return verdicts


def require(case: Case, verdicts: Iterable[Verdict]) -> None:
    """Raise AssertionError with the repro line unless every verdict passed."""
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if failed:
        lines = [
            f"{v.rule}: {v.ratio:.4g} of what is allowed at {v.index}: {v.detail}" for v in failed
        ]
        raise AssertionError("\n".join([*lines, f"repro: {case.repro}"]))


def census(runner: Runner, case: Case) -> Verdict:
    """Counts the keys that every row sees, and identifies them."""
    case = case.without_broadcast()
    generator = np.random.default_rng([case.seed, 100])
    q, k = np.zeros(_shape(case, "q")), generator.standard_normal(_shape(case, "k"))
    columns = generator.integers(0, case.head_dim_v, _shape(case, "v")[:3])
    v = columns[..., None] == np.arange(case.head_dim_v)
    out, lse = _forward(runner, case, q, k, v)
    begin, end = case.visible_ranges()
    sinks = tensor(case, "sinks") if case.sinks else np.full(case.heads_q, -np.inf)
    sunk = np.exp(sinks.astype(np.float64))[:, None] * case.queries_count()[:, None]
    visible = (end - begin) + sunk  # (batch, head, row)
    unit, wide = limits.UNIT[case.dtype], limits.UNIT[case.statistics.name]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        found = np.exp(lse.astype(np.float64))
        logarithms = np.maximum(np.abs(np.log(visible)), 1)
        allowed = np.where(visible > 0, limits.CENSUS_UNITS * wide * logarithms * visible, 0)
    verdicts = [verdict_of("census", np.abs(found - visible), allowed, "exp(lse)")]
    relative = unit + wide * (limits.OPERATIONS + math.sqrt(case.seqlen_kv))
    for b, h in np.ndindex(case.batch, case.heads_q):
        weights = np.where(visible[b, h] > 0, visible[b, h], 1)
        seen = begin[b, 0], end[b, 0]
        expected = _counted(case, v[b, h // case.group], *seen, (b, h)) / weights[:, None]
        size = np.where(expected > 0, np.maximum(expected, limits.SMALLEST[case.dtype]), 0)
        verdicts.append(
            verdict_of("census", np.abs(out[b, h] - expected), relative * size, "v", (b, h))
        )
    return worst_of(verdicts, "census")


def _counted(
    case: Case, v: np.ndarray, begin: np.ndarray, end: np.ndarray, head: tuple[int, int]
) -> np.ndarray:
    """Sums of v over the keys that every row sees, times the factors of dropout."""
    if case.dropout:
        return np.asarray((case.sees(head[0]) * left_of(case, {}, *head)) @ v)
    counted = np.zeros((case.seqlen_kv + 1, case.head_dim_v))
    np.cumsum(v, axis=0, out=counted[1:])
    return counted[end] - counted[begin]


def one_hot(runner: Runner, case: Case) -> Verdict:
    """Checks which key meets which value, to the bit.

    Keys are distinct rows of plus and minus one, a query is the row of its key, and the last column
    lowers all logits so that the winner's is exactly 0. If head_dim is too small for the length,
    some keys share a row that no query asks for.
    """
    case = case.without_broadcast()
    generator = np.random.default_rng([case.seed, 101])
    signs = case.head_dim - 1
    targets, codes = _codes(generator, case.seqlen_kv, signs)
    if not targets.size or not case.seqlen_q:
        return Verdict("one_hot", 0.0, detail="does not apply")
    first, end = (np.searchsorted(targets, bound) for bound in case.visible_ranges())
    choices = end - first  # targets that a row sees, (batch, 1, row)
    judged = (choices > 0) | (_visible(case) == 0)  # a row may see keys and no target
    anywhere = generator.random((case.heads_q, case.seqlen_q))
    edges = generator.random(anywhere.shape)  # the first and the last target, at the mask's edges
    anywhere[edges < 0.25], anywhere[edges > 0.85] = 1, 0
    picks = np.clip((anywhere * choices).astype(np.int64), 0, np.maximum(choices - 1, 0))
    chosen = targets[np.minimum(first + picks, len(targets) - 1)]
    gap = limits.ONE_HOT_GAP[case.statistics.name] / (2 * case.factor)
    power = max(0, math.ceil(math.log2(gap)))
    for_k = 2.0 ** (power // 2)
    for_q = 2.0**power / for_k
    k = np.concatenate([codes, np.full((case.seqlen_kv, 1), signs)], axis=1) * for_k
    q = np.concatenate([codes[chosen], -np.ones((*chosen.shape, 1))], axis=-1) * for_q
    v = _short(generator.standard_normal(_shape(case, "v")).astype(case.storage))
    shapes = (_shape(case, "q"), _shape(case, "k"))
    q, k = (np.broadcast_to(x, shape) for x, shape in zip((q, k), shapes, strict=True))
    out, _ = _forward(runner, case, q, k, v)
    verdicts = []
    for b, h in np.ndindex(case.batch, case.heads_q):
        value = v[b, h // case.group, chosen[b, h]]
        expected = np.where(choices[b, 0, :, None] > 0, value, 0)
        wrong = ((out[b, h] != expected) & judged[b, 0, :, None]).astype(np.float64)
        verdicts.append(verdict_of("one_hot", wrong, np.zeros_like(wrong), "v of the key", (b, h)))
    return worst_of(verdicts, "one_hot")


def _short(values: np.ndarray) -> np.ndarray:
    """Values of at most 22 bits, as many as three tf32 products keep of a float32."""
    if values.dtype != np.float32:
        return values
    return (values.view(np.uint32) & np.uint32(0xFFFFFFFC)).view(np.float32)


def _codes(generator: np.random.Generator, keys: int, signs: int) -> tuple[np.ndarray, np.ndarray]:
    """The keys that queries may select, sorted and with key 0 first; and (keys, signs) of +-1."""
    capacity = 2 ** min(signs, 40)
    count = keys if keys <= capacity else capacity - 1
    others = generator.choice(np.arange(1, keys), count - 1, replace=False) if count > 1 else []
    targets = np.sort(np.concatenate([[0], others])).astype(np.int64)[:count]
    numbers = np.zeros(keys, np.int64)
    numbers[targets] = np.arange(len(targets)) + (keys > capacity)
    codes = generator.choice([-1.0, 1.0], (keys, signs))
    used = min(signs, int(numbers.max(initial=0)).bit_length())
    codes[:, :used] = 2.0 * (numbers[:, None] >> np.arange(used) & 1) - 1
    return targets, codes


def shift(runner: Runner, case: Case, shifts: Iterable[float] = limits.SHIFTS) -> Verdict:
    """Adds C to all logits: column 0 of q is a power of two, column 0 of k is 0 or gives C.

    C is divided between the two, so that float16 holds both. Otherwise logits have unit variance.
    sum_j P_ij^2 is then about e / n for n keys, which gives the rounding of the output without a
    reference.
    """
    case = case.without_broadcast()
    generator = np.random.default_rng([case.seed, 102])
    spread = (case.factor**2 * max(case.head_dim - 1, 1)) ** -0.25
    q, k = (spread * generator.standard_normal(_shape(case, n)) for n in "qk")
    v, dout = (generator.standard_normal(_shape(case, n)) for n in ("v", "dout"))
    base = _shifted(runner, case, (q, k, v, dout), 0, 1)
    verdicts = []
    for wanted in shifts:
        power = 2.0 ** round(math.log2(abs(wanted) / case.factor) / 2)
        in_k = float(np.array(wanted / case.factor / power).astype(case.storage))
        moved = _shifted(runner, case, (q, k, v, dout), in_k, power)
        verdicts.append(_moved(case, base, moved, in_k * power * case.factor))
    return worst_of(verdicts, "shift")


def _shifted(
    runner: Runner, case: Case, data: tuple[np.ndarray, ...], in_k: float, in_q: float
) -> dict[str, np.ndarray]:
    q, k, v, dout = (x.copy() for x in data)
    q[..., :1], k[..., :1] = in_q, in_k
    inputs = [case.in_layout(x).astype(case.storage) for x in (q, k, v)]
    out, lse = runner.forward(case, *inputs, **_flat(case))
    given = case.in_layout(dout).astype(case.storage)
    grads = runner.backward(case, given, *inputs, out, lse, **_flat(case))
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads[:3]), strict=True))
    return {
        name: case.heads_first(name, array).astype(np.float64) for name, array in results.items()
    }


def _moved(
    case: Case, base: dict[str, np.ndarray], moved: dict[str, np.ndarray], by: float
) -> Verdict:
    said, wide = f"C = {by:.6g}", limits.UNIT[case.statistics.name]
    root = math.sqrt(case.head_dim)
    of_sums = limits.OPERATIONS + math.sqrt(case.seqlen_kv) + root
    of_score = limits.OPERATIONS + root + limits.SUM_DRIFT * case.head_dim
    of_score *= wide * abs(by)
    dead = np.broadcast_to(_visible(case) == 0, base["lse"].shape)
    before, after = np.where(dead, 0, base["lse"]), np.where(dead, by, moved["lse"])
    error = np.where(dead, moved["lse"] != -np.inf, np.abs(after - before - by))
    allowed = np.where(dead, 0, of_score + wide * of_sums * np.maximum(1, np.abs(before)))
    verdicts = [verdict_of("shift", error, allowed, f"lse, {said}")]
    # P is about 1 / keys; if that is below the smallest number, it is rounded like that number.
    small = max(1, limits.SMALLEST[case.dtype] * case.seqlen_kv)
    rounding = limits.DEVIATIONS * math.sqrt(2) * limits.UNIT[case.dtype] * small + wide * of_sums
    for (name, model), times in zip(_row_sizes(case).items(), (2, 4), strict=True):
        error, size = _norm(moved[name] - base[name]), _norm(base[name]) + model
        allowed = (rounding + times * of_score) * size
        verdicts.append(verdict_of("shift", error, allowed, f"{name}, {said}"))
    for name in ("dq", "dk"):
        infinite = (~np.isfinite(moved[name])).astype(np.float64)
        verdicts.append(verdict_of("shift", infinite, np.zeros_like(infinite), f"{name}, {said}"))
    return worst_of(verdicts, "shift")


def _row_sizes(case: Case) -> dict[str, np.ndarray]:
    """E of ``error_model`` for out and dv with logits, v and dO of unit variance, times two."""
    begin, end = case.visible_ranges()
    visible = end - begin
    keys = np.maximum(visible, 1)
    of_out = np.minimum(1, 2 * np.sqrt(math.e / keys)) * (visible > 0)
    squares = np.minimum(1, 4 * math.e / keys**2) * (visible > 0) * case.group
    # The rows that see each key: their ranges begin at or before it and end after it.
    of_dv = np.zeros((case.batch, 1, case.seqlen_kv))
    for b, of_rows in enumerate(squares[:, 0]):
        bounds = begin[b, 0], end[b, 0]
        begins, ends = (np.bincount(bound, of_rows, case.seqlen_kv + 1) for bound in bounds)
        of_dv[b] = np.sqrt(np.maximum(np.cumsum(begins - ends)[:-1], 0))
    root = math.sqrt(case.head_dim_v) / (1 - case.dropout_p)
    return {"out": root * of_out, "dv": root * of_dv}


def _visible(case: Case) -> np.ndarray:
    """The number of keys that each query sees, (batch, 1, seqlen_q)."""
    begin, end = case.visible_ranges()
    return end - begin


def _shape(case: Case, name: str) -> tuple[int, ...]:
    return case.heads_first(name, np.empty(case.shape(name), bool)).shape


def _flat(case: Case) -> dict[str, np.ndarray]:
    """Slopes and a bias of zero, and a mask that hides nothing, for a case that has any."""
    made = {"alibi_slopes": np.zeros, "bias": np.zeros, "mask": np.ones}
    added = set(case.operands) & made.keys()
    return {name: made[name](case.shape(name), case.dtype_of(name)) for name in added}


def _forward(runner: Runner, case: Case, *inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    placed = (case.in_layout(x).astype(case.storage) for x in inputs)
    out, lse = runner.forward(case, *placed, **_flat(case))
    return case.heads_first("out", out), case.heads_first("lse", lse)


def _norm(rows: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.sqrt((rows**2).sum(axis=-1))
