"""The planted bugs: one-line edits, and the test that kills each.

``find`` stands exactly once in the file (a test holds it to that), so a bug
cannot rot away when the code changes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUGS", "Bug"]

_ROWS = "tests/property/test_against_float64.py::"
_CHECKS = "tests/property/test_reference_free.py::test_six_checks"
_D64 = "float16-d64-dv64"


@dataclass(frozen=True)
class Bug:
    """One edit, and the pytest arguments that must then fail."""

    name: str
    file: str
    find: str
    replace: str
    test: str

    @property
    def needs_gpu(self) -> bool:
        """Whether the bug is in device code."""
        return self.file.startswith("cuda_src/")


def _forward(runner: str = "cuda-fa1", mask: str = "causal", dims: str = _D64) -> str:
    return f"{_ROWS}test_forward[{runner}-{dims}-{mask}]"


def _backward(runner: str = "cuda-fa1", mask: str = "causal", dims: str = _D64) -> str:
    return f"{_ROWS}test_backward[{runner}-{dims}-{mask}]"


def _checks(runner: str = "cuda-fa1", mask: str = "causal", dims: str = _D64) -> str:
    return f"{_CHECKS}[{runner}-{dims}-{mask}]"


_MASK = "cuda_src/tile/mask.cuh"
_FORWARD = "cuda_src/fa1/forward.cu"
_STEPS = "cuda_src/fa1/forward_steps.cuh"
_BACKWARD = "cuda_src/fa1/backward_steps.cuh"
_SOFTMAX = "cuda_src/tile/softmax.cuh"

BUGS = (
    Bug(
        "the diagonal is dropped",
        _MASK,
        "j <= i + seq.q_offset);",
        "j < i + seq.q_offset);",
        _checks(),
    ),
    Bug(
        "one future key leaks",
        _MASK,
        "j <= i + seq.q_offset);",
        "j <= i + seq.q_offset + 1);",
        _checks(),
    ),
    Bug(
        "keys beyond the length are seen",
        _MASK,
        "return j < seq.seqlen_kv &&",
        "return j < seq.seqlen_kv + 7 &&",
        _checks(mask="full"),
    ),
    Bug(
        "edge tiles are taken for whole ones",
        _MASK,
        "return kv_last >= seq.seqlen_kv ||",
        "return kv_last > seq.seqlen_kv + 16 ||",
        _checks(mask="full"),
    ),
    Bug(
        "the last kv tile is skipped",
        _FORWARD,
        "for (int j = 0; j < kv_tiles; ++j) {",
        "for (int j = 0; j < max(1, kv_tiles - 1); ++j) {",
        _checks(mask="full"),
    ),
    Bug(
        "the workspace is read before it is written",
        _FORWARD,
        "const bool first = kv_tile == 0;",
        "const bool first = kv_tile < 0;",
        _forward(mask="full"),
    ),
    Bug(
        "the row sum is not rescaled",
        _STEPS,
        "Logits<Config>::exponential(old_max.value[m][group] - subtrahend(reference));",
        "Compute(1);",
        _forward(mask="full"),
    ),
    Bug(
        "the output so far is not rescaled",
        _STEPS,
        "x = fma(before.x, keep.value[m][group], x);",
        "x = fma(before.x, sum.value[m][group], x);",
        _forward(mask="full"),
    ),
    Bug(
        "lse comes out in other units",
        _STEPS,
        ": Logits<Config>::to_natural(reference) + log_of(total));",
        ": reference + log_of(total));",
        _checks(mask="full"),
    ),
    Bug(
        "a dead row is written as zero lse",
        _STEPS,
        "store_lse<Config>(c, begin + i, -infinity<Compute>());",
        "store_lse<Config>(c, begin + i, Compute(0));",
        _forward(),
    ),
    Bug(
        "query heads read the wrong kv head",
        _FORWARD,
        "item.head / (params.shape.heads_q / params.shape.heads_kv)};",
        "item.head % params.shape.heads_kv};",
        _forward(mask="full"),
    ),
    Bug(
        "a finite number stands in for minus infinity",
        _SOFTMAX,
        "if (!Mask<Config>::visible(seq, i, j)) s = -infinity<Compute>();",
        "if (!Mask<Config>::visible(seq, i, j)) s = Compute(-5e4);",
        _checks(),
    ),
    Bug(
        "what lies beyond the length is read",
        "cuda_src/tile/copy.cuh",
        "(valid_column && row + first_row < valid_rows);",
        "(valid_column && row + first_row <= valid_rows);",
        _forward(mask="full"),
    ),
    Bug(
        "two 8x8 blocks of V change places",
        "cuda_src/tile/product_mma.cuh",
        "{b.tile, b.depth0 + lane % 16, b.row0 / 8 + lane / 16}};",
        "{b.tile, b.depth0 + lane % 16, b.row0 / 8 + 1 - lane / 16}};",
        _checks(mask="full"),
    ),
    Bug(
        "the batch offset is 32-bit",
        "cuda_src/tile/sequence.cuh",
        "batch * tensor.batch_stride +",
        "static_cast<int>(batch * tensor.batch_stride) +",
        "tests/device/test_large.py::test_strides_beyond_two_to_the_31_elements[out]",
    ),
    Bug(
        "the barrier before P and dS are read is missing",
        "cuda_src/fa1/backward.cu",
        "__syncthreads();  // B",
        "// B",
        _backward(mask="full"),
    ),
    Bug(
        "dout is read with q's stride",
        "cuda_src/tile/backward_steps.cuh",
        "step.head, 0), c.params.dout.row_stride,",
        "step.head, 0), c.params.q.row_stride,",
        _backward(mask="full"),
    ),
    Bug(
        "what dead rows hold reaches the keys' gradients",
        _BACKWARD,
        "bool dead = rows < Config::block_q;",
        "return false;\n  bool dead = rows < Config::block_q;",
        "tests/property/test_dead_rows.py::test_queries_of_minus_infinity_are_dead[rows0-cuda-fa1-float16]",
    ),
    Bug(
        "delta is left out",
        _SOFTMAX,
        "x = p.value[m][n][group][which] * (x - delta.value[m][group]);",
        "x = p.value[m][n][group][which] * x;",
        _checks(mask="full"),
    ),
    Bug(
        "dlse has the wrong sign",
        "cuda_src/steps/delta.cu",
        "sum -= *row_number",
        "sum += *row_number",
        _backward(mask="full"),
    ),
    Bug(
        "dq lacks the scale",
        _BACKWARD,
        "static_cast<Compute>(c.params.scale));",
        "Compute(1));",
        _checks(mask="full"),
    ),
    Bug(
        "dk lacks the scale",
        "cuda_src/fa1/backward.cu",
        "kv_begin, c.params.scale, dk);",
        "kv_begin, 1.0, dk);",
        _checks(mask="full"),
    ),
    Bug(
        "dq forgets the kv tiles before",
        _BACKWARD,
        "load_tile(dq, accumulator, Config::head_dim, first ? 0 : valid_rows);",
        "load_tile(dq, accumulator, Config::head_dim, 0);",
        _checks(mask="full"),
    ),
    Bug(
        "only the first head of a group adds to dk and dv",
        "cuda_src/tile/backward_tiles.cuh",
        "return {first_head + step / tiles, block.index,",
        "return {first_head, block.index,",
        _checks(mask="full"),
    ),
    Bug(
        "the default alignment is top-left",
        "cuflash/checks.py",
        "offset = seqlen_kv - seqlen_q if options.q_offset is None",
        "offset = 0 if options.q_offset is None",
        _checks("numpy-fa2"),
    ),
    Bug(
        "v may be of another length than k",
        "cuflash/checks.py",
        '("v", "seqlen_kv", v_seqlen, seqlen_kv, "k"),',
        '("v", "seqlen_kv", v_seqlen, v_seqlen, "k"),',
        "tests/unit/test_arguments.py",
    ),
    Bug(
        "packed gradients count as overlapping",
        "cuflash/arrays/overlap.py",
        "if not np.may_share_memory(first, second):",
        "if np.may_share_memory(first, second):\n        return True\n    if True:",
        "tests/unit/test_arrays.py",
    ),
    Bug(
        "lengths reach the compile key",
        "cuflash/planning/kernel.py",
        "features=problem.features,",
        "features=(*problem.features, f'len{problem.seqlen_q}'),",
        "tests/unit/test_plan_fa2.py",
    ),
    Bug(
        "an edited header is not noticed",
        "cuflash/cuda/source.py",
        'digest.update(b"\\0" + path.read_bytes() + b"\\0")',
        'digest.update(b"\\0")',
        "tests/unit/test_source.py",
    ),
)
