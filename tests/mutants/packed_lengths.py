"""Planted bugs in packed sequences, in device code: rows of the sequence before or after."""

from __future__ import annotations

from .bug import Bug, row

__all__ = ["BUGS", "packed_bug"]

_FEATURE = "cuda_src/features/packed_lengths.cuh"
_SEQUENCE = "cuda_src/tile/sequence.cuh"
_FA1_STEPS = "cuda_src/fa1/forward_steps.cuh"
_FA2_STORE = "cuda_src/fa2/forward_store.cuh"

_PROPERTY = "tests/property/test_packed_lengths.py::"
_ALONE = "test_a_sequence_is_a_call_of_its_own"
_REFERENCE = "test_packed_lengths.py::test_against_the_reference"

_ROWS = {
    "fa1": "fa1-float16-d64-90",
    "fa1 sinks": "fa1-float32-d64-90-sinks-causal-True",
    "fa2": "fa2-float16-d64-90",
    "fa2 causal": "fa2-bfloat16-d64-80-causal-True",
    "fa2 sinks": "fa2-float32-d64-90-sinks-window_size-(90,40)",
    "fa2 slopes": "fa2-float64-d64-90-alibi_slopes-causal-True",
    "fa2 many": "fa2-float16-d64-90-many-sinks",
    "fa2 ordered": "fa2-float16-d64-ordered-90-causal-True",
    "fa3": "fa3-float16-d64-90",
    "fa3 heads": "fa3-float16-d64-90-few-heads",
    "fa3 offset": "fa3-float16-d64-90-causal-True-q_offset-20",
    "fa3 ordered": "fa3-float16-d64-ordered-90-causal-True",
    "fa3 slopes": "fa3-float16-d64-90-alibi_slopes-sinks-causal-True",
}
#: The rows from a sequence's first row to the end of the array; a sequence must not write them all.
_TO_THE_END = "c.params.shape.seqlen_q - static_cast<int>(c.seq.q_row0)"


def packed_bug(name: str, file: str, find: str, replace: str, of: str, emulated: str = "") -> Bug:
    """A bug killed by a row of the comparison with the reference, or by another emulator test."""
    algorithm, dtype = _ROWS[of].split("-")[:2]
    runner = {"fa3": "auto"}.get(algorithm, algorithm)
    mask = next((m for m in ("causal", "window") if m in _ROWS[of]), "")
    more = {"causal": "{'causal': True}", "window": "{'window': '40:10'}", "": "{}"}[mask]
    offset = "20" if "offset" in of else "None"
    on_gpu = f"{_PROPERTY}{_ALONE}[{offset}-{more}-{dtype}-cuda-{runner}]"
    return Bug(name, file, find, replace, on_gpu, emulated or row(_ROWS[of], _REFERENCE))


def _drawn(kernels: str) -> str:
    return f"test_lengths_drawn.py::test_any_lengths[packed_lengths-{kernels}]"


