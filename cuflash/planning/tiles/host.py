"""The tiled NumPy code: blocks that keep a step's scores in one core's cache."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from ...errors import ArgumentValueError
from ..device import HostLimits
from ..problem import DTYPES, AttentionProblem, Operation
from .common import ceil_div, round_down

__all__ = ["FEW_ROWS", "HostTile", "tile_of_blocks", "tile_of_cache"]

#: Longer blocks were not faster with any cache, and a causal mask hides less of them.
MOST_QUERIES = 512
MOST_KEYS = 1024
#: Blocks of so few rows have longer blocks of keys and a separate computation: their products
#: are small.
FEW_ROWS, MOST_KEYS_OF_FEW = 16, 8192
#: Shorter blocks of queries lose more in small matrix products than they save in the half-hidden
#: squares on the diagonal, which are one ``CAUSAL_BLOCKS``-th of the work.
FEWEST_CAUSAL_QUERIES = 128
CAUSAL_BLOCKS = 8
#: Fewest tasks of a call, if its blocks allow it. Every task of a backward pass computes
#: partial dK and dV, which have to be added.
TASKS: dict[Operation, int] = {"forward": 32, "backward": 16}
#: Multiplications that outweigh handing a task to another thread: about a millisecond.
WORK_OF_A_TASK = 1 << 24


@dataclass(frozen=True)
class HostTile:
    """Blocks of the tiled NumPy code.

    One step computes ``block_q`` queries of every head of a group with
    ``block_kv`` keys, for ``block_heads`` pairs of a batch entry and a
    key/value head at once: short sequences need many pairs to outweigh the
    cost of a NumPy call.

    The queries of the heads of a step are divided into ``parts`` of whole
    blocks. Each part is a task, so that few heads keep many threads busy. Each
    part rounds its own sums. All fields but ``threads`` follow from the problem
    and the cache, so the bits of results do not depend on the threads.
    """

    block_q: int
    block_kv: int
    block_heads: int
    parts: int = 1
    threads: int = 1


def tile_of_cache(problem: AttentionProblem, limits: HostLimits) -> HostTile:
    """Return blocks whose scores fill the cache.

    A block has about twice as many keys as rows. Lengths are divided evenly, so
    that no short block is left at the end.
    """
    scores = _scores(problem, limits)
    most_queries = min(MOST_QUERIES, isqrt(scores // 2)) // max(1, problem.group)
    if problem.mask == "causal":
        causal = max(FEWEST_CAUSAL_QUERIES, problem.seqlen_q // CAUSAL_BLOCKS)
        most_queries = min(most_queries, causal)
    block_q = _even(problem.seqlen_q, max(1, most_queries))
    rows = _rows(problem, block_q)
    most_keys = min(MOST_KEYS if rows > FEW_ROWS else MOST_KEYS_OF_FEW, scores // rows)
    block_kv = _even(problem.seqlen_kv, max(1, most_keys))
    return _fill(problem, limits, scores, block_q, block_kv)


def tile_of_blocks(
    problem: AttentionProblem, limits: HostLimits, blocks: tuple[int, int]
) -> HostTile:
    """Return the requested blocks, cut to the sequences, for as many heads as the cache allows."""
    if min(blocks) < 1:
        raise ArgumentValueError("blocks", f"{blocks}", "two positive numbers of rows")
    block_q = min(blocks[0], max(1, problem.seqlen_q))
    block_kv = min(blocks[1], max(1, problem.seqlen_kv))
    return _fill(problem, limits, _scores(problem, limits), block_q, block_kv)


def _scores(problem: AttentionProblem, limits: HostLimits) -> int:
    """Return the most scores of a step, at least 256.

    The backward pass holds two arrays of scores but has the same blocks: the
    rounding of a score in BLAS depends on the shape of the product, and the weights
    of both passes should agree to the last bit. This costs no speed.
    """
    return max(256, limits.cache // DTYPES[problem.compute].itemsize)


def _rows(problem: AttentionProblem, block_q: int) -> int:
    return block_q * max(1, problem.group)


def _fill(
    problem: AttentionProblem, limits: HostLimits, scores: int, block_q: int, block_kv: int
) -> HostTile:
    pairs = problem.batch * problem.heads_kv
    fitting = scores // (_rows(problem, block_q) * block_kv)
    together = max(1, min(fitting, pairs))
    chunks = ceil_div(pairs, together)
    wanted = ceil_div(TASKS[problem.operation], max(1, chunks))
    shares = _work(problem) // WORK_OF_A_TASK
    parts = max(1, min(wanted, ceil_div(problem.seqlen_q, block_q), shares // max(1, chunks)))
    threads = max(1, min(limits.threads, chunks * parts, shares))
    return HostTile(block_q, block_kv, together, parts, threads)


def _work(problem: AttentionProblem) -> int:
    """Return the multiplications of a call, with exponentials counted as several of them."""
    pairs = problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_kv
    return pairs * (problem.head_dim + problem.head_dim_v + 64)


def _even(length: int, most: int) -> int:
    """Return the shortest block that divides a length into as few blocks as ``most`` does."""
    step = 16 if most >= 16 else 1  # whole vectors of any CPU
    count = max(1, ceil_div(length, round_down(most, step)))
    return max(1, min(length, ceil_div(length, count * step) * step))
