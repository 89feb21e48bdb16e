"""Planted bugs in float8 caches: in kernel code, and on the host."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS", "HOPPER"]

_FEATURE = "cuda_src/features/float8.cuh"
_STORED = "cuda_src/fa3/forward_stored.cuh"
_LOAD = "cuda_src/fa3/forward_load.cuh"
_HOST = "cuflash/caches/float8.py"

_ON_GPU = "tests/device/test_float8_caches.py"
_FILE = "test_float8_caches.py::test_"
_ROUNDING = "every_number_becomes_the_nearest_byte[0.37-float16]"
_BYTES = "every_byte_is_its_number[bfloat16]"
_UNIT = "tests/unit/test_float8_arguments.py::test_"


def _bug(name: str, file: str, find: str, replace: str, case: str) -> Bug:
    """A bug killed by a case of the comparison with the reference, or by another emulator test."""
    test = f"attention_is_that_of_the_reference[{case}]" if "_" not in case else case
    if file.startswith("cuflash/"):
        return Bug(f"float8: {name}", file, find, replace, f"tests/emulator/{_FILE}{test}")
    return Bug(f"float8: {name}", file, find, replace, _ON_GPU, _FILE + test)


BUGS = (
    _bug(
        "the scale of keys is that of values",
        _FEATURE,
        "k_scale == nullptr ? k_number : k_scale[",
        "v_scale == nullptr ? v_number : v_scale[",
        "decode",
    ),
    _bug(
        "every sequence has the scales of the first",
        _FEATURE,
        "v_scale[v_each ? entry * shape.heads_kv + head : 0]",
        "v_scale[v_each ? head : 0]",
        "decode",
    ),
    _bug(
        "query heads have scales of their own",
        _FEATURE,
        "? head : head / (shape.heads_q / shape.heads_kv);",
        "? head : head;",
        "softcap",
    ),
    _bug(
        "scores of caps are of stored keys",
        _FEATURE,
        "return {score * scale, scale};",
        "return {score, scale};",
        "softcap",
    ),
    _bug(
        "the last two of four numbers are the first",
        _FEATURE,
        "second = pair_of_halves(Storage{}, halves[1]);",
        "second = pair_of_halves(Storage{}, halves[0]);",
        _BYTES,
    ),
    _bug(
        "numbers above 448 are not clamped",
        _FEATURE,
        "fminf(fabs(x), 448.0f)",
        "static_cast<float>(fabs(x))",
        _ROUNDING,
    ),
    _bug(
        "halves are rounded up",
        _FEATURE,
        "(bits + 0x7ffff + (bits >> 20 & 1)) >> 20;",
        "(bits + 0x80000) >> 20;",
        "every_number_becomes_the_nearest_byte[1.0-float16]",
    ),
    _bug(
        "small numbers are cut",
        _FEATURE,
        "rintf(size * 512.0f)",
        "(size * 512.0f)",
        _ROUNDING,
    ),
    _bug("NaN becomes a number", _FEATURE, "  if (x != x) return 0x7f;\n", "", _ROUNDING),
    _bug(
        "new numbers are multiplied by their scale",
        _FEATURE,
        "float8_of(to_compute(x) / scale);",
        "float8_of(to_compute(x) * scale);",
        "appended",
    ),
    _bug(
        "new values are divided by the scale of keys",
        "cuda_src/steps/append_kv.cu",
        "Config::Stored::row_of(params, of_keys,",
        "Config::Stored::row_of(params, true,",
        "appended",
    ),
    _bug(
        "rows of 64 bytes are swizzled",
        "cuflash/cuda/tensor_map.py",
        "_SWIZZLES = {64: 0, 128: 3}",
        "_SWIZZLES = {64: 3, 128: 3}",
        "decode",
    ),
    _bug(
        "kernels other than fa3 are given bytes",
        "cuflash/planning/plan.py",
        'if algorithm != "fa2" or not takes_few(problem, limits, blocks, None):',
        "if False:",
        "other_kernels_refuse_float8_caches[86-fa2]",
    ),
    Bug(
        "float8: the host does not saturate",
        _HOST,
        "np.clip(quotient, -_MOST, _MOST).astype",
        "quotient.astype",
        f"{_UNIT}the_edges_of_rounding",
    ),
    Bug(
        "float8: NaN keeps its sign on the host",
        _HOST,
        "    stored[np.isnan(quotient)] = 0x7F\n",
        "    stored[np.isnan(quotient)] = 0xFF\n",
        f"{_UNIT}the_edges_of_rounding",
    ),
    Bug(
        "float8: scales stand beside any cache",
        _HOST,
        "            if value is not None:\n",
        "            if False:\n",
        f"{_UNIT}of_both[False-k_scale: got 1.0; expected None: it goes with float8]",
    ),
)

#: Bugs in the kernels of FlashAttention-3.
HOPPER = (
    _bug(
        "rows after the last key are converted",
        _STORED,
        "if (number < Parts::count && Parts::row0(number) + parts.row < count) {",
        "if (number < Parts::count) {",
        "decode",
    ),
    _bug(
        "wide rows of bytes are not swizzled",
        _STORED,
        "(swizzled ? column ^ row : column) * 16",
        "column * 16",
        "decode-wide",
    ),
    _bug(
        "the second chunk lies behind the first",
        _STORED,
        "(chunks + (to ^ 16))",
        "(chunks + (to + 16))",
        "decode",
    ),
    _bug(
        "the second panel of bytes is the first",
        _STORED,
        "place += columns / Bytes::row_bytes * Bytes::panel_bytes;",
        "place += 0;",
        "decode-widest",
    ),
    _bug(
        "products do not see what was converted",
        _STORED,
        "  ptx::fence_async_shared();\n",
        "",
        "decode",
    ),
    _bug(
        "a stage of K is filled before it is read",
        _STORED,
        "      wait_empty<Config>(c.shared.k_empty[k_place.stage], k_place.phase);\n",
        "",
        "decode",
    ),
    _bug(
        "one warp that converts is not waited for",
        "cuda_src/fa3/forward_types.cuh",
        "Config::Stored::converts ? kConvertingWarps : 1;",
        "Config::Stored::converts ? kConvertingWarps - 1 : 1;",
        "decode",
    ),
    _bug(
        "bytes are given back before the last warp",
        "cuda_src/fa3/forward_types.cuh",
        "init(shared.stored.empty[stage], kConvertingWarps);",
        "init(shared.stored.empty[stage], kConvertingWarps - 1);",
        "decode-wide",
    ),
    _bug(
        "values become keys",
        _LOAD,
        "(&c.params.v_map, StoredKind::values,",
        "(&c.params.v_map, StoredKind::keys,",
        "decode",
    ),
    _bug(
        "an output has no scale",
        "cuda_src/fa3/forward_store.cuh",
        "      if (inverse.value[m][group] != 0) inverse.value[m][group] *= scale;\n",
        "",
        "decode",
    ),
)
