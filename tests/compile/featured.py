"""Representative kernels with features."""

from __future__ import annotations

from cuflash.planning.decision import Algorithm
from cuflash.planning.problem import DTypeName, MaskKind

__all__ = ["FEATURED"]

#: Of each algorithm: dtype, widths, mask, whether dq has an order, and sinks'
#: dtype, "softcap", "alibi", or "dalibi" with the gradient of its slopes, or "bias:" and the axes
#: of q and k that it has, with its gradient.
FEATURED: dict[Algorithm, list[tuple[DTypeName, int, int, MaskKind, bool, str]]] = {
    "fa1": [
        ("float16", 64, 64, "band", False, ""),
        ("float16", 64, 64, "causal", False, "float32"),
        ("float16", 64, 64, "causal", False, "softcap"),
        ("float16", 64, 64, "causal", False, "dalibi"),
        ("float16", 64, 64, "causal", False, "bias:qk"),
    ],
    "fa2": [
        ("float16", 64, 64, "band", False, ""),
        ("float16", 64, 64, "left", True, ""),
        ("bfloat16", 128, 128, "band", True, ""),
        ("float32", 64, 64, "band", False, ""),
        ("float64", 64, 64, "left", False, ""),
        ("float16", 64, 64, "causal", False, "float16"),
        ("float64", 64, 64, "band", False, "float64"),
        ("float16", 64, 64, "causal", True, "softcap"),
        ("bfloat16", 128, 128, "full", False, "softcap"),
        ("float32", 64, 64, "causal", False, "softcap"),
        ("float64", 64, 64, "full", False, "softcap"),
        ("float16", 64, 64, "causal", True, "dalibi"),
        ("bfloat16", 128, 128, "full", False, "alibi"),
        ("float32", 64, 64, "causal", False, "dalibi"),
        ("float16", 64, 64, "causal", False, "bias:qk"),
        ("bfloat16", 128, 128, "full", False, "bias:k:float32"),
        ("float32", 64, 64, "full", False, "bias:q"),
        ("float64", 256, 256, "causal", False, "bias:qk"),
    ],
    "fa3": [
        ("bfloat16", 64, 64, "band", False, ""),
        ("bfloat16", 64, 64, "left", False, ""),
        ("bfloat16", 64, 64, "band", True, ""),
        ("bfloat16", 128, 128, "band", False, ""),
        ("bfloat16", 128, 128, "left", True, ""),
        ("bfloat16", 192, 128, "band", False, ""),
        ("bfloat16", 256, 256, "band", True, ""),
        ("bfloat16", 64, 64, "causal", False, "float32"),
        ("bfloat16", 128, 128, "causal", False, "bfloat16"),
        ("bfloat16", 256, 256, "band", False, "float32"),
        ("bfloat16", 64, 64, "full", False, "softcap"),
        ("bfloat16", 64, 64, "causal", True, "softcap"),
        ("bfloat16", 64, 64, "band", False, "softcap"),
        ("bfloat16", 96, 96, "causal", False, "softcap"),
        ("bfloat16", 128, 128, "full", False, "softcap"),
        ("bfloat16", 128, 128, "causal", True, "softcap"),
        ("bfloat16", 192, 128, "causal", False, "softcap"),
        ("bfloat16", 192, 192, "full", False, "softcap"),
        ("bfloat16", 256, 256, "causal", False, "softcap"),
        ("float16", 64, 64, "causal", False, "softcap"),
        ("float16", 128, 128, "causal", False, "softcap"),
        ("bfloat16", 64, 64, "causal", False, "alibi"),
        ("bfloat16", 64, 64, "full", True, "dalibi"),
        ("bfloat16", 96, 96, "causal", False, "dalibi"),
        ("bfloat16", 128, 128, "causal", False, "alibi"),
        ("bfloat16", 128, 128, "full", False, "dalibi"),
        ("bfloat16", 192, 128, "causal", False, "dalibi"),
        ("bfloat16", 256, 256, "causal", False, "dalibi"),
        ("float16", 64, 64, "band", False, "dalibi"),
        ("bfloat16", 64, 64, "causal", False, "bias:qk"),
        ("bfloat16", 64, 64, "full", False, "bias:k"),
        ("bfloat16", 96, 96, "causal", False, "bias:qk"),
        ("bfloat16", 128, 128, "causal", False, "bias:qk:float32"),
        ("bfloat16", 128, 128, "full", True, "bias:qk"),
        ("bfloat16", 192, 128, "causal", False, "bias:qk"),
        ("bfloat16", 256, 256, "causal", False, "bias:qk"),
        ("float16", 64, 64, "band", False, "bias:1"),
    ],
}
