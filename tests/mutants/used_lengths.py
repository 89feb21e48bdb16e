"""Planted bugs in used lengths, in device code: batch entries that do not use all rows."""

from __future__ import annotations

from .bug import Bug, row

__all__ = ["BUGS", "HOPPER"]

_FEATURE = "cuda_src/features/used_lengths.cuh"
_SCHEDULE = "cuda_src/tile/schedule.cuh"
_TAIL = "cuda_src/tile/tail.cuh"
_FA1_STEPS = "cuda_src/fa1/forward_steps.cuh"
_FA3_STORE = "cuda_src/fa3/forward_store.cuh"

_PROPERTY = "tests/property/test_used_lengths.py::"
_ALONE = "test_an_entry_is_a_call_of_its_own"
_REFERENCE = "test_used_lengths.py::test_against_the_reference"

_ROWS = {
    "fa1": "fa1-float16-d64-90",
    "fa1 sinks": "fa1-float16-d64-90-sinks-window_size-(90,40)",
    "fa1 offset": "fa1-float64-d64-seqused_kv-90-causal-True-q_offset-5",
    "fa2": "fa2-float16-d64-90",
    "fa2 causal": "fa2-bfloat16-d64-80-causal-True",
    "fa2 window": "fa2-float16-d64-90-window_size-(90,40)",
    "fa2 slopes": "fa2-float64-d64-90-alibi_slopes-sinks-causal-True",
    "fa3": "fa3-float16-d64-90",
    "fa3 causal": "fa3-bfloat16-d64-90-causal-True",
    "fa3 panels": "fa3-bfloat16-d128-90-causal-True",
}


def _drawn(kernels: str) -> str:
    return f"test_lengths_drawn.py::test_any_lengths[used_lengths-{kernels}]"


def _bug(name: str, file: str, find: str, replace: str, of: str, emulated: str = "") -> Bug:
    algorithm, dtype = _ROWS[of].split("-")[:2]
    runner = {"fa3": "auto"}.get(algorithm, algorithm)
    mask = next((m for m in ("causal", "window") if m in _ROWS[of]), "")
    more = {"causal": "{'causal': True}", "window": "{'window': '40:10'}", "": "{}"}[mask]
    offset = "20" if "offset" in of else "None"
    on_gpu = f"{_PROPERTY}{_ALONE}[{offset}-{more}-{dtype}-cuda-{runner}]"
    return Bug(name, file, find, replace, on_gpu, emulated or row(_ROWS[of], _REFERENCE))


_OF_LENGTHS = (
    _bug(
        "a used length of keys below 0 stays so",
        _FEATURE,
        "max(0, min(seqused_kv[batch], shape.seqlen_kv))",
        "min(seqused_kv[batch], shape.seqlen_kv)",
        "fa1",
        _drawn("fa1-float16-d64-90"),
    ),
    _bug(
        "a used length of keys leads out of the array",
        _FEATURE,
        "max(0, min(seqused_kv[batch], shape.seqlen_kv))",
        "max(0, seqused_kv[batch])",
        "fa2",
        _drawn("fa2-float16-d20-90-sinks"),
    ),
    _bug(
        "unused queries do not shift the positions of the others",
        _FEATURE,
        " - (queries(shape, batch) - shape.seqlen_q);",
        ";",
        "fa2 causal",
    ),
    _bug(
        "an offset that was given is shifted by used lengths",
        _FEATURE,
        "    if (bottom_right == 0) return 0;\n",
        "",
        "fa1 offset",
    ),
    _bug(
        "the first key of a window is where it is of a whole entry",
        _FEATURE,
        "    seq.q_first += shift;\n",
        "",
        "fa2 window",
    ),
    _bug(
        "slopes measure from where queries of whole entries stand",
        "cuda_src/features/alibi.cuh",
        "shift_of(params, lane.batch, 0) - lane.j",
        "-lane.j",
        "fa2 slopes",
    ),
)
_OF_FORWARD = (
    _bug(
        "lse of rows behind the end of an fa1 tile is not written",
        _FA1_STEPS,
        "if (!writes || row >= c.seq.rows_q) return;",
        "if (!writes || row >= c.seq.seqlen_q) return;",
        "fa1",
    ),
    _bug(
        "fa1 writes an output for unused queries",
        _FA1_STEPS,
        "    if (is_surplus<Config>(c.seq, query + Output::row(m, group))) x = y = 0;\n",
        "",
        "fa1",
    ),
    _bug(
        "fa1's q tiles behind the end are not written",
        "cuda_src/fa1/forward.cu",
        "ceil_div(c.seq.rows_q, Config::block_q)",
        "ceil_div(c.seq.seqlen_q, Config::block_q)",
        "fa1",
    ),
    _bug(
        "the q tile behind the last one that counts sees its keys",
        _SCHEDULE,
        "  if (Config::Lengths::vary && q_begin > last_query) return {0, 0};\n",
        "",
        "fa1",
    ),
    _bug(
        "unused queries have the lse of a sink",
        "cuda_src/tile/softmax.cuh",
        "  if (is_surplus<Config>(seq, row)) return -infinity<Compute>();\n",
        "",
        "fa1 sinks",
    ),
    _bug(
        "fa2 writes an output for unused queries",
        "cuda_src/fa2/forward_store.cuh",
        "    if (is_surplus<Config>(c.seq, first_row + Output::row(m, group))) x = 0;\n",
        "",
        "fa2",
    ),
    _bug(
        "the last tile of values is as long as the array",
        "cuda_src/fa2/forward_types.cuh",
        "return seq.seqlen_kv - (blocks.range.end - 1) * Config::block_kv;",
        "return seq.rows_kv - (blocks.range.end - 1) * Config::block_kv;",
        "fa2",
    ),
)
_OF_BACKWARD = (
    _bug(
        "the lse of an unused query is taken as it is",
        "cuda_src/tile/score.cuh",
        "  if (is_surplus<Config>(seq, row)) return -infinity<Compute>();\n",
        "",
        "fa2",
    ),
    _bug(
        "keys beyond the used ones are loaded for dQ",
        "cuda_src/tile/backward_steps.cuh",
        "const int rows = c.seq.seqlen_kv - kv_begin;",
        "const int rows = c.seq.rows_kv - kv_begin;",
        "fa2",
    ),
    _bug(
        "dQ of rows behind the end of an fa1 tile is not written",
        "cuda_src/fa1/backward_steps.cuh",
        "if (step.q_begin + row >= c.seq.rows_q) return;",
        "if (step.q_begin + row >= c.seq.seqlen_q) return;",
        "fa1",
    ),
    _bug(
        "fa1's kv tiles behind the end are not written",
        "cuda_src/fa1/backward.cu",
        "ceil_div(c.seq.rows_kv, Config::block_kv)",
        "ceil_div(c.seq.seqlen_kv, Config::block_kv)",
        "fa1",
    ),
    _bug(
        "fa2 does not write dK of unused keys",
        "cuda_src/fa2/backward_steps.cuh",
        "c.seq.rows_kv - c.item.kv_begin - row0, columns);",
        "c.seq.seqlen_kv - c.item.kv_begin - row0, columns);",
        "fa2",
    ),
    _bug(
        "unused queries add to the gradient of sinks",
        "cuda_src/steps/sink_gradient.cu",
        "if (row >= seq.seqlen_q) return;",
        "if (row >= seq.rows_q) return;",
        "fa2 slopes",
        _drawn("fa2-float16-d20-90-sinks"),
    ),
)
BUGS = (*_OF_LENGTHS, *_OF_FORWARD, *_OF_BACKWARD)

