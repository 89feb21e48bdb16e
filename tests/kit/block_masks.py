"""Calls with a block mask, and their expected results from the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from cuflash import BlockMask, reference
from cuflash.planning.plan import Algorithm

from .limits import OF_LARGEST

__all__ = ["LEFT_OUT", "ROWS", "Row"]

_Arrays = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A call with a block mask and other features."""

    days_of_turn: ClassVar[int] = 7  # the emulator has its turn once in so many days
    algorithm: Algorithm
    dtype: str
    block: tuple[int, int]
    lengths: tuple[int, int] = (300, 400)
    heads: tuple[int, int] = (2, 1)
    width: int = 64
    axes: str = "1h"  # batch and head axes of the blocks
    batch: int = 1
    shown: float = 0.4
    architecture: str = "90"
    deterministic: bool = False
    more: _Arrays = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [self.algorithm, self.dtype, "x".join(map(str, self.block)), f"d{self.width}"]
        words += ["x".join(map(str, self.lengths)), self.axes, "ordered" * self.deterministic]
        words += [self.architecture, *self.more]
        return "-".join(filter(None, words))

    def arrays(self) -> _Arrays:
        random = np.random.default_rng(list(self.name.encode()))
        dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype
        (rows, keys), (heads_q, heads_kv) = self.lengths, self.heads
        shapes = {"q": (rows, heads_q), "k": (keys, heads_kv), "v": (keys, heads_kv)}
        shapes |= {"dout": (rows, heads_q)}
        made = {
            name: random.standard_normal((self.batch, *shape, self.width)).astype(dtype)
            for name, shape in shapes.items()
        }
        blocks = [-(-n // b) for n, b in zip(self.lengths, self.block, strict=True)]
        own = (self.batch if "b" in self.axes else 1, heads_q if "h" in self.axes else 1)
        shown = random.random((*own, *blocks)) < self.shown
        shown[..., 0, :] = False  # queries that see nothing
        shown[..., -1] = False  # keys that no query sees
        return made | {"block_mask": BlockMask(shown, self.block)}

    def spoiled(self, x: _Arrays) -> _Arrays:
        """The arrays with NaN in keys that no query sees and in queries that see no key."""
        keys = (self.lengths[1] - 1) // self.block[1] * self.block[1]
        for name in ("k", "v"):
            x[name][:, keys:] = np.nan
        for name in ("q", "dout"):
            x[name][:, : self.block[0]] = np.nan
        return x

    def given(self, x: _Arrays) -> _Arrays:
        """The arguments of both passes."""
        return {**{name: x[name] for name in ("q", "k", "v", "block_mask")}, **self.more}

    def expected(self, x: _Arrays) -> _Arrays:
        given = self.given(x)
        out, lse = reference.attention(**given)
        grads = reference.attention_backward(x["dout"], **given)[:3]
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))

    def check(self, found: _Arrays, expected: _Arrays) -> None:
        dead = np.isinf(expected["lse"])
        assert dead.any()
        for name, got in found.items():
            true = np.where(np.isinf(expected[name]), 0, expected[name])
            if name == "lse":
                np.testing.assert_array_equal(np.isinf(got), dead)
                got = np.where(dead, 0, got)
            limit = OF_LARGEST[self.dtype] * np.abs(true).max()
            assert np.abs(got.astype(float) - true).max() <= limit, f"{name} of {self.name}"


_MASK = np.random.default_rng(1).random((300, 400)) < 0.7
_BIAS = np.random.default_rng(2).standard_normal((300, 400)).astype(np.float16)
_SLOPES = np.array([0.1, -0.2], np.float32)
ROWS = (
    Row("fa1", "float16", (128, 128)),
    Row("fa1", "float32", (64, 64), more={"causal": True}),
    Row("fa1", "float64", (128, 64), heads=(4, 2), batch=2, axes="b1", lengths=(150, 200)),
    Row("fa2", "float16", (128, 128), axes="11"),
    Row("fa2", "float16", (64, 64), heads=(4, 2), batch=2, axes="bh", lengths=(200, 333)),
    Row("fa2", "bfloat16", (64, 128), architecture="80", more={"causal": True}),
    Row("fa2", "float32", (64, 64), more={"mask": _MASK}),
    Row("fa2", "float16", (64, 64), deterministic=True),
    Row("fa2", "float16", (64, 128), width=256, lengths=(130, 200)),
    Row("fa3", "float16", (128, 128)),
    Row("fa3", "bfloat16", (64, 64), heads=(4, 2), batch=2, axes="b1", lengths=(200, 333)),
    Row("fa3", "float16", (64, 128), more={"causal": True}),
    Row("fa3", "float16", (192, 64), more={"window_size": (90, 40)}),
    Row("fa3", "float16", (128, 128), deterministic=True),
    Row("fa3", "float16", (64, 64), deterministic=True, width=96),
    Row("fa3", "bfloat16", (128, 128), width=128, heads=(4, 1), axes="1h"),
    Row("fa3", "float16", (64, 64), width=128, more={"dropout_p": 0.3, "dropout_seed": 5}),
    Row("fa3", "float16", (128, 64), width=192),
    Row("fa3", "float16", (64, 64), width=256, lengths=(140, 200)),
    Row("fa3", "float16", (64, 128), more={"mask": _MASK}),
    Row("fa3", "float16", (128, 128), more={"mask": _MASK[:1], "softcap": 3.0}),
    Row("fa3", "float16", (128, 64), more={"mask": _MASK[:, :1]}),
    Row("fa3", "float16", (64, 64), more={"bias": _BIAS}),
    Row("fa3", "float16", (64, 64), width=128, more={"bias": _BIAS}),  # tiles of 112 keys
    Row("fa3", "float16", (128, 128), more={"alibi_slopes": _SLOPES}),
)
#: In these no tile lies in two blocks, and both passes leave out hidden ones.
LEFT_OUT = [r for r in ROWS if r.block == (128, 128) and not (r.deterministic or r.more)]
