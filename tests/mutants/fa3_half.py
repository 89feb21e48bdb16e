"""Planted bugs where the last step of a kv tile has half as many queries."""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import GRADIENTS

__all__ = ["BUGS", "HOST"]

_MATH = "cuda_src/fa3/backward_math.cuh"
_SCORE = "cuda_src/fa3/backward_score.cuh"
_PLAN = "cuflash/planning/fa3.py"
_CHOICE = "cuflash/planning/parts_choice.py"

_HALF = "test_half_steps.py"
_PLANS = "tests/unit/test_plan_half_steps.py"


def _bug(name: str, find: str, replace: str, file: str = _MATH) -> Bug:
    return Bug(name, file, find, replace, GRADIENTS, emulated=_HALF)


BUGS = (
    _bug(
        "a half step is that of the tile before the last",
        "return place.tile + 1 == c.blocks.end;",
        "return place.tile + 2 == c.blocks.end;",
    ),
    _bug(
        "dV of a half step reads the other half of dO",
        "issue_kv<rows>(dv, weights, c.shared.dout[0], stage);",
        "issue_kv<Config::block_q>(dv, weights, c.shared.dout[0], stage);",
    ),
    _bug(
        "dK of a half step has half of its queries",
        "issue_kv<rows>(dk, gradients, c.shared.q[0], stage);",
        "issue_kv<rows / 2>(dk, gradients, c.shared.q[0], stage);",
    ),
    _bug(
        "a half step stores half of its dS",
        "for (int i = 0; i < rows / 16; ++i) place.store(i, gradients.value[i]);",
        "for (int i = 0; i < rows / 32; ++i) place.store(i, gradients.value[i]);",
        _SCORE,
    ),
    _bug(
        "both warpgroups leave dQ of a half step out",
        "if (warpgroup == 1 && is_last(place)) return;",
        "if (is_last(place)) return;",
    ),
)

HOST = (
    Bug(
        "the step of a tile that is more than half full is half as long",
        _CHOICE,
        "return few and 0 < rest <= tile.block_q // 2 and not others",
        "return few and 0 < rest and not others",
        _PLANS,
    ),
    Bug(
        "the step of a whole tile is half as long",
        _CHOICE,
        "return few and 0 < rest <= tile.block_q // 2 and not others",
        "return few and rest <= tile.block_q // 2 and not others",
        _PLANS,
    ),
    Bug(
        "there are half steps in windows",
        _CHOICE,
        "others = problem.uses or problem.has_first or tile.ordered",
        "others = problem.uses or tile.ordered",
        _PLANS,
    ),
    Bug(
        "there are half steps in a fixed order",
        _CHOICE,
        "others = problem.uses or problem.has_first or tile.ordered",
        "others = problem.uses or problem.has_first",
        _PLANS,
    ),
    Bug(
        "there are half steps where blocks share a tile",
        _PLAN,
        "half_last = shared.number == 1 and not stays",
        "half_last = not stays",
        _PLANS,
    ),
    Bug(
        "there are half steps of many tiles",
        _CHOICE,
        "few = 1 < problem.tiles(problem.seqlen_q, tile.block_q) <= tile.halves_until",
        "few = 1 < problem.tiles(problem.seqlen_q, tile.block_q)",
        _PLANS,
    ),
    Bug(
        "no half step is compiled ahead",
        "cuflash/telling.py",
        "return (*every, *few, *half)",
        "return (*every, *few)",
        "tests/unit/test_calls_to_come.py::test_a_half_empty_last_tile_has_its_kernels",
    ),
)