#: Bugs of FlashAttention-3, which only the emulator runs.
HOPPER = (
    _bug(
        "the tail of V is not cleared",
        "cuda_src/fa3/forward_tail.cuh",
        "    clear_rows<32>(c.shared.v[stage], tail.count);\n",
        "",
        "fa3",
    ),
    _bug(
        "the tail of K is not cleared",
        "cuda_src/fa3/backward_load.cuh",
        "    clear_rows<32>(c.shared.k[0], count);\n",
        "",
        "fa3",
    ),
    _bug(
        "the last row of a tail is left",
        _TAIL,
        "(Matrix::rows - first) * 8;",
        "(Matrix::rows - first - 1) * 8;",
        "fa3",
    ),
    _bug(
        "one panel of a tail is cleared",
        _TAIL,
        "panel < Matrix::count",
        "panel < 1",
        "fa3 panels",
    ),
    _bug(
        "a tail is announced before the one before it is cleared",
        "cuda_src/fa3/forward_tail.cuh",
        "    wait_empty<Config>(tail.cleared, place.phase);\n",
        "",
        "fa3",
    ),
    _bug(
        "the copy engine says that V with a tail is there",
        "cuda_src/fa3/forward_load.cuh",
        "copy_kv(v, &c.params.v_map, c.shared.tail.raw, tile, block, found);",
        "copy_kv(v, &c.params.v_map, c.shared.v_full[v_place.stage], tile, block, found);",
        "fa3",
    ),
    _bug(
        "gradients of blocks of keys behind the end are not written",
        "cuda_src/fa3/backward_stay.cuh",
        "min(Config::block_kv, c.seq.rows_kv - c.item.kv_begin)",
        "min(Config::block_kv, c.seq.seqlen_kv - c.item.kv_begin)",
        "fa3",
        _drawn("fa3-float16-d64-90-causal-True-1"),
    ),
    _bug(
        "gradients of keys behind the end of a block are not written",
        "cuda_src/fa3/backward_store.cuh",
        "c.seq.rows_kv - key, columns);",
        "c.seq.seqlen_kv - key, columns);",
        "fa3",
        _drawn("fa3-float16-d64-90-causal-True-1"),
    ),
    _bug(
        "blocks of keys behind the end add to dQ",
        _SCHEDULE,
        "    if (Config::Lengths::vary && kv_begin >= seq.seqlen_kv) begin = end;\n",
        "",
        "fa3",
    ),
    _bug(
        "fa3 writes an output for unused queries",
        _FA3_STORE,
        "    if (is_surplus<Config>(tile.seq, row)) inverse.value[m][group] = 0;\n",
        "",
        "fa3",
    ),
    _bug(
        "outputs behind the end of an fa3 tile are not written",
        _FA3_STORE,
        "const int valid_rows = tile.seq.rows_q - row0;",
        "const int valid_rows = tile.seq.seqlen_q - row0;",
        "fa3 causal",
    ),
    _bug(
        "keys beyond the used ones are seen by gradients",
        "cuda_src/fa3/backward_score.cuh",
        "if (key >= seq.seqlen_kv) hidden = Config::block_q;",
        "if (key >= seq.rows_kv) hidden = Config::block_q;",
        "fa3",
    ),
)
