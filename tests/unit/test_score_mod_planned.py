"""Functions of scores: plans for calls with them, and the arguments on the NumPy side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import ArgumentValueError, ScoreMod
from cuflash.features.score_text import SLOTS, TextArray, device_part, uses
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.plan import plan
from cuflash.planning.problem import MAX_SEQLEN, AttentionProblem

from ..architectures import LIMITS

_PROBLEM = AttentionProblem(
    operation="forward",
    batch=2,
    heads_q=4,
    heads_kv=2,
    seqlen_q=100,
    seqlen_kv=130,
    head_dim=64,
    head_dim_v=64,
    storage="float16",
    output="float16",
    mask="full",
    scale=0.1,
    q_offset=0,
)


def _with(function: ScoreMod, *shapes: tuple[int, ...], position: int = 0) -> AttentionProblem:
    """The problem with a function whose arrays have these shapes."""
    operands = {
        slot: Operand(slot, "float32", shape, None)
        for slot, shape in zip(SLOTS, shapes, strict=False)
    }
    return with_features(_PROBLEM, {"score_mod": function.parts[0]}, operands, position)


def _configs(function: ScoreMod) -> list[Any]:
    chosen = plan(_with(function), LIMITS["90"], algorithm="fa2")
    return [launch.config for launch in chosen.launches]


def test_another_text_is_another_kernel() -> None:
    """A number of another type also makes another kernel; another value of it does not."""
    first = _configs(ScoreMod("return s;", cap=2.0))
    assert first == _configs(ScoreMod("return s;", cap=3.0))
    for text, cap in (("return -s;", 2.0), ("return s;", 2)):
        other = _configs(ScoreMod(text, cap=cap))
        assert first != other
        for a, b in zip(first, other, strict=True):
            digests = (dict(of.constants)["score_mod_digest"] for of in (*a.features, *b.features))
            assert len(set(digests)) == 2


def test_its_scores_are_in_natural_units() -> None:
    problem = _with(ScoreMod("return s;"), position=7)
    assert problem.unit == 1
    numbers = dict(problem.uses[0].numbers)
    assert numbers == {
        "inner": 0.1, "inner_single": 0.1, "position": 7, "entries": 2, "heads": 4,
    }  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1])
def test_an_offset_is_within_the_lengths(sign: int) -> None:
    function = ScoreMod("return s;")
    assert _with(function, position=sign * MAX_SEQLEN).uses
    with pytest.raises(ArgumentValueError, match=r"^q_offset: .*with score_mod"):
        _with(function, position=sign * (MAX_SEQLEN + 1))


def test_many_elements_are_counted_in_64_bits() -> None:
    function = ScoreMod("return s + p.t(i, j);", t=np.ones((1, 1), np.float32))
    for columns, index in ((2**15 - 1, "int"), (2**15, "long long")):
        (use,) = _with(function, (2**16, columns)).uses
        assert f"Array<float, 2, {index}> t;" in use.device.text
    with pytest.raises(ArgumentValueError, match="elements along an axis"):
        _with(function, (1, 2**31))


def _text_of(text: str, axes: int = 2, **arguments: Any) -> str:
    score, _ = ScoreMod(text, **arguments).parts
    arrays = tuple(TextArray(name, "float32", axes, "int") for name in score.arrays)
    return device_part(score, arrays, "float16").text


def test_names_in_comments_are_not_used() -> None:
    text = "return s; // of head i\n/* and j,\n batch */"
    assert not uses(text, "head", "batch")
    assert "kUsesPosition = false" in _text_of(text)
    assert not uses("return s + p.heads * ij;", "head", "i", "j")


@pytest.mark.parametrize("name", ["batch", "head", "i", "j"])
def test_a_text_is_told_what_it_uses(name: str) -> None:
    text = _text_of(f"return s + {name};")
    is_place = str(name in ("i", "j")).lower()
    assert f"kUsesPosition = {is_place};" in text
    assert f"kUsesHead = {str(is_place == 'false').lower()};" in text


def test_sizes_of_an_array_are_in_the_order_of_its_axes() -> None:
    array = np.zeros((2, 3, 4), np.float32)
    text = _text_of("return s + p.t(0, i, j) + p.u(0, 0, 0);", 3, t=array, u=array)
    for name, slot in zip("tu", SLOTS, strict=False):
        sizes = ", ".join(f"params.{slot}_size_{axis}" for axis in range(3))
        assert f"{name}{{static_cast<const float*>(params.{slot}), {{{sizes}}}}}" in text


def test_numbers_are_kept_as_they_are() -> None:
    numbers = {"third": 1 / 3, "least": 5e-324, "most": 1.7e308, "zero": -0.0}
    whole = {"low": -(2**31), "high": 2**31 - 1, "yes": True}
    found = ScoreMod("return s;", **numbers, **whole).arguments
    assert found == {**numbers, **whole}
    assert np.signbit(found["zero"])


#: Functions of NumPy arrays that broadcast; s may hold dual numbers.
_OF_NUMPY: dict[str, Any] = {
    "distance": lambda s, batch, head, i, j, offset, p: s - p.slopes(head) * abs(i + offset - j),
    "entries": lambda s, batch, head, i, j, offset, p: s + p.table(batch, head, j),
    "clamped": lambda s, batch, head, i, j, offset, p: s + p.table(batch - 1, head + 2, j - 3),
}


def _check(name: str, bias: Any) -> None:
    """Check that a function and an equal bias have the same results, tiled and in the reference."""
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((2, n, 4, 8)) for n in (5, 9, 9))
    arrays = {"slopes": _SLOPES, "table": _TABLE}
    function = ScoreMod("return s;", numpy=_OF_NUMPY[name], **arrays)
    expected = cuflash.reference.attention(q, k, v, bias=bias, q_offset=3)
    for found in (
        cuflash.reference.attention(q, k, v, score_mod=function, q_offset=3),
        cuflash.attention(
            q, k, v, score_mod=function, q_offset=3, return_lse=True, backend="numpy"
        ),
    ):
        for got, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-10, atol=1e-12)


_SLOPES = np.array([0.1, 0.5, -0.25, 1.0])
_TABLE = np.random.default_rng(2).standard_normal((2, 4, 7))


def test_numpy_reads_what_the_reference_does() -> None:
    distance = abs(np.arange(5)[:, None] + 3 - np.arange(9))
    _check("distance", -_SLOPES[None, :, None, None] * distance)


def test_an_index_outside_an_axis_reads_the_nearest_element() -> None:
    """The index may be before the axis or after it."""
    near = np.minimum(np.arange(9), 6)
    _check("entries", _TABLE[:, :, None, near])
    outside = _TABLE[[0, 0]][:, [2, 3, 3, 3]][:, :, np.maximum(np.arange(9) - 3, 0)]
    _check("clamped", outside[:, :, None, :])