_OF_PLACES = (
    packed_bug(
        "keys are those of the next sequence",
        _FEATURE,
        "seq.kv_row0 = keys.begin;",
        "seq.kv_row0 = keys.begin + keys.count;",
        "fa2",
    ),
    packed_bug(
        "queries behind the last sequence count",
        _FEATURE,
        "seq.seqlen_q = entry < packed.entries ? queries.count : 0;",
        "seq.seqlen_q = queries.count;",
        "fa1 sinks",
    ),
    packed_bug(
        "all sequences are aligned as the first",
        _FEATURE,
        "const int shift = packed.shift(params.shape, queries, keys);",
        "const int shift = packed.shift(params.shape, 0);",
        "fa2 causal",
    ),
    packed_bug(
        "the alignment of a sequence is that of the arrays",
        _FEATURE,
        "    seq.q_last += shift;\n",
        "",
        "fa2 causal",
    ),
    packed_bug(
        "the first key of a window is where it is of the arrays",
        _FEATURE,
        "    seq.q_first += shift;\n",
        "",
        "fa2 sinks",
    ),
    packed_bug(
        "slopes of all sequences measure as those of the first",
        "cuda_src/tile/softmax.cuh",
        "RowsOfQueries{seq.entry, head, row0, key0}",
        "RowsOfQueries{seq.batch, head, row0, key0}",
        "fa2 slopes",
    ),
    packed_bug(
        "lse is that of the first sequence's rows",
        _SEQUENCE,
        "(seq.q_row0 + row) * vector.row_stride;",
        "row * vector.row_stride;",
        "fa2",
    ),
    packed_bug(
        "sequences share rows of the workspace",
        _FEATURE,
        "(begin + entry * (kAlignment - 1))",
        "(begin + kAlignment - 1)",
        "fa2",
    ),
    packed_bug(
        "a sequence leaves a whole block of the workspace to each before it",
        _FEATURE,
        "(begin + entry * (kAlignment - 1))",
        "(begin + entry * kAlignment)",
        "fa2 many",
    ),
    packed_bug(
        "sequences begin at half a block of the workspace",
        _FEATURE,
        "kAlignment = 128;",
        "kAlignment = 64;",
        "fa2 causal",
    ),
    packed_bug(
        "a padded row that a sequence begins with is of the one before",
        _FEATURE,
        "if (work_row(q_begins[middle], middle) <= row) {",
        "if (work_row(q_begins[middle], middle) < row) {",
        "fa2",
    ),
    packed_bug(
        "padded rows are those of the first sequence",
        _SEQUENCE,
        "padded_rows + seq.work_row0;",
        "padded_rows;",
        "fa2 causal",
    ),
    packed_bug(
        "sinks have the gradient of the first sequence",
        _SEQUENCE,
        "return params.packed_lengths.entries + 1;",
        "return params.shape.batch;",
        "fa2 sinks",
    ),
    packed_bug(
        "fa1's rows of delta are taken for padded ones",
        "cuda_src/steps/sink_gradient.cu",
        "if (params.padded_rows == params.shape.seqlen_q) {",
        "if (params.padded_rows < params.shape.seqlen_q) {",
        "fa1 sinks",
    ),
)
_OF_NEIGHBOURS = (
    packed_bug(
        "the last tile of outputs of fa1 reaches into the next sequence",
        _FA1_STEPS,
        "const int valid_rows = c.seq.rows_q - query;",
        f"const int valid_rows = {_TO_THE_END} - query;",
        "fa1",
        _drawn("fa1-float32-d20-90-sinks"),
    ),
    packed_bug(
        "the last tile of outputs of fa2 reaches into the next sequence",
        _FA2_STORE,
        "c.seq.rows_q - c.first_query() - first, valid_columns);",
        f"{_TO_THE_END} - c.first_query() - first, valid_columns);",
        "fa2",
    ),
    packed_bug(
        "the last tile of wide outputs reaches into the next sequence",
        _FA2_STORE,
        "c.seq.rows_q - c.first_query(), column0,",
        f"{_TO_THE_END} - c.first_query(), column0,",
        "fa2",
        _drawn("fa2-float16-d64-90-sinks-causal-True-wide"),
    ),
    packed_bug(
        "the last block of dQ reaches into the next sequence",
        _SEQUENCE,
        "return Config::Lengths::packed ? seq.rows_q : shape.seqlen_q;",
        "return shape.seqlen_q - static_cast<int>(seq.q_row0);",
        "fa2",
        _drawn("fa2-float16-d20-90"),
    ),
    packed_bug(
        "the last tile of dK of fa2 reaches into the next sequence",
        "cuda_src/fa2/backward_steps.cuh",
        "c.seq.rows_kv - c.item.kv_begin - row0, columns);",
        "c.params.shape.seqlen_kv - static_cast<int>(c.seq.kv_row0) - c.item.kv_begin - row0,"
        " columns);",
        "fa2",
    ),
    packed_bug(
        "the last tile of dK of fa1 reaches into the next sequence",
        "cuda_src/tile/backward_steps.cuh",
        "tensor.row_stride, c.seq.rows_kv - row, warp.column",
        "tensor.row_stride, c.params.shape.seqlen_kv - static_cast<int>(c.seq.kv_row0) - row,"
        " warp.column",
        "fa1",
        _drawn("fa1-float32-d20-90-sinks"),
    ),
)


_DROPPED = "d64-90-causal-True-dropout_p-0.3-dropout_seed-7"
_OF_DRAWS = (
    packed_bug(
        "all sequences draw as the first in fa1",
        "cuda_src/fa1/forward.cu",
        "RowsOfQueries{c.seq.entry, c.item.head,",
        "RowsOfQueries{c.seq.batch, c.item.head,",
        "fa1",
        _drawn(f"fa1-float16-{_DROPPED}"),
    ),
    packed_bug(
        "all sequences draw as the first in fa2",
        "cuda_src/fa2/forward_steps.cuh",
        "return {c.seq.entry, c.item.head,",
        "return {c.seq.batch, c.item.head,",
        "fa2",
        _drawn(f"fa2-float16-{_DROPPED}-1"),
    ),
    packed_bug(
        "gradients of all sequences draw as the first",
        "cuda_src/tile/backward_steps.cuh",
        "place{c.seq.entry, step.head,",
        "place{c.seq.batch, step.head,",
        "fa1",
        _drawn(f"fa1-float16-{_DROPPED}"),
    ),
    packed_bug(
        "transposed gradients of all sequences draw as the first",
        "cuda_src/fa2/backward_transposed.cuh",
        "const RowsOfKeys place{c.item.entry, step.head,",
        "const RowsOfKeys place{c.seq.batch, step.head,",
        "fa2",
        _drawn(f"fa2-float16-{_DROPPED}-1"),
    ),
)
BUGS = (*_OF_PLACES, *_OF_NEIGHBOURS, *_OF_DRAWS)
