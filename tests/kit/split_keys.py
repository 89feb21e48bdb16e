"""Forward passes with few tiles: split keys, packed groups and tiles for few queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import cuflash
from cuflash import dispatch
from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.plan import Plan
from cuflash.planning.tiles import fa2_few

from .case import Case
from .compare import compare
from .data import arrays
from .oracle import judge
from .written import given_to

__all__ = ["ROWS", "Row"]

#: Calls a function.
Run = Callable[..., Any]
#: Moves an array to a device or back.
Place = Callable[[Any], Any]


@dataclass(frozen=True)
class Row:
    """A call, and the split of its keys.

    Attributes
    ----------
    label, algorithm, case
        The problem.
    kv_chunk, blocks
        As in the call.
    packed
        Whether its groups are rows of a tile.
    wide
        Whether the output of 16-bit inputs is float32.
    """

    days_of_turn: ClassVar[int] = 7  # the emulator has its turn once in so many days
    label: str
    algorithm: str
    case: Case
    kv_chunk: int | None = None
    blocks: tuple[int, int] | None = None
    packed: bool = False
    wide: bool = False

    @property
    def name(self) -> str:
        case = self.case
        width = f"d{case.head_dim}" + (
            f"-{case.head_dim_v}" if case.head_dim_v != case.head_dim else ""
        )
        words = [self.algorithm, case.dtype, width, self.label.replace(" ", "-")]
        words += ["x".join(map(str, self.blocks or ())), str(self.kv_chunk or "")]
        return "-".join(filter(None, words))

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of the call."""
        of_call: dict[str, Any] = {"algorithm": self.algorithm, "blocks": self.blocks}
        of_call |= {"out_dtype": "float32"} if self.wide else {}
        return {**self.case.options, **of_call, "kv_chunk": self.kv_chunk}

    def inputs(self) -> dict[str, np.ndarray]:
        """All arrays of the forward pass."""
        return arrays(self.case, "q", "k", "v", *self.case.operands)

    def results(self, run: Run, x: dict[str, Any], **more: Any) -> tuple[Any, Any]:
        """The output and its log-sum-exp, from arrays on the computing device.

        It checks that the plan is the one for which the row is meant.
        """
        operands = given_to(self.case, {name: x[name] for name in self.case.operands})
        options = {**self.options, **operands, **more, "return_lse": True}
        ran: list[Plan] = []
        with dispatch.observe(ran.append):
            found = run(cuflash.attention, *(x[name] for name in "qkv"), **options)
        (plan,) = ran
        assert plan.algorithm == self.algorithm
        assert (plan.problem.group_rows > 1) == self.packed
        if self.kv_chunk is not None:
            assert chunk_of(plan.problem) == self.kv_chunk
            names = [launch.config.kernel for launch in plan.launches]
            main = "forward_few" if self._is_few else "forward"
            assert names == [main, *["merge"] * bool(self.kv_chunk)]
        if self.blocks is not None:
            assert (plan.tile.block_q, plan.tile.block_kv) == self.blocks
        return found  # type: ignore[no-any-return]

    @property
    def _is_few(self) -> bool:
        """Whether FlashAttention-2 has its kernel for few queries."""
        case = self.case
        rows = case.heads_q // case.heads_kv if self.packed else case.seqlen_q
        half = case.dtype in ("float16", "bfloat16")
        return self.algorithm == "fa2" and self.blocks is None and half and rows <= fa2_few.ROWS

    def check(self, run: Run, place: Place, read: Place, **more: Any) -> None:
        """Compare a call with the truth; ``place`` and ``read`` move arrays there and back."""
        x = self.inputs()
        truth = judge(self.case, x)
        placed = {name: place(array) for name, array in x.items()}
        for name, got in zip(("out", "lse"), self.results(run, placed, **more), strict=True):
            compare(truth, name, read(got)).check()


def _case(heads: tuple[int, int], lengths: tuple[int, int], width: int = 64, **more: Any) -> Case:
    batch, dtype = more.pop("batch", 1), more.pop("dtype", "float16")
    return Case(batch, *heads, *lengths, width, width, dtype, seed=3, **more)


_CAUSAL: dict[str, Any] = {"causal": True}
_ONE, _TWO = (1, 1), (2, 1)


def _of_both(label: str, case: Case, chunk: int, fa3: tuple[int, int] | None = None) -> list[Row]:
    return [Row(label, "fa2", case, chunk), Row(label, "fa3", case, chunk, fa3)]


def _packed_causal(heads: tuple[int, int], chunk: int, blocks: tuple[int, int] | None) -> list[Row]:
    case = _case(heads, (1, 300), **_CAUSAL, q_offset=100)
    label = "packed causal" if blocks is None else "packed 70 causal"
    return [Row(label, a, case, chunk, blocks, packed=True) for a in ("fa2", "fa3")]


