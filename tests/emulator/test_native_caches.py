"""``cuflash.jax.attention_with_kvcache`` through the handler of launch tables, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ..kit.caches import Built, CacheCase, build, check_close, same_bits
from ..kit.jax_caches import check_caches, in_jax
from .build import compiler
from .device import emulated_device

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with"),
    pytest.mark.here,
]

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("numba", reason="Numba is not installed")

from cuflash.jax import attention_with_kvcache  # noqa: E402

from ..kit.native_frame import FakeDriver  # noqa: E402
from .test_native_launches import driver  # noqa: E402

__all__ = ["driver"]

_CASE = CacheCase(
    "float16", lengths=(3, 0, 17, 31), slots=32, queries=3, new=3, pairs=5, table_rows=40,
    dims=(16, 16), counts=True, options=(("causal", True),),
)  # fmt: skip
_PAGED = replace(_CASE, kind="paged", slots=16, pages=2)
_FLOAT8 = replace(_CASE, float8="each")
#: A case for each way in which the two steps get their inputs and outputs.
_CASES = {
    "rotated": ("fa2", _CASE),
    "positions": ("fa1", replace(_CASE, positions=(0, 5, 9, 1), queries=1)),
    "plain": ("fa3", replace(_CASE, pairs=0, slopes=True, sinks=True)),
    "nothing new": ("fa2", replace(_CASE, new=None, pairs=0, counts=False)),
    "pages": ("fa2", _PAGED),
    "pages, copied": ("fa3", replace(_PAGED, slopes=True)),
    "entries": ("fa2", replace(_CASE, kind="indexed", pairs=0)),
    "padding": ("fa2", replace(_CASE, leftpad=(1, 0, 17, 20))),
    "float8": ("fa3", _FLOAT8),
    "float8, numbers": ("fa3", replace(_FLOAT8, float8="numbers", dims=(64, 128), new=None,
                                       pairs=0, counts=False)),
    "float8, pages": ("fa3", replace(_PAGED, float8="mixed", dtype="bfloat16", dims=(128, 80))),
    "float8, entries": ("fa3", replace(_FLOAT8, kind="indexed", float8="ones", pairs=0,
                                       leftpad=(1, 0, 17, 20), sinks=True, slopes=True)),
}  # fmt: skip


def _run(built: Built, algorithm: str) -> Any:
    """Run both steps in one compiled computation; return the results and the given arrays."""
    arrays, keywords = in_jax(built, jax)
    keywords |= {"return_lse": True, "algorithm": algorithm}
    return jax.jit(lambda arrays: attention_with_kvcache(**arrays, **keywords))(arrays), arrays


@pytest.mark.parametrize(("algorithm", "case"), _CASES.values(), ids=_CASES)
def test_a_compiled_computation_is_what_the_reference_says(
    driver: FakeDriver, algorithm: str, case: CacheCase
) -> None:
    built = build(case)
    truth, truth_lse, raw, overflow = built.expected()
    with emulated_device("90", num_sms=1 if algorithm == "fa3" else None):
        (out, *caches, counted, lse), arrays = _run(built, algorithm)
    check_close(case, out, truth)
    check_close(case, lse, truth_lse)
    check_caches(built, raw, caches, arrays)
    assert np.asarray(counted).tolist() == np.asarray(overflow).tolist()
    assert driver.asked.count("launch") >= 1 + (case.new is not None)
    assert ("encode" in driver.asked) == (algorithm == "fa3")


def test_tokens_that_do_not_fit_are_counted_and_nothing_else_is_written(
    driver: FakeDriver,
) -> None:
    """Lengths out of range are clamped, as in the kernels."""
    built = build(replace(_CASE, pairs=0, lengths=(32, 31, 30, 29)))
    built.arrays["cache_seqlens"] = np.array([40, 31, -5, 29], np.int32)
    with emulated_device("90"):
        (_, *caches, overflow), _ = _run_without_lse(built)
    assert np.asarray(overflow).tolist() == [3, 2, 0, 0]
    written = {(1, 31), (2, 0), (2, 1), (2, 2), (3, 29), (3, 30), (3, 31)}
    for name, cache in zip(("k", "v"), caches, strict=True):
        before = np.ascontiguousarray(built.caches[f"{name}_cache"])
        changed = (np.asarray(cache).view("u2") != before.view("u2")).any((2, 3))
        assert {tuple(place) for place in np.argwhere(changed).tolist()} == written


def _run_without_lse(built: Built) -> Any:
    (*results, _), given = _run(built, "fa2")
    return results, given


def test_a_loop_appends_step_after_step(driver: FakeDriver) -> None:
    """The loop carries one buffer for each cache: nothing copies them."""
    rng = np.random.default_rng(3)
    shapes = (6, 2, 1, 4, 16), (6, 2, 1, 2, 16), (6, 2, 1, 2, 16), (2, 8, 2, 16), (2, 8, 2, 16)
    *new, k_cache, v_cache = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)

    def loop(new: Any, k_cache: Any, v_cache: Any) -> Any:
        def body(carried: Any, step: Any) -> Any:
            k_cache, v_cache, length = carried
            q, k, v = step
            given = {"cache_seqlens": length, "causal": True, "algorithm": "fa2"}
            out, k_cache, v_cache, _ = attention_with_kvcache(q, k_cache, v_cache, k, v, **given)
            return (k_cache, v_cache, length + 1), out

        return jax.lax.scan(body, (k_cache, v_cache, jax.numpy.int32(1)), new)

    with emulated_device("90"):
        compiled = jax.jit(loop, donate_argnums=(1, 2)).lower(new, k_cache, v_cache).compile()
        assert "f16[2,8,2,16]{3,2,1,0} copy(" not in compiled.as_text()
        (k_after, v_after, length), _ = compiled(new, k_cache, v_cache)
    assert int(length) == 7
    for after, before, added in ((k_after, k_cache, new[1]), (v_after, v_cache, new[2])):
        expected = before.copy()
        expected[:, 1:7] = added[:, :, 0].swapaxes(0, 1)
        assert same_bits(np.asarray(after), expected)
