"""Tiled attention as a kernel does it, in NumPy, with bugs that can be planted.

It rounds where a 16-bit kernel rounds (P, dS, the results) and accumulates in float32 (float64 for
float64), tile after tile. P below float32's normal numbers is flushed to zero, as with CuPy's
-ftz=true. The tests of the kit use it: the kit must accept it without a bug and reject it with one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.kit.case import Case
from tests.kit.data import tensor

__all__ = ["BUGS", "Emulation"]

#: The bugs, and their meaning.
BUGS = {
    "no_rescale_out": "the accumulator is not rescaled when the maximum moves",
    "no_rescale_sum": "the row sum is not rescaled when the maximum moves",
    "drop_diagonal": "the causal mask hides one key too many",
    "leak_one": "the causal mask shows one future key",
    "tail_unmasked": "keys beyond the length count, with score 0",
    "top_left": "the causal mask ignores q_offset",
    "skip_last_tile": "the last tile of keys is left out",
    "stale_stage": "the third tile of keys meets the values of the second",
    "swapped_k_columns": "two groups of 8 columns of K trade places",
    "swapped_v_rows": "two groups of 8 rows of V trade places",
    "scale_2_percent": "the forward scale is 2 % too large",
    "sentinel": "masked scores are -5e4, not minus infinity",
    "lse_log2": "lse is in units of log 2",
    "head_modulo": "query head h reads kv head h % heads_kv",
    "last_rows_zero": "the last 8 rows of the output are not stored",
    "delta_zero": "delta is left out",
    "delta_next_row": "delta is that of the row above",
    "dk_unscaled": "dk lacks the scale",
    "dq_unscaled": "dq lacks the scale",
    "dq_lost_tile": "the last tile of keys gives nothing to dq",
    "dq_twice_tile": "the first tile of keys is added to dq twice",
    "skip_q_tile": "the last tile of queries gives nothing to dk and dv",
    "gradient_unmasked": "the backward pass does not mask the last tile of keys",
    "group_overwritten": "dk and dv hold the last query head of a group, not the sum",
    "dv_bias": "dO is 1 % too large inside dv",
    "window_end": "a window shows one key too many on its right",
    "window_begin": "a window hides one key too many on its left",
    "sink_twice": "the sink's weight is doubled",
    "sink_next_head": "a head has the sink of the next one",
    "sink_output": "the output is not scaled down by what the sink weighs",
    "sink_log2": "the sink is taken for a number in units of log 2",
    "dsinks_sign": "the gradient of the sinks has the wrong sign",
    "dsinks_first_tile": "the gradient of the sinks is that of the first tile of queries",
}


@dataclass(frozen=True)
class Emulation:
    """A runner: ``forward`` and ``backward`` take and return arrays in the case's layout."""

    bug: str = ""
    block_q: int = 32
    block_kv: int = 48
    truncation: float = 0.0  # dP is this fraction too small, as when tensor cores truncate sums

    def tiles(self, case: Case, operation: str = "forward") -> tuple[int, int]:
        return self.block_q, self.block_kv

    def forward(
        self,
        case: Case,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        sinks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        sinks = self._sinks(case, sinks)
        compute = case.statistics
        q, k, v = (
            case.heads_first(n, x).astype(compute) for n, x in zip("qkv", (q, k, v), strict=True)
        )
        out = np.zeros((*q.shape[:3], v.shape[3]), case.storage)
        lse = np.zeros(q.shape[:3], compute)
        with np.errstate(all="ignore"):
            for b, h in np.ndindex(case.batch, case.heads_q):
                kv = self._kv_head(case, h)
                given = q[b, h], k[b, kv], v[b, kv], sinks[h]
                out[b, h], lse[b, h] = self._forward_head(case, *given)
        return case.in_layout(out), lse.reshape(case.shape("lse"))

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
        sinks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        compute = case.statistics
        names = ("dout", "q", "k", "v", "out")
        given = zip(names, (dout, q, k, v, out), strict=True)
        x = {name: case.heads_first(name, a).astype(compute) for name, a in given}
        rows = (case.batch, case.heads_q, case.seqlen_q)
        lse = lse.reshape(rows)
        dlse = np.zeros(rows, compute) if dlse is None else dlse.reshape(rows)
        dq, dk, dv = (np.zeros_like(x[name]) for name in "qkv")
        sinks, dsinks = self._sinks(case, sinks), np.zeros(case.heads_q, compute)
        with np.errstate(all="ignore"):
            for b, h in np.ndindex(case.batch, case.heads_q):
                kv = self._kv_head(case, h)
                heads = {n: a[b, kv if n in "kv" else h] for n, a in x.items()}
                delta = (heads["dout"] * heads["out"]).sum(axis=1) - dlse[b, h]
                dq[b, h], dk_head, dv_head = self._backward_head(case, heads, lse[b, h], delta)
                if self.bug == "group_overwritten":
                    dk[b, kv], dv[b, kv] = 0, 0
                dk[b, kv] += dk_head
                dv[b, kv] += dv_head
                weight = np.exp(sinks[h] - lse[b, h]) if sinks[h] > -np.inf else 0 * delta
                weight *= 1 if self.bug == "dsinks_sign" else -1
                rows = self.block_q if self.bug == "dsinks_first_tile" else case.seqlen_q
                dsinks[h] += (weight * delta)[:rows].sum()
            grads = tuple(case.in_layout(x.astype(case.storage)) for x in (dq, dk, dv))
            return (*grads, dsinks.astype(case.dtype_of("sinks"))) if case.sinks else grads

    def _sinks(self, case: Case, sinks: np.ndarray | None) -> np.ndarray:
        """The sinks in the compute type, changed by the bug; minus infinity if there are none."""
        if not case.sinks:
            return np.full(case.heads_q, -np.inf, case.statistics)
        found = (tensor(case, "sinks") if sinks is None else sinks).astype(case.statistics)
        found = np.roll(found, -1) if self.bug == "sink_next_head" else found
        found = found * (np.log(2) if self.bug == "sink_log2" else 1)
        return (found + (np.log(2) if self.bug == "sink_twice" else 0)).astype(case.statistics)

    def _kv_head(self, case: Case, h: int) -> int:
        return h % case.heads_kv if self.bug == "head_modulo" else h // case.group

    def _visible(self, case: Case, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        seen = np.full((i.size, j.size), True)
        left, right = case.sides
        own = i[:, None] + case.offset
        if left is not None:
            seen &= j >= own - left + (self.bug == "window_begin")
        if right is not None:
            seen &= j <= own + right + (self.bug == "window_end")
        if self.bug != "tail_unmasked":
            seen &= j < case.seqlen_kv
        if case.causal:
            offset = 0 if self.bug == "top_left" else case.offset
            offset += {"drop_diagonal": -1, "leak_one": 1}.get(self.bug, 0)
            seen &= j <= i[:, None] + offset
        return seen

    def _forward_head(
        self, case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray, sink: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        out = np.zeros((case.seqlen_q, v.shape[1]), q.dtype)
        lse = np.full(case.seqlen_q, -np.inf, q.dtype)
        for start in range(0, case.seqlen_q, self.block_q):
            rows = slice(start, min(start + self.block_q, case.seqlen_q))
            out[rows], lse[rows] = self._forward_tile(case, rows, q[rows], k, v, sink)
        if self.bug == "last_rows_zero":
            out[-8:] = 0
        return out, lse / np.log(2).astype(q.dtype) if self.bug == "lse_log2" else lse

    def _forward_tile(
        self,
        case: Case,
        rows: slice,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        sink: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        hidden = q.dtype.type(-5e4 if self.bug == "sentinel" else -np.inf)
        top = np.full(len(q), hidden)
        total, acc = np.zeros(len(q), q.dtype), np.zeros((len(q), v.shape[1]), q.dtype)
        scale = q.dtype.type(case.factor * (1.02 if self.bug == "scale_2_percent" else 1))
        starts = list(range(0, case.seqlen_kv, self.block_kv))
        if self.bug == "skip_last_tile" and len(starts) > 1:
            starts.pop()
        for number, start in enumerate(starts):
            j = np.arange(start, start + self.block_kv)
            s = scale * (q @ self._load("k", k, start).T)
            s = np.where(self._visible(case, np.arange(rows.start, rows.stop), j), s, hidden)
            new_top = np.maximum(top, s.max(axis=1))
            base = np.where(np.isneginf(new_top), 0, new_top)
            alpha = np.exp(top - base)
            p = self._flushed(np.exp(s - base[:, None]))
            stage = starts[1] if self.bug == "stale_stage" and number == 2 else start
            acc = (1 if self.bug == "no_rescale_out" else alpha[:, None]) * acc
            acc = acc + self._rounded(case, p) @ self._load("v", v, stage)
            total = (1 if self.bug == "no_rescale_sum" else alpha) * total + p.sum(axis=1)
            top = new_top
        if sink > -np.inf:
            raised = np.maximum(top, sink)
            keep = np.exp(top - raised)
            if self.bug == "sink_output":
                acc = acc / np.where(total == 0, 1, total)[:, None]
            total, top = total * keep + np.exp(sink - raised), raised
            acc = (total if self.bug == "sink_output" else keep)[:, None] * acc
        dead = total == 0
        safe = np.where(dead, 1, total)
        return acc / safe[:, None], np.where(dead, -np.inf, top + np.log(safe))

    def _backward_head(
        self, case: Case, x: dict[str, np.ndarray], lse: np.ndarray, delta: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dq, dk, dv = (np.zeros_like(x[name]) for name in "qkv")
        delta = {"delta_zero": 0 * delta, "delta_next_row": np.roll(delta, 1)}.get(self.bug, delta)
        scale = q_scale = k_scale = x["q"].dtype.type(case.factor)
        q_scale = 1 if self.bug == "dq_unscaled" else q_scale
        k_scale = 1 if self.bug == "dk_unscaled" else k_scale
        last_q = (case.seqlen_q - 1) // self.block_q * self.block_q
        last_kv = (case.seqlen_kv - 1) // self.block_kv * self.block_kv
        for start in range(0, case.seqlen_kv, self.block_kv):
            keys = slice(start, min(start + self.block_kv, case.seqlen_kv))
            k, v = x["k"][keys], x["v"][keys]
            unmasked = self.bug == "gradient_unmasked" and start == last_kv
            for first in range(0, case.seqlen_q, self.block_q):
                rows = slice(first, min(first + self.block_q, case.seqlen_q))
                i, j = np.arange(rows.start, rows.stop), np.arange(keys.start, keys.stop)
                base = np.where(np.isneginf(lse[rows]), 0, lse[rows])[:, None]
                p = self._flushed(np.exp(scale * (x["q"][rows] @ k.T) - base))
                p = p if unmasked else np.where(self._visible(case, i, j), p, 0)
                dp = (x["dout"][rows] @ v.T) * x["q"].dtype.type(1 - self.truncation)
                ds = self._rounded(case, p * (dp - delta[rows, None]))
                times = 2 if self.bug == "dq_twice_tile" and start == 0 else 1
                times = 0 if self.bug == "dq_lost_tile" and 0 < start == last_kv else times
                dq[rows] += times * q_scale * (ds @ k)
                if self.bug == "skip_q_tile" and 0 < first == last_q:
                    continue
                dk[keys] += k_scale * (ds.T @ x["q"][rows])
                bias = x["q"].dtype.type(1.01 if self.bug == "dv_bias" else 1)
                dv[keys] += self._rounded(case, p).T @ self._rounded(case, bias * x["dout"][rows])
        return dq, dk, dv

    def _flushed(self, values: np.ndarray) -> np.ndarray:
        smallest = np.finfo(np.float32).tiny if values.dtype == np.float32 else 0
        return np.where(values < smallest, values.dtype.type(0), values)

    def _rounded(self, case: Case, values: np.ndarray) -> np.ndarray:
        return values.astype(case.storage).astype(values.dtype)

    def _load(self, name: str, rows: np.ndarray, start: int) -> np.ndarray:
        """A tile of K or V, padded with zeros; the bugs of its swizzle swap rows or columns."""
        tile = np.zeros((self.block_kv, rows.shape[1]), rows.dtype)
        part = rows[start : start + self.block_kv]
        tile[: len(part)] = part
        if self.bug == f"swapped_{name}_columns":
            tile[:, :16] = np.roll(tile[:, :16], 8, axis=1)
        if self.bug == f"swapped_{name}_rows":
            tile[8:24] = np.roll(tile[8:24], 8, axis=0)
        return tile
