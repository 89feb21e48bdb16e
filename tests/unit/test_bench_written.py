"""Block masks, and score functions written as text: calls, comparisons and tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import cuflash
from bench import measure as measuring
from bench.case import CAP
from bench.cases import Case, select
from bench.inputs import Inputs, make_inputs
from bench.masks import BLOCK, shown, shown_blocks
from bench.peers import PEERS, select_peers
from bench.stored import kind, of_set
from bench.tables import render
from bench.verify import Truth

from .bench_rows import rows_of
from .fake_torch import FakeTorch, fake_torch
from .test_bench_measure import CASE, _measure, _peer
from .test_bench_report import Store, stored
from .whole_attention import whole_attention

__all__ = ["fake_torch", "stored"]

BLOCKS = replace(CASE, dtype="bfloat16", block_mask=True, seqlen_q=1024, seqlen_kv=1000)
SCORES = replace(CASE, score_mod=True)


@dataclass
class _BlockMask:
    blocks: Any
    block: tuple[int, int]


class _ScoreMod:
    def __init__(self, text: str, **arguments: Any) -> None:
        self.text, self.arguments = text, arguments


@pytest.fixture(autouse=True)
def _classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the library stand-ins of both classes, whether it has the classes or not."""
    monkeypatch.setattr(cuflash, "BlockMask", _BlockMask, raising=False)
    monkeypatch.setattr(cuflash, "ScoreMod", _ScoreMod, raising=False)


def test_of_blocks_a_quarter_is_shown() -> None:
    blocks = shown_blocks(8192, 8192)
    assert (blocks.shape, blocks.dtype) == ((1, 1, 64, 64), bool)
    assert blocks.mean() == 0.25
    assert blocks[0, 0].diagonal().all()
    pairs = np.kron(shown_blocks(1024, 1000)[0, 0], np.ones((BLOCK, BLOCK), bool))
    assert np.array_equal(pairs[:, :1000], shown("blocks", 1, 1024, 1000)[0, 0])


def test_a_block_mask_comes_with_the_dense_call() -> None:
    forward, backward = select("block-mask"), select("block-mask-backward")
    assert [replace(case, op="backward") for case in forward] == backward
    assert [(c.head_dim, c.seqlen_q, c.heads_q) for c in forward] == [
        (64, 8192, 32),
        (128, 8192, 16),
    ]
    for case in [*forward, *backward]:
        assert case.companions == [replace(case, block_mask=False)]
        assert not case.plain.causal
        assert (case.features, case.arrays) == (("block_mask",), ("block_mask",))
        assert case.options["block_mask"] == (128, 128)
        assert case.keywords == case.plain.keywords == {"algorithm": "fa3"}
        assert case.flops == case.plain.flops / 4
    assert str(forward[0]).endswith(" block mask")


def test_a_score_modification_comes_with_the_softcap_that_it_writes() -> None:
    forward, backward = select("score-mod"), select("score-mod-backward")
    assert [replace(case, op="backward") for case in forward] == backward
    sizes = [(case.head_dim, case.seqlen_q) for case in forward]
    assert sizes == [(64, 4096), (64, 8192), (128, 4096), (128, 8192)]
    for case in [*forward, *backward]:
        assert case.companions == [replace(case, score_mod=False, softcap=50.0)]
        assert (case.features, case.arrays) == (("score_mod",), ())
        assert case.options == {"algorithm": "fa3", "score_mod": "softcap 50"}
        assert case.plain.options == {"algorithm": "fa3", "softcap": 50.0}
    assert str(forward[0]).endswith(" full score_mod")


def test_our_own_call_is_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(cuflash, "attention", lambda *a, **options: seen.append(options))
    for case in (BLOCKS, SCORES):
        PEERS["cuflash"].prepare(case, make_inputs(case, np))()
    mask, score = seen[0].pop("block_mask"), seen[1].pop("score_mod")
    assert seen == [{"causal": False, "algorithm": "fa1"}] * 2
    assert np.array_equal(mask.blocks, shown_blocks(1024, 1000))
    assert mask.block == (128, 128)
    assert score.text == "return p.cap * tanh(s / p.cap);"
    assert score.arguments == {"cap": CAP} == {"cap": 50.0}


@pytest.mark.parametrize(("case", "name"), [(BLOCKS, "BlockMask"), (SCORES, "ScoreMod")])
def test_a_library_without_it_leaves_the_case_out(
    monkeypatch: pytest.MonkeyPatch, case: Case, name: str
) -> None:
    monkeypatch.delattr(cuflash, name)
    with pytest.raises(measuring.LeftOutError, match=f"there is no cuflash.{name}"):
        _measure(case)


