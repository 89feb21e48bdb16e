"""Plans with kernels that may begin before the kernel before them has ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuflash.calls_to_come import Calls, problems_of
from cuflash.cuda import source
from cuflash.planning.decision import Plan
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS
from .fake_device import fake_device
from .test_forward_time import few
from .test_plan_fa3 import planned
from .test_plan_fa3_backward import of_gradients

__all__ = ["fake_device"]


def test_other_devices_have_no_such_launches() -> None:
    for name in ("80", "89"):
        chosen = plan(few(1, (8, 2), (1, 4096)), LIMITS[name])
        assert chosen.tile.block_q == 16
        assert not any(one.overlaps for one in chosen.launches)
        assert len(chosen.launches) == 2
    wide = replace(few(1, (8, 2), (64, 4096)), storage="bfloat16")
    assert not any(one.overlaps for one in plan(wide, LIMITS["90"], algorithm="fa3").launches)


def _gradients(heads: str, seqlens: int | tuple[int, int], **more: Any) -> AttentionProblem:
    """A plain problem; ``heads`` is a text "batch query heads/key heads"."""
    batch, heads_q, heads_kv = map(int, heads.replace("/", " ").split())
    queries, keys = (seqlens, seqlens) if isinstance(seqlens, int) else seqlens
    of = {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "mask": "full", "width": 128}
    return of_gradients(**{**of, "seqlen_q": queries, "seqlen_kv": keys, **more})


#: Plain backward passes, and their kernels after ``statistics``.
_BACKWARD = {
    "blocks convert": (_gradients("4 16/16", 4096), ["backward"]),
    "another kernel converts": (
        _gradients("4 16/16", 4096, width=192),
        ["backward", "convert_dq"],
    ),
    "parts": (_gradients("1 32/2", 2048, mask="causal"), ["backward", "sum_parts"]),
    "parts, and another kernel converts": (
        _gradients("1 32/2", 2048, mask="causal", width=192),
        ["backward", "convert_dq", "sum_parts"],
    ),
    "deterministic": (_gradients("1 32/2", 2048, deterministic=True), ["backward", "sum_parts"]),
    "a window": (_gradients("4 16/16", 4096, mask="band", q_first=-300), ["backward"]),
    "blocks stay": (_gradients("64 4/4", 512, width=32), ["backward", "convert_dq"]),
    "few": (_gradients("16 8/8", (77, 4096)), ["backward_few", "convert_dq"]),
    "short": (_gradients("64 12/12", 197, width=64), ["backward_short"]),
}


@pytest.mark.parametrize("name", _BACKWARD)
def test_every_kernel_of_a_plain_backward_pass_but_the_first_begins_early(name: str) -> None:
    problem, kernels = _BACKWARD[name]
    chosen = planned(problem)
    assert [one.config.kernel for one in chosen.launches] == ["statistics", *kernels]
    assert [one.overlaps for one in chosen.launches] == [False] + [True] * len(kernels)
    assert [one.config.waits for one in chosen.launches] == [False] + [True] * len(kernels)


def _waits(chosen: Plan) -> list[bool]:
    return [one.overlaps or one.config.waits for one in chosen.launches]


def test_no_kernel_of_a_pass_with_features_begins_early() -> None:
    some = Calls(
        ((128, 128),), ("float16",), ("backward",), softcap=(True, False), alibi=(True, False),
        sinks=("float32", None), dropout=(True, False), seqlens=((512, 512),),
    )  # fmt: skip
    arrays = replace(some, softcap=(False,), alibi=(False,), sinks=(None,), dropout=(False,))
    arrays = replace(arrays, bias=("qk", None), mask_array=("k", None), block_mask=(None, (64, 64)))
    lengths = replace(arrays, bias=(None,), mask_array=(None,), block_mask=(None,))
    lengths = replace(lengths, used_lengths=(True, False), packed=(True, False))
    seen: set[str] = set()
    for problem in (one for calls in (some, arrays, lengths) for one in problems_of(calls)):
        chosen = plan(problem, LIMITS["90"], algorithm="fa3")
        others = [not problem.uses] * (len(chosen.launches) - 1)
        assert _waits(chosen) == [False, *others], problem.features
        seen |= {*problem.features}
    assert seen == {
        *("softcap", "alibi", "sinks", "dropout", "bias", "mask", "block_mask"),
        *("used_lengths", "packed_lengths"),
    }


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_no_kernel_of_another_pass_waits_first_of_all(algorithm: Any) -> None:
    for problem in (few(1, (8, 2), (1, 4096)), few(4, (8, 8), (1000, 1000))):
        chosen = plan(problem, LIMITS["90"], algorithm=algorithm)
        assert not any(one.config.waits for one in chosen.launches)
    if algorithm != "fa3":
        backward = _gradients("4 16/16", 4096)
        assert not any(_waits(plan(backward, LIMITS["90"], algorithm=algorithm)))


def test_the_text_of_a_kernel_waits_before_it_does_anything(root: Path) -> None:
    _, main, *_ = planned(_gradients("4 16/16", 4096)).launches
    include, call = '#include "ptx/dependent_launch.cuh"', "cuflash::ptx::wait_for_kernel_before();"
    text = source.translation_unit(main.config, root / "cuda_src")
    assert text.count(include) == text.count(call) == 1
    assert text.index(include) < text.index("struct Config")
    body = text[text.index(f"{main.config.entry}(") :].split("{", 1)[1]
    assert [line.strip() for line in body.splitlines()][1:] == [
        call,
        "cuflash::fa3::backward<Config>(params);",
        "}",
    ]
    plain = source.translation_unit(replace(main.config, waits=False), root / "cuda_src")
    assert "dependent_launch" not in plain
    assert "wait_for_kernel_before" not in plain
