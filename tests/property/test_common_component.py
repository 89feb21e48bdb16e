"""If keys share a large component, gradients are as accurate as those of whole matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ..kit.case import Case
from ..kit.data import arrays
from ..kit.runners import RUNNERS, ApiRunner

Array = np.ndarray[Any, np.dtype[Any]]

#: Roundings of the sums in the products themselves, which no implementation avoids.
FLOOR = 8
NAMES = ("out", "dq", "dk", "dv")
HOST = [
    pytest.param(runner, id=f"numpy-{runner.algorithm}")
    for runner in RUNNERS.values()
    if runner.backend == "numpy"
]
#: The forward pass whose out and lse the backward pass is given.
FORWARD = ("same", "other", "whole")


@dataclass(frozen=True)
class Whole:
    """Attention and its gradients with whole matrices in one precision; heads first."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    p: Array  # (batch, query head, row, key)
    summed: dict[str, Array]  # the magnitude that each result sums

    @classmethod
    def of(cls, case: Case, x: dict[str, Array], dtype: Any) -> Whole:
        """Compute from the arrays of a case."""
        q, k, v, dout = (case.heads_first(n, x[n]).astype(dtype) for n in ("q", "k", "v", "dout"))
        k, v = (np.repeat(a, case.group, axis=1) for a in (k, v))
        scale = dtype(case.factor)
        scores = (q @ k.swapaxes(-1, -2)) * scale
        hidden = np.arange(case.seqlen_kv) >= case.visible()[:, None]
        scores[..., hidden] = -np.inf
        highest = scores.max(axis=-1, keepdims=True)
        highest[highest == -np.inf] = 0
        p = np.exp(scores - highest)
        total = p.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = (highest + np.log(total))[..., 0]
        p /= np.where(total == 0, 1, total)
        out = p @ v
        delta = (dout * out).sum(axis=-1, keepdims=True)
        if "dlse" in x:
            dlse = case.heads_first("dlse", x["dlse"]).astype(dtype)[..., None]
            delta = delta - np.where(total == 0, 0, dlse)
        ds = p * (dout @ v.swapaxes(-1, -2) - delta) * scale
        grads = ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
        sizes = (p * (np.abs(dout) @ np.abs(v).swapaxes(-1, -2) + np.abs(delta))) * scale
        summed = {
            "out": p @ np.abs(v),
            "dq": np.abs(ds) @ np.abs(k) + sizes @ np.abs(k - k.mean(axis=2, keepdims=True)),
            "dk": sizes.swapaxes(-1, -2) @ np.abs(q),
            "dv": p.swapaxes(-1, -2) @ np.abs(dout),
        }
        grouped = (case.batch, case.heads_kv, case.group, case.seqlen_kv, -1)
        dk, dv = (a.reshape(grouped).sum(axis=2) for a in grads[1:])
        summed |= {n: summed[n].reshape(grouped).sum(axis=2) for n in ("dk", "dv")}
        return cls(out, lse, grads[0], dk, dv, p, summed)

    def of_given_out(self, case: Case, x: dict[str, Array], given: Array) -> float:
        """Norm of the error in dK from the errors of a saved output, from which delta is made.

        Whole matrices make both from the same scores, so their errors partly cancel.
        """
        dtype = self.out.dtype
        q, dout, given = (
            case.heads_first(n, a).astype(dtype)
            for n, a in (("q", x["q"]), ("dout", x["dout"]), ("out", given))
        )
        error = (dout * (given - self.out)).sum(axis=-1, keepdims=True)
        dk = (self.p * error * dtype.type(case.factor)).swapaxes(-1, -2) @ q
        grouped = (case.batch, case.heads_kv, case.group, case.seqlen_kv, -1)
        return float(np.linalg.norm(dk.reshape(grouped).sum(axis=2)))


@st.composite
def problems(draw: st.DrawFn, dtype: str) -> tuple[Case, float, float, float]:
    """Draw a case, the size of the keys' common part, the share of columns with it, and q's."""
    heads_kv = draw(st.integers(1, 2))
    causal = draw(st.booleans())
    case = Case(
        heads_q=heads_kv * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        seqlen_q=draw(st.integers(16, 300)),
        seqlen_kv=draw(st.integers(16, 700)),
        head_dim=draw(st.sampled_from((1, 5, 16, 64))),
        head_dim_v=draw(st.sampled_from((5, 64))),
        dtype=dtype,
        causal=causal,
        q_offset=draw(st.sampled_from((None, 0))) if causal else None,
        seed=draw(st.integers(0, 2**16)),
    )
    size = draw(st.floats(0, np.log10(3e4))), draw(st.sampled_from((-1, 1)))
    return (
        case,
        size[1] * 10 ** size[0],
        draw(st.sampled_from((0.0, 0.5, 1.0))),
        draw(st.sampled_from((1.0, 8.0))),
    )


