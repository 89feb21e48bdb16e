"""Boolean masks on the emulated device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ..kit.case import Case
from ..kit.checks import require, run_checks
from ..kit.compare import compare
from ..kit.data import arrays, tensor
from ..kit.oracle import judge
from .build import compiler
from .featured_rows import MASKED
from .rows import Row, params
from .tiles_seen import rows_of_tiles, tiles_seen

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


def _results(
    row: Row, case: Case, x: dict[str, np.ndarray], **beside: np.ndarray
) -> dict[str, np.ndarray]:
    """The results of both passes, by name."""
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"], **beside)
    given = (x["dout"], x["q"], x["k"], x["v"], out, lse, x["dlse"])
    grads = row.runner.backward(case, *given, **beside)
    return dict(zip(("out", "lse", *case.gradients), (out, lse, *grads), strict=True))


def _check(row: Row, case: Case) -> dict[str, np.ndarray]:
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    truth, found = judge(case, x), _results(row, case, x)
    for name, got in found.items():
        compare(truth, name, got).check()
    return found


@pytest.mark.parametrize("row", params(*MASKED))
def test_against_float64(row: Row) -> None:
    for case in row.cases():
        if min(case.seqlen_q, case.seqlen_kv) > 1:
            _check(row, case)


@pytest.mark.parametrize("row", params(*MASKED[::3]))
def test_checks(row: Row) -> None:
    case = replace(row.cases()[1], values="normal")
    require(case, run_checks(row.runner, case))


@pytest.mark.parametrize("row", params(*MASKED))
def test_a_mask_that_hides_nothing_changes_nothing(row: Row) -> None:
    """Such a mask changes results only where the feature changes the order of roundings."""
    case = replace(row.cases()[0], bias="")
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    truth = judge(replace(case, mask=""), x)
    every = np.ones(case.shape("mask"), bool)
    for name, array in _results(row, case, x, mask=every).items():
        compare(truth, name, array).check()


@pytest.mark.parametrize("row", params(*MASKED))
def test_a_mask_that_hides_everything_leaves_zeros(row: Row) -> None:
    case = replace(row.cases()[0], sinks="")
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    found = _results(row, case, x, mask=np.zeros(case.shape("mask"), bool))
    assert (found.pop("lse") == -np.inf).all()
    for name, array in found.items():
        assert (array == 0).all(), name


@pytest.mark.parametrize("row", params(*(row for row in MASKED if "k" in row.mask)))
def test_keys_that_it_hides_may_hold_anything(row: Row) -> None:
    """Padding of keys, in the forward pass: none of its scores is used."""
    case = row.cases()[0]
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    hidden = np.arange(case.seqlen_kv) >= case.seqlen_kv * 2 // 3
    mask = tensor(case, "mask") & ~hidden
    truth = judge(case, {**x, "mask": mask})
    case.heads_first("k", x["k"])[:, :, hidden] = np.nan
    out, lse = row.runner.forward(case, x["q"], x["k"], x["v"], mask=mask)
    for name, array in {"out": out, "lse": lse}.items():
        compare(truth, name, array).check()


#: Rows whose kernels walk along lists of tiles.
_LISTED = [
    r for r in MASKED if r.algorithm == "fa3" and "k" in r.mask and not (r.deterministic or r.bias)
]


@pytest.mark.parametrize("row", params(*_LISTED))
def test_no_tile_that_it_hides_is_loaded(row: Row) -> None:
    """Passes read the bytes of K, V and Q of exactly the tiles with a visible pair."""
    blocks = row.mask.removesuffix("-blocks") + "-blocks"
    for case in row.cases()[:2]:
        case = replace(case, mask=blocks, strides=Case().strides)
        read = row.runner.reads(case, arrays(case, "q", "k", "v", "dout", "dlse"))
        for operation in ("forward", "backward"):
            tile = row.runner.tiles(case, operation)
            seen = _tiles_of_heads(case, tile, visit_one=operation == "forward")
            if operation == "forward":
                rows = (seen.sum(axis=(0, 1, 2)) * rows_of_tiles(case.seqlen_kv, tile[1])).sum()
                expected = {"k": rows * case.head_dim, "v": rows * case.head_dim_v}
            else:
                rows = (seen.sum(axis=(0, 1, 3)) * rows_of_tiles(case.seqlen_q, tile[0])).sum()
                expected = {"q": rows * case.head_dim}
            found = {name: read[operation][name] for name in expected}
            size = case.storage.itemsize
            assert found == {n: size * e for n, e in expected.items()}, (operation, case.repro)


def _tiles_of_heads(case: Case, tile: tuple[int, int], visit_one: bool) -> np.ndarray:
    """Whether a tile is visited, (entry, head, q tile, kv tile).

    With ``visit_one``, a q tile that sees no kv tile visits one.
    """
    whole = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv)
    mask, bounds = np.broadcast_to(tensor(case, "mask"), whole), tiles_seen(case, tile)
    found = np.array([[tiles_seen(case, tile, pairs) for pairs in head] for head in mask])
    found &= bounds
    if visit_one:
        last = np.where(bounds.any(1), bounds.shape[1] - 1 - bounds[:, ::-1].argmax(1), 0)
        nothing = ~found.any(axis=3)
        found[..., np.arange(len(last)), last] |= nothing
    return found
