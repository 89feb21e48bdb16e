"""Calls with features of this folder, and attention written out in float64 to judge them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.dispatch import call

__all__ = ["DTYPES", "Array", "TenantCall", "both_passes", "judge"]

Array = np.ndarray[Any, np.dtype[Any]]

#: The NumPy type, and the error allowed, as a fraction of a tensor's largest number.
DTYPES: dict[str, tuple[Any, float]] = {
    "float16": (np.float16, 4e-3),
    "bfloat16": (ml_dtypes.bfloat16, 3e-2),
    "float32": (np.float32, 1e-5),
    "float64": (np.float64, 1e-13),
}


@dataclass(frozen=True)
class TenantCall:
    """Sizes, keywords and features of a call; its arrays follow from a seed."""

    batch: int = 2
    heads_q: int = 4
    heads_kv: int = 2
    seqlen_q: int = 37
    seqlen_kv: int = 53
    head_dim: int = 8
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    q_offset: int | None = None
    sinks: bool = False
    parity: int | None = None
    tilt: float | None = None
    softcap: float | None = None
    shift: float = 0.0  # common to all keys
    dead: float | None = None  # the content of q and dout for queries that see no key
    seed: int = 0

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords that are not arrays and not None."""
        every = {"causal": self.causal, "window_size": self.window, "q_offset": self.q_offset}
        every |= {"parity": self.parity, "tilt": self.tilt, "softcap": self.softcap}
        return {name: value for name, value in every.items() if value is not None}

    def inputs(self) -> dict[str, Array]:
        """The arrays q, k and v, then the arrays of the features."""
        rng = np.random.default_rng(self.seed)
        kv = (self.batch, self.seqlen_kv, self.heads_kv, self.head_dim)
        x = {"q": self._like_q(rng), "k": rng.standard_normal(kv), "v": rng.standard_normal(kv)}
        x["k"] = x["k"] + self.shift
        x["q"] = self._spoilt(x["q"])
        x = {name: array.astype(DTYPES[self.dtype][0]) for name, array in x.items()}
        wide = np.float64 if self.dtype == "float64" else np.float32
        if self.sinks:
            x["sinks"] = rng.standard_normal(self.heads_q).astype(wide)
        if self.tilt is not None:
            x["weights"] = rng.uniform(-1, 1, (self.batch, self.heads_q)).astype(wide)
        return x

    def cotangents(self) -> tuple[Array, Array]:
        """dout and dlse."""
        rng = np.random.default_rng(self.seed + 1)
        dlse = rng.standard_normal((self.batch, self.heads_q, self.seqlen_q))
        wide = np.float64 if self.dtype == "float64" else np.float32
        dout = self._spoilt(self._like_q(rng))
        return dout.astype(DTYPES[self.dtype][0]), dlse.astype(wide)

    def _like_q(self, rng: np.random.Generator) -> Array:
        shape = (self.batch, self.seqlen_q, self.heads_q, self.head_dim)
        drawn: Array = rng.standard_normal(shape)
        return drawn

    def _spoilt(self, rows: Array) -> Array:
        if self.dead is not None:
            rows[:, ~self.visible().any(axis=1)] = self.dead
        return rows

    def visible(self) -> Array:
        """Which keys a query sees, (seqlen_q, seqlen_kv)."""
        i, j = np.arange(self.seqlen_q)[:, None], np.arange(self.seqlen_kv)
        offset = self.seqlen_kv - self.seqlen_q if self.q_offset is None else self.q_offset
        left, right = self.window or (None, None)
        seen = np.ones((self.seqlen_q, self.seqlen_kv), bool)
        if self.causal:
            seen &= j <= i + offset
        if left is not None:
            seen &= j >= i + offset - left
        if right is not None:
            seen &= j <= i + offset + right
        if self.parity is not None:
            seen &= j % 2 == self.parity
        return seen

    def without(self, *names: str) -> TenantCall:
        """The same call without some of its features."""
        plain: dict[str, Any] = {"parity": None, "tilt": None, "window": None, "sinks": False}
        plain["softcap"] = None
        return replace(self, **{name: plain[name] for name in names})


def both_passes(
    given: TenantCall,
    place: Callable[[Array], Any] = lambda array: array,
    run: Callable[..., dict[str, Any]] = call,
    **more: Any,
) -> dict[str, Any]:
    """The library's results, by the path of the public functions.

    ``place`` puts an array where the call is computed, ``run`` runs a pass, and ``more`` are
    further keywords.
    """
    keywords = {**given.keywords, **more}
    inputs = {name: place(array) for name, array in given.inputs().items()}
    results = run("forward", inputs, {**keywords, "return_lse": True})
    dout, dlse = map(place, given.cotangents())
    saved = {"dout": dout, "dlse": dlse, **results}
    wrt = ("q", "k", "v", "sinks") if given.sinks else ("q", "k", "v")
    return {**results, **run("backward", {**saved, **inputs}, {**keywords, "wrt": wrt})}


def judge(given: TenantCall) -> dict[str, Array]:
    """The same results in float64, from the whole matrix of scores; ``dead`` is ignored."""
    given = replace(given, dead=None)
    x = {name: array.astype(np.float64) for name, array in given.inputs().items()}
    dout, dlse = (array.astype(np.float64) for array in given.cotangents())
    group = given.heads_q // given.heads_kv
    k, v = (np.repeat(x[name], group, axis=2) for name in "kv")
    scale = 1 / np.sqrt(given.head_dim)
    z = np.einsum("bihd,bjhd->bhij", x["q"], k) * scale
    i, j = np.arange(given.seqlen_q)[:, None], np.arange(given.seqlen_kv)
    slope: Any = 1.0
    if given.softcap is not None:
        slope = 1 - np.tanh(z / given.softcap) ** 2
        z = given.softcap * np.tanh(z / given.softcap)
    if given.tilt is not None:
        z += given.tilt * x["weights"][:, :, None, None] * (i - j)
    z[:, :, ~given.visible()] = -np.inf
    sinks = x.get("sinks", np.full(given.heads_q, -np.inf))[:, None]
    with np.errstate(all="ignore"):
        lse = np.logaddexp(np.logaddexp.reduce(z, axis=-1), sinks)
        p = np.where(z == -np.inf, 0, np.exp(z - lse[..., None]))
        of_sinks = np.where(sinks == -np.inf, 0, np.exp(sinks - lse))
    out = np.einsum("bhij,bjhd->bihd", p, v)
    delta = np.einsum("bihd,bihd->bhi", dout, out) - dlse
    ds = p * (np.einsum("bihd,bjhd->bhij", dout, v) - delta[..., None])
    dq = np.einsum("bhij,bjhd->bihd", ds * slope, k) * scale
    dk = np.einsum("bhij,bihd->bjhd", ds * slope, x["q"]) * scale
    dv = np.einsum("bhij,bihd->bjhd", p, dout)
    dk, dv = (g.reshape(*x["k"].shape[:3], group, -1).sum(axis=3) for g in (dk, dv))
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    if given.sinks:
        found["dsinks"] = (-of_sinks * delta).sum(axis=(0, 2))
    return found
