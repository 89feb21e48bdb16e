"""The batch and head axes of the arrays of a pass, by the table of tensors.

The mapped axes of :func:`jax.vmap` are before the batch; arrays without a batch have none.
"""

from __future__ import annotations

from ..tensors import tensors

__all__ = ["HEADS", "broadcasts", "free_axes", "has_batch", "may_share_batch", "source_of"]

#: Name of the axis of heads, of queries or of keys: both are divided into the same parts.
HEADS = "heads"


def has_batch(name: str) -> bool:
    """Return whether a tensor has a batch axis."""
    return "batch" in tensors()[name].axes


def may_share_batch(name: str) -> bool:
    """Return whether a tensor's array may lack the batch axis; all entries then share it."""
    return "batch" in tensors()[name].shared


def broadcasts(name: str) -> bool:
    """Return whether any axis of a tensor's array may be 1, mapped axes too."""
    return tensors()[name].broadcast


def source_of(name: str) -> str:
    """Return the tensor that ``name`` is the gradient of, or ``name`` if it is no gradient."""
    return tensors()[name].gradient_of or name


def free_axes(name: str, mapped: int) -> dict[str, int]:
    """Return the axes of a tensor that may be divided, by name: mapped axes, batch and heads."""
    ahead = mapped if has_batch(name) else 0
    free = {f"mapped{axis}": axis for axis in range(ahead)}
    for place, axis in enumerate(tensors()[name].axes):
        if axis == "batch":
            free["batch"] = ahead + place
        elif axis in ("heads_q", "heads_kv"):
            free[HEADS] = ahead + place
    return free
