"""Planted bugs in blocks of FlashAttention-3's backward pass that go through several kv tiles."""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import NARROW_GRADIENTS

__all__ = ["BUGS", "HOST"]

_STAY = "cuda_src/fa3/backward_stay.cuh"
_KERNEL = "cuda_src/fa3/backward.cu"
_MATH = "cuda_src/fa3/backward_math.cuh"
_TYPES = "cuda_src/fa3/backward_types.cuh"
_PLAN = "cuflash/planning/fa3.py"
_ORDER = "cuflash/planning/row_order.py"

_TEST = "test_staying.py::test_against_float64"
_PLANNED = "tests/unit/test_plan_staying.py::test_blocks_stay_where_kv_tiles_have_few_steps[None]"


def _bug(name: str, file: str, find: str, replace: str, of: str = "") -> Bug:
    test = _TEST + (f"[{of}]" if of else "")
    return Bug(name, file, find, replace, NARROW_GRADIENTS, emulated=test)


BUGS = (
    _bug(
        "a block goes through its first kv tile alone",
        _STAY,
        "++i, tile += gridDim.x) {",
        "++i, tile += kv_tiles_of_all<Config>(params)) {",
        "full-1",
    ),
    _bug(
        "steps of earlier tiles are not counted", _STAY, "    steps += c.steps();\n", "", "full-1"
    ),
    _bug(
        "K and V of all tiles have one place", _TYPES, "return tiles_before % 2; }", "return 0; }"
    ),
    _bug(
        "the place of K and V is never in another phase",
        _TYPES,
        "return tiles_before / 2 % 2; }",
        "return 0; }",
    ),
    _bug(
        "scores read K and V of the first place",
        _MATH,
        "    if constexpr (Config::stays) a_step += c.kv_place() * (sizeof(Keys) / 16);\n",
        "",
        "full-1",
    ),
    _bug(
        "dQ reads K of the first place",
        _MATH,
        "    if constexpr (Config::stays) b_step += "
        "c.kv_place() * (sizeof(typename Types::KPanels) / 16);\n",
        "",
        "full-1",
    ),
    _bug(
        "the first dQ of a tile is that of the tile before",
        _TYPES,
        "dead_before(stays ? first_step : 0) {}",
        "dead_before(0) {}",
        "full-1",
    ),
    _bug(
        "the last dS of a tile is never free",
        _STAY,
        "  arrive_warp<Config>(c.shared.ds_empty[RingPlace<Config::score_stages>(last).stage]);\n",
        "",
        "full-1",
    ),
    _bug(
        "K is never free",
        _STAY,
        "  arrive_warp<Config>(c.shared.stay.kv_empty[c.kv_place()]);\n}\n\n// All warps",
        "}\n\n// All warps",
        "full-1",
    ),
    _bug(
        "K and V are loaded without waiting for room",
        _STAY,
        "  wait_empty<Config>(barriers.kv_empty[place], c.kv_phase());\n",
        "",
    ),
    _bug(
        "keys of a tile that no query sees are not announced",
        _STAY,
        "    arrive<Config>(barriers.k_full[place]);\n",
        "",
        "unseen keys-1",
    ),
    _bug(
        "dK of a tile that no query sees is not written",
        _STAY,
        "  store_zeros(c, c.params.dk, c.params.shape.head_dim, kWarpgroup, threads);\n",
        "",
        "unseen keys-1",
    ),
    _bug(
        "the load warp leaves before the last steps end",
        _STAY,
        "  for (int i = max(0, step - stages); i < step; ++i) await_step<Config>(i % stages);\n",
        "",
        "full-1",
    ),
)

#: Bugs of the host.
HOST = (
    Bug(
        "blocks that stay are as many as tiles",
        _PLAN,
        "min(order.blocks, limits.num_sms) if tile.stays else order.blocks",
        "order.blocks",
        _PLANNED,
    ),
    Bug(
        "sums are left to blocks that do not clear",
        _ORDER,
        "        if not self.clears:\n            return self.heads\n",
        "",
        _PLANNED,
    ),
)
