"""Forward passes with few tiles: split keys, packed groups and the tiles for few queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.device import DeviceLimits
from cuflash.planning.plan import Algorithm, Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa3_tables import FORWARD_OF_FEW

__all__ = ["SplitCall", "of_caches", "split_calls"]

#: Chunks per row: enough that warps of ``merge`` share it, and few.
_CHUNKS = (512, 4096)


@dataclass(frozen=True)
class SplitCall:
    """A problem, and the requests for its plan."""

    #: What names of its main kernel say beside the kernel's own constants.
    tag: ClassVar[str] = ""

    problem: AttentionProblem
    algorithm: Algorithm
    blocks: tuple[int, int] | None = None
    kv_chunk: int | None = None

    def plan(self, limits: DeviceLimits) -> Plan:
        """The plan with the requested tile and chunk."""
        return plan(
            self.problem,
            limits,
            algorithm=self.algorithm,
            blocks=self.blocks,
            kv_chunk=self.kv_chunk,
        )


def split_calls(plain: AttentionProblem) -> Iterator[SplitCall]:
    """Calls of FlashAttention-3 and 2; ``plain`` gives the other fields of their problems."""
    few = replace(plain, storage="bfloat16", output="bfloat16", seqlen_q=64, seqlen_kv=16384)
    for row, mask, chunk in product(FORWARD_OF_FEW, ("full", "causal"), (0, *_CHUNKS)):
        of = replace(few, head_dim=row.widest, head_dim_v=row.widest_v, mask=mask)
        of = replace(of, q_offset=of.seqlen_kv - of.seqlen_q)
        yield SplitCall(of, "fa3", (row.block_q, row.block_kv), chunk)
    for width, algorithm in product((64, 128, 256), ("fa2", "fa3")):
        of = replace(few, head_dim=width, head_dim_v=width)
        yield SplitCall(replace(of, storage="float16", output="float16"), algorithm, None, 1024)
        one = replace(of, seqlen_q=1, heads_q=8, heads_kv=2)
        for name, problem in _of_one_query(one):
            blocks = (64, 64) if algorithm == "fa3" else None
            yield SplitCall(problem, algorithm, blocks, 512 if name != "whole" else 0)
    for dtype, mask in product(("float32", "float64"), ("full", "causal")):
        of = replace(few, storage=dtype, output=dtype, mask=mask, q_offset=few.seqlen_kv - 64)
        yield SplitCall(of, "fa2", None, 1024)
    sinks = Operand("sinks", "bfloat16", (few.heads_q,))
    yield SplitCall(with_features(few, {}, {"sinks": sinks}), "fa3", (64, 64), 512)
    for width, algorithm in product((64, 128, 256), ("fa2", "fa3")):
        of = replace(few, head_dim=width, head_dim_v=width, seqlen_q=1, heads_q=8, heads_kv=2)
        for problem in of_caches(of):
            blocks = (64, 64) if algorithm == "fa3" else None
            yield SplitCall(problem, algorithm, blocks, 512)
    for width, storage in product((64, 128, 256), ("bfloat16", "float16")):
        of = replace(few, head_dim=width, head_dim_v=width, seqlen_q=1, heads_q=8, heads_kv=2)
        of = replace(of, storage=storage, output=storage, float8=True)
        for problem in of_caches(of):
            for blocks in ((64, 64), (64, 128)) if width == 128 else ((64, 64),):
                yield SplitCall(problem, "fa3", blocks, 512)
    wide = replace(few, storage="float32", output="float32", seqlen_q=1)
    yield SplitCall(next(of_caches(wide)), "fa2")
    capped = with_features(few, {"softcap": 50.0}, {})
    yield SplitCall(capped, "fa3", (64, 64), 4096)
    yield SplitCall(capped, "fa2", None, 4096)


def _of_one_query(one: AttentionProblem) -> Iterator[tuple[str, AttentionProblem]]:
    """Problems with one query, whose group is packed."""
    yield "whole", one
    yield "chunks", one
    used = Operand("seqused_kv", "int32", (one.batch,))
    yield "used", with_features(one, {}, {"seqused_kv": used}, bottom_right=True)
    yield "window", with_features(replace(one, mask="left", q_first=12000), {}, {})


def of_caches(one: AttentionProblem) -> Iterator[AttentionProblem]:
    """Paged caches; caches after padding, whose groups are not packed; float8 with scales."""
    used = {"seqused_kv": Operand("seqused_kv", "int32", (one.batch,))}
    if one.float8:
        used["k_scale"] = Operand("k_scale", "float32", (one.batch, one.heads_kv))
    pages = replace(one, pages=(one.batch * one.seqlen_kv // 64, 64))
    table = Operand("page_table", "int32", (one.batch, one.seqlen_kv // 64))
    scale = {"v_number": 2.0} if one.float8 else {}
    yield with_features(pages, scale, {**used, "page_table": table}, bottom_right=True)
    pad = Operand("cache_leftpad", "int32", (one.batch,))
    slopes = Operand("alibi_slopes", "float32", (one.heads_q,))
    causal = replace(one, seqlen_q=3, mask="causal", q_offset=one.seqlen_kv - 3)
    more = {**used, "cache_leftpad": pad, "alibi_slopes": slopes}
    yield with_features(causal, scale, more, bottom_right=True)
