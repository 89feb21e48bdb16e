"""The counts of bytes equal the loads and stores of a walk through the algorithms' loops."""

from __future__ import annotations

import pytest

from bench.story.counts import (
    Traffic,
    fa1_formula,
    fa1_kernel,
    once,
    standard_by_hand,
    standard_paper,
    tiled_rows,
)

HALF, SINGLE = 2, 4  # bytes


class Memory:
    """Counts the bytes of arrays that are read and written."""

    def __init__(self) -> None:
        self.reads = self.writes = 0

    def read(self, elements: int, size: int) -> None:
        self.reads += elements * size

    def write(self, elements: int, size: int) -> None:
        self.writes += elements * size

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.reads, self.writes)


def _blocks(length: int, block: int) -> list[int]:
    return [min(block, length - start) for start in range(0, length, block)]


def _walk_fa1(seqlen: int, dim: int, block_q: int, block_kv: int, rounds_last: bool) -> Traffic:
    """Algorithm 1; ``rounds_last``: its last pass writes the output and one number a row."""
    memory, keys = Memory(), _blocks(seqlen, block_kv)
    for j, columns in enumerate(keys):
        memory.read(2 * columns * dim, HALF)  # K_j, V_j
        for rows in _blocks(seqlen, block_q):
            memory.read(rows * dim, HALF)  # Q_i
            if j > 0:
                memory.read(rows * dim + 2 * rows, SINGLE)  # O_i, l_i, m_i
            if rounds_last and j == len(keys) - 1:
                memory.write(rows * dim, HALF)
                memory.write(rows, SINGLE)
            else:
                memory.write(rows * dim + 2 * rows, SINGLE)
    return memory.traffic


def _walk_tiled(seqlen: int, dim: int, block_q: int, block_kv: int) -> Traffic:
    memory = Memory()
    for rows in _blocks(seqlen, block_q):
        memory.read(rows * dim, HALF)
        for columns in _blocks(seqlen, block_kv):
            memory.read(2 * columns * dim, HALF)
        memory.write(rows * dim, HALF)
        memory.write(rows, SINGLE)
    return memory.traffic


SHAPES = [
    (128, 16, 32, 16),
    (128, 64, 64, 128),
    (100, 24, 32, 48),
    (37, 8, 16, 16),
    (16, 8, 16, 64),
]


@pytest.mark.parametrize(("seqlen", "dim", "block_q", "block_kv"), SHAPES)
def test_fa1_is_what_its_loops_do(seqlen: int, dim: int, block_q: int, block_kv: int) -> None:
    walked = _walk_fa1(seqlen, dim, block_q, block_kv, rounds_last=False)
    assert fa1_formula(seqlen, dim, block_kv, HALF) == walked
    walked = _walk_fa1(seqlen, dim, block_q, block_kv, rounds_last=True)
    assert fa1_kernel(seqlen, dim, block_kv, HALF) == walked


@pytest.mark.parametrize(("seqlen", "dim", "block_q", "block_kv"), SHAPES)
def test_tiles_of_rows_read_all_keys(seqlen: int, dim: int, block_q: int, block_kv: int) -> None:
    walked = _walk_tiled(seqlen, dim, block_q, block_kv)
    assert tiled_rows(seqlen, dim, block_q, HALF) == walked
    assert tiled_rows(seqlen, dim, seqlen, HALF) == once(seqlen, dim, HALF)


def test_the_papers_formula() -> None:
    """``2Nd*s + T_c (Nd*s + 8Nd + 16N)`` less the first pass's reads of O, l and m."""
    n, d, s, passes = 16384, 64, 2, 64
    whole = 2 * n * d * s + passes * (n * d * s + 8 * n * d + 16 * n)
    assert fa1_formula(n, d, 256, s).total == whole - (4 * n * d + 8 * n)


def test_figures_worked_by_hand() -> None:
    # 4 rows of 8 columns and 2 keys a block make two passes. K and V have 128 bytes together, Q has
    # 64 in each pass, O 128, l and m 32 together.
    assert fa1_formula(4, 8, 2, HALF) == Traffic(128 + 2 * 64 + 160, 2 * 160)
    assert fa1_kernel(4, 8, 2, HALF) == Traffic(128 + 2 * 64 + 160, 160 + 64 + 16)
    # The square has 32 bytes, a matrix 64.
    assert standard_paper(4, 8, HALF) == Traffic(3 * 64 + 2 * 32, 2 * 32 + 64)
    assert once(4, 8, HALF) == Traffic(3 * 64, 64 + 16)
    assert Traffic(3, 4).total == 7
    assert Traffic(3, 4).times(5) == Traffic(15, 20)


def test_standard_attention_is_what_its_operations_do() -> None:
    """Every operation of the code reads its operands and writes its result."""
    n, d, memory = 12, 4, Memory()
    square, matrix = n * n, n * d
    operations = [
        (square, square),  # times the scale
        (square, n),  # maxima
        (square + n, square),  # less them
        (square, square),  # exponentials
        (square, n),  # sums
        (square + n, square),  # divided by them
    ]
    for read, written in operations:
        memory.read(read, HALF)
        memory.write(written, HALF)
    for left, right, product in ((matrix, matrix, square), (square, matrix, matrix)):
        for operand in (left, right):  # widened
            memory.read(operand, HALF)
            memory.write(operand, SINGLE)
        memory.read(left + right, SINGLE)
        memory.write(product, SINGLE)
        memory.read(product, SINGLE)  # rounded
        memory.write(product, HALF)
    assert standard_by_hand(n, d, HALF) == memory.traffic
