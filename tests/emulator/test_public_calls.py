"""The public functions as users call them, drawn; the kernels run, and every launch is audited."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..kit.case import Case
from .apart import apart
from .build import compiler
from .call import QKV, Call, Kernels
from .drawn import calls
from .rows import ROWS, Row
from .session import check

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_SMALL, _NARROW = (32, 32), (16, 32)
_WIDE = (16, 64, 128)
KERNELS = (
    Kernels("fa1", "float16", (64, 64), True, _SMALL, steps=(16, 32)),
    Kernels(
        "fa1", "float16", (24, 56), False, _SMALL, steps=(16, 32)
    ),  # widths are one chunk narrower than the bucket
    Kernels("fa1", "float64", (64, 64), True, _NARROW, steps=(16, 32)),
    Kernels("fa2", "float16", (64, 64), True, _SMALL, steps=(16, 32, 64)),
    Kernels("fa2", "bfloat16", (56, 24), False, _SMALL, steps=(16, 32, 64)),
    Kernels("fa2", "float32", (5, 24), True, _NARROW, "80", steps=(8, 16, 32, 64)),
    Kernels("fa2", "float64", (64, 64), False, _NARROW, steps=(8, 16, 32, 64)),
    # Backward with scores as keys x queries, and with ordered sums.
    Kernels("fa2", "bfloat16", (64, 64), True, num_sms=1, steps=(16, 64, 128)),
    Kernels("fa2", "float16", (64, 64), True, num_sms=1, deterministic=True),
    Kernels("fa3", "float16", (64, 64), True, num_sms=1, steps=_WIDE, parted=True),
    Kernels("fa3", "bfloat16", (64, 64), False, num_sms=1, steps=_WIDE, deterministic=True),
    Kernels("fa3", "bfloat16", (128, 128), True, (192, 80), num_sms=1, steps=_WIDE, parted=True),
    Kernels("fa3", "float16", (192, 128), True, num_sms=1, steps=_WIDE, parted=True),
    Kernels("fa3", "bfloat16", (192, 192), True, num_sms=1, steps=(16, 64, 96), parted=True),
    # Backward with the queries of a head in a block.
    Kernels("fa3", "bfloat16", (64, 64), True, num_sms=1, steps=_WIDE, kept=128),
    Kernels("fa3", "float16", (64, 64), True, num_sms=1, steps=_WIDE, kept=256),
    # Windows.
    Kernels("fa1", "float16", (64, 64), False, _SMALL, steps=(16, 32), window="band"),
    Kernels("fa2", "float16", (64, 64), False, _SMALL, steps=(16, 32, 64), window="band"),
    Kernels("fa2", "float32", (5, 24), False, _NARROW, "80", steps=(8, 16, 32), window="left"),
    Kernels("fa2", "bfloat16", (64, 64), False, num_sms=1, deterministic=True, window="band"),
    Kernels("fa3", "float16", (64, 64), False, num_sms=1, steps=_WIDE, parted=True, window="band"),
    Kernels(
        *("fa3", "bfloat16", (128, 128), False, (192, 80)),
        num_sms=1,
        steps=_WIDE,
        deterministic=True,
        window="band",
    ),
    # Sinks.
    Kernels("fa1", "float16", (64, 64), True, _SMALL, steps=(16, 32), sinks="float32"),
    Kernels("fa2", "float16", (64, 64), True, _SMALL, steps=(16, 32, 64), sinks="float16"),
    Kernels("fa2", "float64", (64, 64), False, _NARROW, steps=(8, 16, 32), sinks="float64"),
    Kernels("fa3", "bfloat16", (64, 64), True, num_sms=1, steps=_WIDE, sinks="float32"),
    Kernels(
        *("fa3", "float16", (128, 128), False, (192, 80)),
        num_sms=1,
        steps=_WIDE,
        window="band",
        sinks="float16",
    ),
    # Soft caps.
    Kernels("fa2", "float32", (24, 24), False, _NARROW, "80", steps=(8, 16, 32), softcap=True),
    Kernels("fa2", "bfloat16", (64, 64), True, num_sms=1, deterministic=True, softcap=True),
    Kernels("fa3", "bfloat16", (64, 64), True, num_sms=1, steps=_WIDE, parted=True, softcap=True),
    Kernels("fa3", "float16", (128, 128), True, (192, 80), num_sms=1, steps=_WIDE, softcap=True),
    # ALiBi.
    Kernels("fa2", "float32", (24, 24), True, _NARROW, "80", steps=(8, 16, 32), alibi="batch"),
    Kernels("fa3", "float16", (64, 64), True, num_sms=1, steps=_WIDE, parted=True, alibi="heads"),
    # A bias.
    Kernels("fa2", "float32", (24, 24), True, _NARROW, "80", steps=(8, 16, 32), bias="qk"),
    Kernels("fa2", "bfloat16", (64, 64), False, num_sms=1, deterministic=True, bias="1k:float32"),
    Kernels("fa3", "float16", (64, 64), True, num_sms=1, steps=_WIDE, parted=True, bias="qk"),
    # A mask.
    Kernels("fa2", "float32", (24, 24), True, _NARROW, "80", steps=(8, 16, 32), mask="1k"),
    Kernels("fa2", "bfloat16", (64, 64), False, num_sms=1, deterministic=True, mask="qk"),
    Kernels("fa3", "float16", (64, 64), True, num_sms=1, steps=_WIDE, parted=True, mask="qk"),
    Kernels("fa3", "bfloat16", (64, 64), False, num_sms=1, steps=_WIDE, bias="1k", mask="qk"),
    # Functions of scores.
    Kernels("fa1", "float16", (64, 64), True, _SMALL, steps=(16, 32), softcap=True, written=True),
    Kernels(
        *("fa2", "float32", (24, 24), False, _NARROW, "80"),
        steps=(8, 16, 32),
        alibi="batch",
        bias="qk",
        written=True,
    ),
    Kernels(
        *("fa2", "bfloat16", (64, 64), True),
        num_sms=1,
        deterministic=True,
        softcap=True,
        alibi="heads",
        mask="1k",
        written=True,
    ),
    Kernels(
        *("fa3", "bfloat16", (64, 64), True),
        num_sms=1,
        steps=_WIDE,
        parted=True,
        softcap=True,
        bias="qk:float32",
        written=True,
    ),
    Kernels(
        *("fa3", "float16", (128, 128), True, (192, 80)),
        num_sms=1,
        steps=_WIDE,
        alibi="heads",
        mask="qk",
        written=True,
    ),
    # Dropout.
    Kernels("fa1", "float16", (64, 64), True, _SMALL, steps=(16, 32), dropout=True),
    Kernels("fa2", "float32", (24, 24), False, _NARROW, "80", steps=(8, 16, 32), dropout=True),
    Kernels("fa2", "bfloat16", (64, 64), True, num_sms=1, deterministic=True, dropout=True),
    Kernels("fa3", "float16", (64, 64), True, num_sms=1, steps=_WIDE, parted=True, dropout=True),
    Kernels(
        *("fa3", "bfloat16", (128, 128), False, (192, 80)),
        num_sms=1,
        steps=_WIDE,
        window="band",
        dropout=True,
    ),
    Kernels("fa3", "float16", (192, 128), True, num_sms=1, steps=_WIDE, dropout=True),
)


def _of_row(row: Row) -> Kernels:
    """Kernels of a row; calls compile no others."""
    runner = row.runner
    return Kernels(
        *(row.algorithm, row.dtype, row.dims, row.causal, runner.blocks, row.architecture),
        num_sms=runner.num_sms,
        deterministic=row.deterministic,
        steps=_WIDE if row.algorithm == "fa3" else (8, 16, 32, 64),
        plain=True,
        forward_row=row.forward_row,
    )


_OF_ROWS = dict.fromkeys(_of_row(row) for row in ROWS if not row.planned)


def _params(kernels: Iterable[Kernels]) -> Any:
    named = [pytest.param(one, id=f"{i}-{one.name}") for i, one in enumerate(kernels)]
    return pytest.mark.parametrize("kernels", named)


@_params(KERNELS)
@settings(max_examples=20)
@given(data=st.data())
def test_any_call(kernels: Kernels, data: Any) -> None:
    call = data.draw(calls(kernels))
    apart(partial(check, kernels, call))


@_params(_OF_ROWS)
@settings(max_examples=6)
@given(data=st.data())
def test_any_call_of_a_row(kernels: Kernels, data: Any) -> None:
    call = data.draw(calls(kernels))
    apart(partial(check, kernels, call))


def test_roundings_of_the_same_number_add_up() -> None:
    """All keys are the same key, and dS is below the smallest normal number: its errors add up."""
    case = Case(1, 1, 1, 47, 23, 64, 64, "float16", causal=True, values="zeros", alibi="heads")
    case = replace(case, seed=56)
    call = Call(case, with_dlse=True, shift=-300, wrt=("q", "k", "v", "alibi_slopes"))
    check(next(one for one in KERNELS if one.alibi == "heads"), call)


@_params(KERNELS)
def test_tails_of_scores_far_below_zero(kernels: Kernels) -> None:
    """Lengths are one off whole tiles, and scores far from 0: padding that scores 0 would show."""
    for step in kernels.steps:
        for beside in (-1, 1):
            lengths = kernels.queries(step - beside), step + beside
            case = Case(1, 1, 1, *lengths, *kernels.dims, kernels.dtype, causal=kernels.causal)
            if kernels.window:
                case = replace(case, window={"left": "3:", "band": "3:2"}[kernels.window])
            case = replace(case, bias=kernels.bias, mask=kernels.mask)
            case = replace(case, dropout="0.3:4" if kernels.dropout else "")
            case = replace(case, written=kernels.written)
            wrt = (*QKV, *["bias"] * (bool(kernels.bias) and not kernels.written))
            check(kernels, Call(case, shift=-300, wrt=wrt, mapped=kernels.mapped))
