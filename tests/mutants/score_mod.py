"""Planted bugs in functions of scores, in device code."""

from __future__ import annotations

from .bug import Bug

__all__ = ["BUGS", "HOPPER"]

_TERM = "cuda_src/features/score_mod.cuh"
_WORDS = "cuda_src/features/score_text.cuh"
_DUAL = "cuda_src/tile/dual.cuh"
_SCORE = "cuda_src/tile/score.cuh"
_FA3_FORWARD = "cuda_src/fa3/forward_math.cuh"
_FA3_SCORE = "cuda_src/fa3/backward_score.cuh"

_EVERY = "every_function_and_its_derivative"
_HALF = f"{_EVERY}[fa2-float16-0.002]"
_SINGLE = f"{_EVERY}[fa1-float32-3e-06]"
_CLAMPED = "an_index_outside_an_axis_reads_the_nearest_element"
_INSIDE = "positions_are_within_the_lengths"
_PART = "a_part_of_a_call_has_entries_and_heads_of_the_whole"
_INFINITE = "a_score_of_minus_infinity_may_have_an_infinite_slope"
_HIDDEN = "what_is_hidden_may_have_any_score_and_slope"


def _bug(name: str, file: str, find: str, replace: str, of: str) -> Bug:
    """A bug of device code. The test that kills it runs on the emulator, even beside a GPU."""
    test = f"test_score_mod.py::test_{of}"
    return Bug(name, file, find, replace, f"tests/emulator/{test}", test)


