"""The oracle against finite differences, loops and its own definition."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cuflash import reference
from tests.kit import limits

# (batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, head_dim_v)
SHAPES = [(1, 1, 1, 3, 4, 2, 3), (2, 4, 2, 5, 3, 3, 2), (1, 3, 1, 2, 6, 4, 4)]
MASKS = [(False, None), (True, None), (True, 0), (True, -2), (True, 3)]


def draw(
    sizes: tuple[int, ...], seed: int = 0
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """q, k and v, and dout and dlse, in "bshd"."""
    b, hq, hk, sq, sk, d, dv = sizes
    normal = np.random.default_rng(seed).standard_normal
    inputs = {
        "q": normal((b, sq, hq, d)),
        "k": normal((b, sk, hk, d)),
        "v": normal((b, sk, hk, dv)),
    }
    return inputs, {"dout": normal((b, sq, hq, dv)), "dlse": normal((b, hq, sq))}


def by_loops(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, offset: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The definition, one number at a time, in longdouble."""
    q, k, v = (x.astype(np.longdouble) for x in (q, k, v))
    b, sq, hq, d = q.shape
    sk, hk = k.shape[1:3]
    offset = sk - sq if offset is None else offset
    out = np.zeros((b, sq, hq, v.shape[3]), np.longdouble)
    lse = np.full((b, hq, sq), -np.inf, np.longdouble)
    for n, h, i in itertools.product(range(b), range(hq), range(sq)):
        g = h // (hq // hk)
        weights = {}
        for j in range(sk):
            if not causal or j <= i + offset:
                product = sum(q[n, i, h, c] * k[n, j, g, c] for c in range(d))
                weights[j] = np.exp(product / np.sqrt(np.longdouble(d)))
        if weights:
            total = sum(weights.values())
            lse[n, h, i] = np.log(total)
            for j, weight in weights.items():
                out[n, i, h] += weight / total * v[n, j, g]
    return out, lse


def assert_near(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    live = np.isfinite(expected)
    assert np.array_equal(got[~live], expected[~live])
    error = np.linalg.norm((got[live] - expected[live]).astype(np.float64))
    units = limits.REFERENCE_UNITS * float(np.finfo(got.dtype).eps) / 2
    assert error <= units * np.linalg.norm(expected[live].astype(np.float64))


@pytest.mark.parametrize("dtype", [np.float64, np.longdouble])
@pytest.mark.parametrize(("causal", "offset"), MASKS)
@pytest.mark.parametrize("sizes", SHAPES)
def test_forward_is_the_definition(
    sizes: tuple[int, ...], causal: bool, offset: int | None, dtype: type
) -> None:
    inputs, _ = draw(sizes)
    out, lse = reference.attention(**inputs, causal=causal, q_offset=offset, dtype=dtype)
    expected_out, expected_lse = by_loops(**inputs, causal=causal, offset=offset)
    assert_near(out, expected_out)
    assert_near(lse, expected_lse)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("causal", "offset"), MASKS)
@pytest.mark.parametrize("sizes", SHAPES)
def test_gradients_are_finite_differences(
    sizes: tuple[int, ...], causal: bool, offset: int | None, scale: float | None
) -> None:
    inputs, gradients = draw(sizes, 1)
    options = {"causal": causal, "q_offset": offset, "scale": scale}

    def loss(**moved: np.ndarray) -> float:
        out, lse = reference.attention(**{**inputs, **moved}, **options)
        live = np.isfinite(lse)
        by_lse = np.sum(lse[live] * gradients["dlse"][live])
        return float(np.sum(out * gradients["dout"]) + by_lse)

    grads = reference.attention_backward(
        gradients["dout"], **inputs, dlse=gradients["dlse"], **options
    )
    step = limits.DIFFERENCE_STEP
    generator = np.random.default_rng(2)
    for (name, value), grad in zip(inputs.items(), grads, strict=True):
        for _ in range(3):
            along = generator.standard_normal(value.shape)
            ahead, behind = (loss(**{name: value + sign * step * along}) for sign in (1, -1))
            found, expected = (ahead - behind) / (2 * step), np.sum(grad * along)
            size = np.linalg.norm(along) * max(1, np.linalg.norm(grad))
            assert abs(found - expected) <= limits.DIFFERENCE_LIMIT * size


