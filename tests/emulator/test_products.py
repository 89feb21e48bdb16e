"""Products on the emulated tensor cores: each kind, and values that are not finite."""

from __future__ import annotations

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.data import arrays
from .build import compiler
from .rows import ROWS, Row, params

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def test_every_kind_of_product_is_run() -> None:
    """A kind is the products, the instruction's depth and the rows of a fragment of a plan."""
    found = set()
    for row in ROWS:
        for config in row.runner.configs(row.cases()[0]):
            if config.generation == "fa2":
                rows = dict(config.constants)["fragment_rows"]
                found.add((config.kernel, config.products, config.mma_depth, rows))
    kinds = {
        ("tensor_cores", 16, 16),
        ("tensor_cores", 8, 16),
        ("tf32", 8, 16),
        ("fp64", 8, 16),
        ("fp64", 4, 8),
        ("scalar", 0, 8),
    }
    assert found == {(kernel, *kind) for kernel in ("forward", "backward") for kind in kinds}


_TF32 = [r for r in ROWS if r.algorithm == "fa2" and r.dtype == "float32" and not r.causal]


@pytest.mark.parametrize("row", params(*_TF32))
def test_infinities_and_nan_come_through(row: Row) -> None:
    """If the larger tf32 part is not finite, products with the smaller part are NaN: not added."""
    case = Case(1, 2, 1, 33, 40, *row.dims, row.dtype)
    x = arrays(case, "q", "k", "v")
    x["v"][0, 3, 0, 2] = np.inf
    x["v"][0, 4, 0, 5] = np.nan
    x["v"][0, 6, 0, 7] = -np.inf
    out, _ = row.runner.forward(case, x["q"], x["k"], x["v"])
    assert (out[..., 2] == np.inf).all()
    assert np.isnan(out[..., 5]).all()
    assert (out[..., 7] == -np.inf).all()
    assert np.isfinite(out[..., [0, 1, 3, 4, 6]]).all()
