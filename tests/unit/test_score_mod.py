"""Functions of scores: refusals, compilation, and derivatives on the NumPy side."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentTypeError, ArgumentValueError, ScoreMod, UnsupportedError
from cuflash.features.dual import DualArray
from cuflash.features.score_text import SLOTS, ScoreText, TextArray, device_part

Q = np.random.default_rng(0).standard_normal((2, 5, 4, 8)).astype(np.float32)


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (3, {}, "score_mod: got 3"),
        ("# define x\nreturn s;", {}, "'#' in the text"),
        ("%: define x\nreturn s;", {}, "'%:' in the text"),
        ("return s; // \\\n", {}, r"'\\\\' in the text"),
        ("return s; // x\r } void f() {", {}, r"'\\r' in the text"),
        ('const char* x = "{"; return s;', {}, "'\"' in the text"),
        ("return s + '{';", {}, "in the text"),
        ("return s;", {"INFINITY": 1.0}, "an argument 'INFINITY'"),
        ("return s;", {"cap": np.ones((), np.float32)}, "cap: got an array without axes"),
        ("return s; /* on", {}, "a comment without an end"),
        ("s + 1;", {}, "a text without return"),
        ("// return\ns;", {}, "a text without return"),
        ("return s; } void f() {", {}, "braces that are not in pairs"),
        ("if (i) { return s;", {}, "braces that are not in pairs"),
        ("return s;", {"double": 1.0}, "an argument 'double'"),
        ("return s;", {"_x": 1.0}, "an argument '_x'"),
        ("return s;", {"cap": float("nan")}, "cap: got nan; expected a finite number"),
        ("return s;", {"cap": 2**31}, "an integer of 32 bits"),
        ("return s;", {"cap": 1j}, "cap: got 1j"),
        ("return s;", {"numpy": 3}, "numpy: got 3; expected a function, or None"),
        ("return s;", {f"a{n}": np.zeros(3) for n in range(9)}, "9 arrays; expected up to 8"),
    ],
)
def test_what_can_be_no_function_is_refused(
    text: Any, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match=said):
        ScoreMod(text, **arguments)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((1, 1, 1, 1, 1), np.float32), "1 to 4 axes"),
        (np.zeros((3, 0), np.float32), "none of them empty"),
        (np.zeros(3, np.complex64), "score_mod: got .*complex64"),
        ("text", "score_mod: got"),
        (np.zeros(3, np.int16), "dtype int16"),
    ],
)
def test_what_can_be_no_array_is_refused(array: Any, said: str) -> None:
    function = ScoreMod("return s;", numpy=lambda s, *_: s, table=array)
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match=said):
        cuflash.attention(Q, Q, Q, score_mod=function, backend="numpy")


def test_a_call_takes_no_other_function() -> None:
    for other in ("return s;", ScoreText("return s;"), len):
        with pytest.raises(ArgumentTypeError, match=r"score_mod: got .*cuflash\.ScoreMod"):
            cuflash.attention(Q, Q, Q, score_mod=other)  # type: ignore[arg-type]


def test_numpy_needs_the_function_in_numpy() -> None:
    needs = "the NumPy backend needs numpy= of score_mod, its function in NumPy"
    with pytest.raises(UnsupportedError, match=f"^{needs}$"):
        cuflash.attention(Q, Q, Q, score_mod=ScoreMod("return s;"), backend="numpy")
    with pytest.raises(ArgumentTypeError, match="a ScoreMod with numpy="):
        cuflash.reference.attention(Q, Q, Q, score_mod=ScoreMod("return s;"))


def test_a_soft_cap_goes_with_no_function() -> None:
    function = ScoreMod("return s;", numpy=lambda s, *_: s)
    with pytest.raises(UnsupportedError, match="softcap with score_mod: the text can cap"):
        cuflash.attention(Q, Q, Q, score_mod=function, softcap=2.0)
    with pytest.raises(ArgumentValueError, match="one beside softcap"):
        cuflash.reference.attention(Q, Q, Q, score_mod=function, softcap=2.0)


def test_there_is_no_gradient_of_an_argument() -> None:
    function = ScoreMod("return s;", numpy=lambda s, *_: s, table=np.zeros(3, np.float32))
    out, lse = cuflash.attention(Q, Q, Q, score_mod=function, return_lse=True, backend="numpy")
    for name in ("score_mod", "table", SLOTS[0]):
        with pytest.raises(ArgumentValueError, match="wrt"):
            cuflash.attention_backward(
                out, Q, Q, Q, out, lse, score_mod=function, wrt=(name,), backend="numpy"
            )


def _text_of(text: str, **arguments: Any) -> str:
    score, _ = ScoreMod(text, **arguments).parts
    arrays = tuple(TextArray(name, "float32", 2, "int") for name in score.arrays)
    return device_part(score, arrays, "bfloat16").text


def test_numbers_of_the_text_are_of_the_type_of_scores() -> None:
    text = "return 0.5 * s + x2.y + 1.e-3 - .25 + 3 + 1e5f + 2.5f + 0x1p3 + a1e5 + 7. - 2e4;"
    found = _text_of(text)
    expected = (
        "return Real(0.5) * s + x2.y + Real(1.e-3) - Real(.25) + 3 + 1e5f + 2.5f + 0x1p3 "
        "+ a1e5 + Real(7.) - Real(2e4);"
    )
    assert expected in found
    assert '#line 1 "score"\n' + expected in found


def test_arguments_are_members_of_p() -> None:
    text = _text_of("return s;", cap=2.0, count=3, table=np.zeros((2, 3), np.float32))
    assert "Real cap;" in text
    assert "int count;" in text
    assert "Array<float, 2, int> table;" in text


class _AlikeFunction:
    """A function that equals every object and has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __call__(self, s: Any, *_: Any) -> Any:
        return s


