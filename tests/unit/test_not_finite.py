"""NaN and infinity reach exactly the outputs and gradients that see them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash

from ..kit.case import Case
from ..kit.nonfinite import SPOILED, spoiled


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize(("name", "value"), SPOILED)
@settings(max_examples=8)
@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    causal=st.booleans(),
    lengths=st.tuples(st.integers(1, 90), st.integers(1, 120)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    layout=st.sampled_from(["bshd", "bhsd"]),
    offset=st.sampled_from([None, 0, -20, 15]),
    place=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_who_sees_it(
    algorithm: str,
    name: str,
    value: float,
    dtype: str,
    causal: bool,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    layout: str,
    offset: int | None,
    place: float,
    seed: int,
) -> None:
    case = Case(
        *(2, *heads, *lengths, 8, 16, dtype),
        causal=causal,
        q_offset=offset,
        layout=layout,
        seed=seed,
    )
    one = spoiled(case, name, value, place, slack=16)
    x, options = one.x, {**case.options, "algorithm": algorithm, "blocks": (8, 8)}
    with np.errstate(all="ignore"):
        out, lse = cuflash.attention(x["q"], x["k"], x["v"], return_lse=True, **options)
        given_ = (x["dout"], x["q"], x["k"], x["v"], out, lse)
        dq, dk, dv = cuflash.attention_backward(*given_, dlse=x["dlse"], **options)
    one.check({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