ROWS = (
    # Chunks of whole tiles, the last one short; an entry with its own length.
    *_of_both("full", _case(_TWO, (70, 300)), 128, (64, 64)),
    *_of_both("causal", _case(_TWO, (200, 700), dtype="bfloat16", **_CAUSAL), 256, (64, 128)),
    *_of_both("window", _case(_TWO, (200, 700), window="100:20"), 128, (64, 64)),
    *_of_both("left window", _case(_ONE, (130, 500), window="60:"), 128, (64, 64)),
    # Queries before the first key: rows and tiles that see nothing.
    *_of_both("dead rows", _case(_TWO, (300, 200), **_CAUSAL, sinks="float16"), 128, (64, 64)),
    *_of_both(
        "used lengths",
        _case(_TWO, (200, 300), batch=4, **_CAUSAL, used="100,0,200,7/300,7,0,128"),
        *(128, (64, 64)),
    ),
    *_of_both("sinks", _case(_TWO, (90, 300), sinks="float32"), 128, (64, 64)),
    *_of_both("softcap", _case(_TWO, (90, 300), dtype="bfloat16", softcap=3.0), 128, (64, 64)),
    *_of_both("dropout", _case(_TWO, (90, 300), dropout="0.3"), 128, (64, 64)),
    *_of_both("alibi", _case(_TWO, (90, 300), alibi="batch", **_CAUSAL), 128, (64, 64)),
    # A bias for each pair, whose tiles fa3 loads beside those of K, and one for each row.
    Row("bias", "fa2", _case(_TWO, (90, 300), bias="hqk"), 128),
    Row("bias", "fa3", _case(_TWO, (90, 304), bias="hqk"), 128),
    *_of_both("bias of rows", _case(_TWO, (90, 300), bias="hq1"), 128, (64, 64)),
    # Functions of scores.
    *_of_both("written", _case(_TWO, (90, 300), softcap=9.0, alibi="heads", written=True), 128),
    # More chunks than warps of a block, which then share a row: one column for each lane, and more.
    *_of_both("many chunks", _case(_TWO, (5, 1300)), 128, (64, 64)),
    *_of_both("many chunks sinks", _case(_TWO, (5, 2400), **_CAUSAL, sinks="float16"), 64),
    *_of_both("many chunks of more rows", _case(_ONE, (70, 1300), 40), 128),
    # Widths; one is not a multiple of a panel.
    *_of_both("width", _case(_TWO, (70, 300), 80), 128, (64, 64)),
    *_of_both("width", _case(_TWO, (70, 300), 128, **_CAUSAL), 128, (64, 64)),
    *_of_both("width", _case(_ONE, (70, 300), 256, **_CAUSAL), 128, (64, 64)),
    Row("float32", "fa2", _case(_TWO, (70, 300), 20, dtype="float32", **_CAUSAL), 64),
    Row(
        "float64 sinks",
        "fa2",
        _case(_TWO, (70, 300), 20, dtype="float64", **_CAUSAL, sinks="float64"),
        64,
    ),
    Row("wide output", "fa2", _case(_TWO, (70, 300)), 128, wide=True),
    Row("wide output", "fa3", _case(_TWO, (70, 300)), 128, (64, 64), wide=True),
    # Tiles of the table, whose warpgroups skip tiles of keys.
    Row("table", "fa3", _case(_ONE, (300, 700), **_CAUSAL), 128, (256, 64)),
    Row("table", "fa3", _case(_ONE, (300, 700), window="200:30"), 128, (192, 128)),
    Row("table", "fa3", _case(_ONE, (300, 700), 128, **_CAUSAL), 256, (128, 128)),
    # Tiles for few queries, without split rows.
    Row("whole", "fa3", _case(_TWO, (70, 300), **_CAUSAL), 0, (64, 64)),
    Row("whole", "fa3", _case(_TWO, (70, 300), window="90:"), 0, (64, 128)),
    Row("whole", "fa3", _case(_TWO, (200, 300), **_CAUSAL), 0, (128, 128)),
    Row("whole", "fa3", _case(_TWO, (70, 300), 128), 0, (64, 64)),
    Row("whole", "fa3", _case(_TWO, (70, 300), 128, **_CAUSAL), 0, (64, 128)),
    Row("whole", "fa3", _case(_TWO, (70, 300), 256), 0, (64, 64)),
    # One query: its group is rows of a tile.
    *(
        Row(
            f"packed {group}",
            algorithm,
            _case((2 * group, 2), (1, 300), batch=2),
            chunk,
            packed=True,
        )
        for algorithm in ("fa2", "fa3")
        for group, chunk in ((2, 128), (3, 0), (8, 128))
    ),
    *(
        Row("packed window", algorithm, _case((6, 2), (1, 700), window="300:"), chunk, packed=True)
        for algorithm, chunk in (("fa2", 128), ("fa3", 128), ("fa3", 0))
    ),
    *(
        Row("packed used", algorithm, case, chunk, packed=True)
        for algorithm, chunk in (("fa2", 64), ("fa3", 128), ("fa3", 0))
        for case in (_case((8, 1), (1, 300), batch=4, softcap=3.0, **_CAUSAL, used="/300,0,7,128"),)
    ),
    # A query that does not see the last keys.
    *_packed_causal((8, 2), 64, None),
    # More heads of a group than rows of a tile.
    *_packed_causal((70, 1), 128, (64, 64)),
    Row("packed 70", "fa3", _case((70, 1), (1, 200)), 128, (64, 64), packed=True),
    # As planned.
    Row("planned", "fa3", _case((2, 1), (300, 500), 128, **_CAUSAL)),
    Row("planned packed", "fa3", _case((8, 2), (1, 2000), 128), packed=True),
)
