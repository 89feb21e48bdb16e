"""Calls with used lengths, and their expected results from the reference, entry by entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from cuflash import reference
from cuflash.planning.plan import Algorithm

from .limits import OF_LARGEST

__all__ = ["ROWS", "Row"]

_Arrays = dict[str, Any]
#: Whole entries, empty ones, tails inside a tile and at its end, and lengths that must be clamped.
_USED = ((300, 400), (0, 400), (129, 0), (64, 128), (-3, 7), (999, 201), (1, 1), (200, 64))


@dataclass(frozen=True)
class Row:
    """A call with used lengths and other features."""

    days_of_turn: ClassVar[int] = 7  # a whole run on the emulator covers the row once in so many
    algorithm: Algorithm
    dtype: str
    given: tuple[str, ...] = ("seqused_q", "seqused_kv")
    lengths: tuple[int, int] = (300, 400)
    heads: tuple[int, int] = (2, 1)
    width: int = 64
    architecture: str = "90"
    deterministic: bool = False
    used: tuple[tuple[int, int], ...] = _USED
    blocks: tuple[int, int] | None = None
    options: _Arrays = field(default_factory=dict)  # keywords of the call
    #: Names of arrays of features.
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        words = [self.algorithm, self.dtype, f"d{self.width}", "ordered" * self.deterministic]
        words += [*(self.given if len(self.given) == 1 else ()), self.architecture]
        words += ["x".join(map(str, self.blocks or ())), *self.more]
        words += [f"{name}-{value}".replace(" ", "") for name, value in self.options.items()]
        return "-".join(filter(None, words))

    @property
    def batch(self) -> int:
        return len(self.used)

    def arrays(self) -> _Arrays:
        """Random numbers; rows that do not count are NaN."""
        random = np.random.default_rng(list(self.name.encode()))
        dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        (rows, keys), (heads_q, heads_kv) = self.lengths, self.heads
        shapes = {"q": (rows, heads_q), "k": (keys, heads_kv), "v": (keys, heads_kv)}
        shapes |= {"dout": (rows, heads_q)}
        made: _Arrays = {
            name: random.standard_normal((self.batch, *shape, self.width)).astype(dtype)
            for name, shape in shapes.items()
        }
        compute = np.float64 if self.dtype == "float64" else np.float32
        pairs = (self.batch, heads_q, rows, keys)
        features = {
            "alibi_slopes": random.random((self.batch, heads_q)).astype(compute) / 16,
            "sinks": random.standard_normal(heads_q).astype(compute),
            "bias": random.standard_normal(pairs).astype(dtype),
            "mask": random.random(pairs) < 0.5,
        }
        made |= {name: features[name] for name in self.more}
        for b, (q, kv) in enumerate(self.counts()):
            for name in ("q", "dout"):
                made[name][b, q:] = np.nan
            for name in ("k", "v"):
                made[name][b, kv:] = np.nan
            if "bias" in made:
                made["bias"][b, :, q:] = np.nan
                made["bias"][b, :, :, kv:] = np.nan
        used = np.array(self.used, np.int32)
        columns = {"seqused_q": used[:, 0], "seqused_kv": used[:, 1]}
        return made | {name: np.ascontiguousarray(columns[name]) for name in self.given}

    def counts(self) -> list[tuple[int, int]]:
        """How many queries and keys of each entry count."""
        named = [name in self.given for name in ("seqused_q", "seqused_kv")]
        return [
            tuple(  # type: ignore[misc]
                min(max(used, 0), whole) if is_given else whole
                for used, whole, is_given in zip(pair, self.lengths, named, strict=True)
            )
            for pair in self.used
        ]

    def _of_entry(self, x: _Arrays, b: int) -> tuple[_Arrays, tuple[int, int]]:
        """The reference's arguments for one entry."""
        q, kv = self.counts()[b]
        given: _Arrays = {"q": x["q"][b : b + 1, :q], "k": x["k"][b : b + 1, :kv]}
        given |= {"v": x["v"][b : b + 1, :kv]}
        cut = {"alibi_slopes": x.get("alibi_slopes"), "bias": x.get("bias"), "mask": x.get("mask")}
        given |= {
            name: array[b : b + 1, :, :q, :kv] if array.ndim == 4 else array[b : b + 1]
            for name, array in cut.items()
            if array is not None
        }
        if "sinks" in x:
            given["sinks"] = x["sinks"]
        return {**given, **self.options}, (q, kv)

    def expected(self, x: _Arrays) -> _Arrays:
        """Every result in float64, entry by entry; 0 or minus infinity for the other rows."""
        heads = self.heads[0]
        rows = np.zeros((self.batch, self.lengths[0], heads, self.width))
        keys = np.zeros((self.batch, self.lengths[1], self.heads[1], self.width))
        found = {"out": rows, "lse": np.full((self.batch, heads, self.lengths[0]), -np.inf)}
        found |= {"dq": rows.copy(), "dk": keys, "dv": keys.copy()}
        if "bias" in x:
            found["dbias"] = np.zeros(x["bias"].shape)
        if "alibi_slopes" in x:
            found["dalibi_slopes"] = np.zeros(x["alibi_slopes"].shape)
        if "sinks" in x:
            found["dsinks"] = np.zeros(heads)
        for b in range(self.batch):
            given, (q, kv) = self._of_entry(x, b)
            out, lse = reference.attention(**given)
            found["out"][b, :q], found["lse"][b, :, :q] = out[0], lse[0]
            dout = x["dout"][b : b + 1, :q]
            dlse = x["dlse"][b : b + 1, :, :q] if "dlse" in x else None
            dq, dk, dv, *others = reference.attention_backward(dout, dlse=dlse, **given)
            found["dq"][b, :q], found["dk"][b, :kv], found["dv"][b, :kv] = dq[0], dk[0], dv[0]
            names = [n for n in ("alibi_slopes", "bias", "sinks") if n in given]
            for name, grad in zip(names, others, strict=True):
                if name == "bias":
                    found["dbias"][b, :, :q, :kv] = grad[0]
                elif name == "sinks":
                    found["dsinks"] += grad
                else:
                    found["dalibi_slopes"][b] = grad[0]
        return found

    def spoil(self, saved: _Arrays) -> None:
        """Put NaN into the rows that a forward pass wrote for queries that do not count."""
        for b, (q, _) in enumerate(self.counts()):
            saved["out"][b, q:] = np.nan
            saved["lse"][b, :, q:] = np.nan

    def wrt(self, x: _Arrays) -> tuple[str, ...]:
        """The arrays with gradients."""
        return ("q", "k", "v", *(n for n in ("alibi_slopes", "bias", "sinks") if n in x))

    def check(self, found: _Arrays, expected: _Arrays) -> None:
        """Compare results with the truth, relative to the largest number of each."""
        for name, true in expected.items():
            got = np.asarray(found[name]).astype(np.float64)
            finite = np.isfinite(true)
            assert ((got == true) | finite).all(), f"{self.name}: {name}, where it is not finite"
            error = np.abs(np.where(finite, got - np.where(finite, true, 0), 0)).max(initial=0)
            largest = np.abs(true[finite]).max(initial=1)
            limit = OF_LARGEST[self.dtype] * largest
            assert error <= limit, f"{self.name}: {name} is off by {error:.3g} of {limit:.3g}"
            exact = found[name][true == 0] if name in ("out", "dq", "dk", "dv", "dbias") else ()
            assert not np.any(np.isnan(np.asarray(exact, np.float64))), f"{self.name}: {name}"


