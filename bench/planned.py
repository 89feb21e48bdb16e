"""The library's plan for a case: algorithm, tile and, with split keys, the chunk."""

from __future__ import annotations

from typing import Any

from cuflash.planning.key_chunks import chunk_of
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa2_few import Fa2FewTile

from .cases import Case
from .inputs import Inputs

__all__ = ["plan_of"]


def plan_of(case: Case, inputs: Inputs) -> str:
    """The plan as the text that rows contain."""
    if case.kvcache:
        return _of_caches(case, inputs)
    import cuflash

    operation: Any = case.op
    q, k, v, _ = inputs.of(case).matrices(case)
    said = cuflash.explain(q, k, v, operation=operation, **inputs.asked(case))
    return _words(said.algorithm, said.block_q, said.block_kv, said.problem)


def _of_caches(case: Case, inputs: Inputs) -> str:
    """The plan of a call for caches as such a text; ``explain`` does not cover these calls."""
    from cuflash.arrays.adopt import adopt
    from cuflash.options import check_options
    from cuflash.pipeline import plan_call

    own = inputs.of(case)
    q, k, v, _ = own.matrices(case)
    arrays = {"q": q, "k": k, "v": v, "seqused_kv": inputs.cache_seqlens}
    if own.paged is not None:
        arrays["page_table"] = own.paged.table
    scales = {"k_number": 1.0, "v_number": 1.0} if case.float8 else {}
    options = check_options(causal=case.causal, **case.keywords, **scales, batch_invariant=True)
    given = tuple((name, adopt(name, array).spec) for name, array in arrays.items())
    plan = plan_call("forward", given, options, given[0][1].device).plan
    tile = plan.tile
    words = _words(plan.algorithm, tile.block_q, tile.block_kv, plan.problem)
    merged = isinstance(tile, Fa2FewTile) and tile.chunk
    return f"{words} merging chunks of {tile.chunk}" if merged else words


def _words(algorithm: str, block_q: int, block_kv: int, problem: AttentionProblem) -> str:
    chunk = chunk_of(problem)
    return f"{algorithm} {block_q}x{block_kv}" + (f" chunks of {chunk}" if chunk else "")
