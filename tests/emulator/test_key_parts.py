"""FlashAttention-3's gradients where several blocks share a kv tile, on the CPU."""

from __future__ import annotations

import pytest

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.parts import parts_forced
from .build import compiler
from .device import EmulatedRunner

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")


#: Widths, dtype, and whether dQ is summed in order.
_KERNELS = [
    ((128, 128), "bfloat16", False),
    ((128, 128), "bfloat16", True),
    ((192, 128), "float16", False),
    ((192, 256), "bfloat16", False),
    ((192, 256), "bfloat16", True),
    ((192, 192), "bfloat16", False),
    ((136, 168), "float16", True),
]


@pytest.mark.parametrize("heads", [(4, 1), (4, 2)], ids=str)
@pytest.mark.parametrize(("dims", "dtype", "ordered"), _KERNELS, ids=str)
def test_against_float64(
    dims: tuple[int, int], dtype: str, ordered: bool, heads: tuple[int, int]
) -> None:
    """One kv head, and several. The last keys are hidden from every query."""
    runner = EmulatedRunner("90", "fa3", deterministic=ordered, num_sms=1)
    case = Case(2, *heads, 150, 300, *dims, dtype, causal=True, q_offset=-40, seed=1)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    with parts_forced(2):
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        given = (x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
        grads = runner.backward(case, *given)
    truth = judge(case, x)
    for name, got in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(truth, name, got).check()


@pytest.mark.parametrize("parts", [2, 3, 16])
@pytest.mark.parametrize(
    ("heads", "lengths", "q_offset"),
    [((1, 1), (350, 300), -40), ((6, 2), (150, 300), 0), ((3, 3), (700, 130), None)],
    ids=str,
)
@pytest.mark.parametrize(("dims", "dtype"), [*dict.fromkeys(k[:2] for k in _KERNELS)], ids=str)
def test_cut_steps_against_float64(
    dims: tuple[int, int],
    dtype: str,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    q_offset: int | None,
    parts: int,
) -> None:
    """Blocks begin and end inside of query heads; with 16 parts some have no steps."""
    runner = EmulatedRunner("90", "fa3", num_sms=1)
    causal = q_offset is not None
    case = Case(2, *heads, *lengths, *dims, dtype, causal=causal, q_offset=q_offset, seed=1)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    with parts_forced(parts, cut=True):
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
    truth = judge(case, x)
    for name, got in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(truth, name, got).check()


@pytest.mark.parametrize("last", [1, 3, 5, 8])
@pytest.mark.parametrize("parts", [2, 3, 16])
@pytest.mark.parametrize(
    ("dims", "dtype"), [((64, 64), "float16"), *dict.fromkeys(k[:2] for k in _KERNELS)], ids=str
)
def test_cut_last_tiles_against_float64(
    dims: tuple[int, int], dtype: str, parts: int, last: int
) -> None:
    """The last tiles are cut, within a head and over several; blocks of rows wait for all parts."""
    runner = EmulatedRunner("90", "fa3", num_sms=last)
    case = Case(2, 6, 2, 270, 300, *dims, dtype, seed=1)
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    with parts_forced(parts, cut=True, last=last):
        main = next(c for c in runner.configs(case) if c.kernel == "backward")
        assert dict(main.constants)["cut_last"] == 1
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
    truth = judge(case, x)
    for name, got in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(truth, name, got).check()
