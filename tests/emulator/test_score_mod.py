"""Functions of scores on the emulated device: every function that a text may call, and its edges.

``test_public_calls.py`` tests features that are written as texts, over any problem.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import cuflash
from cuflash import ScoreMod, calls, dispatch
from cuflash.features.score_text import PLACE, SLOTS
from cuflash.options import check_options

from .build import compiler
from .host_cupy import host_cupy

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")

#: A text and the same in NumPy for each function. Scores are multiples of 0.3 between -3.9 and 3.9,
#: so that none is near a jump of a derivative, where differences would err.
_FUNCTIONS: dict[str, tuple[str, Any]] = {
    "exp": ("exp(s) + exp(0.5)", lambda s: np.exp(s) + np.exp(0.5)),
    "exp2": ("exp2(s) + exp2(0.5)", lambda s: np.exp2(s) + np.exp2(0.5)),
    "log": ("log(4 + s) + log(3.0)", lambda s: np.log(4 + s) + np.log(3.0)),
    "log2": ("log2(4 + s) + log2(3.0)", lambda s: np.log2(4 + s) + np.log2(3.0)),
    "tanh": ("tanh(s) + tanh(0.3)", lambda s: np.tanh(s) + np.tanh(0.3)),
    "sqrt": ("sqrt(4 + s) + sqrt(2.0)", lambda s: np.sqrt(4 + s) + np.sqrt(2.0)),
    "rsqrt": ("rsqrt(4 + s) + rsqrt(2.0)", lambda s: 1 / np.sqrt(4 + s) + 1 / np.sqrt(2.0)),
    "sin": ("sin(s) + sin(0.3)", lambda s: np.sin(s) + np.sin(0.3)),
    "cos": ("cos(s) + cos(0.3)", lambda s: np.cos(s) + np.cos(0.3)),
    "power": ("pow(4 + s, 1.5) + pow(2.0, 1.5)", lambda s: (4 + s) ** 1.5 + 2.0**1.5),
    "power of": ("pow(1.5, s)", lambda s: 1.5**s),
    "powers": ("pow(4 + s, 0.5 * s)", lambda s: (4 + s) ** (0.5 * s)),
    "magnitude": ("s * abs(s - 0.1) + fabs(s + 0.1) * abs(-0.5) + fabs(-0.5) * abs(-2)", None),
    "smaller": (
        "min(s + 0.1, 0.3 * s * s) + min(0.3, 0.2) * min(3, 2) + 0.01 * min(i, 9.5) * min(2.5, j)",
        None,
    ),
    "larger": (
        "max(s + 0.1, 0.3 * s * s) + max(0.3, 0.2) * max(3, 2) + 0.01 * max(1.5, i) * max(j, 0.5)",
        None,
    ),
    "where": ("where(s > 0.1, s * s, 0.01) + where(i > j, 0.5, 0.25) + where(i > j, 1, 2)", None),
    "where mixed": ("s + where(i > j, 0, -0.5) + where(i > j, 0.5, 0)", None),
    "arithmetic": ("+(2 - s) * (s - 0.5) + (1 + s) * 3 - (-s) / 4 + (s + s) / 2", None),
    "quotients": ("s / (5 + s) + 2 / (5 + s) + s / 7", None),
    "assignments": ("[]", lambda s: ((s * s + s + 0.5) * s - s - 0.25) * 0.5 / (6 + s)),
    "comparisons": ("s * (s < 0.5) + s * s * (s >= 0.5) + 0.1 * (s <= s) + (s != s)", None),
    "composed": ("tanh(exp(0.5 * s))", lambda s: np.tanh(np.exp(0.5 * s))),
    "more": ("s * (s > 0.5) + 0.1 * s * (s == s)", None),
}
_ASSIGNMENTS = (
    "Value t = s * s; t += s; t += 0.5; t *= s; t -= s; t -= 0.25; t *= 0.5; t /= 6 + s; x = t;"
)


def _numpy(expression: str) -> Any:
    """The expression as a function of NumPy arrays."""
    names = {"abs": np.abs, "fabs": np.fabs, "min": np.minimum, "max": np.maximum}
    names |= {"where": np.where}
    code = compile(expression, "score", "eval")
    return lambda s, i, j: eval(code, {**names, "s": s, "i": i, "j": j})


def _every_function() -> tuple[str, Any]:
    """A text with another function for each head, and the same in NumPy."""
    cases = []
    for head, (expression, _) in enumerate(_FUNCTIONS.values()):
        body = _ASSIGNMENTS if expression == "[]" else f"x = {expression};"
        cases.append(f"case {head}: {{ {body} break; }}")
    text = "Value x = 0.0;\nswitch (head) {\n" + "\n".join(cases) + "\n}\nreturn x;"

    def numpy(s: Any, batch: Any, head: Any, i: Any, j: Any, offset: int, p: Any) -> Any:
        result = 0.0 * s
        for number, (expression, function) in enumerate(_FUNCTIONS.values()):
            changed = _numpy(expression)(s, i, j) if function is None else function(s)
            result = np.where(head == number, changed, result)
        return result

    return text, numpy


def _drawn(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    values = np.random.default_rng(seed).uniform(-1, 1, shape)
    return values.astype(dtype)


def _both(function: ScoreMod, x: dict[str, Any], algorithm: str, **more: Any) -> list[Any]:
    """The results of both passes of a call on the emulator."""
    options = {"score_mod": function, "algorithm": algorithm, "backend": "cuda", **more}
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    with host_cupy("90") as host:
        out, lse = host.call(cuflash.attention, q, k, v, return_lse=True, **options)
        given = (dout, q, k, v, out, lse)
        return [out, lse, *host.call(cuflash.attention_backward, *given, **options)]


def _expected(function: ScoreMod, x: dict[str, Any], **more: Any) -> list[Any]:
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    options = {"score_mod": function, "dtype": np.longdouble, **more}
    forward = cuflash.reference.attention(q, k, v, **options)
    return [*forward, *cuflash.reference.attention_backward(dout, q, k, v, **options)]


def _inputs(heads: int, dtype: Any, rows: int = 40, keys: int = 50, width: int = 16) -> Any:
    q, kv = (1, rows, heads, width), (1, keys, heads, width)
    shapes = {"q": q, "k": kv, "v": kv, "dout": q}
    return {name: _drawn(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}


@pytest.mark.parametrize(
    ("algorithm", "dtype", "limit"),
    [("fa2", np.float64, 1e-13), ("fa1", np.float32, 3e-6), ("fa2", np.float16, 2e-3)],
)
def test_every_function_and_its_derivative(algorithm: str, dtype: Any, limit: float) -> None:
    """Each head's results, compared with differences in extended precision."""
    text, numpy = _every_function()
    function = ScoreMod(text, numpy=numpy)
    x = _inputs(len(_FUNCTIONS), dtype)
    for name in ("q", "k"):
        x[name] = np.round(1.4 * x[name].astype(float)).astype(dtype)
    assert abs(np.einsum("bihd,bjhd->bhij", x["q"], x["k"])).max() <= 13
    names = ("out", "lse", "dq", "dk", "dv")
    found, expected = _both(function, x, algorithm, scale=0.3), _expected(function, x, scale=0.3)
    for name, got, right in zip(names, found, expected, strict=True):
        heads = 1 if name == "lse" else 2
        for head, of in enumerate(_FUNCTIONS):
            one, truth = (np.take(a, head, axis=heads).astype(float) for a in (got, right))
            assert abs(one - truth).max() <= limit * max(abs(truth).max(), 0.1), (name, of)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_what_is_hidden_may_have_any_score_and_slope(algorithm: str, dtype: Any) -> None:
    """NaN and infinite slopes of hidden pairs and of pairs beyond the lengths reach no result."""
    text = (
        "if (j > i + offset || !p.seen(i, j)) return sqrt(s - 1000.0) / (0.0 * s);\n"
        "return s / (1.0 + 0.0 / ((p.rows - i) * (p.keys - j)));"
    )
    rows, keys = 70, 90
    seen = np.random.default_rng(5).random((rows, keys)) < 0.7
    function = ScoreMod(text, rows=rows, keys=keys, seen=seen)
    x = _inputs(2, dtype, rows, keys, 64)
    more = {"causal": True, "mask": seen}
    found = _both(function, x, algorithm, **more)
    identity = ScoreMod("return s;", numpy=lambda s, *_: s)
    limit = 4e-3 if dtype is np.float16 else 3e-2
    for got, right in zip(found, _expected(identity, x, **more), strict=True):
        assert np.isfinite(got.astype(float)).all()
        assert abs(got.astype(float) - right).max() <= limit * abs(right).max()


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_without_an_edge(causal: bool) -> None:
    """Several whole blocks of keys, with a function of positions and with one of scores."""
    x = _inputs(1, np.float16, 130, 520, 64)
    for text, numpy in (
        ("return s + 0.01 * (i + offset - j);", lambda s, b, h, i, j, o, p: s + 0.01 * (i + o - j)),
        ("return tanh(2.0 * s);", lambda s, *_: np.tanh(2 * s)),
    ):
        function = ScoreMod(text, numpy=numpy)
        found = _both(function, x, "fa3", causal=causal)
        for got, right in zip(found, _expected(function, x, causal=causal), strict=True):
            assert abs(got.astype(float) - right).max() <= 4e-3 * abs(right).max()


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_an_index_outside_an_axis_reads_the_nearest_element(algorithm: str) -> None:
    function = ScoreMod(
        "return s + p.table(batch, head - 1, i - 7, j + 20) * (offset + 1);",
        numpy=lambda s, batch, head, i, j, offset, p: (
            s + p.table(batch, head - 1, i - 7, j + 20) * (offset + 1)
        ),
        table=np.random.default_rng(3).standard_normal((2, 3, 40, 60)).astype(np.float32),
    )
    x = {name: _drawn((2, 70, 4, 64), np.float16, n) for n, name in enumerate(("q", "k", "v"))}
    x["dout"] = x["v"]
    found = _both(function, x, algorithm)
    for got, right in zip(found, _expected(function, x), strict=True):
        assert abs(got.astype(float) - right).max() <= 4e-3 * abs(right).max()


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_score_of_minus_infinity_may_have_an_infinite_slope(algorithm: str) -> None:
    """The text hides pairs by itself, and its derivative is NaN there."""
    rows, keys = 70, 90
    seen = np.random.default_rng(6).random((rows, keys)) < 0.7
    function = ScoreMod("return p.seen(i, j) ? s : -infinity * (s * s + 1);", seen=seen)
    x = _inputs(2, np.float16, rows, keys, 64)
    found = _both(function, x, algorithm)
    identity = ScoreMod("return s;", numpy=lambda s, *_: s)
    for got, right in zip(found, _expected(identity, x, mask=seen), strict=True):
        assert abs(got.astype(float) - right).max() <= 4e-3 * abs(right).max()


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_positions_are_within_the_lengths(algorithm: str) -> None:
    """The text divides by numbers that are 0 beyond the lengths, which would end the emulator."""
    rows, keys = 70, 90
    function = ScoreMod(
        "return s + 0.25 * (7 / (p.rows - i) + 7 % (p.keys - j)) + 0.01 * (i + offset - j);",
        numpy=lambda s, batch, head, i, j, offset, p: (
            s + 0.25 * (7 // (p.rows - i) + 7 % (p.keys - j)) + 0.01 * (i + offset - j)
        ),
        rows=rows,
        keys=keys,
    )
    x = _inputs(1, np.float16, rows, keys, 64)
    for got, right in zip(_both(function, x, algorithm), _expected(function, x), strict=True):
        assert abs(got.astype(float) - right).max() <= 4e-3 * abs(right).max()


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_a_part_of_a_call_has_entries_and_heads_of_the_whole(algorithm: Any) -> None:
    """Two mapped entries have the heads of one entry, from the third on and wrapping around."""
    random = np.random.default_rng(2)
    q, k, v = random.standard_normal((3, 3, 40, 6, 64)).astype(np.float16)
    table = random.standard_normal((3, 6, 40)).astype(np.float32)
    function = ScoreMod("return s + p.table(batch, head, j);", table=table)
    keywords: dict[str, Any] = {"algorithm": algorithm, "backend": "cuda"}
    given = {**keywords, "score_mod": function.parts[0]}
    options = replace(check_options(**given), places=(1, 6))
    heads = [2, 3, 4, 5, 0, 1]
    some = {name: x[[1, 1]][:, :, heads] for name, x in (("q", q), ("k", k), ("v", v))}
    inputs = {**some, SLOTS[0]: table, PLACE: np.array([1, 2], np.uint32)}
    with host_cupy("90") as host:
        whole = host.call(cuflash.attention, q, k, v, score_mod=function, **keywords)
        part = host.call(dispatch.run, "forward", inputs, {}, options)["out"]
    for entry in part:
        np.testing.assert_array_equal(entry, whole[1][:, heads])


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32", "bool"]
)
def test_an_array_of_every_dtype(dtype: str) -> None:
    values = np.arange(50) % 3
    table = values.astype(bfloat16 if dtype == "bfloat16" else dtype)
    function = ScoreMod("return s + 0.5 * p.table(j);", table=table)
    as_bias = (0.5 * table.astype(np.float32)).reshape(1, 1, 1, -1)
    x = _inputs(2, np.float32)
    found = _both(function, x, "fa2")
    options = {"bias": as_bias, "dtype": np.float64}
    right = cuflash.reference.attention(x["q"], x["k"], x["v"], **options)
    for got, one in zip(found, right, strict=False):
        assert abs(got - one).max() <= 3e-6


def test_a_text_that_does_not_return_gives_nan() -> None:
    function = ScoreMod("if (j == 3) return s;")
    out, *_ = _both(function, _inputs(1, np.float32), "fa2")
    assert np.isnan(out).all()


def test_a_function_is_run_again_without_a_decision() -> None:
    """A new function with another array repeats the call; another text is another call."""
    text = "return s + p.table(j);"
    x = _inputs(1, np.float32)
    with host_cupy("90") as host:
        q, k, v = (host.array(x[name]) for name in "qkv")
        results = []
        for value in (0.0, 1.0, 0.0):
            table = host.array((value * np.arange(50)).astype(np.float32))
            function = ScoreMod(text, table=table)
            results.append(host.call(cuflash.attention, q, k, v, score_mod=function).peek())
            decided = len(calls._ready)
            host.call(cuflash.attention, q, k, v, score_mod=ScoreMod(text, table=table))
            assert len(calls._ready) == decided
        other = host.call(cuflash.attention, q, k, v, score_mod=ScoreMod("return s;")).peek()
    assert (results[0] == results[2]).all()
    assert not (results[0] == results[1]).all()
    assert abs(other - results[0]).max() < 1e-6
