"""Planted bugs in the tiled NumPy backend and in JAX, chosen by a reader of the code alone."""

from __future__ import annotations

from .bug import OutsideBug

__all__ = ["JAX", "NUMPY"]

NUMPY = (
    OutsideBug(
        "common_part_without_dlse",
        "cuflash/tiled_numpy/gradient_rows.py",
        "dlse = none if self.dlse is None else self.dlse",
        "dlse = none",
        "numpy",
        "attention_backward with dlse where all keys have a component of the same sign: dq lacks "
        "what dlse gives to that component.",
    ),
    OutsideBug(
        "parts_added_as_they_come",
        "cuflash/tiled_numpy/key_sums.py",
        "while (ready := self._waiting.pop((self._next[block], block), None)) is not None:",
        "while (ready := self._waiting.pop((part, block), None)) is not None:",
        "numpy",
        "attention_backward by several threads: the bits of dk and dv depend on which is first.",
    ),
    OutsideBug(
        "large_negative_values",
        "cuflash/tiled_numpy/operands.py",
        "largest = np.maximum(values.max(axis=2), -values.min(axis=2))",
        "largest = np.maximum(values.max(axis=2), values.min(axis=2))",
        "numpy",
        "attention in float32 of 256 queries or more with v down to -1e30 in a column that also "
        "has ordinary positive values: the sum overflows, out is minus infinity.",
    ),
)

JAX = (
    OutsideBug(
        "scratch_without_room_to_align",
        "cuflash/jax/device.py",
        "return needed + _ALIGNMENT if needed else 0",
        "return needed",
        "jax",
        "A gradient on CUDA whose scratch buffer XLA lays at no multiple of 256: the workspace "
        "reaches up to 255 bytes beyond it.",
    ),
    OutsideBug(
        "divided_as_heads_of_queries",
        "cuflash/jax/partition.py",
        "_fitting(mesh, names, key.shape[axis], taken)",
        "_fitting(mesh, names, arrays['q'].shape[axis], taken)",
        "jax",
        "8 query heads on 2 key heads divided over 4 devices: the key heads cannot be.",
    ),
    OutsideBug(
        "device_gradients_in_any_order",
        "cuflash/jax/call.py",
        'options = replace(self.over(arrays).described, backend="cuda")',
        'options = replace(self.over(arrays).described, backend="cuda", deterministic=False)',
        "jax",
        "deterministic_gradients=True is ignored in a computation on CUDA.",
    ),
)
