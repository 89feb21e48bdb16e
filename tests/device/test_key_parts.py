"""FlashAttention-3's gradients where several blocks share the query heads of a kv tile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from ..kit.parts import parts_forced
from ..kit.runners import ApiRunner
from .common import Gradients, jitter, skip_without

#: Query heads, kv heads, parts; a part may have the whole group.
HEADS = ((8, 1, 1), (32, 1, 8), (8, 1, 4), (6, 2, 3), (4, 1, 4))
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
#: Lengths, offset under a mask: tails; dead rows; tiles of keys that no row sees.
LENGTHS = (((200, 333), None), ((300, 700), -40), ((150, 900), 100), ((1, 300), 0))


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    skip_without("fa3")


def _parts(prepared: cuflash.Prepared) -> int:
    launches = prepared.plan.launches
    assert ("sum_parts" in launches[-1].config.kernel) == ("parts" in dict(launches[1].arguments))
    return dict(launches[1].arguments).get("parts", 1)


def _check(cp: Any, case: Case, ordered: bool, parts: int) -> None:
    """Compare all gradients in parts with the truth; outputs and workspace hold NaN before."""
    x = arrays(case, "q", "k", "v", "dout", "dlse")
    given = {name: cp.asarray(array) for name, array in x.items()}
    qkv, options = [given[name] for name in "qkv"], {**case.options, "algorithm": "fa3"}
    saved = cuflash.attention(*qkv, return_lse=True, **options)
    options["deterministic"] = ordered
    prepared = cuflash.prepare(*qkv, operation="backward", **options)
    assert _parts(prepared) == parts
    workspace = cp.full(prepared.workspace_bytes, 0xFF, np.uint8)
    grads = tuple(cp.empty_like(array) for array in qkv)
    for array in grads:
        array.view(np.uint16)[...] = 0xFFFF
    named = {"dlse": given["dlse"], "grads": grads, "workspace": workspace, **options}
    cuflash.attention_backward(given["dout"], *qkv, *saved, **named)
    truth = judge(case, x)
    for name, array in zip(("dq", "dk", "dv"), grads, strict=True):
        compare(truth, name, array.get()).check()


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_against_float64(cp: Any, dims: tuple[int, int], heads: tuple[int, int, int]) -> None:
    of_q, of_keys, parts = heads
    with parts_forced(parts):
        for number, (lengths, q_offset) in enumerate(LENGTHS):
            dtype = ("float16", "bfloat16")[number % 2]
            case = Case(2, of_q, of_keys, *lengths, *dims, dtype, seed=number)
            _check(cp, replace(case, causal=True, q_offset=q_offset), ordered=False, parts=parts)
            _check(cp, case, ordered=number == 0, parts=parts)
            if number == 2:
                _check(cp, replace(case, causal=True, q_offset=q_offset), ordered=True, parts=parts)


@pytest.mark.parametrize("heads", [(1, 1, 2), (1, 1, 16), (4, 2, 3), (3, 3, 5)], ids=str)
@pytest.mark.parametrize("dims", [(32, 32), *DIMS, (192, 192)], ids=str)
def test_cut_steps_against_float64(
    cp: Any, dims: tuple[int, int], heads: tuple[int, int, int]
) -> None:
    """Blocks begin and end inside of query heads; with 16 parts some have no steps."""
    of_q, of_keys, parts = heads
    with parts_forced(parts, cut=True):
        for number, (lengths, q_offset) in enumerate((*LENGTHS, ((900, 260), 0))):
            dtype = ("float16", "bfloat16")[number % 2]
            case = Case(2, of_q, of_keys, *lengths, *dims, dtype, seed=number)
            if lengths[0] <= 256 and dims[0] <= 128:
                continue  # tiles for few queries have no parts
            masked = replace(case, causal=True, q_offset=q_offset)
            _check(cp, masked, ordered=False, parts=parts)
            _check(cp, case, ordered=False, parts=parts)


@pytest.mark.parametrize("last", [1, 7, 11])
@pytest.mark.parametrize("dims", [(32, 32), *DIMS, (192, 192)], ids=str)
def test_cut_last_tiles_against_float64(cp: Any, dims: tuple[int, int], last: int) -> None:
    for number, (lengths, heads) in enumerate((((300, 700), (4, 2)), ((900, 260), (3, 3)))):
        dtype = ("float16", "bfloat16")[number % 2]
        case = Case(2, *heads, *lengths, *dims, dtype, seed=number)
        for parts in (2, 3, 16):
            with parts_forced(parts, cut=True, last=last):
                _check(cp, case, ordered=False, parts=parts)


@pytest.mark.parametrize("dims", [(72, 8), (104, 128), (136, 40), (200, 136)], ids=str)
def test_columns_that_do_not_fill_the_kernels_widths(cp: Any, dims: tuple[int, int]) -> None:
    with parts_forced(2):
        case = Case(1, 4, 2, 130, 200, *dims, "float16", causal=True, layout="bshd", seed=3)
        _check(cp, case, ordered=False, parts=2)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_strided_gradients(dims: tuple[int, int]) -> None:
    """In a layout with distant heads, dk and dv are written head by head."""
    with parts_forced(2):
        case = Case(2, 4, 2, 130, 200, *dims, "bfloat16", causal=True, layout="bhsd", seed=4)
        runner, x = ApiRunner("cuda", "fa3"), arrays(case, "q", "k", "v", "dout", "dlse")
        saved = runner.forward(case, x["q"], x["k"], x["v"])
        grads = runner.backward(case, x["dout"], x["q"], x["k"], x["v"], *saved, x["dlse"])
        truth = judge(case, x)
        for name, got in zip(("dq", "dk", "dv"), grads, strict=True):
            compare(truth, name, got).check()


def _launch_again(gradients: Gradients, first: Any, again: Any, times: int) -> None:
    """Launch into poisoned arrays; each launch must give the bits of the first one."""
    for _ in range(times):
        gradients.poison(again)
        gradients.launch(again)
        assert int(gradients.differ(again, first)) == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_many_tiles_have_the_same_bits_again_and_with_jitter(
    cp: Any, dims: tuple[int, int], causal: bool
) -> None:
    """There are enough tiles that blocks clear sums; a deterministic dq has the same bits too."""
    with parts_forced(4):
        case = Case(9, 8, 2, 300, 777, *dims, "bfloat16", causal=causal, seed=1)
        for ordered in (False, True):
            gradients = Gradients(cp, case, ordered)
            prepared = gradients.prepare()
            assert _parts(prepared) == 4
            main = prepared.plan.launches[1]
            assert dict(main.arguments)["ahead"] < main.grid, "no block would clear sums"
            first, again = gradients.first(), gradients.destinations()
            _launch_again(gradients, first, again, 10)
            with jitter():
                _launch_again(gradients, first, again, 1)
                gradients.check("dq", gradients.last("dq", again[0]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_cut_steps_have_the_same_bits_again_and_with_jitter(
    cp: Any, dims: tuple[int, int], causal: bool
) -> None:
    with parts_forced(3, cut=True):
        case = Case(3, 4, 2, 700, 777, *dims, "bfloat16", causal=causal, seed=1)
        gradients = Gradients(cp, case, False)
        assert _parts(gradients.prepare()) == 3
        first, again = gradients.first(), gradients.destinations()
        _launch_again(gradients, first, again, 5)
        with jitter():
            _launch_again(gradients, first, again, 1)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_cut_last_tiles_have_the_same_bits_again_and_with_jitter(
    cp: Any, dims: tuple[int, int]
) -> None:
    """Some blocks clear sums, and blocks of rows wait for all parts of a tile."""
    with parts_forced(3, cut=True, last=40):
        case = Case(21, 4, 2, 700, 777, *dims, "bfloat16", seed=1)
        gradients = Gradients(cp, case, False)
        prepared = gradients.prepare()
        assert _parts(prepared) == 3
        main = prepared.plan.launches[1]
        assert dict(main.arguments)["ahead"] < dict(main.arguments)["whole_tiles"]
        first, again = gradients.first(), gradients.destinations()
        _launch_again(gradients, first, again, 5)
        with jitter():
            _launch_again(gradients, first, again, 1)
            gradients.check("dq", gradients.last("dq", again[0]))


def test_few_tiles_are_parted_and_many_are_not(cp: Any) -> None:
    """The plan's own rule decides."""
    few = Case(1, 8, 1, 300, 500, 128, 128, "bfloat16", causal=True, seed=1)
    many = replace(few, batch=120)
    one_head = replace(few, heads_q=1, seqlen_q=1500, seqlen_kv=1500)
    assert _parts(Gradients(cp, few).prepare()) > 1
    assert _parts(Gradients(cp, one_head).prepare()) > 1
    assert _parts(Gradients(cp, many).prepare()) == 1
    odd = Case(1, 9, 9, 4096, 4096, 128, 128, "bfloat16", seed=1)
    if cp.cuda.Device().attributes["MultiProcessorCount"] == 132:
        launches = Gradients(cp, odd).prepare().plan.launches
        assert dict(launches[1].config.constants)["cut_last"] == 1
    for case in (few, one_head, many):
        Gradients(cp, case).first()