def _right(case: Case, inputs: Inputs) -> list[Any]:
    """The right results, by whole matrices."""
    if not case.block_mask:
        return whole_attention(replace(case, score_mod=False, softcap=CAP), inputs)
    mask = shown("blocks", 1, case.seqlen_q, case.seqlen_kv)
    added = np.where(mask, np.float32(0), np.float32(-np.inf))
    added = np.broadcast_to(added, case.bias_shape)
    return whole_attention(replace(case.plain, bias=True), replace(inputs, bias=added))


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("case", [BLOCKS, SCORES], ids=["blocks", "scores"])
def test_they_are_verified(case: Case, op: str) -> None:
    case = replace(case, op=op)
    inputs = make_inputs(case, np)
    truth = Truth(case, inputs)
    right = _right(case, inputs)
    assert 0 < truth.worst_ratio(right) < 1
    without = whole_attention(replace(case.plain, softcap=None), inputs)
    assert truth.worst_ratio(without) > truth.limit


def test_they_take_turns_with_the_call_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replace(PEERS["cuflash"], prepare=lambda case, inputs: lambda: _right(case, inputs))
    monkeypatch.setitem(measuring.PEERS, "cuflash", ours)
    monkeypatch.setattr(measuring, "digest_now", lambda algorithm, op, features: str(features))
    monkeypatch.setattr(measuring, "plan_of", lambda case, inputs: "")
    peer = _peer("quick", lambda case, inputs: tuple(_right(case, inputs)))
    times = {"cuflash fa1 score_mod": 2.0, "cuflash fa1 softcap": 1.0, "quick": 4.0}
    rows, lines = _measure(SCORES, peer, **times)
    assert lines == []
    assert [(row["options"], row["ratio"], row["sources"]) for row in rows] == [
        ({"algorithm": "fa1", "score_mod": "softcap 50"}, 2.0, "('score_mod',)"),
        ({"algorithm": "fa1", "softcap": 50.0}, 2.0, "('softcap',)"),
        ({"score_mod": "softcap 50"}, 0.5, None),
    ]


def test_only_flex_attention_has_them() -> None:
    for case in select("block-mask,score-mod"):
        assert [peer.name for peer in select_peers(None) if peer.supports(case)] == ["flex"]


def test_flex_attention_has_a_block_mask_of_whole_blocks(
    fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(fake_torch, "create_block_mask", lambda *asked: made.append(asked) or "it")
    inputs = make_inputs(BLOCKS, np)
    call = select_peers("flex")[0].prepare(BLOCKS, inputs)
    call()
    call()
    ((visible, *sizes),) = made
    assert sizes == [None, None, 1024, 1000]
    places = [(i, j) for i in (0, 127, 128, 900) for j in (0, 127, 128, 500, 999)]
    mask = shown("blocks", 1, 1024, 1000)[0, 0]
    assert [visible(0, 0, i, j) for i, j in places] == [mask[place] for place in places]
    asked = [asked["options"] for what, asked in fake_torch.calls if what == "flex"]
    assert [(one["block_mask"], one["score_mod"]) for one in asked] == [("it", None)] * 2


def test_flex_attention_caps_scores(fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_torch, "tanh", np.tanh, raising=False)
    select_peers("flex")[0].prepare(SCORES16, make_inputs(SCORES16, np))()
    ((_, asked),) = [call for call in fake_torch.calls if call[0] == "flex"]
    assert asked["options"]["block_mask"] is None
    assert asked["options"]["score_mod"](30.0, 0, 0, 0, 0) == 50 * np.tanh(0.6)


SCORES16 = replace(SCORES, dtype="float16")


@pytest.mark.parametrize(
    ("name", "head", "last", "said"),
    [
        ("block-mask", "block_mask | cuflash fa3", "of the dense call", "Block masks"),
        (
            "score-mod",
            "score_mod | cuflash fa3, softcap",
            "of the call with softcap",
            "Score modifications",
        ),
    ],
)
@pytest.mark.parametrize("op", ["", "-backward"])
def test_they_stand_beside_the_call_without_them(
    stored: Store, name: str, op: str, head: str, last: str, said: str
) -> None:
    rows = rows_of(name + op, "torch flex", ratio=1.6)
    assert of_set(name + op, rows) == rows
    assert kind(rows[0]) == said.lower()
    stored(*rows)
    text = render(name + op)
    assert f"| mask | cuflash fa3, {head} | torch flex | ratio to the best other" in text
    assert f"| at least | {last} |" in text
    mask = "block mask" if name == "block-mask" else "full"
    assert f"| 64 | 64 | 8192 | {mask} | 100 | 50.0 | 200 | 1.60 | 0.40 | 0.625 |" in text
    assert text.count("| 0.625 |") == len(select(name))
    assert f"**{said}**: cuflash fa3, {head.split()[0]} is 1.60 times" in text


def test_of_a_soft_cap_of_another_size_the_plain_call_is_beside(stored: Store) -> None:
    stored(*rows_of("softcap", "torch flex"), *rows_of("score-mod", "torch flex"))
    assert render("softcap").count("\n| 128 |") == 2
    assert render("score-mod").count("\n| 128 |") == 2


def test_sources_are_of_the_features_that_a_row_has() -> None:
    from bench.sources import features_of

    for name in ("dropout", "block-mask", "score-mod", "softcap", "windows"):
        for row in rows_of(name):
            case = next(
                one
                for case in select(name)
                for one in (case, *case.companions)
                if {**row["options"]} == one.options
            )
            assert features_of(row) == case.features
