"""Identities of the gradients; see ``checks``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import limits
from .case import OF_FEATURES, Case
from .compare import Verdict
from .data import tensor

__all__ = ["identities"]


def identities(runner: Any, case: Case) -> list[Verdict]:
    """``sum_dv``, ``sum_dk`` and ``q_dq`` of one forward and backward pass; with sinks ``sum_ds``.

    With a soft cap there is no ``sum_dk``: rows of dS do not sum to 0. With dropout there is no
    ``sum_dv``: rows of the kept P do not sum to 1.

    Logits have unit variance, half of it from the key alone, so that columns of P differ and their
    sums are rounded in no common direction; dO is positive, so that a bias of it adds up.
    """
    case = case.without_broadcast()
    generator = np.random.default_rng([case.seed, 103])
    spread = (2 * case.head_dim * case.factor**2) ** -0.25
    values = {name: generator.standard_normal(case.shape(name)) for name in ("q", "k", "v", "dout")}
    values["q"], values["k"] = spread * (values["q"] + 1), spread * values["k"]
    values["dout"] = np.abs(values["dout"]) + 0.5
    x = {name: value.astype(case.storage) for name, value in values.items()}
    x["out"], x["lse"] = runner.forward(case, x["q"], x["k"], x["v"])
    names = ("dout", "q", "k", "v", "out", "lse")
    grads = runner.backward(case, *(x[name] for name in names))
    x |= zip(case.gradients, grads, strict=True)
    sinks = tensor(case, "sinks") if case.sinks else np.full(case.heads_q, -np.inf)
    x = {name: case.heads_first(name, array) for name, array in x.items()}
    with np.errstate(invalid="ignore"):  # the sink's weight in each row, (batch, head, row)
        lost = np.exp(sinks.astype(np.float64)[:, None] - x["lse"])
    sunk = (sinks[:, None] > -np.inf) & case.queries_count()[:, None]
    x["lost"], seen = np.where(sunk, lost, 0), _seen(case)
    rules = [*([] if case.dropout else ["sum_dv"]), *([] if case.softcap else ["sum_dk"]), "q_dq"]
    worst = [Verdict(name, 0.0) for name in rules]
    for b, kv in np.ndindex(case.batch, case.heads_kv):
        heads = slice(kv * case.group, (kv + 1) * case.group)
        of_rows = x.keys() - {*OF_FEATURES}
        part = {n: x[n][b, kv if n in _OF_KV else heads] for n in of_rows}
        centred = getattr(runner, "backend", "") == "numpy"
        group = _Group(case, part, seen[b, heads], centred)
        for i, rule in enumerate(rules):
            ratios = getattr(group, rule)()
            ratio = float(np.max(np.where(np.isnan(ratios), np.inf, ratios), initial=0))
            if ratio > worst[i].ratio:
                worst[i] = Verdict(rule, ratio, index=(b, kv), detail="(batch, kv head)")
    return [*worst, _sum_ds(case, x)] if case.sinks else worst


def _seen(case: Case) -> np.ndarray:
    """The number of keys that a row sees, (batch, head, row)."""
    begin, end = case.visible_ranges()
    seen = np.maximum(end - begin, 0)
    hidden = {name: tensor(case, name) for name in case.operands if name in ("bias", "mask")}
    whole = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv)
    if hidden:
        shown = np.array([case.sees(entry) for entry in range(case.batch)], dtype=bool)
        pairs = np.broadcast_to(np.reshape(shown, (case.batch, 1, *whole[2:])), whole)
        for name, array in hidden.items():
            pairs = pairs & (array if name == "mask" else array != -np.inf)
        seen = pairs.sum(axis=3)
    return np.broadcast_to(seen, whole[:3])


def _sum_ds(case: Case, x: dict[str, np.ndarray]) -> Verdict:
    """The gradient of every sink against the sum over its rows, from the saved out."""
    dout, out = (x[name].astype(np.float64) for name in ("dout", "out"))
    delta, size = (dout * out).sum(axis=3), np.abs(dout * out).sum(axis=3)
    expected = -(x["lost"] * delta).sum(axis=(0, 2))
    rows, wide = case.batch * case.seqlen_q, limits.UNIT[case.statistics.name]
    exponents = -np.log(x["lost"], where=x["lost"] > 0, out=np.zeros(x["lost"].shape))
    largest = max(np.abs(a[np.isfinite(a)]).max(initial=0) for a in (x["lse"], exponents))
    roots = math.sqrt(max(rows, 1)) + math.sqrt(case.head_dim_v) + largest
    bound = wide * (limits.OPERATIONS + roots) * (x["lost"] * size).sum(axis=(0, 2))
    magnitude = np.maximum(np.abs(expected), np.where(expected, limits.SMALLEST[case.sinks], 0))
    bound += limits.DEVIATIONS * limits.UNIT[case.sinks] * magnitude
    ratio = _over(x["dsinks"].astype(np.float64) - expected, bound)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    return Verdict("sum_ds", float(ratio.max(initial=0)))


_OF_KV = ("k", "v", "dk", "dv")


@dataclass
class _Group:
    """A kv head and its query heads, (head, row, dim): ratios of deviation to bound."""

    case: Case
    x: dict[str, np.ndarray]
    seen: np.ndarray  # keys of each row, (head, row)
    centred: bool  # whether the backend subtracts the keys' common part

    def __post_init__(self) -> None:
        self.x = {name: array.astype(np.float64) for name, array in self.x.items()}
        live = self.seen > 0
        self.dout = self.x["dout"] * live[:, :, None]
        terms = max(self.case.seqlen_q * self.case.group, self.case.seqlen_kv, 1)
        # P is about 1 / keys; if that is below the smallest number, it is rounded like that number.
        smallest = limits.SMALLEST[self.case.dtype]
        unit = limits.UNIT[self.case.dtype] * max(1, smallest * self.case.seqlen_kv)
        wide = limits.UNIT[self.case.statistics.name]
        roots = math.sqrt(terms) + math.sqrt(self.case.head_dim)
        lse = np.abs(self.x["lse"][live]).max(initial=0)
        self.drift = wide * (limits.OPERATIONS + roots + lse + limits.SUM_DRIFT * terms)
        self.rounding = limits.DEVIATIONS * math.sqrt(2) * unit
        self.several = limits.DEVIATIONS * wide * (limits.OPERATIONS + roots)

    def sum_dv(self) -> np.ndarray:
        """The columns of v. The bound: rounding of dv and of the P in it, drift of all of dO.

        With a single row, the dv of every key is that row of dO times a number of few bits. Such
        products are rounded in one direction more often than in the other, so errors add up.
        """
        kept = self.dout * (1 - self.x["lost"])[:, :, None]
        deviation = self.x["dv"].sum(axis=0) - kept.sum(axis=(0, 1))
        rounded = _root(self._rounded("dv"))
        bound = self.rounding * rounded + self.drift * self.dout.sum(axis=(0, 1))
        if np.count_nonzero(self.dout.any(axis=2)) == 1:
            bound += limits.UNIT[self.case.dtype] * self._rounded("dv").sum(axis=0)
        return _over(deviation, bound)

    def sum_dk(self) -> np.ndarray:
        """The columns of k. The bound: rounding of dk, of the dS in it, and of delta in every row.

        Rows of dS sum to the sink's part of delta, or to 0 without a sink. Under dropout the dS of
        dropped pairs has one sign, and so has what is lost of it below the smallest numbers. Rows
        that see the same single key have the same out, so their deltas have the same error.
        """
        x, smallest = self.x, limits.SMALLEST[self.case.dtype]
        in_delta = ((self.dout * x["out"]) ** 2).sum(axis=2).reshape(-1, 1)
        most = 1 / (1 - self.case.dropout_p)
        in_dp = (
            most**2
            * (self.dout**2).sum(axis=2).reshape(-1, 1)
            * (x["v"] ** 2).sum(axis=1).max(initial=0)
        )
        q = x["q"].reshape(-1, self.case.head_dim) * self.case.factor
        small = smallest * math.sqrt(self.case.seqlen_kv) * _root(q)  # of dS
        rounded = _root(self._rounded("dk")) + _root(q * np.sqrt(in_delta)) + small
        bound = self.rounding * rounded + self.several * _root(q * np.sqrt(in_dp))
        of_sinks = q * (x["lost"] * (self.dout * x["out"]).sum(axis=2)).reshape(-1, 1)
        bound += self.drift * np.abs(of_sinks).sum(axis=0)
        if self.case.dropout:
            of_out = np.abs(self.dout * x["out"]).sum(axis=2) * (self.seen == 1)
            bound += limits.UNIT[self.case.dtype] * (np.abs(q) * of_out.reshape(-1, 1)).sum(axis=0)
            bound += self._vanished("dk", np.ones(1)).sum(axis=0)
        return _over(x["dk"].sum(axis=0) - of_sinks.sum(axis=0), bound)

    def q_dq(self) -> np.ndarray:
        """One number. The bound: rounding of dq, of dk and of dS in both, drift of the whole."""
        of_q, of_k = self.x["q"] * self.x["dq"], self.x["k"] * self.x["dk"]
        rounded = [self.x[name] * self._rounded(f"d{name}") for name in "qk"]
        # dS below the smallest number: logits are of unit variance.
        pairs = self.case.group * self.case.seqlen_q * self.case.seqlen_kv
        rounded.append(limits.SMALLEST[self.case.dtype] * np.sqrt([pairs]))
        size = math.sqrt(sum((part**2).sum() for part in rounded))
        bound = (self.rounding + self.several) * size + self.drift * abs(of_q.sum())
        bound += sum(self._vanished(f"d{name}", self.x[name]).sum() for name in "qk")
        if self.centred:
            bound += self.rounding * self._of_delta()
        return _over(np.atleast_1d(of_q.sum() - of_k.sum()), np.atleast_1d(bound))

    def _of_delta(self) -> float:
        """Error of delta that may be in dk and not in dq, for a backend that centres the keys.

        The saved output is rounded, so delta errs, and every row of dS sums to that error instead
        of 0. Such a backend computes the sum and removes it from dq.
        """
        in_delta = ((self.dout * self.x["out"]) ** 2).sum(axis=2)
        of_rows = in_delta * (self.x["q"] ** 2).sum(axis=2)
        longest = (self.x["k"] ** 2).sum(axis=1).max(initial=0)
        return float(self.case.factor * math.sqrt(of_rows.sum() * longest))

    def _vanished(self, name: str, weights: np.ndarray) -> np.ndarray:
        """The most that is lost below the smallest numbers; all losses may have one sign."""
        lost = limits.UNIT[self.case.dtype] * limits.SMALLEST[self.case.dtype]
        return np.where(np.abs(self.x[name]) <= 2 * lost, lost * np.abs(weights), 0)

    def _rounded(self, name: str) -> np.ndarray:
        """Magnitudes to which the rounding of a result is proportional."""
        return np.maximum(np.abs(self.x[name]), limits.SMALLEST[self.case.dtype])


def _root(rows: np.ndarray) -> np.ndarray:
    return np.sqrt((rows**2).sum(axis=0))


def _over(deviation: np.ndarray, bound: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(deviation == 0, 0, np.abs(deviation) / bound)
