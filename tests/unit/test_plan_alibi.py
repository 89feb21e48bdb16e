"""Plans with ALiBi: the numbers that kernels get, and the algorithms for its gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import cuflash
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.plan import Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles import fa3

from ..architectures import LIMITS


def _problem(shape: tuple[int, ...], softcap: float = 0.0, **changed: Any) -> AttentionProblem:
    sizes = {"batch": 3, "heads_q": 4, "heads_kv": 2, "seqlen_q": 512, "seqlen_kv": 700}
    kinds = {"storage": "float16", "output": "float16", "mask": "full", "operation": "backward"}
    wide = {"head_dim": 64, "head_dim_v": 64, "scale": 0.125, "q_offset": 0}
    more = {"alignment": "tensor_map", "wrt": ("q", "k", "v", "alibi_slopes")}
    plain = AttentionProblem(**{**sizes, **kinds, **wide, **more, **changed})  # type: ignore[arg-type]
    slopes = {"alibi_slopes": Operand("alibi_slopes", "float32", shape)}
    return with_features(plain, {"softcap": softcap}, slopes, position=188)


@pytest.mark.parametrize(("shape", "stride"), [((4,), 0), ((3, 4), 4)])
@pytest.mark.parametrize(("softcap", "unit"), [(0.0, 0.125), (8.0, 8.0)])
def test_the_numbers_of_the_kernels(
    shape: tuple[int, ...], stride: int, softcap: float, unit: float
) -> None:
    use = next(use for use in _problem(shape, softcap).uses if use.feature == "alibi")
    numbers = {"inverse_unit": 1 / unit, "inverse_unit_single": 1 / unit}
    assert dict(use.numbers) == {**numbers, "batch_stride": stride, "position": 188}


@pytest.mark.parametrize(("shape", "slopes", "entries"), [((4,), 4, 3), ((3, 4), 12, 1)])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_the_sums_of_the_gradient(
    algorithm: Any, shape: tuple[int, ...], slopes: int, entries: int
) -> None:
    """Each thread has one sum for each kv tile of a head; a block adds up all sums of a slope."""
    chosen = plan(_problem(shape), LIMITS["90"], algorithm=algorithm)
    (main,) = (one for one in chosen.launches if one.config.kernel == "backward")
    last = chosen.launches[-1]
    of_head = -(-700 // chosen.tile.block_kv) * main.config.threads
    assert (last.config.kernel, last.grid) == ("slope_gradient", slopes)
    assert last.arguments == (("sums_of_head", of_head), ("entries", entries))
    (buffer,) = (buffer for buffer in chosen.workspace if buffer.name == "pair_sums")
    assert buffer.nbytes == 4 * 3 * 4 * of_head


def _kernels(chosen: Plan) -> list[str]:
    return [launch.config.kernel for launch in chosen.launches]


def test_a_gradient_that_is_not_wanted_costs_nothing() -> None:
    chosen = plan(_problem((4,), wrt=("q", "k", "v")), LIMITS["90"], algorithm="fa3")
    assert "slope_gradient" not in _kernels(chosen)
    assert "pair_sums" not in [buffer.name for buffer in chosen.workspace]


@pytest.mark.parametrize("slopes", [(4,), None])
def test_blocks_stay_only_without_slopes(slopes: tuple[int, ...] | None) -> None:
    of = {"head_dim": 32, "head_dim_v": 32, "heads_kv": 4, "seqlen_q": 300}
    problem = _problem((4,), **of)
    tile = plan(problem if slopes else replace(problem, uses=()), LIMITS["90"]).tile
    assert isinstance(tile, fa3.Fa3BackwardTile)
    assert tile.stays == (slopes is None)


@pytest.mark.parametrize(
    ("dims", "served"),
    [((64, 64), True), ((192, 128), True), ((192, 192), False), ((256, 8), False)],
)
def test_fa3_leaves_wide_heads_with_a_softcap_to_fa2(dims: tuple[int, int], served: bool) -> None:
    """In wide heads, warpgroups of fa3 exchange P alone, not also P times the cap's derivative."""
    of = {"head_dim": dims[0], "head_dim_v": dims[1]}
    assert plan(_problem((4,), **of), LIMITS["90"]).algorithm == "fa3"
    capped = _problem((4,), softcap=8.0, **of)
    assert plan(capped, LIMITS["90"]).algorithm == ("fa3" if served else "fa2")
    if not served:
        with pytest.raises(cuflash.UnsupportedError, match="no gradient of alibi_slopes beside"):
            plan(capped, LIMITS["90"], algorithm="fa3")