def test_equal_functions_are_one_key() -> None:
    """They are equal keys of calls and kernels; a number of another type or sign is another key."""
    same = ScoreMod("return s;", cap=2.0), ScoreMod("return s;", cap=np.float64(2))
    assert same[0].parts == same[1].parts
    for other in (
        ScoreMod("return s;", cap=2),
        ScoreMod("return s ;", cap=2.0),
        ScoreMod("return s;", cap=-2.0),
        ScoreMod("return s;", cup=2.0),
        ScoreMod("return s;", numpy=len, cap=2.0),
        ScoreMod("return s;", numpy=_AlikeFunction(), cap=2.0),
    ):
        assert other.parts[0] != same[0].parts[0]
    alike = (ScoreMod("return s;", numpy=_AlikeFunction()).parts[0] for _ in range(2))
    assert len(set(alike)) == 2  # what their ``__eq__`` returns does not count
    zeros = (ScoreMod("return s;", cap=zero).parts[0] for zero in (0.0, -0.0, 0))
    assert len(set(zeros)) == 3


def test_it_says_what_it_is_and_pickles() -> None:
    function = ScoreMod("return s;", numpy=np.tanh, cap=2.5, n=3, table=np.arange(3.0))
    assert repr(function) == "ScoreMod('return s;', cap=2.5, n=3, table=...)"
    assert function.numpy is np.tanh
    again = pickle.loads(pickle.dumps(function))
    assert again.parts[0] == function.parts[0]
    assert (again.arguments["table"] == np.arange(3.0)).all()
    assert {"cap": 2.5, "n": 3}.items() <= again.arguments.items()


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": lambda x: np.log(3 + x),
    "log2": lambda x: np.log2(3 + x),
    "tanh": np.tanh,
    "sqrt": lambda x: np.sqrt(3 + x),
    "square": np.square,
    "reciprocal": lambda x: np.reciprocal(3 + x),
    "sin": np.sin,
    "cos": np.cos,
    "abs": abs,
    "fabs": np.fabs,
    "negative": lambda x: -x,
    "positive": lambda x: +x,
    "sum": lambda x: x + np.exp(x) + 2 + (1 + x),
    "difference": lambda x: 3 - x - np.exp(x) - (x - 1),
    "product": lambda x: 2 * x * np.exp(x) * 3,
    "quotient": lambda x: 2 / (3 + x) / (x * x + 1) + x / 7,
    "power": lambda x: (3 + x) ** 2.5 + 2.5 ** (3 + x) + (3 + x) ** (1 + x * x),
    "minimum": lambda x: np.minimum(x, np.exp(x) - 1.5) + np.minimum(0.3, x),
    "maximum": lambda x: np.maximum(x, np.exp(x) - 1.5) + np.maximum(0.3, x),
    "fmin": lambda x: np.fmin(x, 0.25),
    "fmax": lambda x: np.fmax(x, 0.25),
    "where": lambda x: np.where(x > 0.1, np.exp(x), 2.0) + np.where(x <= -0.2, 1.0, x * x),
    "comparisons": lambda x: x * (x < 0.2) + x * x * (x != 5) + (x >= 9) + (x == x),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_derivatives_are_those_of_differences(name: str) -> None:
    function = _FUNCTIONS[name]
    x = np.random.default_rng(1).uniform(-1.4, 1.4, 50)
    with np.errstate(all="ignore"):
        found = function(DualArray(x, np.full_like(x, 2.0)))
        slope = (function(x + 1e-6) - function(x - 1e-6)) / 2e-6
    np.testing.assert_allclose(found.value, function(x), rtol=1e-14)
    np.testing.assert_allclose(np.broadcast_to(found.slope, x.shape), 2 * slope, rtol=1e-6)


