"""The public functions as users call them, drawn; the kernels run, and every launch is audited."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .apart import apart
from .build import compiler
from .drawn import Kernels, calls
from .session import check

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

_SMALL, _NARROW = (32, 32), (16, 32)
_WIDE = (16, 64, 128)
KERNELS = (
    Kernels("fa1", "float16", (64, 64), True, _SMALL, steps=(16, 32)),
    Kernels("fa1", "float64", (64, 64), True, _NARROW, steps=(16, 32)),
    Kernels("fa2", "float16", (64, 64), True, _SMALL, steps=(16, 32, 64)),
    Kernels("fa2", "bfloat16", (64, 64), False, _SMALL, steps=(16, 32, 64)),
    Kernels("fa2", "float32", (5, 24), True, _NARROW, "80", steps=(8, 16, 32, 64)),
    Kernels("fa2", "float64", (64, 64), False, _NARROW, steps=(8, 16, 32, 64)),
    # Backward with scores as keys x queries, and its sums in an order.
    Kernels("fa2", "bfloat16", (64, 64), True, num_sms=1, steps=(16, 64, 128)),
    Kernels("fa2", "float16", (64, 64), True, num_sms=1, deterministic=True),
    Kernels("fa3", "float16", (64, 64), True, num_sms=1, steps=_WIDE, parted=True),
    Kernels("fa3", "bfloat16", (64, 64), False, num_sms=1, steps=_WIDE, deterministic=True),
    Kernels("fa3", "bfloat16", (128, 128), True, (192, 80), num_sms=1, steps=_WIDE, parted=True),
    Kernels("fa3", "float16", (192, 128), True, num_sms=1, steps=_WIDE),
)


@pytest.mark.parametrize("kernels", [pytest.param(k, id=k.name) for k in KERNELS])
@settings(max_examples=25)
@given(data=st.data())
def test_any_call(kernels: Kernels, data: Any) -> None:
    call = data.draw(calls(kernels))
    apart(partial(check, kernels, call))