@pytest.mark.parametrize(("causal", "offset"), MASKS)
def test_longdouble_agrees(causal: bool, offset: int | None) -> None:
    inputs, gradients = draw((2, 4, 2, 20, 30, 8, 5))
    dout, dlse = gradients["dout"], gradients["dlse"]
    options = {"causal": causal, "q_offset": offset}
    for function in (
        lambda dtype: reference.attention(**inputs, **options, dtype=dtype),
        lambda dtype: reference.attention_backward(
            dout, **inputs, dlse=dlse, **options, dtype=dtype
        ),
    ):
        for narrow, wide in zip(function(np.float64), function(np.longdouble), strict=True):
            assert narrow.dtype == np.float64
            assert wide.dtype == np.longdouble
            assert_near(narrow, wide)


def test_dlse_is_zero_by_default() -> None:
    inputs, gradients = draw(SHAPES[1])
    without = reference.attention_backward(gradients["dout"], **inputs)
    zero = reference.attention_backward(
        gradients["dout"], **inputs, dlse=np.zeros_like(gradients["dlse"])
    )
    other = reference.attention_backward(gradients["dout"], **inputs, dlse=gradients["dlse"])
    assert all(np.array_equal(x, y) for x, y in zip(without, zero, strict=True))
    assert not np.array_equal(without[0], other[0])
    assert np.array_equal(without[2], other[2])  # lse does not depend on v


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_any_storage_is_computed_in_float64(dtype: type) -> None:
    inputs, gradients = draw(SHAPES[1])
    narrow = {name: value.astype(dtype) for name, value in inputs.items()}
    wide = {name: value.astype(np.float64) for name, value in narrow.items()}
    for got, expected in zip(
        (
            *reference.attention(**narrow),
            *reference.attention_backward(gradients["dout"], **narrow),
        ),
        (*reference.attention(**wide), *reference.attention_backward(gradients["dout"], **wide)),
        strict=True,
    ):
        assert got.dtype == np.float64
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "shd", "hsd", "sd"])
def test_layouts_hold_the_same_numbers(layout: str) -> None:
    heads = (2, 2) if "h" in layout else (1, 1)
    inputs, gradients = draw((2 if "b" in layout else 1, *heads, 5, 4, 3, 2))
    expected = reference.attention(**inputs, causal=True)
    expected += reference.attention_backward(
        gradients["dout"], **inputs, causal=True, dlse=gradients["dlse"]
    )

    def arranged(x: np.ndarray) -> np.ndarray:
        spelled = "bshd" if x.ndim == 4 else "bhs"
        wanted = layout if x.ndim == 4 else [axis for axis in "bhs" if axis in layout]
        absent = tuple(n for n, axis in enumerate(spelled) if axis not in layout)
        present = [axis for axis in spelled if axis in layout]
        return x.squeeze(absent).transpose([present.index(axis) for axis in wanted])

    moved = {name: arranged(x) for name, x in {**inputs, **gradients}.items()}
    dout, dlse = moved.pop("dout"), moved.pop("dlse")
    said = None if layout in ("bshd", "sd") else layout
    got = reference.attention(**moved, causal=True, layout=said)
    got += reference.attention_backward(dout, **moved, causal=True, layout=said, dlse=dlse)
    for x, y in zip(got, expected, strict=True):
        assert x.flags.c_contiguous
        assert np.array_equal(x, arranged(y))


@pytest.mark.parametrize("layout", [None, "dhs"])
def test_three_axes_must_be_named(layout: str | None) -> None:
    x = np.zeros((2, 3, 4))
    with pytest.raises(ValueError, match="'shd' or 'hsd'"):
        reference.attention(x, x, x, layout=layout)


def test_dead_rows_give_nothing_whatever_their_gradients_hold() -> None:
    inputs, gradients = draw((1, 2, 1, 5, 4, 3, 2))
    options = {"causal": True, "q_offset": -3}  # rows 0 to 2 see no key
    out, lse = reference.attention(**inputs, **options)
    assert not out[:, :3].any()
    assert np.isneginf(lse[..., :3]).all()
    assert np.isfinite(lse[..., 3:]).all()
    expected = reference.attention_backward(gradients["dout"], **inputs, **options)
    dout = gradients["dout"].copy()
    dout[:, :3] = np.nan
    dlse = np.zeros_like(lse)
    dlse[..., :3] = np.nan
    got = reference.attention_backward(dout, **inputs, **options, dlse=dlse)
    assert all(np.array_equal(x, y) for x, y in zip(got, expected, strict=True))
    assert not got[0][:, :3].any()


