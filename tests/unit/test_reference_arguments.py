"""The oracle refuses the same calls as attention, and names the argument."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash import ArgumentTypeError, ArgumentValueError, CuflashError, reference


def _call(layout: str | None = "sd", **changed: Any) -> Any:
    """Both passes over good arguments, with one change."""
    x = np.zeros((2, 4))
    arrays = {name: changed.pop(name, x) for name in ("dout", "q", "k", "v")}
    dlse = changed.pop("dlse", None)
    reference.attention_backward(**arrays, dlse=dlse, layout=layout, **changed)
    del arrays["dout"]
    return reference.attention(**arrays, layout=layout, **changed)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan])
def test_scales_must_be_finite_and_positive(scale: float) -> None:
    x = np.zeros((2, 4))
    with pytest.raises(ValueError, match="finite and positive"):
        reference.attention(x, x, x, scale=scale)
    with pytest.raises(ValueError, match="finite and positive"):
        reference.attention_backward(x, x, x, x, scale=scale)


def test_kv_heads_must_divide_query_heads() -> None:
    q, kv, none = (np.zeros((1, 3, heads, 4)) for heads in (4, 3, 0))
    for other in (kv, none):
        with pytest.raises(ArgumentValueError, match=r"k: got heads_kv=. beside heads_q=4"):
            reference.attention(q, other, other)


def test_a_layout_has_the_axes_of_the_arrays() -> None:
    x = np.zeros((2, 3, 4))
    with pytest.raises(ValueError, match="of 3 axes"):
        reference.attention(x, x, x, layout="bshd")


OPTIONS = {
    "causal": ["no", "yes", 1, 0, None, [], np.zeros(1)],
    "scale": ["1", True, 1j, [1.0], np.ones(1)],
    "q_offset": [1.0, "1", True, []],
    "dtype": ["float64", np.int64, float, None],
    "layout": ["sdh", 3, ["sd"], "bshd"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in OPTIONS.items() for v in vs])
def test_options_are_taken_or_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(CuflashError, match=f"^{name}: got "):
        _call(**{name: value})


@pytest.mark.parametrize("causal", [True, np.True_])
def test_both_kinds_of_true_are_true(causal: bool) -> None:
    q = np.random.default_rng(0).standard_normal((3, 4))
    assert np.array_equal(
        reference.attention(q, q, q, causal=causal)[0],
        reference.attention(q, q, q, causal=True)[0],
    )


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse", "alibi_slopes", "bias"])
def test_only_numpy_arrays_of_real_numbers_are_taken(name: str) -> None:
    shape = {"dlse": (2,), "alibi_slopes": (1,), "bias": (2, 1)}.get(name, (2, 4))
    bad = [[[1.0]], 1.0, np.zeros(shape, complex), np.zeros(shape, "U1"), np.zeros(shape, object)]
    for value in (*bad, np.ma.masked_array(np.zeros(shape))):
        with pytest.raises(ArgumentTypeError, match=f"^{name}: got "):
            _call(**{name: value})
    for dtype in (np.float16, ml_dtypes.bfloat16, np.longdouble, np.int32):
        _call(**{name: np.zeros(shape, dtype)})


def test_a_matrix_is_its_numbers() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4))
    out = reference.attention(x, x.view(np.matrix), x)[0]
    assert type(out) is np.ndarray
    assert np.array_equal(out, reference.attention(x, x, x)[0])


#: The axes of every array. Each letter occurs in at least two arrays.
_AXES = {"q": "bshd", "k": "bthd", "v": "bthe", "dout": "bshe"}
_LAYOUTS = ("bshd", "bhsd", "shd", "hsd", "sd")


@st.composite
def _one_that_does_not_fit(draw: st.DrawFn) -> tuple[str, str, dict[str, np.ndarray]]:
    """A layout, an array's name, and arrays that fit each other but for one axis of that array."""
    layout = draw(st.sampled_from(_LAYOUTS))
    axes = {
        name: [axis for axis, place in zip(text, "bshd", strict=True) if place in layout]
        for name, text in _AXES.items()
    }
    for name, text in axes.items():
        text.sort(key=lambda axis, name=name: layout.index("bshd"[_AXES[name].index(axis)]))
    axes["dlse"] = [axis for axis in "bhs" if axis in layout]
    sizes = {axis: draw(st.integers(1, 3)) for axis in "bsthde"}
    wrong = draw(st.sampled_from(sorted(axes)))
    odd = draw(st.sampled_from(axes[wrong]))
    arrays = {
        name: np.zeros([sizes[axis] + ((name, axis) == (wrong, odd)) for axis in text])
        for name, text in axes.items()
    }
    return layout, wrong, arrays


@given(_one_that_does_not_fit())
def test_shapes_that_do_not_fit_are_refused(drawn: tuple[str, str, dict[str, np.ndarray]]) -> None:
    layout, wrong, arrays = drawn
    with pytest.raises(ArgumentValueError) as caught:
        reference.attention_backward(**arrays, layout=layout)
    assert caught.value.argument in arrays
    if wrong in ("dout", "dlse"):  # q, k and v fit each other
        assert caught.value.argument == wrong
        reference.attention(*(arrays[name] for name in "qkv"), layout=layout)