def test_a_function_may_work_in_place() -> None:
    x = np.linspace(-1.05, 1, 9)

    def changed(x: Any) -> Any:
        x = x.copy()
        x *= 0.5
        x += np.exp(x)
        x -= 1
        x /= 2 + x * x
        return np.clip(x, -0.4, 0.3) + np.sign(x) + np.where(np.isnan(x), 1.0, x)

    found = changed(DualArray(x, np.ones_like(x)))
    slope = (changed(x + 1e-6) - changed(x - 1e-6)) / 2e-6
    np.testing.assert_allclose(found.value, changed(x))
    np.testing.assert_allclose(found.slope, slope, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (lambda s, *_: None, ArgumentValueError, "numpy= that returns NoneType"),
        (lambda s, *_: np.zeros((2, 1, 1, 1, 1, 1)), ArgumentValueError, "broadcast against"),
        (lambda s, *_: np.arcsin(s), UnsupportedError, "numpy= has no derivative here"),
        (lambda s, *_: s.sum(), UnsupportedError, "numpy= has no derivative here"),
    ],
)
def test_a_numpy_function_that_cannot_be_used_is_named(
    function: Any, error: Any, said: str
) -> None:
    good = ScoreMod("return s;", numpy=lambda s, *_: s)
    out, lse = cuflash.attention(Q, Q, Q, score_mod=good, return_lse=True, backend="numpy")
    bad = ScoreMod("return s;", numpy=function)
    with pytest.raises(error, match=f"score_mod: .*{said}"):
        cuflash.attention_backward(out, Q, Q, Q, out, lse, score_mod=bad, backend="numpy")


def test_arrays_of_narrow_numbers_are_computed_with_as_on_the_device() -> None:
    table = np.full(5, 300, np.float16)
    function = ScoreMod(
        "return s + p.t(j) * p.t(j) - p.t(i) * p.t(i);",
        numpy=lambda s, b, h, i, j, o, p: s + p.t(j) * p.t(j) - p.t(i) * p.t(i),
        t=table,
    )
    plain = cuflash.attention(Q, Q, Q, backend="numpy")
    found = cuflash.attention(Q, Q, Q, score_mod=function, backend="numpy")
    np.testing.assert_allclose(found, plain, atol=0.03)  # scores of 90000 have few digits left
    expected, _ = cuflash.reference.attention(Q, Q, Q, score_mod=function)
    np.testing.assert_allclose(found, expected, atol=0.03)


def test_an_array_of_a_function_is_not_written_to() -> None:
    table = np.zeros(Q.shape, np.float32)
    function = ScoreMod("return s;", numpy=lambda s, *_: s, table=table)
    with pytest.raises(ArgumentValueError, match="out: got memory that score_mod uses"):
        cuflash.attention(Q, Q, Q, score_mod=function, out=table, backend="numpy")


def test_what_has_no_derivative_here_is_no_function() -> None:
    """NumPy functions that dual numbers do not support raise, instead of losing a derivative."""
    x = DualArray(np.ones(3), np.ones(3))
    for function in (np.arcsin, lambda x: np.add.reduce(x), lambda x: np.sort(x), float):
        with pytest.raises(TypeError):
            function(x)


def test_a_function_without_the_scores_has_no_gradient() -> None:
    function = ScoreMod("return 1.0;", numpy=lambda s, *_: np.ones_like(np.asarray(0.0)))
    out, lse = cuflash.attention(Q, Q, Q, score_mod=function, return_lse=True, backend="numpy")
    dq, _, dv = cuflash.attention_backward(
        out, Q, Q, Q, out, lse, score_mod=function, backend="numpy"
    )
    assert not dq.any()
    assert dv.any()
    np.testing.assert_allclose(lse, 1 + np.log(5), rtol=1e-6)