@pytest.mark.parametrize("zero", ["batch", "heads", "seqlen_q", "seqlen_kv"])
def test_nothing_is_empty_or_dead(zero: str) -> None:
    sizes = {"batch": 2, "heads": 2, "seqlen_q": 3, "seqlen_kv": 4, zero: 0}
    heads = sizes["heads"]
    inputs, gradients = draw(
        (sizes["batch"], heads, heads, sizes["seqlen_q"], sizes["seqlen_kv"], 3, 2)
    )
    out, lse = reference.attention(**inputs)
    assert not out.any()
    assert np.isneginf(lse).all()
    for grad, x in zip(
        reference.attention_backward(gradients["dout"], **inputs), inputs.values(), strict=True
    ):
        assert grad.shape == x.shape
        assert not grad.any()


def test_what_is_hidden_never_matters() -> None:
    inputs, gradients = draw((1, 1, 1, 4, 6, 3, 2))
    options = {"causal": True, "q_offset": 0}  # only the last query sees key 3, none sees keys 4, 5
    clean = (
        *reference.attention(**inputs, **options),
        *reference.attention_backward(gradients["dout"], **inputs, **options),
    )
    for name, garbage in itertools.product("kv", (np.nan, np.inf, -np.inf)):
        moved = {**inputs, name: inputs[name].copy()}
        moved[name][:, 4:] = garbage
        dirty = (
            *reference.attention(**moved, **options),
            *reference.attention_backward(gradients["dout"], **moved, **options),
        )
        assert all(np.array_equal(x, y) for x, y in zip(clean, dirty, strict=True))
        moved[name][:, 3] = garbage  # only the last query sees it
        out, lse = reference.attention(**moved, **options)
        assert np.array_equal(out[:, :3], clean[0][:, :3])
        assert np.array_equal(lse[..., :3], clean[1][..., :3])
        dq = reference.attention_backward(gradients["dout"], **moved, **options)[0]
        assert np.array_equal(dq[:, :3], clean[2][:, :3])


def test_scores_that_are_not_finite() -> None:
    q, k, v = np.ones((3, 1)), np.array([[1.0], [-np.inf], [2.0]]), np.arange(3.0)[:, None]
    out, lse = reference.attention(q, k, v)  # a key with the score minus infinity has no weight
    kept = reference.attention(q, k[[0, 2]], v[[0, 2]], q_offset=2)
    assert np.array_equal(out, kept[0])
    assert np.array_equal(lse, kept[1])
    for bad in (np.nan, np.inf):
        k[1] = bad
        out, lse = reference.attention(q, k, v)
        assert np.isnan(out).all()
        assert np.isnan(lse).all()
    k[:] = -np.inf  # all of them: dead
    out, lse = reference.attention(q, k, v)
    assert not out.any()
    assert np.isneginf(lse).all()
    dq, _, dv = reference.attention_backward(np.ones((3, 1)), q, k, v)
    assert not dq.any()
    assert not dv.any()


@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits_neither_overflow_nor_vanish(sign: int) -> None:
    q, k, v = np.full((2, 1), 1e4), np.full((2, 1), sign * 1e4), np.array([[1.0], [3.0]])
    out, lse = reference.attention(q, k, v)
    assert np.array_equal(out, [[2.0], [2.0]])
    assert_near(lse, np.full(2, sign * 1e8 + math.log(2)))


def test_it_imports_nothing_of_the_library_but_its_own_parts() -> None:
    """The classes of errors are the only exception: the reference's checks import them."""
    parts = {p.stem: p for p in Path(reference.__file__).parent.glob("reference*.py")}
    assert parts.keys() > {"reference", "reference_checks", "reference_heads"}
    for node in (node for path in parts.values() for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            if node.level == 1 and node.module in {*parts, "errors"}:
                continue
            assert node.level == 0
            known = ("__future__", "typing", "numpy", "collections")
            assert node.module.split(".")[0] in known
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= {"math", "numbers", "numpy"}