def _long_sums(dtype: str) -> tuple[Case, float, float, float]:
    """Scores with 64 terms, where whole matrices round only about five at their full size."""
    case = Case(heads_q=3, seqlen_q=24, seqlen_kv=16, head_dim=64, head_dim_v=5, dtype=dtype)
    return replace(case, causal=True), -29427.27176209282, 0.0, 1.0


def _few_rows(dtype: str) -> tuple[Case, float, float, float]:
    """Saved outputs err more than the backward pass, whose errors lack the common part."""
    case = Case(seqlen_q=16, seqlen_kv=16, head_dim=1, dtype=dtype, causal=True, seed=3143)
    return case, 1604.7080140922033, 0.0, 1.0


def shared(case: Case, size: float, share: float, q_size: float) -> dict[str, Array]:
    """Inputs whose keys have ``size`` added to their first component, or to a share of all."""
    x = {n: a.copy() for n, a in arrays(case, "q", "k", "v", "dout", "dlse").items()}
    if case.seed % 2:
        del x["dlse"]
    columns = slice(0, max(1, int(share * case.head_dim)))
    x["k"][..., columns] += case.storage.type(size)
    x["q"][..., columns] *= case.storage.type(q_size)
    return x


def saved(
    case: Case, x: dict[str, Array], runner: ApiRunner, forward: str, whole: Whole
) -> tuple[Array, Array]:
    """The saved out and lse that the backward pass gets, in the case's layout."""
    if forward == "whole":
        return case.in_layout(whole.out).astype(case.storage), np.ascontiguousarray(whole.lse)
    others = {"fa1": "fa2", "fa2": "fa1"}
    if forward == "other":
        runner = replace(
            runner, algorithm=others[runner.algorithm], options=(("blocks", (24, 40)),)
        )
    return runner.forward(case, x["q"], x["k"], x["v"])


def norm_ratio(
    got: Array, wanted: Any, summed: Any, eps: float, plain: Any, given: float = 0
) -> float:
    """Error of ``got`` relative to twice the plain one's, plus roundings of the sums.

    ``given`` is the part of the error that comes from errors of the input arrays.
    """
    allowed = 2 * np.linalg.norm(plain - wanted) + FLOOR * eps * np.linalg.norm(summed) + given
    return float(np.linalg.norm(got - wanted) / allowed) if allowed else 0.0


@pytest.mark.parametrize("forward", FORWARD)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("runner", HOST)
def test_errors_are_at_most_twice_those_of_whole_matrices(
    runner: ApiRunner, dtype: str, forward: str
) -> None:
    precise = np.float64 if dtype == "float32" else np.longdouble

    @settings(max_examples=max(4, settings.default.max_examples // 2))
    @given(problems(dtype))
    @example(_long_sums(dtype))
    @example(_few_rows(dtype))
    def run(drawn: tuple[Case, float, float, float]) -> None:
        case, *sizes = drawn
        if dtype == "float64":
            case = replace(
                case, seqlen_q=min(case.seqlen_q, 60), seqlen_kv=min(case.seqlen_kv, 200)
            )
        x = shared(case, *sizes)
        truth, plain = Whole.of(case, x, precise), Whole.of(case, x, case.storage.type)
        out, lse = saved(case, x, runner, forward, plain)
        given_to = (x["dout"], x["q"], x["k"], x["v"], out, lse)
        grads = runner.backward(case, *given_to, x.get("dlse"))
        for name, array in zip(NAMES, (out, *grads), strict=True):
            got = case.heads_first(name, array).astype(precise)
            eps = float(np.finfo(case.storage).eps)
            wanted, whole = getattr(truth, name), getattr(plain, name)
            # dQ gets no such allowance: delta's error times a common component would spoil dQ most.
            given = truth.of_given_out(case, x, out) if name == "dk" else 0
            ratio = norm_ratio(got, wanted, truth.summed[name], eps, whole, given)
            assert ratio <= 1, f"{name}: {ratio:.3g} of what is allowed; {case.repro} {sizes}"

    run()
