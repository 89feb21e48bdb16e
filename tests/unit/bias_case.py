"""Problems with a bias that are planned without arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.kernel import KernelLaunch
from cuflash.planning.plan import Plan
from cuflash.planning.problem import AttentionProblem

__all__ = [
    "BATCH",
    "FORMS",
    "HEADS",
    "KEYS",
    "ROWS",
    "bytes_of",
    "kernel_of",
    "kernels_of",
    "problem_of",
    "shape_of",
]

ROWS, KEYS, HEADS, BATCH = 500, 700, 4, 3
#: Whether the bias differs along the queries, and whether it differs along the keys.
FORMS = [(True, True), (False, True), (True, False), (False, False)]


def shape_of(batch: int, heads: int, form: tuple[bool, bool]) -> tuple[int, ...]:
    return (batch, heads, ROWS if form[0] else 1, KEYS if form[1] else 1)


def problem_of(
    shape: tuple[int, ...],
    dtype: str = "float16",
    softcap: float = 0.0,
    entries: tuple[int, int] | None = None,
    more: dict[str, Operand] | None = None,
    mappable: bool = True,
    **changed: Any,
) -> AttentionProblem:
    sizes = {"batch": BATCH, "heads_q": HEADS, "heads_kv": 2}
    lengths = {"seqlen_q": ROWS, "seqlen_kv": KEYS}
    kinds = {"storage": "float16", "mask": "full", "operation": "backward"}
    wide = {"head_dim": 64, "head_dim_v": 64, "scale": 0.125, "q_offset": 0}
    named = {"alignment": "tensor_map", "wrt": ("q", "k", "v", "bias")}
    every = {**sizes, **lengths, **kinds, **wide, **named, **changed}
    plain = AttentionProblem(output=every["storage"], **every)
    bias = Operand("bias", dtype, shape, entries)
    problem = with_features(plain, {"softcap": softcap}, {"bias": bias, **(more or {})}, 188)
    uses = (
        replace(use, operands=tuple(replace(one, mappable=mappable) for one in use.operands))
        for use in problem.uses
    )
    return replace(problem, uses=tuple(uses))


def kernel_of(chosen: Plan, name: str) -> KernelLaunch:
    (found,) = (launch for launch in chosen.launches if launch.config.kernel == name)
    return found


def kernels_of(chosen: Plan) -> list[str]:
    return [launch.config.kernel for launch in chosen.launches]


def bytes_of(chosen: Plan) -> dict[str, int]:
    return {buffer.name: buffer.nbytes for buffer in chosen.workspace}
