"""Boolean masks: their contents, calls of cuflash and of peers, comparisons and tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from bench import measure as measuring
from bench.cases import Case, select
from bench.inputs import Inputs, make_inputs
from bench.masks import BLOCK, KINDS, part_shown, shown
from bench.peers import PEERS, select_peers
from bench.stored import kind, of_set, problem
from bench.tables import render
from bench.verify import WHOLE, Truth

from .bench_rows import rows_of
from .fake_torch import FakeTorch, fake_torch
from .test_bench_measure import BACKWARD, CASE, _measure, _peer
from .test_bench_report import Store, stored
from .whole_attention import whole_attention

__all__ = ["fake_torch", "stored"]


def test_a_causal_array_shows_what_causal_shows() -> None:
    assert np.array_equal(shown("causal", 2, 7, 7)[0, 0], np.tri(7, dtype=bool))
    fewer = shown("causal", 2, 3, 5)
    assert fewer.shape == (1, 1, 3, 5)
    assert fewer.sum(-1).tolist() == [[[3, 4, 5]]]  # the last query sees the last key


def test_of_a_random_half_each_pair_is_drawn_by_itself() -> None:
    mask = shown("random-half", 2, 512, 640)
    assert (mask.shape, mask.dtype) == ((1, 1, 512, 640), bool)
    assert np.array_equal(mask, shown("random-half", 2, 512, 640))
    for axis in (-1, -2):
        assert 0.35 < mask.mean(axis).min() < mask.mean(axis).max() < 0.65
    tiles = mask.reshape(32, 16, 40, 16).sum((1, 3))
    assert 64 < tiles.min() < tiles.max() < 192


def test_padding_is_behind_the_keys_of_an_entry() -> None:
    mask = shown("padding", 3, 9, 8)
    assert mask.shape == (3, 1, 1, 8)
    assert mask[:, 0, 0].sum(-1).tolist() == [4, 6, 4]
    assert not (np.diff(mask.astype(int)) > 0).any()


def test_of_blocks_a_quarter_is_shown_and_the_diagonal() -> None:
    mask = shown("blocks", 2, 8 * BLOCK, 8 * BLOCK)
    assert mask.shape == (1, 1, 8 * BLOCK, 8 * BLOCK)
    blocks = mask.reshape(8, BLOCK, 8, BLOCK).transpose(0, 2, 1, 3).reshape(8, 8, -1)
    assert np.array_equal(blocks.all(-1), blocks.any(-1))
    assert blocks.all(-1).diagonal().all()
    assert blocks.all(-1).sum() == 16
    ragged = shown("blocks", 2, 5 * BLOCK + 3, 6 * BLOCK + 1)
    assert ragged.shape == (1, 1, 5 * BLOCK + 3, 6 * BLOCK + 1)
    assert part_shown("blocks", 1, 7, 9) == 1.0


@pytest.mark.parametrize("name", KINDS)
def test_operations_are_of_pairs_that_a_mask_shows(name: str) -> None:
    plain = Case("forward", "float16", 3, 4, 4, 64, 32, 512, 512, False, "fa2")
    case = replace(plain, mask=name)
    pairs = np.broadcast_to(shown(name, 3, 512, 512), (3, 4, 512, 512)).sum()
    if name == "causal":
        pairs = replace(plain, causal=True).flops / (2 * 96)
    assert case.flops == pytest.approx(2 * 96 * pairs, rel=1e-12)
    assert case.flops < 0.7 * plain.flops
    assert replace(case, op="backward").flops == 2.5 * case.flops


def test_masks_come_with_the_call_without_an_array() -> None:
    forward, backward = select("mask"), select("mask-backward")
    assert [replace(case, op="backward") for case in forward] == backward
    assert [case.mask for case in forward] == 2 * ["causal", "random-half", "padding", "blocks"]
    assert [(case.head_dim, case.heads_q) for case in forward] == 4 * [(64, 32)] + 4 * [(128, 16)]
    for case in [*forward, *backward]:
        without = replace(case, mask=None, causal=case.mask == "causal")
        assert case.companions == [without]
        assert "mask" not in without.options
        assert case.options["mask"] == case.peer_options["mask"] == case.mask
        assert (case.features, case.extras, case.arrays) == (("mask",), ["mask"], ("mask",))
        assert case.keywords == {"algorithm": "fa3"}
        assert case.gradients == ()
    assert str(forward[1]) == "fa3 forward bfloat16 2x8192x32x64 array (random-half)"


def test_inputs_have_the_mask_of_the_kind() -> None:
    for name in KINDS:
        case = replace(CASE, batch=2, mask=name)
        inputs = make_inputs(case, np)
        assert np.array_equal(inputs.mask, shown(name, 2, 40, 40))
        assert inputs.features(case) == {"mask": inputs.mask}
    assert make_inputs(CASE, np).mask is None


def _right(case: Case, inputs: Inputs) -> list[Any]:
    """Results by whole matrices, with a bias of minus infinity for hidden pairs."""
    added = np.where(inputs.mask, np.float32(0), np.float32(-np.inf))
    return whole_attention(replace(case, mask=None, bias=True), replace(inputs, bias=added))


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_mask_is_verified(case: Case, name: str) -> None:
    case = replace(case, dtype="bfloat16", batch=2, mask=name, seqlen_q=384, seqlen_kv=384)
    inputs = make_inputs(case, np)
    truth = Truth(case, inputs)
    right = _right(case, inputs)
    assert 0 < truth.worst_ratio(right) < 1
    assert truth.worst_ratio(whole_attention(replace(case, mask=None), inputs)) > truth.limit
    for other in (*set(KINDS) - {name}, None):
        mask = np.roll(inputs.mask, 1, -1) if other is None else shown(other, 2, 384, 384)
        assert truth.worst_ratio(_right(case, replace(inputs, mask=mask))) > truth.limit
    causal = whole_attention(case.plain, inputs)
    assert (truth.worst_ratio(causal) < 1) == (name == "causal")


@pytest.mark.parametrize("name", ["padding", "blocks"])
def test_a_mask_of_each_entry_and_head_is_verified(name: str) -> None:
    case = replace(CASE, dtype="float16", batch=2, mask=name)
    inputs = make_inputs(case, np)
    mask = np.random.default_rng(0).integers(0, 2, (2, 2, 40, 40), dtype=bool)
    whole, first = replace(inputs, mask=mask), replace(inputs, mask=mask[:1, :1])
    truth = Truth(case, whole)
    assert truth.worst_ratio(_right(case, whole)) < 1
    assert truth.worst_ratio(_right(case, first)) > truth.limit


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=str)
def test_a_mask_of_a_long_sequence_is_verified(case: Case) -> None:
    seqlen = WHOLE + 150
    case = replace(case, dtype="float16", heads_q=1, heads_kv=1, mask="blocks")
    case = replace(case, seqlen_q=seqlen, seqlen_kv=seqlen)
    inputs = make_inputs(case, np)
    truth = Truth(case, inputs)
    assert truth.worst_ratio(_right(case, inputs)) < 1
    mask = inputs.mask.copy()
    mask[..., -BLOCK:, -BLOCK:] = False  # hides the last keys from the last rows
    assert truth.worst_ratio(_right(case, replace(inputs, mask=mask))) > truth.limit


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("name", KINDS)
def test_a_mask_reaches_our_own_call(monkeypatch: pytest.MonkeyPatch, op: str, name: str) -> None:
    seen: list[Any] = []
    for function in ("attention", "attention_backward"):
        monkeypatch.setattr(cuflash, function, _recorded(getattr(cuflash, function), seen))
    case = replace(CASE, op=op, algorithm="fa2", batch=2, mask=name)
    inputs = make_inputs(case, np)
    found = PEERS["cuflash"].prepare(case, inputs)()
    assert Truth(case, inputs).worst_ratio(found if op == "backward" else (found,)) < 10
    assert len(seen) == (1 if op == "forward" else 2)
    assert all(asked["mask"] is inputs.mask and asked["causal"] is False for asked in seen)


def _recorded(function: Callable[..., Any], seen: list[Any]) -> Callable[..., Any]:
    def record(*given: Any, **options: Any) -> Any:
        seen.append(options)
        return function(*given, **options)

    return record


@pytest.mark.parametrize(("name", "causal"), [("causal", True), ("blocks", False)])
def test_a_mask_takes_turns_with_the_call_without_it(
    monkeypatch: pytest.MonkeyPatch, name: str, causal: bool
) -> None:
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, features: str(features))
    case = replace(CASE, op="backward", algorithm="fa2", mask=name)
    peer = _peer("quick", lambda case, inputs: tuple(_right(case, inputs)))
    rows, lines = _measure(case, peer, **{"cuflash fa2 mask": 2.0, "quick": 4.0})
    assert lines == []
    assert [(row["options"], row["causal"], row["ratio"], row["sources"]) for row in rows] == [
        ({"algorithm": "fa2", "mask": name}, False, 2.0, "('mask',)"),
        ({"algorithm": "fa2"}, causal, 2.0, "()"),
        ({"mask": name}, False, 0.5, None),
    ]


def test_a_peer_that_leaves_the_mask_out_is_left_out() -> None:
    without = _peer("quick", lambda case, inputs: whole_attention(case, inputs)[0])
    case = replace(CASE, dtype="bfloat16", algorithm="fa2", mask="random-half")
    rows, lines = _measure(case, without, **{"cuflash fa2 mask": 2.0})
    assert [row["impl"] for row in rows] == ["cuflash", "cuflash"]
    assert "the quick" in lines[0]
    assert "times what rounding explains" in lines[0]


SMALL = Case("forward", "bfloat16", 2, 3, 3, 8, 8, 5, 5, False, "fa2")


def _of(name: str) -> tuple[Case, Inputs]:
    """A case with a kind of mask, and a random array that shows whether a peer reads it."""
    case = replace(SMALL, mask=name)
    inputs = make_inputs(case, np)
    drawn = np.random.default_rng(0).integers(0, 2, inputs.mask.shape, dtype=bool)
    return case, replace(inputs, mask=drawn)


@pytest.mark.parametrize("peer", ["cudnn", "efficient", "math"])
@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("name", KINDS)
def test_pytorch_gets_the_boolean_mask_as_it_is(
    fake_torch: FakeTorch, name: str, op: str, peer: str
) -> None:
    case, inputs = _of(name)
    select_peers(peer)[0].prepare(replace(case, op=op), inputs)()
    options = dict(fake_torch.calls[0][1]["options"])
    mask = options.pop("attn_mask")
    assert options == {"is_causal": False, "enable_gqa": False}
    assert (mask.dtype, mask.array.shape) == ("bool", inputs.mask.shape)
    assert np.shares_memory(mask.array, inputs.mask)
    if op == "backward":
        assert fake_torch.calls[1][1]["wanted"] == [True] * 3


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("name", KINDS)
def test_flex_attention_has_a_block_mask_that_is_made_once(
    fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, name: str, op: str
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(fake_torch, "create_block_mask", lambda *asked: made.append(asked) or "it")
    case, inputs = _of(name)
    call = select_peers("flex")[0].prepare(replace(case, op=op), inputs)
    call()
    call()
    ((visible, *sizes),) = made
    assert sizes == [2 if name == "padding" else None, None, 5, 5]
    asked = [asked["options"] for what, asked in fake_torch.calls if what == "flex"]
    assert len(asked) == (2 if op == "forward" else 1)
    assert all((one["block_mask"], one["score_mod"]) == ("it", None) for one in asked)
    found = [[[visible(b, 1, i, j) for j in range(5)] for i in range(5)] for b in range(2)]
    expected = np.tri(5, dtype=bool) if name == "causal" else inputs.mask[:, 0]
    assert np.array_equal(found, np.broadcast_to(expected, (2, 5, 5)))


def test_rows_are_of_one_kind_of_mask() -> None:
    rows = json.loads(json.dumps(rows_of("mask", "torch flex")))
    masked = [row for row in rows if row["options"].get("mask")]
    assert len({problem(row) for row in masked}) == 8
    assert {kind(row) for row in masked} == {"masks"}
    assert {kind(row) for row in rows if row not in masked} == {""}
    assert of_set("mask", rows) == rows
    assert of_set("mask", [row for row in rows if row not in masked]) == []
    assert of_set("mask-backward", rows) == []


@pytest.mark.parametrize("name", ["mask", "mask-backward"])
def test_masks_stand_beside_the_call_without_an_array(stored: Store, name: str) -> None:
    rows = rows_of(name, "torch efficient", "torch flex", ratio=1.5)
    for row in rows:
        if row["impl"] == "cuflash" and not row["options"].get("mask"):
            row["tflops"], row["ratio"] = (60.0, 1.25) if row["causal"] else (50.0, 2.0)
    stored(*rows)
    text = render(name)
    assert (
        "| mask | cuflash fa3, mask | cuflash fa3 | torch efficient | torch flex "
        "| ratio to the best other | at least | of the call without an array |"
    ) in text
    assert "| 64 | 64 | 8192 | array (causal) | 100 | 60.0 | 200 | 200 | 1.50 | 0.40 | 0.800 |" in (
        text
    )
    for other in ("random-half", "padding", "blocks"):
        line = (
            f"| 128 | 32 | 8192 | array ({other}) | 100 | 50.0 | 200 | 200 | 1.50 | 0.40 | 0.500 |"
        )
        assert line in text
    assert text.count("\n| 64 |") == text.count("\n| 128 |") == 4
    assert "**Masks**: cuflash fa3, mask is 1.50 times" in text
    assert "(geometric mean of 8)" in text
    assert "docs/charts" not in text
