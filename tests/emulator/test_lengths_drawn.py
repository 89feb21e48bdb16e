"""Used lengths and packed sequences of any lengths on the emulated device, for a few kernels.

Blocks run in both orders. If a tile writes rows of another sequence, in one of the orders the
sequence's own tile does not overwrite them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .apart import apart
from .build import compiler
from .lengths import KERNELS, Kernels, check, drawn_lengths

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@settings(max_examples=20)
@given(data=st.data())
def test_any_lengths(kernels: Kernels, data: Any) -> None:
    apart(partial(check, kernels, data.draw(drawn_lengths(kernels))))
