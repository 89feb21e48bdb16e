"""The six checks pass on correct tiled attention and each sees the bugs it is there for."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kit import checks, limits
from tests.kit.case import STORAGE, Case
from tests.kit.compare import Verdict
from tests.kit.strides import Strides
from tests.unit.emulation import BUGS, Emulation

# Two cases with at least three of the emulation's tiles, whose lengths are no multiples of them.
CAUSAL = Case(1, 4, 2, 130, 250, 32, 48, causal=True)
FULL = Case(1, 4, 2, 70, 170, 32, 48, layout="bhsd")
#: Cases for bugs that need a window or sinks.
WINDOW = Case(1, 4, 2, 130, 250, 32, 48, window="60:20")
SINKS = Case(1, 4, 2, 130, 250, 32, 48, causal=True, seed=1)

#: The checks that must notice each bug; others may notice it too.
SEEN_BY = {
    "no_rescale_out": {"one_hot", "sum_dk"},
    "no_rescale_sum": {"one_hot", "sum_dv", "sum_dk"},
    "drop_diagonal": {"census", "one_hot"},
    "leak_one": {"census"},
    "tail_unmasked": {"census", "one_hot", "sum_dv"},
    "top_left": {"census", "one_hot"},
    "skip_last_tile": {"census", "one_hot", "sum_dv", "sum_dk"},
    "stale_stage": {"census", "one_hot", "sum_dk"},
    "swapped_k_columns": {"one_hot", "shift", "sum_dv", "sum_dk"},
    "swapped_v_rows": {"census", "one_hot", "sum_dk"},
    "scale_2_percent": {"shift", "sum_dv", "sum_dk"},
    "sentinel": {"shift"},
    "lse_log2": {"census", "shift", "sum_dv"},
    "head_modulo": {"census", "one_hot", "sum_dv", "q_dq"},
    "last_rows_zero": {"census", "one_hot", "sum_dk"},
    "delta_zero": {"sum_dk"},
    "delta_next_row": {"sum_dk"},
    "dk_unscaled": {"q_dq"},
    "dq_unscaled": {"q_dq"},
    "dq_lost_tile": {"q_dq"},
    "dq_twice_tile": {"q_dq"},
    "skip_q_tile": {"sum_dv", "q_dq"},
    "gradient_unmasked": {"sum_dv", "sum_dk"},
    "group_overwritten": {"sum_dv", "q_dq"},
    "dv_bias": {"sum_dv"},
    "window_end": {"census"},
    "window_begin": {"census"},
    "sink_twice": {"census", "sum_dv", "sum_dk", "sum_ds"},
    "sink_next_head": {"census", "sum_dv", "sum_dk", "sum_ds"},
    "sink_output": {"census", "sum_dk"},
    "sink_log2": {"census", "sum_dv", "sum_dk", "sum_ds"},
    "dsinks_sign": {"sum_ds"},
    "dsinks_first_tile": {"sum_ds"},
}


@functools.cache
def found(bug: str, dtype: str) -> dict[str, bool]:
    """Whether each check failed on any case."""
    failed: dict[str, bool] = {}
    sunk = replace(SINKS, dtype=dtype, sinks=replace(SINKS, dtype=dtype).statistics.name)
    cases = {"": (CAUSAL, FULL, WINDOW, sunk), "window": (WINDOW,), "sink": (sunk,)}
    kind = next((kind for kind in ("window", "sink") if kind in bug), "")
    for case in cases[kind] if kind or not bug else (CAUSAL, FULL):
        for verdict in checks.run_checks(Emulation(bug), replace(case, dtype=dtype)):
            failed[verdict.rule] = failed.get(verdict.rule, False) or not verdict.passed
    return failed


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_is_seen(bug: str, dtype: str) -> None:
    seen = {rule for rule, failed in found(bug, dtype).items() if failed}
    assert SEEN_BY[bug] <= seen


@pytest.mark.parametrize("dtype", STORAGE)
def test_correct_attention_passes(dtype: str) -> None:
    assert not any(found("", dtype).values())


CASES = [
    "B=2 Hq=6 Hk=2 Sq=100 Sk=120 D=64 Dv=64",
    "B=1 Hq=1 Hk=1 Sq=250 Sk=130 D=8 Dv=16 causal=yes layout=sd",
    "B=1 Hq=4 Hk=2 Sq=70 Sk=330 D=32 Dv=96 scale=0.015625 layout=hsd",
    "B=1 Hq=2 Hk=2 Sq=100 Sk=100 D=128 Dv=128 causal=yes q_offset=-7 layout=shd",
    "B=1 Hq=2 Hk=1 Sq=1 Sk=500 D=64 Dv=64 causal=yes",
    "B=1 Hq=2 Hk=1 Sq=500 Sk=1 D=64 Dv=64",
    "B=1 Hq=2 Hk=2 Sq=100 Sk=100 D=2 Dv=4 causal=yes",
    "B=1 Hq=2 Hk=2 Sq=5 Sk=7 D=1 Dv=1",
    "B=1 Hq=1 Hk=1 Sq=1 Sk=323 D=40 Dv=40 layout=sd seed=5",
    "B=0 Hq=2 Hk=2 Sq=5 Sk=5 D=4 Dv=4",
    "B=1 Hq=2 Hk=2 Sq=0 Sk=5 D=4 Dv=4",
    "B=1 Hq=2 Hk=2 Sq=5 Sk=0 D=4 Dv=4",
    "B=1 Hq=2 Hk=2 Sq=40 Sk=40 D=64 Dv=64 scale=2.0",
    "B=2 Hq=4 Hk=2 Sq=100 Sk=120 D=64 Dv=64 window=20:0",
    "B=1 Hq=2 Hk=2 Sq=150 Sk=90 D=32 Dv=32 window=:5 q_offset=-20",
    "B=1 Hq=2 Hk=1 Sq=200 Sk=70 D=64 Dv=64 window=31:33 q_offset=-60 layout=bhsd",
    "B=1 Hq=2 Hk=2 Sq=60 Sk=90 D=8 Dv=8 window=0:0",
    "B=1 Hq=2 Hk=2 Sq=60 Sk=90 D=8 Dv=8 window=3: q_offset=500",
]


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("line", CASES)
def test_correct_attention_passes_in_any_shape(line: str, dtype: str) -> None:
    case = Case.parse(f"{line} dtype={dtype}")
    verdicts = checks.run_checks(Emulation(), case)
    assert [verdict.rule for verdict in verdicts] == [
        "census",
        "one_hot",
        "shift",
        "sum_dv",
        "sum_dk",
        "q_dq",
    ]
    checks.require(case, verdicts)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("line", [line for line in CASES if "B=0" not in line])
def test_correct_sinks_pass_in_any_shape(line: str, dtype: str) -> None:
    case = Case.parse(f"{line} dtype={dtype}")
    for sinks in dict.fromkeys((dtype, case.statistics.name)):
        for seed in range(4):
            sunk = replace(case, sinks=sinks, seed=seed)
            verdicts = checks.run_checks(Emulation(), sunk)
            rules = [verdict.rule for verdict in verdicts]
            assert rules == ["census", "sum_dv", "sum_dk", "q_dq", "sum_ds"]
            checks.require(sunk, verdicts)


def test_checks_ignore_broadcast_strides() -> None:
    case = CAUSAL.with_strides(k=Strides(broadcast=(0, 2)), v=Strides(broadcast=(2,)))
    checks.require(case, checks.run_checks(Emulation(), replace(case, dtype="bfloat16")))


def test_one_hot_says_where_it_does_not_apply() -> None:
    verdict = checks.one_hot(Emulation(), Case(seqlen_q=4, seqlen_kv=3, head_dim=1))
    assert verdict.passed
    assert "does not apply" in verdict.detail
    assert not checks.one_hot(Emulation(), CAUSAL).detail.startswith("does not")


def test_a_failure_tells_the_repro_line() -> None:
    with pytest.raises(AssertionError, match=re.escape(CAUSAL.repro)):
        checks.require(CAUSAL, [Verdict("census", 2.0)])
    with pytest.raises(AssertionError, match="sum_dk"):
        checks.require(CAUSAL, [Verdict("sum_dk", float("nan"))])


def test_tolerances_are_in_one_table() -> None:
    """Other files have no tolerances: the usual names of such comparisons are not in them."""
    other = re.compile(r"allclose|approx\(|\b[ar]tol\b|assert_array_almost|isclose")
    here = Path(__file__).resolve().parent.parent
    files = [p for part in ("kit", "device", "property") for p in (here / part).rglob("*.py")]
    assert Path(limits.__file__) in files
    assert not [path.name for path in files if other.search(path.read_text())]


@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_truncated_products_of_long_columns_pass(dtype: str, head_dim: int) -> None:
    """With one key, dS is only truncation, of one sign, and dq is below the smallest number."""
    case = Case(seqlen_q=4551, seqlen_kv=1, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
    for cut in (2.0**-24, 2.0**-23, 2.0**-22):
        for seed in range(3):
            emulation = Emulation(truncation=cut)
            checks.require(case, checks.run_checks(emulation, replace(case, seed=seed)))
