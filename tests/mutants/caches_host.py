"""Planted bugs in caches on the host, which checks, places and launches."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS"]

_HOST = "cuflash/caches/host.py"
_LENGTHS = "cuflash/caches/lengths.py"
_ROTARY = "cuflash/caches/rotary.py"
_ATTEND = "cuflash/caches/attend.py"
_CHECKS = "cuflash/caches/checks.py"
_DEVICE = "cuflash/caches/device.py"

_DRAWN = "tests/property/test_caches.py::test_attention_is_that_of_the_reference"
_ATTENTION = "tests/emulator/test_kvcache.py::test_attention_is_that_of_the_reference"
_KVCACHE = "tests/emulator/test_kvcache.py::test_"
_PLACES = "tests/emulator/test_append_places.py::test_"
_ANOTHER_DEVICE = _PLACES + "arrays_of_a_device_that_is_not_the_current_one"
_KEPT = _PLACES + "a_graph_keeps_copies_of_what_it_appends"

_OF_NUMPY = (
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
    Bug(
        "NumPy reads the padding on the left", _HOST, "lengths.padding[entry] + row", "row", _DRAWN
    ),
    Bug(
        "NumPy's overflow is one too few",
        _HOST,
        "= lengths.new - lengths.fitting",
        "= np.maximum(lengths.new - lengths.fitting - 1, 0)",
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
        "cuflash/caches/as_attention.py",
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
        "a cache may share memory with the tokens appended to it",
        _CHECKS,
        "if share_memory(array, native, mappings):",
        "if False:",
        "tests/unit/test_cache_arguments.py",
    ),
    Bug(
        "errors of attention come after the append",
        _ATTEND,
        "    _check_attention(call, beside, options)\n",
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
        _ATTENTION,
    ),
    Bug(
        "NumPy appends tokens of an entry that begins before the tables",
        _LENGTHS,
        "np.where(positions < 0, 0, table - positions)",
        "table - positions",
        _DRAWN,
    ),
    Bug(
        "pages of no slots are refused where a table names some",
        _CHECKS,
        "        if not slots:\n",
        '        if not slots and arrays["page_table"].spec.shape[1]:\n',
        "tests/unit/test_cache_arguments.py",
    ),
)

_OF_CUDA = (
    Bug(
        "a length that is a number is on the first device",
        _DEVICE,
        "    with cupy.cuda.Device(device):\n        lengths",
        "    with cupy.cuda.Device(0):\n        lengths",
        _ANOTHER_DEVICE,
    ),
    Bug(
        "the stream of the first device may not capture a length that is a number",
        _DEVICE,
        "is_capturing(current_stream(device))",
        "is_capturing(current_stream(0))",
        _PLACES + "a_capture_is_that_of_the_stream_of_the_arrays",
    ),
    Bug(
        "an append makes what it needs on the first device",
        _DEVICE,
        "    with cupy.cuda.Device(device):\n        stream",
        "    with cupy.cuda.Device(0):\n        stream",
        _ANOTHER_DEVICE,
    ),
    Bug(
        "an append is of the first device",
        _DEVICE,
        "device, sizes = call.device or 0, call.sizes",
        "device, sizes = 0, call.sizes",
        _ANOTHER_DEVICE,
    ),
    Bug(
        "an append is launched on the first device",
        _DEVICE,
        "plan_append(*made, call.device or 0, call.scales)",
        "plan_append(*made, 0, call.scales)",
        _ANOTHER_DEVICE,
    ),
    Bug(
        "a graph keeps no copies of new tokens",
        _DEVICE,
        'made, queries = [before, natives["k"], natives["v"]],',
        "made, queries = [before],",
        _KEPT,
    ),
    Bug(
        "a graph keeps no rotated queries",
        _DEVICE,
        'made += [natives["q"], natives["q_rotated"]]',
        "pass",
        _KEPT,
    ),
    Bug(
        "a graph keeps no lengths",
        _DEVICE,
        'made.append(natives["lengths_after"])',
        "pass",
        _KEPT,
    ),
    Bug(
        "an append reads elements that are not aligned",
        _DEVICE,
        "if spec.rows_are_unit and spec.whole_elements else",
        "if spec.rows_are_unit else",
        _PLACES + "elements_that_are_not_aligned_are_copied",
    ),
    Bug(
        "a table without elements is no table",
        _DEVICE,
        '"rotates": int("rotary_cos" in specs)',
        '"rotates": int(rows * pairs > 0)',
        "tests/emulator/test_empty_tables.py",
    ),
    Bug(
        "the plan that is checked is not that of the attention",
        "cuflash/caches/as_attention.py",
        "backend=backend, batch_invariant=True)",
        "backend=backend)",
        _KVCACHE + "what_a_batch_of_the_usual_size_refuses_comes_before_a_cache_is_written",
    ),
)

BUGS = (*_OF_NUMPY, *_OF_CUDA)
