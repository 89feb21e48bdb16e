"""Which axes of the arrays of a pass count entries and heads, as the table of tensors has them.

The mapped axes of :func:`jax.vmap` stand before the batch; what has no batch has none.
"""

from __future__ import annotations

from ..tensors import tensors

__all__ = ["HEADS", "broadcasts", "free_axes", "has_batch", "may_share_batch", "source_of"]

#: The heads among the axes that may be divided: of queries, or in the same parts of keys.
HEADS = "heads"


def has_batch(name: str) -> bool:
    """Whether a tensor has something for each batch entry."""
    return "batch" in tensors()[name].axes


def may_share_batch(name: str) -> bool:
    """Whether an array of a tensor may lack the batch, and then holds the same for all entries."""
    return "batch" in tensors()[name].shared


def broadcasts(name: str) -> bool:
    """Whether an array of a tensor may have 1 in place of any size, mapped ones too."""
    return tensors()[name].broadcast


def source_of(name: str) -> str:
    """The tensor of which one is the gradient; one that is none is its own."""
    return tensors()[name].gradient_of or name


def free_axes(name: str, mapped: int) -> dict[str, int]:
    """Axes of a tensor that may be divided, by what they count: mapped ones, batch and heads."""
    ahead = mapped if has_batch(name) else 0
    free = {f"mapped{axis}": axis for axis in range(ahead)}
    for place, axis in enumerate(tensors()[name].axes):
        if axis == "batch":
            free["batch"] = ahead + place
        elif axis in ("heads_q", "heads_kv"):
            free[HEADS] = ahead + place
    return free
