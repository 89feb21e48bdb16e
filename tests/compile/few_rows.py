"""Forward passes of few queries, by the kernel of FlashAttention-2 whose warps divide the keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from cuflash.errors import UnsupportedError
from cuflash.features.packed_group import with_packed_group
from cuflash.planning.device import DeviceLimits
from cuflash.planning.fa2 import fa2_plan
from cuflash.planning.plan import Plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.fa2_few import Fa2FewTile, few_tiles, merging_tile
from cuflash.planning.tiles.fa2_tables import FEW_BUCKETS

from .split import SplitCall, of_caches

__all__ = ["few_row_calls"]

_CHUNK = 512


@dataclass(frozen=True)
class _FewestCall(SplitCall):
    """A problem whose blocks have the fewest rows, and even loads."""

    tag = "fewest"

    def plan(self, limits: DeviceLimits) -> Plan:
        tile = _with_even_loads(_tiles(self.problem, limits)[-1], self.problem)
        return fa2_plan(self.problem, limits, None, (), tile=tile, kv_chunk=self.kv_chunk)


@dataclass(frozen=True)
class _MergingCall(SplitCall):
    """A problem whose blocks merge the chunks of their rows."""

    def plan(self, limits: DeviceLimits) -> Plan:
        merging = merging_tile(_tiles(self.problem, limits)[0], limits, _CHUNK)
        if merging is None:
            raise UnsupportedError("no room for results")
        return fa2_plan(self.problem, limits, None, (), tile=merging)


@dataclass(frozen=True)
class _FewestMergingCall(SplitCall):
    """Both."""

    tag = "fewest"

    def plan(self, limits: DeviceLimits) -> Plan:
        merging = merging_tile(_tiles(self.problem, limits)[-1], limits, _CHUNK)
        if merging is None:
            raise UnsupportedError("no room for results")
        tile = _with_even_loads(merging, self.problem)
        return fa2_plan(self.problem, limits, None, (), tile=tile)


def _with_even_loads(tile: Fa2FewTile, problem: AttentionProblem) -> Fa2FewTile:
    return tile if problem.float8 else tile.with_even_loads()


def _tiles(problem: AttentionProblem, limits: DeviceLimits) -> tuple[Fa2FewTile, ...]:
    tiles = few_tiles(with_packed_group(problem), limits)
    if not tiles:
        raise UnsupportedError("no tile for few queries")
    return tiles


def few_row_calls(plain: AttentionProblem) -> Iterator[SplitCall]:
    """Calls of one query and of sixteen; ``plain`` is the rest of their problem."""
    one = replace(plain, seqlen_q=1, seqlen_kv=16384, heads_q=8, heads_kv=2)
    for width, dtype in (*product(FEW_BUCKETS, ("bfloat16",)), (128, "float16")):
        of = replace(one, head_dim=width, head_dim_v=width, storage=dtype, output=dtype)
        yield _MergingCall(of, "fa2")
        for problem in (*of_caches(of), *of_caches(replace(of, float8=True))):
            yield SplitCall(problem, "fa2", None, _CHUNK)
        yield _MergingCall(next(of_caches(of)), "fa2")
        yield _FewestCall(of, "fa2", None, 0)
        yield _FewestCall(next(of_caches(of)), "fa2", None, _CHUNK)
        yield _FewestMergingCall(next(of_caches(of)), "fa2")
        yield _MergingCall(next(of_caches(replace(of, float8=True))), "fa2")
    several = replace(one, seqlen_q=16, storage="bfloat16", output="bfloat16")
    for width, mask, heads in product((64, 128), ("causal", "band"), (2, 8)):
        of = replace(several, head_dim=width, head_dim_v=width, mask=mask, heads_q=heads)
        yield SplitCall(replace(of, q_offset=16368, q_first=9000), "fa2", None, _CHUNK)
    yield from _drafts(replace(several, mask="causal"))


def _drafts(several: AttentionProblem) -> Iterator[SplitCall]:
    """Calls whose blocks have queries of several heads."""
    for width, queries in ((64, 2), (128, 8), (192, 8), (256, 2)):
        of = replace(several, seqlen_q=queries, q_offset=several.seqlen_kv - queries)
        of = replace(of, head_dim=width, head_dim_v=width)
        yield SplitCall(of, "fa2", None, 0)
        for paged in (next(of_caches(of)), next(of_caches(replace(of, float8=True)))):
            yield SplitCall(paged, "fa2", None, _CHUNK)
            yield _MergingCall(paged, "fa2")
            if width <= 128:
                yield _FewestCall(paged, "fa2", None, _CHUNK)
                yield _FewestMergingCall(paged, "fa2")
