"""Rows of the emulator: generations, architectures and products, tiles and problems.

Compiling a kernel takes longer than running it, so every row has one configuration for each pass,
and other tests take their problems from these rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from cuflash.planning.tiles.fa2_tables import ForwardRow

from ..kit.case import Case
from ..kit.strides import Strides
from .device import EmulatedRunner

__all__ = ["FULL", "ROWS", "SMALL", "Row", "params"]

#: Small tiles, so that short problems have many of them.
SMALL = {"float16": (32, 32), "bfloat16": (32, 32), "float32": (16, 32), "float64": (16, 32)}
_STRIDED = {
    "q": Strides((1, 0, 2, 3), (0, 8, 16, 0), 16, (1,)),
    "k": Strides((), (8, 8, 8, 0), 8, (0, 2)),
    "v": Strides((2, 1, 0, 3), (0, 0, 24, 0)),
}
#: Strides from which the copy engine can load.
_LOADED = {
    "q": Strides((1, 0, 2, 3), (0, 8, 16, 0), 16),
    "k": Strides((), (8, 8, 8, 0), 8),
    "v": Strides((2, 1, 0, 3), (0, 0, 24, 0)),
}
#: Absurd strides along axes of one element.
_ALONE = {name: Strides(absurd=True) for name in ("q", "k", "v", "dout")}


@dataclass(frozen=True)
class Row:
    """One configuration of each pass."""

    days_of_turn: ClassVar[int] = 7  # every row has its turn once in so many days
    algorithm: str
    architecture: str
    dtype: str
    dims: tuple[int, int] = (64, 64)
    causal: bool = True
    planned: bool = False  # the plan's own tiles
    deterministic: bool = False
    blocks: tuple[int, int] | None = None  # replaces the small ones; fa3 forward
    filled: bool = False  # planned for one multiprocessor, which any problem fills
    forward_row: ForwardRow | None = None  # the forward pass's table has only this row
    window: str = ""  # "left" or "band": the bounds that the keys of a query have
    sinks: str = ""  # their dtype; empty for none
    softcap: float | None = None
    alibi: str = ""  # these four have the form that ``Case`` gives them
    bias: str = ""
    mask: str = ""
    dropout: str = ""

    @property
    def runner(self) -> EmulatedRunner:
        planned = self.planned or self.filled or self.forward_row
        blocks = self.blocks or (None if planned else SMALL[self.dtype])
        sms = 1 if self.filled else None
        return EmulatedRunner(
            self.architecture, self.algorithm, blocks, self.deterministic, sms, self.forward_row
        )

    @property
    def name(self) -> str:
        parts = [f"{self.algorithm}-sm_{self.architecture}-{self.dtype}"]
        mask = self.window or ("causal" if self.causal else "full")
        parts += [f"d{self.dims[0]}-dv{self.dims[1]}", mask]
        parts += ["softcap"] * (self.softcap is not None)
        parts += [f"alibi-{self.alibi}"] if self.alibi else []
        parts += [f"bias-{self.bias}"] if self.bias else []
        parts += [f"mask-{self.mask}"] if self.mask else []
        parts += [f"dropout-{self.dropout}"] if self.dropout else []
        parts += [f"sinks-{self.sinks}"] if self.sinks else []
        parts += (
            ["planned"] * self.planned + ["filled"] * self.filled + ["ordered"] * self.deterministic
        )
        parts += ["x".join(map(str, self.blocks))] if self.blocks else []
        if self.forward_row:
            parts += ["paired"] * self.forward_row.paired
            parts += ["single-stage"] * (self.forward_row.num_stages == 1)
        return "-".join(parts)

    def cases(self) -> list[Case]:
        """Tiles and tails both ways, grouped heads, dead rows and tiles, strides, one row."""
        found = self._windowed_cases() if self.window else self._plain_cases()
        more = {"sinks": self.sinks, "softcap": self.softcap, "alibi": self.alibi}
        more |= {"bias": self.bias, "mask": self.mask, "dropout": self.dropout}
        return [replace(case, **more) for case in found]

    def _plain_cases(self) -> list[Case]:
        first = Case(2, 4, 2, 70, 100, *self.dims, self.dtype, causal=self.causal, seed=1)
        if self.algorithm == "fa3":
            return self._cases_of_wide_tiles(first)
        second = replace(first, batch=1, heads_q=2, seqlen_q=37, seqlen_kv=130, seed=2)
        short = replace(second, q_offset=-40, seqlen_q=70, seqlen_kv=33, layout="bhsd", seed=3)
        found = [
            first.with_strides(**_STRIDED),
            replace(second, q_offset=20, values="outliers"),
            short,
            replace(second, seqlen_q=1).with_strides(**_ALONE),
        ]
        if self.algorithm == "fa1":
            return found
        return [
            *found,
            replace(first, seqlen_kv=1).with_strides(**_ALONE),
            replace(second, values="x8"),
        ]

    def _cases_of_wide_tiles(self, first: Case) -> list[Case]:
        first = replace(first, seqlen_q=150, seqlen_kv=200)
        second = replace(first, batch=1, heads_q=2, seqlen_q=70, seqlen_kv=333, seed=2)
        short = replace(second, q_offset=-80, seqlen_q=200, seqlen_kv=70, layout="bhsd", seed=3)
        many = replace(first, batch=5, seed=4)
        return [
            first.with_strides(**_LOADED),
            replace(second, q_offset=150, values="outliers"),
            short,
            replace(second, seqlen_q=1).with_strides(**_ALONE),
            replace(second, heads_kv=1, values="x8"),
            # so many heads that blocks clear sums for others, some of which no query sees
            replace(many, heads_q=8, heads_kv=4, seqlen_q=100, seqlen_kv=300, q_offset=0),
        ]

    def windowed(self, case: Case, left: int, right: int) -> Case:
        """The case with this window, without bounds that the row's kernels lack."""
        if self.window == "left":
            return replace(case, causal=False, window=f"{left}:")
        return replace(case, window=f"{left}:{right}")

    def _windowed_cases(self) -> list[Case]:
        """Windows with edges at and beside tiles, dead first and last queries, single keys."""
        first = Case(1, 4, 2, 100, 140, *self.dims, self.dtype, seed=1)
        loaded = self.algorithm == "fa3"
        if loaded:
            first = replace(first, heads_q=2, heads_kv=1, seqlen_q=200, seqlen_kv=300)
        one = replace(first, heads_q=2, heads_kv=1, seed=2)
        dead = replace(one, seqlen_q=first.seqlen_kv + 70, seqlen_kv=70, layout="bhsd")
        square = replace(one, heads_kv=2, seqlen_q=128, seqlen_kv=128, values="x8")
        return [
            self.windowed(first.with_strides(**(_LOADED if loaded else _STRIDED)), 31, 7),
            self.windowed(replace(one, q_offset=20, values="outliers"), 64, 5),
            self.windowed(replace(dead, q_offset=-40), 16, 3),
            self.windowed(square, 32, 64),
            self.windowed(replace(square, q_offset=-1), 64, 31),
            self.windowed(replace(one, q_offset=3), 0, 0),
            self.windowed(replace(one, causal=True, q_offset=5), 17, 2),
            self.windowed(
                replace(one, q_offset=first.seqlen_kv + 50), 49, 1
            ),  # no query sees a key
            self.windowed(replace(one, seqlen_q=1, q_offset=90).with_strides(**_ALONE), 30, 10),
        ]


