"""Bugs of caches: of the kernel that appends, and of the host."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_KERNEL = "cuda_src/steps/append_kv.cu"
_TYPES = "cuda_src/steps/append_types.cuh"
_HOST = "cuflash/caches/host.py"
_LENGTHS = "cuflash/caches/lengths.py"
_ROTARY = "cuflash/caches/rotary.py"
_ATTEND = "cuflash/caches/attend.py"
_CHECKS = "cuflash/caches/checks.py"
_DEVICE = "cuflash/caches/device.py"

_ON_GPU = "tests/device/test_caches.py"
_ATTENTION = "test_kvcache.py::test_attention_is_that_of_the_reference"
_DRAWN = "tests/property/test_caches.py::test_attention_is_that_of_the_reference"
_BITS = (
    "test_append_kv.py::test_appended_bits_are_those_of_the_reference_and_no_other_changes[float16]"
)


def _bug(name: str, file: str, find: str, replace: str, emulated: str = _BITS) -> Bug:
    return Bug(name, file, find, replace, _ON_GPU, emulated)


_OF_KERNEL = (
    _bug(
        "a token goes to the slot behind the cache",
        _TYPES,
        "params.capacity - length_before(params, entry);",
        "params.capacity + 1 - length_before(params, entry);",
    ),
    _bug(
        "a page is not held to those there are",
        _TYPES,
        "return found < params.entries ? found : -1;",
        "return found;",
        "test_append_kv.py::test_a_page_that_is_not_there_is_not_written[8]",
    ),
    _bug(
        "the first slot of the next page is in the page before",
        _TYPES,
        "0 : slot / params.page_size;",
        "0 : (slot > 0 ? slot - 1 : slot) / params.page_size;",
    ),
    _bug(
        "values lie as keys do",
        _KERNEL,
        "of_keys ? params.k_cache : params.v_cache;",
        "true ? params.k_cache : params.v_cache;",
    ),
    _bug(
        "new values are the new keys",
        _KERNEL,
        "of_keys ? params.k : params.v;",
        "true ? params.k : params.v;",
    ),
    _bug(
        "the two conventions of pairs change places",
        _KERNEL,
        "rotation.interleaved ? 2 * pair : pair;",
        "!rotation.interleaved ? 2 * pair : pair;",
    ),
    _bug("values are rotated too", _KERNEL, "  if (!of_keys) rotation.pairs = 0;\n", ""),
    _bug(
        "columns that do not turn come from the beginning",
        _KERNEL,
        "= from[rotation.pairs + i];",
        "= from[i];",
    ),
    _bug(
        "positions are slots although others are given",
        _TYPES,
        "if (params.rotary_seqlens != nullptr) return",
        "if (false) return",
    ),
    _bug(
        "a token one position behind the tables is rotated",
        _TYPES,
        "params.rotary_rows - first;",
        "params.rotary_rows + 1 - first;",
        "test_append_kv.py::test_a_token_without_angles_is_not_written",
    ),
    _bug(
        "a length below 0 leads in front of the cache",
        _TYPES,
        "return length < 0 ? 0 : length <",
        "return length <",
        "test_append_kv.py::test_lengths_are_clamped",
    ),
    _bug(
        "pages of the table are looked for as if rows had no gaps",
        _TYPES,
        "entry * params.table_stride + page",
        "entry * (params.capacity / params.page_size) + page",
    ),
    _bug(
        "tokens of lost pages are counted by the first lane's pages",
        _KERNEL,
        "page = begin / size + lane;",
        "page = begin / size;",
        "test_append_kv.py::test_a_page_that_is_not_there_is_not_written[8]",
    ),
    _bug(
        "offsets have 32 bits",
        _KERNEL,
        "batch * tensor.batch_stride",
        "static_cast<int>(batch * tensor.batch_stride)",
        "test_append_kv.py::test_offsets_have_64_bits",
    ),
    _bug(
        "the length after the append counts tokens that did not fit",
        _KERNEL,
        "static_cast<int>(length_before(params, entry)) + fitting;",
        "static_cast<int>(length_before(params, entry)) + params.shape.seqlen_kv;",
        _ATTENTION,
    ),
    _bug(
        "queries turn by what stands behind the tables",
        _KERNEL,
        "const bool known = 0 <= position && position < params.rotary_rows;",
        "const bool known = true;",
        _ATTENTION,
    ),
    _bug(
        "queries advance without a mask",
        _KERNEL,
        "params.queries_advance != 0 ? at.row : 0;",
        "at.row;",
        _ATTENTION,
    ),
)

_OF_HOST = (
    Bug(
        "NumPy appends one slot early",
        _HOST,
        "lengths.before[entry] + token)",
        "np.maximum(lengths.before[entry] + token - 1, 0))",
        _DRAWN,
    ),
    Bug(
        "NumPy's conventions of pairs change places",
        _ROTARY,
        "if interleaved:",
        "if not interleaved:",
        _DRAWN,
    ),
    Bug("NumPy reads what pads on the left", _HOST, "lengths.padding[entry] + row", "row", _DRAWN),
    Bug(
        "NumPy's overflow is one too few",
        _HOST,
        "= new - lengths.fitting",
        "= np.maximum(new - lengths.fitting - 1, 0)",
        _DRAWN,
    ),
    Bug(
        "NumPy's queries do not advance",
        _HOST,
        "np.arange(q.shape[1]) if advance",
        "np.zeros(q.shape[1], int) if advance",
        _DRAWN,
    ),
    Bug(
        "a window does not let queries advance",
        _ATTEND,
        "window is not None and window != (None, None)",
        "False",
        _DRAWN,
    ),
    Bug(
        "NumPy looks at pages that are not used",
        _LENGTHS,
        "used = given[(page >= first[:, None]) & (page < end[:, None])]",
        "used = given",
        _DRAWN,
    ),
    Bug(
        "NumPy's length counts tokens that did not fit",
        _LENGTHS,
        "Lengths(before, before + fitting,",
        "Lengths(before, before + sizes.new_tokens,",
        _DRAWN,
    ),
    Bug(
        "a cache may be what is appended to it",
        _CHECKS,
        "if share_memory(array, native, mappings):",
        "if False:",
        "tests/unit/test_cache_arguments.py",
    ),
    Bug(
        "errors of attention come after the append",
        _ATTEND,
        "    _check_attention(call, arrays, options)\n",
        "",
        "tests/unit/test_kvcache_arguments.py",
    ),
    Bug(
        "a graph keeps nothing of an append",
        _DEVICE,
        "_kept_for_graphs.extend(made)",
        "pass",
        "tests/emulator/test_kvcache.py::test_a_graph_reads_lengths_when_it_runs",
    ),
    Bug(
        "attention reads lengths before the append",
        _ATTEND,
        "before, q = appended.lengths, appended.queries",
        "q = appended.queries",
        "tests/emulator/" + _ATTENTION,
    ),
)

BUGS = (*_OF_KERNEL, *_OF_HOST)
