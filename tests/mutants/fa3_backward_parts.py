"""Planted bugs in gradients in parts, where several blocks share a kv tile; see ``hopper``."""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import PARTED_GRADIENTS

__all__ = ["BUGS"]

_KERNEL = "cuda_src/fa3/backward.cu"
_STORE = "cuda_src/fa3/backward_store.cuh"
_SUM = "cuda_src/fa3/sum_parts.cu"
_TYPES = "cuda_src/fa3/backward_types.cuh"

BUGS = (
    Bug(
        "a part loads K and V of the head that has its own number",
        _TYPES,
        "static_cast<unsigned>(item.head) / parts",
        "static_cast<unsigned>(item.head)",
        PARTED_GRADIENTS,
    ),
    Bug(
        "the last part is left out of the sum",
        _SUM,
        "for (int part = 1; part < parts; ++part)",
        "for (int part = 1; part < parts - 1; ++part)",
        PARTED_GRADIENTS,
    ),
    Bug(
        "all batch entries have the sums of the first",
        _SUM,
        "at.row_of_parts = head * static_cast<int>(params.parts) * params.padded_keys + at.row;",
        "at.row_of_parts = at.head * params.parts * params.padded_keys + at.row;",
        PARTED_GRADIENTS,
    ),
    Bug(
        "both warpgroups leave their part in the rows of the first",
        _STORE,
        "part_row(c) + first + row",
        "part_row(c) + row",
        PARTED_GRADIENTS,
    ),
    Bug(
        "the parts of dK lack the scale",
        _STORE,
        "gradient.for_each([&](float& x, int, int, int, int) { x *= factor; });\n"
        "  if constexpr (Config::cut_last)",
        "if constexpr (Config::cut_last)",
        PARTED_GRADIENTS,
    ),
    Bug(
        "parts of keys that no query sees keep what lies there",
        _KERNEL,
        "clear_part<Config::head_dim_v, Config::block_kv, threads>(",
        "clear_part<0, Config::block_kv, threads>(",
        PARTED_GRADIENTS,
    ),
)