FULL = False
ROWS = (
    Row("fa1", "90", "float16"),
    Row("fa1", "90", "float16", (5, 24), FULL),
    Row("fa1", "75", "float16", causal=FULL),
    Row("fa1", "90", "float32", (5, 24)),
    Row("fa1", "90", "float64"),
    Row("fa2", "90", "float16"),
    Row("fa2", "90", "float16", (5, 24), FULL),
    Row("fa2", "90", "float16", (256, 192)),
    Row("fa2", "90", "float16", planned=True, deterministic=True),
    Row("fa2", "90", "float16", blocks=(32, 64)),  # weights of a step as one part
    # warps that share rows, two pairs of them; K and V in one stage
    Row("fa2", "90", "float16", forward_row=ForwardRow(256, 64, 32, 4, paired=True)),
    Row(
        "fa2",
        "90",
        "float16",
        (40, 192),
        FULL,
        forward_row=ForwardRow(256, 64, 64, 4, 2, paired=True),
    ),
    Row("fa2", "80", "bfloat16", forward_row=ForwardRow(256, 32, 32, 2, num_stages=1)),
    Row("fa2", "80", "bfloat16", forward_row=ForwardRow(256, 64, 32, 4, paired=True)),
    Row("fa2", "90", "float16", (256, 256), planned=True),
    Row("fa2", "75", "float16"),
    Row("fa2", "90", "bfloat16", causal=FULL),
    # backward with scores as keys x queries
    Row("fa2", "90", "bfloat16", filled=True),
    Row("fa2", "90", "float16", filled=True, deterministic=True),
    Row("fa2", "80", "bfloat16", (40, 64), FULL, filled=True),
    Row("fa2", "80", "float16", (64, 5), filled=True),
    Row("fa2", "75", "float16", (8, 16), filled=True),
    # tf32
    Row("fa2", "90", "float32", causal=FULL),
    Row("fa2", "80", "float32", (5, 24)),
    Row("fa2", "80", "float32", (96, 128)),
    Row("fa2", "90", "float32", planned=True),
    # m8n8k4
    Row("fa2", "80", "float64"),
    Row("fa2", "80", "float64", (5, 24), FULL),
    # m16n8k16
    Row("fa2", "90", "float64", causal=FULL),
    Row("fa2", "90", "float64", (96, 128)),
    Row("fa2", "90", "float64", planned=True, deterministic=True),
    Row("fa2", "90", "float64", filled=True),  # backward with one stage of Q and dO
    # fused multiply-adds
    Row("fa2", "75", "float32"),
    Row("fa2", "75", "float64", (5, 24), FULL),
    # FlashAttention-3 on one multiprocessor, whose block draws all tiles; blocks clear for others
    Row("fa3", "90", "float16", filled=True),
    Row("fa3", "90", "bfloat16", causal=FULL, filled=True, deterministic=True),
    Row("fa3", "90", "float16", (24, 32), FULL, filled=True),
    Row("fa3", "90", "bfloat16", (96, 80), filled=True),
    Row("fa3", "90", "bfloat16", (128, 128), filled=True, blocks=(192, 80)),
    Row("fa3", "90", "float16", (128, 72), FULL, filled=True, deterministic=True),
    Row("fa3", "90", "float16", (192, 128), filled=True),
    Row("fa3", "90", "bfloat16", (160, 128), filled=True, deterministic=True),
    Row("fa3", "90", "bfloat16", (200, 256), filled=True),
    # backward with scores as queries x keys
    Row("fa3", "90", "bfloat16", (192, 168), filled=True),
    Row("fa3", "90", "float16", (136, 192), FULL, filled=True, deterministic=True),
)


def params(*rows: Row) -> list[Any]:
    """Parameters of a test that takes ``row``."""
    return [pytest.param(row, id=row.name) for row in rows]