_CAUSAL = {"causal": True}
_WINDOW = {"window_size": (90, 40)}
_LEFT = {"window_size": (50, None)}
_FEW = ((300, 400), (129, 0), (64, 130), (0, 3))
ROWS = (
    Row("fa1", "float16"),
    Row("fa1", "float32", options=_CAUSAL),
    Row("fa1", "float16", options=_WINDOW, more=("sinks",)),
    Row("fa1", "float64", ("seqused_kv",), heads=(4, 2), options={"causal": True, "q_offset": 5}),
    Row("fa2", "float16"),
    Row("fa2", "bfloat16", options=_CAUSAL, architecture="80"),
    Row("fa2", "float16", options=_WINDOW),
    Row("fa2", "float32", ("seqused_q",), options=_LEFT),
    Row("fa2", "float64", options=_CAUSAL, more=("alibi_slopes", "sinks")),
    Row("fa1", "float16", more=("alibi_slopes", "bias")),
    Row("fa2", "float16", more=("alibi_slopes", "bias")),
    Row("fa3", "float16", more=("alibi_slopes", "bias")),
    Row("fa2", "float16", deterministic=True, options=_CAUSAL),
    Row("fa2", "float16", width=256, options=_CAUSAL, used=_FEW),
    Row("fa2", "float16", options=_CAUSAL, more=("bias",), used=_FEW),
    Row("fa2", "float32", more=("mask",), used=_FEW),
    Row("fa3", "float16"),
    Row("fa3", "bfloat16", options=_CAUSAL, heads=(4, 2)),
    Row("fa3", "float16", ("seqused_kv",), options=_WINDOW),
    Row("fa3", "float16", ("seqused_q",), options=_LEFT),
    Row("fa3", "float16", options={"causal": True, "q_offset": -20}),
    Row("fa3", "float16", options=_CAUSAL, deterministic=True),
    Row("fa3", "float16", width=96, options=_CAUSAL),
    Row("fa3", "bfloat16", width=128, options=_CAUSAL, heads=(4, 1)),
    Row("fa3", "float16", width=128, deterministic=True),
    Row("fa3", "float16", width=192, used=_FEW),
    Row("fa3", "float16", width=256, options=_CAUSAL, used=_FEW),
    Row("fa3", "float16", options=_CAUSAL, more=("alibi_slopes", "sinks")),
    Row("fa3", "float16", more=("bias",), options=_CAUSAL, used=_FEW),
    Row("fa3", "float16", more=("mask",), used=_FEW),
)
