"""Planted bugs in a bias, and in its gradient."""

from __future__ import annotations

from .bug import Bug, row

__all__ = ["AGAINST", "BUGS", "NEIGHBOURS", "emulated"]

_PAIRS = "cuda_src/features/pairs.cuh"
_GRADIENT = "cuda_src/steps/bias_gradient.cu"
_STEPS = "cuda_src/steps/bias_steps.cuh"
_REDUCE = "cuda_src/steps/reduce_bias.cu"
_ARGUMENTS = "cuflash/planning/argument_gradients.py"
_NUMPY_GRADIENT = "cuflash/tiled_numpy/bias_gradient.py"
_JAX = "cuflash/jax/entries.py"

_PROPERTY = "tests/property/test_bias.py::"
_PLANS = "tests/unit/test_plan_bias.py::"
_NEIGHBOURS = "test_neighbouring_entries_share_one_of_the_bias_and_of_its_gradient"
_SHARING = "test_bias_sharing.py::"
_WALKERS = f"{_SHARING}test_walkers_take_all_steps_in_turns"
_DEAD = "test_bias.py::test_queries_that_minus_infinity_hides_whole_may_hold_anything"
#: Tests of the emulator.
AGAINST = "test_bias.py::test_against_float64"
NEIGHBOURS = f"{_SHARING}{_NEIGHBOURS}"

_WHOLE = "fa1-sm_90-float16-d64-dv64-causal-bias-bhqk"
_KEYS = "fa2-sm_90-float16-d64-dv64-causal-bias-bh1k-filled-ordered"
_SINGLE = "fa2-sm_90-bfloat16-d256-dv192-causal-bias-b111-sinks-bfloat16"


def _broadcast(axes: str, runner: str = "fa2", dtype: str = "float16") -> str:
    """The test on a GPU of a bias that broadcasts over entries and heads in every way."""
    return f"{_PROPERTY}test_every_way_to_broadcast[{axes}-{dtype}-cuda-{runner}]"


def emulated(name: str, file: str, find: str, replace: str, test: str) -> Bug:
    """A bug of device code that only the emulator shows, also where there is a GPU."""
    return Bug(name, file, find, replace, f"tests/emulator/{test}", test)