def test_dlse_is_not_taken_in_another_order() -> None:
    x, rows = np.zeros((1, 3, 2, 4)), np.zeros((1, 2, 3))
    reference.attention_backward(x, x, x, x, dlse=rows)
    for wrong in (rows.swapaxes(1, 2), rows[0], rows.ravel()):
        with pytest.raises(ArgumentValueError, match=r"^dlse: got shape .* expected \(1, 2, 3\)"):
            reference.attention_backward(x, x, x, x, dlse=wrong)


def test_a_bias_broadcasts_against_all_pairs() -> None:
    q, kv = np.zeros((2, 5, 4, 3)), np.zeros((2, 6, 2, 3))
    for shape in ((), (6,), (1,), (5, 1), (4, 5, 6), (1, 1, 6), (2, 1, 1, 6), (2, 4, 5, 6)):
        given_ = {"bias": np.zeros(shape)}
        reference.attention(q, kv, kv, **given_)
        *_, dbias = reference.attention_backward(q, q, kv, kv, **given_)
        assert dbias.shape == shape
    for shape in ((5,), (6, 5), (2, 1, 1), (3, 1, 1, 1), (1, 2, 4, 5, 6), (0,), (2, 2, 5, 6)):
        for call in (reference.attention, lambda *a, **b: reference.attention_backward(q, *a, **b)):
            with pytest.raises(
                ArgumentValueError, match=r"^bias: got shape .* \(2, 4, 5, 6\), or 1"
            ):
                call(q, kv, kv, bias=np.zeros(shape))


def test_a_mask_is_boolean_and_broadcasts_as_a_bias_does() -> None:
    q, kv = np.zeros((2, 5, 4, 3)), np.zeros((2, 6, 2, 3))
    for shape in ((), (6,), (1,), (5, 1), (4, 5, 6), (1, 1, 6), (2, 1, 1, 6), (2, 4, 5, 6)):
        given_ = {"mask": np.ones(shape, bool)}
        reference.attention(q, kv, kv, **given_)
        assert len(reference.attention_backward(q, q, kv, kv, **given_)) == 3
    for call in (reference.attention, lambda *a, **b: reference.attention_backward(q, *a, **b)):
        for shape in ((5,), (6, 5), (2, 1, 1), (3, 1, 1, 1), (1, 2, 4, 5, 6), (0,), (2, 2, 5, 6)):
            with pytest.raises(
                ArgumentValueError, match=r"^mask: got shape .* \(2, 4, 5, 6\), or 1"
            ):
                call(q, kv, kv, mask=np.ones(shape, bool))
        for dtype in (np.uint8, np.int8, np.float32, np.float64):
            with pytest.raises(ArgumentTypeError, match=r"^mask: got dtype .*; expected bool"):
                call(q, kv, kv, mask=np.ones((5, 6), dtype))


@pytest.mark.parametrize(
    ("p", "seed", "error", "says"),
    [
        (0.1, None, ArgumentValueError, "dropout_seed"),
        (None, 3, ArgumentValueError, "dropout_seed"),
        (0, 3, ArgumentValueError, "dropout_seed"),
        (1, 3, ArgumentValueError, "dropout_p"),
        (-0.1, 3, ArgumentValueError, "dropout_p"),
        (0.99999, 3, ArgumentValueError, "dropout_p"),
        (float("nan"), 3, ArgumentValueError, "dropout_p"),
        (True, 3, ArgumentTypeError, "dropout_p"),
        ("0.1", 3, ArgumentTypeError, "dropout_p"),
        (0.1, -1, ArgumentValueError, "dropout_seed"),
        (0.1, 2**64, ArgumentValueError, "dropout_seed"),
        (0.1, 1.5, ArgumentTypeError, "dropout_seed"),
        (0.1, np.zeros(3, np.uint32), ArgumentTypeError, "dropout_seed"),
        (0.1, np.zeros(2, np.int32), ArgumentTypeError, "dropout_seed"),
    ],
)
def test_dropout_has_a_part_and_a_seed(p: Any, seed: Any, error: Any, says: str) -> None:
    q = np.zeros((1, 2, 1, 4))
    for call in (reference.attention, lambda *a, **b: reference.attention_backward(q, *a, **b)):
        with pytest.raises(error, match=f"^{says}: got"):
            call(q, q, q, dropout_p=p, dropout_seed=seed)
        call(q, q, q, dropout_p=0)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_arrays_have_the_axes_of_the_layout(name: str) -> None:
    with pytest.raises(ArgumentValueError, match="axes"):
        _call(**{name: np.zeros((1, 2, 4))})
    with pytest.raises(ArgumentValueError, match=r"^q: got head_dim 0"):
        _call(q=np.zeros((2, 0)), k=np.zeros((2, 0)))
