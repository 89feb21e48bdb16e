"""FlashAttention-3's backward pass: the same dk and dv, and a correct dq, beside other work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.cuda import compile as compiling
from cuflash.planning.tiles.fa3_tables import BACKWARD, BackwardRow

from ..kit.case import Case
from .common import Gradients, Hog, gradients_on_two_streams, jitter, skip_without
from .test_generations import APART

#: (head_dim, head_dim_v): every row of the table, and one with padded columns.
DIMS = ((64, 64), (96, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
REPEATS = 50


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    skip_without("fa3")


def _busy(dims: tuple[int, int], causal: bool) -> Case:
    """Ragged lengths, grouped heads, at least seven kv tiles; so many heads that blocks clear."""
    return Case(36, 4, 2, 300, 777, *dims, "bfloat16", causal=causal, seed=1)


def _row(case: Case) -> BackwardRow:
    """The first row of the table that holds both widths; the table has the best first."""
    d, dv = case.head_dim, case.head_dim_v
    return next(
        row
        for row in BACKWARD
        if d <= row.widest and dv <= row.widest_v and not row.fewest_of_window
    )


def _small(dims: tuple[int, int]) -> Case:
    """Fewer tiles than a third of the multiprocessors, and rows that see nothing."""
    return Case(1, 8, 2, 500, 400, *dims, "bfloat16", causal=True, seed=1)


def _busy_gradients(cp: Any, case: Case) -> Gradients:
    gradients = Gradients(cp, case)
    chosen = gradients.prepare().plan
    main, tile = chosen.launches[1], chosen.tile
    assert dict(main.arguments)["ahead"] < _tiles(case), "no block would clear sums"
    told = dict(main.arguments)  # of last tiles with several blocks each, if there are any
    parts = (_tiles(case) - told.get("whole_tiles", _tiles(case))) * (told.get("parts", 1) - 1)
    assert (main.grid > _tiles(case) + parts) == (tile.kv_tiles_per_convert_block > 0)
    assert _tiles(case) > cp.cuda.Device().attributes["MultiProcessorCount"]
    return gradients


def _tiles(case: Case) -> int:
    return case.batch * case.heads_kv * -(-case.seqlen_kv // block_kv(case))


def block_kv(case: Case) -> int:
    """Keys of a block."""
    return _row(case).block_kv


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_beside_copies(cp: Any, hog: Hog, dims: tuple[int, int], causal: bool) -> None:
    gradients = _busy_gradients(cp, _busy(dims, causal))
    first, again = gradients.first(), gradients.destinations()
    wrong, kept = cp.zeros((), np.int64), []
    for _ in range(REPEATS):
        hog.copy()
        gradients.poison(again)
        gradients.launch(again)
        wrong += gradients.differ(again, first)
        kept.append(gradients.last("dq", again[0]))
    assert int(wrong) == 0
    for dq in kept:
        gradients.check("dq", dq)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_two_streams_at_once(cp: Any, dims: tuple[int, int]) -> None:
    """Small passes run entirely at the same time; larger ones overlap at their ends."""
    both = [Gradients(cp, _small(dims)), _busy_gradients(cp, _busy(dims, True))]
    gradients_on_two_streams(cp, both, 15)


@pytest.fixture(scope="module")
def _both_builds(cp: Any) -> None:
    """Compile both kernels of the test in parallel."""

    def compile_all(*operations: str) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda of: _prepare(*of), product(DIMS, (False, True), operations)))

    skip_without("fa3")
    compile_all("forward", "backward")
    with jitter():
        compile_all("backward")


def _prepare(dims: tuple[int, int], causal: bool, operation: Any) -> None:
    case = _busy(dims, causal)
    shapes = [case.shape(name) for name in "qkv"]
    named: dict[str, Any] = {"dtype": case.dtype, "algorithm": "fa3", "causal": causal}
    cuflash.prepare(*shapes, operation=operation, **named)


@pytest.mark.usefixtures("_both_builds")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_with_jitter(cp: Any, dims: tuple[int, int], causal: bool) -> None:
    gradients = _busy_gradients(cp, _busy(dims, causal))
    config = gradients.prepare().plan.launches[1].config
    first, late = gradients.first(), gradients.destinations()
    with jitter():
        for _ in range(5):
            gradients.poison(late)
            gradients.launch(late)
            assert int(gradients.differ(late, first)) == 0
            gradients.check("dq", gradients.last("dq", late[0]))
        assert any(key[0] == config and key[-1] is True for key in compiling._kernels._values)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize(
    ("batch", "lengths", "q_offset"),
    [
        (700, (1, 1), None),
        (700, (65, 65), None),
        (80, (100, 600), -30),
        (80, (300, 600), 0),
        (200, (260, 200), None),
    ],
    ids=str,
)
def test_many_tiles(
    cp: Any, batch: int, lengths: tuple[int, int], q_offset: int | None, dims: tuple[int, int]
) -> None:
    """Thousands of tiny tiles, and tiles between others that no row sees.

    The last heads are compared with the truth, all heads with FlashAttention-2.
    """
    case = Case(batch, 4, 2, *lengths, *dims, "float16", causal=True, q_offset=q_offset)
    assert _tiles(case) > 5 * cp.cuda.Device().attributes["MultiProcessorCount"]
    gradients = Gradients(cp, case)
    got = [bits.get().view(np.float16) for bits in gradients.first()]
    other = gradients.of_another("fa2")
    for one, array in zip(got, other, strict=True):
        a, b = one.astype(np.float32), array.get().astype(np.float32)
        assert np.abs(a - b).max() <= APART["float16"] * np.abs(b).max()
    seen = int(case.visible().max())
    assert not any(array[:, seen:].any() for array in got[1:])
