"""``mask`` in the tiled NumPy code: rows that see nothing, and numbers that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash

_of_algorithms = pytest.mark.parametrize("algorithm", ["fa1", "fa2"])


def _passes(x: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    """Out, lse and the gradients of q, k and v."""
    qkv = {name: x[name] for name in "qkv"}
    options = {"backend": "numpy", **options}
    out, lse = cuflash.attention(**qkv, **options, return_lse=True)
    dq, dk, dv = cuflash.attention_backward(x["dout"], **qkv, out=out, lse=lse, **options)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _inputs(rows: int, keys: int, batch: int = 1) -> dict[str, np.ndarray]:
    """Inputs of two heads."""
    random = np.random.default_rng(4)
    lengths = {"q": rows, "k": keys, "v": keys, "dout": rows}
    return {name: random.standard_normal((batch, n, 2, 4)) for name, n in lengths.items()}


@_of_algorithms
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("more", [{}, {"softcap": 1.5}, {"causal": True}], ids=str)
def test_a_row_that_is_hidden_from_all_keys_sees_none(
    algorithm: Any, sunk: bool, more: Any
) -> None:
    """Such a row adds nothing to any gradient, and its own dq is 0. A row with one key is live."""
    x = _inputs(6, 7)
    mask = np.ones((6, 7), bool)
    mask[[1, 4]] = False
    mask[2, 1:] = False
    logits = np.array([0.5, -1.0])
    options = {"mask": mask, "algorithm": algorithm, "blocks": (2, 3), **more}
    options |= {"sinks": logits} if sunk else {}
    if not sunk:  # without a sink, the row's contents reach no result
        x["q"][:, [1, 4]], x["dout"][:, [1, 4]] = np.nan, np.inf
    got = _passes(x, **options)
    assert (got["out"][:, [1, 4]] == 0).all()
    expected = np.broadcast_to(logits[:, None] if sunk else -np.inf, (2, 2))
    np.testing.assert_allclose(got["lse"][0][:, [1, 4]], expected, rtol=1e-14)
    assert all(np.isfinite(got[name]).all() for name in ("out", "dq", "dk", "dv"))
    assert (got["dq"][:, [1, 4]] == 0).all()
    assert (got["out"][:, [0, 2, 3, 5]] != 0).all()
    if not sunk:
        np.testing.assert_allclose(got["out"][:, 2], x["v"][:, 0], rtol=1e-14)


@_of_algorithms
def test_rows_that_a_mask_and_a_window_hide_together_see_no_key(algorithm: Any) -> None:
    """The mask alone and the window alone leave every row a key."""
    x = _inputs(12, 12)
    mask = np.ones((12, 12), bool)
    mask[5, 3:7] = False
    options = {"algorithm": algorithm, "blocks": (4, 4), "window_size": (2, 0)}
    together = _passes(x, mask=mask, **options)
    assert np.isneginf(together["lse"][0, :, 5]).all()
    assert np.isfinite(np.delete(together["lse"], 5, axis=2)).all()
    assert (together["dq"][:, 5] == 0).all()
    for alone in (_passes(x, **options), _passes(x, **{**options, "window_size": None}, mask=mask)):
        assert np.isfinite(alone["lse"]).all()


@_of_algorithms
@pytest.mark.parametrize("head_alone", [False, True])
def test_a_head_or_an_entry_that_is_hidden_whole(algorithm: Any, head_alone: bool) -> None:
    """The other heads and entries have the same bits as if nothing were hidden."""
    x = _inputs(9, 8, batch=2)
    mask = np.ones((2, 2, 1, 1), bool)
    hidden: Any = (1, 1) if head_alone else 1
    mask[hidden] = False
    options = {"algorithm": algorithm, "blocks": (4, 4)}
    every = _passes(x, mask=np.ones_like(mask), **options)
    got = _passes(x, mask=mask, **options)
    for name, array in got.items():
        heads_first = array if name == "lse" else array.swapaxes(1, 2)
        expected = every[name] if name == "lse" else every[name].swapaxes(1, 2)
        assert (heads_first[hidden] == (-np.inf if name == "lse" else 0)).all(), name
        seen = np.broadcast_to(mask[:, :, 0, 0], (2, 2))
        np.testing.assert_array_equal(heads_first[seen], expected[seen])


@_of_algorithms
@pytest.mark.parametrize("blocks", [None, (4, 4)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_padding_of_keys_that_is_not_finite(algorithm: Any, blocks: Any, value: float) -> None:
    """Such keys reach no result except dq, for which dS is multiplied by them."""
    x = _inputs(12, 12)
    mask = np.arange(12) < 8
    options = {"mask": mask, "algorithm": algorithm, "blocks": blocks}
    expected = _passes(x, **options)
    x["k"][:, 8:] = value
    got = _passes(x, **options)
    for name in ("out", "lse", "dk", "dv"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-12, atol=1e-13)
    assert np.isnan(got["dq"]).all()
    alone = {name: array[:, :8] if name in "kv" else array for name, array in x.items()}
    cut = _passes(alone, algorithm=algorithm, blocks=blocks)
    for name in ("out", "lse"):
        np.testing.assert_allclose(got[name], cut[name], rtol=1e-12, atol=1e-13)


@_of_algorithms
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_padding_of_values_that_is_not_finite(algorithm: Any, value: float) -> None:
    """Rows become NaN: a weight of 0 is multiplied by such values. ``lse`` depends on no value."""
    x = _inputs(12, 12)
    mask = np.arange(12) < 8
    expected = _passes(x, mask=mask, algorithm=algorithm, blocks=(4, 4))
    x["v"][:, 8:] = value
    got = _passes(x, mask=mask, algorithm=algorithm, blocks=(4, 4))
    assert np.isnan(got["out"]).all()
    np.testing.assert_array_equal(got["lse"], expected["lse"])


@_of_algorithms
@pytest.mark.parametrize("bias", [np.nan, np.inf, -np.inf])
def test_a_bias_of_hidden_pairs_may_be_anything(algorithm: Any, bias: float) -> None:
    """A mask hides any score that a bias has made."""
    x = _inputs(6, 7)
    mask = np.random.default_rng(1).random((6, 7)) < 0.6
    mask[:, 0] = True
    numbers = np.random.default_rng(2).standard_normal((2, 6, 7))
    odd = np.where(mask, numbers, bias)
    options = {"mask": mask, "algorithm": algorithm, "blocks": (2, 3)}
    got = _passes(x, bias=odd, **options)
    for name, array in _passes(x, bias=numbers, **options).items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@_of_algorithms
def test_a_query_that_is_not_finite_reaches_its_own_row(algorithm: Any) -> None:
    x = _inputs(6, 7)
    mask = np.random.default_rng(1).random((6, 7)) < 0.6
    mask[:, 0], mask[3] = True, False
    x["q"][:, [2, 3]] = np.nan
    got = _passes(x, mask=mask, algorithm=algorithm, blocks=(2, 3))
    reached = np.isnan(got["out"]).any(axis=(0, 2, 3))
    np.testing.assert_array_equal(reached, np.arange(6) == 2)
    assert np.isneginf(got["lse"][..., 3]).all()


@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3), (1, 2, 3, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 0, 3), (2, 3, 0)], ids=str)
def test_a_mask_where_there_are_no_pairs(shape: Any, sizes: Any) -> None:
    batch, rows, keys = sizes
    pairs = dict(zip((-2, -1), (rows, keys), strict=True))
    own = [n if n == 1 else pairs.get(axis - len(shape), n) for axis, n in enumerate(shape)]
    got = _passes(_inputs(rows, keys, batch), mask=np.ones(own, bool))
    assert all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv"))
    assert np.isneginf(got["lse"]).all()