BUGS = (
    _bug(
        "functions of scores know no offset",
        _TERM,
        "position(params.score_mod.position + ",
        "position(",
        f"{_INSIDE}[fa2]",
    ),
    _bug(
        "the last query of a function is one beyond",
        _TERM,
        "last_i(params.shape.seqlen_q - 1)",
        "last_i(params.shape.seqlen_q)",
        f"{_INSIDE}[fa1]",
    ),
    _bug(
        "the last key of a function is the last query",
        _TERM,
        "last_j(params.shape.seqlen_kv - 1)",
        "last_j(params.shape.seqlen_q - 1)",
        f"{_INSIDE}[fa2]",
    ),
    _bug(
        "entries of a function do not repeat",
        _TERM,
        "+ entry % params.entries;",
        "+ entry;",
        f"{_PART}[fa2]",
    ),
    _bug(
        "heads of a function do not repeat",
        _TERM,
        "+ head) % params.heads;",
        "+ head);",
        f"{_PART}[fa1]",
    ),
    _bug(
        "a part begins at the head that it has for an entry",
        _TERM,
        "static_cast<int>(first[1])",
        "static_cast<int>(first[0])",
        f"{_PART}[fa2]",
    ),
    _bug(
        "functions of scores are given scores that are not scaled",
        _TERM,
        "natural({score, inner}, Compute(1))",
        "natural(score, Compute(1))",
        _HALF,
    ),
    _bug(
        "steps of keys are those of queries",
        _TERM,
        "::min(j + dj, last_j)",
        "::min(j + di, last_j)",
        f"{_CLAMPED}[fa2]",
    ),
    _bug(
        "an index is not clamped behind its axis",
        _WORDS,
        "max(min(index, size - 1), 0)",
        "max(index, 0)",
        f"{_CLAMPED}[fa2]",
    ),
    _bug(
        "an index is not clamped before its axis",
        _WORDS,
        "max(min(index, size - 1), 0)",
        "min(index, size - 1)",
        f"{_CLAMPED}[fa2]",
    ),
    _bug(
        "all axes of an array are as long as the first",
        _WORDS,
        "place = place * size[axis]",
        "place = place * size[0]",
        f"{_CLAMPED}[fa2]",
    ),
    _bug(
        "a weight of 0 times an infinite slope is NaN",
        _SCORE,
        "return p == Compute(0) ? p : p * slope;",
        "return p * slope;",
        f"{_INFINITE}[fa2]",
    ),
    _bug(
        "the derivative of a square root is twice it",
        _WORDS,
        "quotient<kExact>(Real(0.5), y)",
        "quotient<kExact>(Real(1), y)",
        _HALF,
    ),
    _bug(
        "the derivative of the reciprocal root rises",
        _WORDS,
        "quotient<kExact>(Real(-0.5) * y, x.value())",
        "quotient<kExact>(Real(0.5) * y, x.value())",
        _HALF,
    ),
    _bug(
        "half precision takes exp for exp2",
        _WORDS,
        "return exp2(x * static_cast<Real>(cuflash::kLog2E));",
        "return exp2(x);",
        _HALF,
    ),
    _bug(
        "the derivative of exp2 lacks a logarithm",
        _WORDS,
        "static_cast<Real>(cuflash::kLn2) * y",
        "y",
        _HALF,
    ),
    _bug(
        "the derivative of log2 is that of log",
        _WORDS,
        "quotient<kExact>(static_cast<Real>(cuflash::kLog2E), x.value())",
        "quotient<kExact>(Real(1), x.value())",
        _HALF,
    ),
    _bug(
        "the derivative of tanh in half precision is 1 + y^2",
        _WORDS,
        "::fma(-y, y, Real(1))",
        "::fma(y, y, Real(1))",
        _HALF,
    ),
    _bug(
        "the derivative of tanh in single precision lacks a square",
        _WORDS,
        "Real(4) * e / ((Real(1) + e) * (Real(1) + e))",
        "Real(4) * e / (Real(1) + e)",
        _SINGLE,
    ),
    _bug(
        "the derivative of cos is sin",
        _WORDS,
        "cos(x.value()), -sin(x.value())",
        "cos(x.value()), sin(x.value())",
        _HALF,
    ),
    _bug(
        "a power's derivative has the power itself",
        _WORDS,
        "y * pow(x.value(), y - Real(1))",
        "y * pow(x.value(), y)",
        _HALF,
    ),
    _bug(
        "a power of two functions has no derivative by its exponent",
        _WORDS,
        "::fma(by_x, x.slope(), log(x.value()) * z * y.slope())",
        "by_x * x.slope()",
        _HALF,
    ),
    _bug(
        "a magnitude keeps the slope of what it negates",
        _WORDS,
        "Value fabs(Value x) { return x.value() < 0 ? -x : x; }",
        "Value fabs(Value x) { return {fabs(x.value()), x.of_slope}; }",
        _HALF,
    ),
    _bug(
        "the smaller of two is the larger",
        _WORDS,
        "return y.value() < x.value() ? y : x;",
        "return y.value() < x.value() ? x : y;",
        _HALF,
    ),
    _bug(
        "the larger of two has the slope of the smaller",
        _WORDS,
        "return x.value() < y.value() ? y : x;",
        "return x.value() < y.value() ? Value(y.value(), x.slope()) : Value(x.value(), y.slope());",
        _HALF,
    ),
    _bug(
        "branches of where change places",
        _WORDS,
        "where(bool condition, Value x, Value y) { return condition ? x : y; }",
        "where(bool condition, Value x, Value y) { return condition ? y : x; }",
        _HALF,
    ),
    _bug(
        "a quotient's derivative adds where it subtracts",
        _DUAL,
        "fma(-value, b.slope(), a.slope())",
        "fma(value, b.slope(), a.slope())",
        _HALF,
    ),
    _bug(
        "a number by a function rises with it",
        _DUAL,
        "quotient<exact>(-value * b.slope(), x)",
        "quotient<exact>(value * b.slope(), x)",
        _HALF,
    ),
    _bug(
        "a product's derivative is that of one factor",
        _DUAL,
        "fma(a.slope(), y, x * b.slope())",
        "a.slope() * y",
        _HALF,
    ),
    _bug(
        "a number less a function rises with it",
        _DUAL,
        "operator-(Real a, Dual b) { return {a - b.value(), -b.of_slope}; }",
        "operator-(Real a, Dual b) { return {a - b.value(), b.of_slope}; }",
        _HALF,
    ),
    _bug(
        "a number added in place has no slope",
        _DUAL,
        "return *this = *this + b;",
        "return *this = Dual((*this + b).of_value, of_slope);",
        _HALF,
    ),
    _bug(
        "a function times a number keeps its factor",
        _DUAL,
        "Factored operator*(Real b) const { return {number, factor * b}; }",
        "Factored operator*(Real b) const { return {number, factor}; }",
        _HALF,
    ),
    _bug(
        "the chain rule loses a factor",
        _DUAL,
        "return {b * number, factor};",
        "return {b * number};",
        _HALF,
    ),
    _bug(
        "the chain rule stops at a function",
        _DUAL,
        "return {value, x.of_slope.with(derivative)};",
        "return {value, derivative};",
        _HALF,
    ),
)
#: Bugs of FlashAttention-3.
HOPPER = (
    _bug(
        "a weight of 0 of fa3 times an infinite slope is NaN",
        _FA3_SCORE,
        "put_pair(sloped, n, group, times_slope<Config>(p[0], slope[0]),",
        "put_pair(sloped, n, group, p[0] * slope[0],",
        f"{_INFINITE}[fa3]",
    ),
)
