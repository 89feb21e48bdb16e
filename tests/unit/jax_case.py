"""Helpers of the tests of ``cuflash.jax``: attention by its formula, and comparisons."""

from __future__ import annotations

import functools
import importlib.util
import mmap
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash

from ..kit.limits import REFERENCE_UNITS, UNIT

__all__ = ["alike", "cpu_mesh", "draw", "formula", "loss", "near", "seen_pairs", "wide"]


def _known(flag: str) -> bool:
    """Whether the compiler of this version of JAX has a flag; an unknown flag ends the process."""
    found = importlib.util.find_spec("jaxlib")
    folders = [] if found is None else found.submodule_search_locations or []
    for library in (path for folder in folders for path in Path(folder).glob("*.so")):
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            if text.find(flag.encode()) >= 0:
                return True
    return False


def _flags() -> dict[str, str]:
    """Four devices; without a GPU also a compiler that spends little time on each program.

    The tests compile hundreds of small programs, and run most of them once.
    """
    flags = {"xla_force_host_platform_device_count": "4"}
    if not cuflash.is_available():
        quick = {"xla_backend_optimization_level": "0", "xla_cpu_use_fusion_emitters": "false"}
        flags |= {name: value for name, value in quick.items() if _known(name)}
    return flags


def _with_flags(given: str) -> str:
    more = [f"--{name}={value}" for name, value in _flags().items() if name not in given]
    return " ".join([*given.split(), *more])


# JAX reads XLA_FLAGS when it starts its backend. Nothing starts it while tests are collected.
os.environ["XLA_FLAGS"] = _with_flags(os.environ.get("XLA_FLAGS", ""))

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy


@pytest.fixture
def wide() -> Iterator[None]:
    """JAX computes in float64, so that structural errors are far larger than the rounding."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def cpu_mesh(*sizes: int, explicit: bool = False) -> Any:
    """Four devices of the CPU as a mesh of axes "x" and "y"."""
    devices = jax.devices("cpu")
    assert len(devices) >= 4, "JAX was started before the tests asked for 4 devices"
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    names = ("x", "y")[: len(sizes)]
    grid = np.array(devices[:4]).reshape(sizes)
    return jax.sharding.Mesh(grid, names, axis_types=(kind,) * len(sizes))


def draw(*shapes: tuple[int, ...], dtype: Any = "float64", seed: int = 0) -> list[Any]:
    """Arrays of normal random numbers."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def _positions(queries: int, keys: int, q_offset: int | None) -> tuple[Any, Any]:
    """The positions of the queries among the keys, as a column, and the positions of the keys."""
    first = keys - queries if q_offset is None else q_offset
    return np.arange(queries)[:, None] + first, np.arange(keys)


def _distances(queries: int, keys: int, q_offset: int | None) -> Any:
    i, j = _positions(queries, keys, q_offset)
    return abs(i - j)


def seen_pairs(
    queries: int,
    keys: int,
    *,
    is_causal: bool = False,
    local_window_size: Any = None,
    q_offset: int | None = 0,
) -> Any:
    """Which query sees which key, by the rules of ``jax.nn``."""
    i, j = _positions(queries, keys, q_offset)
    seen = np.ones((queries, keys), bool)
    if is_causal:
        seen &= j <= i
    if local_window_size is not None:
        window = local_window_size
        left, right = window if isinstance(window, tuple) else (window, window)
        seen &= (i - left <= j) & (j <= i + right)
    return seen


def formula(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    alibi_slopes: Any = None,
    sinks: Any = None,
    left: Any = 1,
    **options: Any,
) -> Any:
    """Attention from its definition, by whole matrices, in the dtype of the arrays.

    ``left`` holds the factors by which dropout multiplies the weights. The options are those of
    :func:`_formula`. JAX compiles the whole formula, which takes less time than its operations.
    """
    compiled = _compiled(tuple(options.items()))
    return compiled(query, key, value, bias, mask, alibi_slopes, sinks, left)


@functools.cache
def _compiled(options: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(_formula, **dict(options)))


def _formula(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    alibi_slopes: Any,
    sinks: Any,
    left: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int | None = 0,
    return_lse: bool = False,
    **rules: Any,
) -> Any:
    """The formula; ``rules`` are those of :func:`seen_pairs`."""
    length, keys = query.shape[-3], key.shape[-3]
    seen = seen_pairs(length, keys, q_offset=q_offset, **rules)
    if mask is not None:
        seen = seen & jnp.reshape(mask, mask.shape[max(0, mask.ndim - query.ndim) :])
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(array, group, axis=-2) for array in (key, value))
    scores = jnp.einsum("...qhd,...khd->...hqk", query, key)
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if alibi_slopes is not None:
        distances = _distances(length, keys, q_offset)
        scores -= jnp.asarray(alibi_slopes)[..., None, None] * distances
    if bias is not None:
        scores += jnp.reshape(bias, bias.shape[max(0, bias.ndim - scores.ndim) :])
    weights, lse = _softmax(scores, seen, sinks)
    out = jnp.einsum("...hqk,...khd->...qhd", weights * left, value)
    return (out, lse) if return_lse else out


def _softmax(scores: Any, seen: Any, sinks: Any) -> tuple[Any, Any]:
    """The weights and the log-sum-exp of each row."""
    if sinks is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
        logits = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        lse = jax.scipy.special.logsumexp(jnp.concatenate([scores, logits], axis=-1), axis=-1)
        return jnp.exp(scores - lse[..., None]), lse
    dead = ~seen.any(axis=-1)[..., None]
    scores = jnp.where(seen, scores, jnp.where(dead, 0, -jnp.inf))
    lse = jax.scipy.special.logsumexp(scores, axis=-1)
    weights = jnp.where(dead, 0, jnp.exp(scores - lse[..., None]))
    return weights, jnp.where(dead[..., 0], -jnp.inf, lse)


def loss(function: Any, **options: Any) -> Any:
    """A function that returns a loss of the output, and of the log-sum-exp if it is returned."""

    def of(*arrays: Any) -> Any:
        results = function(*arrays, **options)
        results = results if isinstance(results, tuple) else (results,)
        return sum(jnp.sin(2 * result).sum() for result in results)

    return of


def near(got: Any, expected: Any) -> None:
    """Check that float64 arrays, or tuples of them, differ only by rounding.

    Infinities must be equal.
    """
    if isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            near(one, other)
        return
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype == np.float64
    finite = np.isfinite(expected)
    one, other = (np.asarray(array) for array in (got, expected))
    assert (one[~finite] == other[~finite]).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        error = np.abs(one[finite] - other[finite]).max(initial=0)
        size = np.abs(other[finite]).max(initial=1)
    assert error <= REFERENCE_UNITS * UNIT["float64"] * size


def alike(got: Any, expected: Any) -> None:
    """Check that arrays differ only by the roundings of BLAS in different threads.

    XLA chooses the thread. The difference is a unit or two of the largest element.
    """
    one, other = (np.asarray(array) for array in (got, expected))
    assert one.dtype == other.dtype
    unit = float(ml_dtypes.finfo(one.dtype).eps)
    one, other = (array.astype(np.float64) for array in (one, other))
    largest = np.abs(other[np.isfinite(other)]).max(initial=0)
    np.testing.assert_allclose(one, other, rtol=0, atol=4 * unit * largest)