BUGS = (
    Bug(
        "NumPy's neighbouring entries have a bias each",
        "cuflash/features/pairs.py",
        "own = place.batch.ravel() // entries % whole.shape[0]",
        "own = place.batch.ravel() % whole.shape[0]",
        f"tests/unit/test_bias.py::{_NEIGHBOURS}",
    ),
    Bug(
        "NumPy's entries that share a gradient have their heads in one step with others",
        _NUMPY_GRADIENT,
        "most_entries=1 if some else None",
        "most_entries=None",
        "tests/unit/test_bias.py::test_entries_that_share_a_gradient_are_in_no_step_with_others",
    ),
    Bug(
        "NumPy's gradient of a bias for all heads is that of the last",
        _NUMPY_GRADIENT,
        "one.query_heads.start if heads else 0",
        "one.query_heads.start",
        "tests/unit/test_bias.py::test_both_passes_against_the_formula",
    ),
    Bug(
        "parts of one number for all pairs are as long as the keys",
        _ARGUMENTS,
        "self.problem.seqlen_kv if keys > 1 else self.problem.seqlen_q",
        "self.problem.seqlen_q if rows > 1 else self.problem.seqlen_kv",
        _PLANS + "test_the_launches_of_the_gradient",
    ),
    Bug(
        "the gradient has as many entries as share the bias",
        _ARGUMENTS,
        "batch = self.problem.batch // bias.entries[1]",
        "batch = self.problem.batch // bias.entries[0]",
        _PLANS + "test_entries_that_share_one_of_the_gradient",
    ),
    Bug(
        "terms are kept beside slopes",
        _ARGUMENTS,
        '{"bias", "sinks", "window"}',
        '{"bias", "sinks", "window", "alibi"}',
        _PLANS + "test_terms_are_kept_where_they_are_the_same_in_every_step",
    ),
    Bug(
        "there are more walkers than steps",
        "cuflash/planning/tiles/bias.py",
        "if row.walkers <= few_blocks_of)",
        "if row.walkers <= few_blocks_of + 1)",
        _PLANS + "test_few_blocks_have_walkers_for_their_steps",
    ),
    Bug(
        "head groups of shared pairs are rounded down",
        "cuflash/planning/head_groups.py",
        "ceil_div(head_group, batch) * batch if",
        "head_group // batch * batch if",
        "tests/unit/test_plan_bias_fa3.py::test_entries_that_share_pairs_come_together",
    ),
    Bug(
        "the map of a bias has its heads where its queries are",
        "cuflash/cuda/launch.py",
        "(entries, queries, heads, keys)",
        "(entries, heads, queries, keys)",
        "tests/unit/test_bias_launches.py::test_the_map_of_a_bias_that_comes_in_tiles",
    ),
    Bug(
        "vmap's neighbours include those that have a bias each",
        _JAX,
        "math.prod(full[has[-1] + 1 :])",
        "math.prod(full[has[-1] :])",
        "tests/unit/test_jax_bias.py::test_entries_that_share",
    ),
    emulated(
        "the bias of a query behind the last is read",
        _PAIRS,
        "rows_left(shape.seqlen_q - 1 - lane.i)",
        "rows_left(shape.seqlen_q - lane.i)",
        f"test_bias.py::test_nothing_is_read_beyond_the_bias[False-{_WHOLE}]",
    ),
    emulated(
        "neighbouring entries have a bias each",
        _PAIRS,
        "batch / block.entries % block.own_entries",
        "batch % block.own_entries",
        f"{NEIGHBOURS}[2-1-{_WHOLE}]",
    ),
    emulated(
        "the sums of the last walker are left out",
        _GRADIENT,
        "other < Config::walkers; ++other",
        "other < Config::walkers - 1; ++other",
        f"{_WALKERS}[11qk-None]",
    ),
    emulated(
        "walkers share a barrier",
        _GRADIENT,
        "ptx::named_barrier(1 + walker, Types::threads);",
        "ptx::named_barrier(1, Types::threads);",
        f"{_WALKERS}[11qk-None]",
    ),
    emulated(
        "walkers take the step of their neighbour again",
        _STEPS,
        "next_heads(Config::walkers);\n    } else if",
        "next_heads(1);\n    } else if",
        f"{_WALKERS}[11qk-None]",
    ),
    emulated(
        "walkers go over one entry at most in a step",
        _STEPS,
        "while (head >= item->heads.end) {",
        "if (head >= item->heads.end) {",
        f"{_WALKERS}[1hqk-None]",
    ),
    Bug(
        "delta of the gradient of a bias is that of the key's head",
        _GRADIENT,
        "padded_row(params.shape, seq, step.head,",
        "padded_row(params.shape, seq, step.kv_head(),",
        _broadcast("qk"),
        row(_WHOLE, AGAINST),
    ),
    Bug(
        "kept terms are those of the first head",
        _GRADIENT,
        "RowsOfQueries{item.entries.begin, item.heads.begin, query, key}",
        "RowsOfQueries{item.entries.begin, 0, query, key}",
        _broadcast("qk"),
        row(_WHOLE, AGAINST),
    ),
    emulated(
        "a product comes before its tiles have",
        _GRADIENT,
        "wait_copies<Config::copies, Config::slots - 2>();",
        "wait_copies<Config::copies, Config::slots - 1>();",
        row(_WHOLE, AGAINST),
    ),
    emulated(
        "four slots are used as two",
        _GRADIENT,
        "product : number % Config::slots]",
        "product : number % 2]",
        row(_KEYS, AGAINST),
    ),
    emulated(
        "dead rows add to the gradient of a bias",
        _GRADIENT,
        "    clear_dead(p, lse);\n",
        "",
        row(_WHOLE, _DEAD),
    ),
    emulated(
        "a pair is written where one number is left",
        _GRADIENT,
        "if (left > 1) place[to.column_stride]",
        "if (left > 0) place[to.column_stride]",
        f"{_SHARING}test_nothing_is_written_behind_the_rows_of_the_gradient[33]",
    ),
    Bug(
        "parts lie where those of key heads would",
        _GRADIENT,
        "static_cast<long long>(item.entries.begin) * params.shape.heads_q",
        "static_cast<long long>(item.entries.begin) * params.shape.heads_kv",
        _broadcast("1k"),
        row(_KEYS, AGAINST),
    ),
    Bug(
        "keys of the next tiles are walked over too",
        _STEPS,
        "kv_end = min(seen.end, item->kv_tiles.end);",
        "kv_end = seen.end;",
        _broadcast("1k"),
        row(_KEYS, AGAINST),
    ),
    emulated(
        "a gradient is that of the entries behind the first of it",
        _STEPS,
        "entries = {entries.begin * shared, (entries.begin + 1) * shared};",
        "entries = {entries.begin, entries.begin + shared};",
        f"{NEIGHBOURS}[2-2-{_WHOLE}]",
    ),
    emulated(
        "parts of neighbouring entries are added",
        _REDUCE,
        "(entry * entries + e)",
        "(entry + e)",
        f"{NEIGHBOURS}[2-2-{_KEYS}]",
    ),
    emulated(
        "one number for all pairs is the sum of a block's threads alone",
        _REDUCE,
        "if (!Config::single) break;",
        "break;",
        f"{_SHARING}test_parts_are_longer_than_the_block_that_adds_them_up[{_SINGLE}]",
    ),
    emulated(
        "every block adds up the parts of the first keys",
        _REDUCE,
        "const int first = block * threads + static_cast<int>(threadIdx.x);",
        "const int first = static_cast<int>(threadIdx.x);",
        f"{_SHARING}test_parts_are_longer_than_the_block_that_adds_them_up[{_KEYS}]",
    ),
    Bug(
        "blocks of all entries of a head take the wrong head",
        "cuda_src/tile/schedule.cuh",
        "head / entries",
        "head % heads",
        _broadcast("qk"),
        row("fa2-sm_80-float32-d5-dv24-full-alibi-heads-bias-hqk", AGAINST),
    ),
)
