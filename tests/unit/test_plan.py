"""Plans are pure: every architecture's tiles, without a GPU."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from cuflash.arrays.spec import TensorSpec
from cuflash.checks import describe
from cuflash.errors import ArgumentValueError, UnsupportedError
from cuflash.options import Options
from cuflash.planning.device import DeviceLimits, HostLimits
from cuflash.planning.plan import Algorithm, Plan, plan
from cuflash.planning.problem import AttentionProblem
from cuflash.planning.tiles.common import HEAD_DIM_BUCKETS, bucket

from ..architectures import LIMITS

PLAIN = AttentionProblem(
    "forward", 2, 4, 2, 1000, 1000, 64, 64, "float16", "float16", "causal", 0.125, 0
)


def problem(**changes: object) -> AttentionProblem:
    changed = replace(PLAIN, **changes)
    return replace(changed, output=changed.storage) if "storage" in changes else changed


def test_buckets_hold_every_head_dim() -> None:
    for head_dim in range(1, 257):
        assert bucket(head_dim) >= head_dim
        smaller = [b for b in HEAD_DIM_BUCKETS if b < bucket(head_dim)]
        assert all(b < head_dim for b in smaller)


def _described(operation: str, batch: int, heads: int) -> AttentionProblem:
    """The problem of one float16 row shared by every batch entry and head."""
    spec = TensorSpec((batch, 1, heads, 8), "float16", (0, 0, 0, 1), 2, 0)
    return describe(operation, dict.fromkeys(("q", "k", "v"), spec), Options()).problem


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_grids_stay_within_the_launch_limit(operation: str) -> None:
    for batch, heads in ((2**31 - 1, 1), (1, 2**31 - 1), (2**16, 2**15 - 1)):
        for launch in plan(_described(operation, batch, heads), LIMITS["90"]).launches:
            assert 0 < launch.grid < 2**31
    for batch, heads in ((2**31, 1), (1, 2**31), (2**16, 2**15), (2**32, 1), (2**16, 2**16)):
        with pytest.raises(ArgumentValueError, match=rf"q: got batch {batch} of {heads} heads"):
            _described(operation, batch, heads)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_a_named_algorithm_is_taken(algorithm: Algorithm) -> None:
    chosen = plan(PLAIN, LIMITS["90"], algorithm=algorithm)
    assert (chosen.algorithm, chosen.rejected) == (algorithm, ())


def test_a_named_algorithm_never_falls_back() -> None:
    with pytest.raises(UnsupportedError, match="fa3"):
        plan(PLAIN, LIMITS["90"], algorithm="fa3")


def test_auto_says_why_not_the_better_ones() -> None:
    chosen = plan(PLAIN, LIMITS["90"])
    assert [name for name, _ in chosen.rejected] == ["fa3"]


def test_older_devices_are_refused_by_their_number() -> None:
    old = replace(LIMITS["75"], compute_capability=(7, 0))
    with pytest.raises(UnsupportedError, match=r"7\.5.*7\.0"):
        plan(PLAIN, old)


def test_no_decision_reads_the_device_name() -> None:
    named = replace(LIMITS["90"], name="NVIDIA Something 9000")
    one, other = plan(PLAIN, LIMITS["90"]), plan(PLAIN, named)
    assert one == other


def test_plans_and_configs_survive_pickling() -> None:
    chosen = plan(PLAIN, LIMITS["90"])
    assert pickle.loads(pickle.dumps(chosen)) == chosen


def test_the_numpy_plan() -> None:
    limits = HostLimits(cache=1 << 20)
    chosen = plan(PLAIN, limits)
    assert (chosen.backend, chosen.algorithm, chosen.launches) == ("numpy", "fa2", ())
    assert plan(PLAIN, limits, algorithm="fa1").algorithm == "fa1"
    asked = plan(PLAIN, limits, blocks=(17, 33)).tile
    assert (asked.block_q, asked.block_kv) == (17, 33)
    with pytest.raises(UnsupportedError, match="Hopper"):
        plan(PLAIN, limits, algorithm="fa3")


def test_a_plan_prints_what_an_error_needs() -> None:
    text = str(plan(PLAIN, LIMITS["90"]))
    for part in (
        "forward float16",
        "heads 4/2",
        "1000x1000",
        "head_dim 64",
        "causal",
        "fa2 on cuda",
    ):
        assert part in text


def test_limits_are_plain_values() -> None:
    limits: DeviceLimits = LIMITS["90"]
    assert limits.architecture == "sm_90"
    assert isinstance(plan(PLAIN, limits), Plan)
