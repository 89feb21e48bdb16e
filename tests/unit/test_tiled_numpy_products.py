"""Products of narrow matrices: their terms are added in parts, whatever BLAS does with them."""

from __future__ import annotations

import numpy as np
import pytest

from cuflash.tiled_numpy.blocks import Scratch
from cuflash.tiled_numpy.steps import multiply

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.runners import ApiRunner


@pytest.mark.parametrize("width", [1, 5, 16, 17])
@pytest.mark.parametrize("terms", [1, 64, 65, 128, 189, 700])
@pytest.mark.parametrize("transposed", [False, True])
def test_is_the_product(terms: int, width: int, transposed: bool) -> None:
    """It is exact for whole numbers; the old content of the scratch memory does not matter."""
    generator = np.random.default_rng([terms, width])
    left = generator.integers(-9, 9, (2, 3, 7, terms)).astype("float64")
    right = generator.integers(-9, 9, (2, 3, terms, width)).astype("float64")
    scratch = Scratch(np.dtype("float64"))
    scratch.array("parts", (2, 3, 11, 7, width))[...] = np.nan
    product = np.full((2, 3, 7, width), np.nan)
    given = np.ascontiguousarray(left.swapaxes(-1, -2)).swapaxes(-1, -2) if transposed else left
    multiply(given, right, product, scratch)
    np.testing.assert_array_equal(product, np.einsum("bhmk,bhkn->bhmn", left, right))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_large_term_before_many_small_ones(dtype: str, transposed: bool) -> None:
    """If terms were added one after another, each small one would lose digits to the large one."""
    generator = np.random.default_rng(0)
    left = generator.random((1, 1, 64, 512)).astype(dtype)
    left[..., 0] = 1000
    right = (1 + generator.random((1, 1, 512, 5))).astype(dtype)
    given = np.ascontiguousarray(left.swapaxes(-1, -2)).swapaxes(-1, -2) if transposed else left
    product = np.empty((1, 1, 64, 5), dtype)
    multiply(given, right, product, Scratch(np.dtype(dtype)))
    truth = np.einsum("bhmk,bhkn->bhmn", left.astype("longdouble"), right.astype("longdouble"))
    error = (product - truth) / truth / (np.finfo(dtype).eps / 2)
    assert np.sqrt(np.mean(error**2)) < 3


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_narrow_positive_values(algorithm: str) -> None:
    """The error of the output must be within the bound of plain NumPy, which it once exceeded."""
    case = Case.parse(
        "B=1 Hq=1 Hk=1 Sq=66 Sk=189 D=5 Dv=5 dtype=float64 layout=hsd seed=0 "
        "values=positive_v v:o021,g0.0.0"
    )
    x = arrays(case, "q", "k", "v")
    out, _ = ApiRunner("numpy", algorithm).forward(case, x["q"], x["k"], x["v"])
    compare(judge(case, x), "out", out).check()
