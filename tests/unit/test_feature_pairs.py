"""Every pair of features runs or is refused, in every algorithm and pass of the NumPy backend.

``pairs_case`` makes the pairs from the table of features. The emulator runs the CUDA kernels.
"""

from __future__ import annotations

import numpy as np
import pytest

import cuflash
from cuflash import calls
from cuflash.features import refused
from cuflash.features.refused import REFUSED, Refusal, check_refused, gradients_of
from cuflash.features.table import FEATURES, with_features
from cuflash.planning.plan import ALGORITHMS, plan
from cuflash.planning.problem import DTYPES, AttentionProblem

from ..architectures import LIMITS
from .pairs_case import OPERATIONS, PAIRS, call_of, in_float64, refusal_of, run

ON_NUMPY = ["fa1", "fa2"]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("algorithm", ON_NUMPY)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_pair_runs_or_is_refused(
    pair: tuple[str, str], algorithm: str, operation: str
) -> None:
    call = call_of(pair, backend="numpy", algorithm=algorithm)
    refusal = refusal_of((*pair, algorithm, operation, "numpy", "float32"))
    if refusal is not None:
        with pytest.raises(cuflash.UnsupportedError) as caught:
            run(call, operation)
        assert refusal.first in str(caught.value)
        assert refusal.second in str(caught.value)
        return
    exact = in_float64(call)
    for got, expected in zip(run(call, operation), run(exact, operation), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    for name in pair:
        others = tuple(other for other in pair if other != name)
        without = run(call_of(others, backend="numpy", algorithm=algorithm), operation)
        assert any(
            a.shape != b.shape or not np.array_equal(a, b)
            for a, b in zip(run(call, operation), without, strict=False)
        ), f"{name} changes nothing"


def test_refusals_name_what_there_is() -> None:
    arrays = [name for feature in FEATURES.values() for name in feature.arrays]
    gradients = gradients_of(arrays)
    known = {*FEATURES, *ALGORITHMS, *DTYPES, "cuda", "numpy", "forward", "backward", *gradients}
    for pair in REFUSED:
        assert {pair.first, pair.second} <= known
        assert pair.first in FEATURES
        assert pair.reason
    both = [frozenset((pair.first, pair.second)) for pair in REFUSED]
    assert len({*both}) == len(both)


@pytest.mark.parametrize("second", ["sinks", "fa1", "fa2", "numpy", "forward", "float32"])
def test_a_refused_pair_raises_wherever_it_stands(
    second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test plants a refusal with a feature, an algorithm, a backend, a pass or a dtype."""
    monkeypatch.setattr(refused, "REFUSED", (Refusal("window", second, "as a test has it"),))
    calls.forget()
    algorithm = second if second in ALGORITHMS else "auto"
    names = ("window", second) if second in FEATURES else ("window",)
    call, plain = (call_of(some, backend="numpy", algorithm=algorithm) for some in (names, ()))
    with pytest.raises(cuflash.UnsupportedError, match=f"window with {second}: as a test has it"):
        cuflash.attention(**call.inputs, **call.keywords)
    cuflash.attention(**plain.inputs, **plain.keywords)
    calls.forget()


@pytest.mark.parametrize("second", ["fa3", "cuda"])
def test_a_generation_that_is_refused_is_passed_over(
    second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto" the next algorithm runs, and the plan says why; a refused backend is an error."""
    monkeypatch.setattr(refused, "REFUSED", (Refusal("window", second, "as a test has it"),))
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 4, "seqlen_q": 512, "seqlen_kv": 512}
    kinds = {"storage": "float16", "output": "float16", "mask": "left", "operation": "forward"}
    wide = {"head_dim": 64, "head_dim_v": 64, "scale": 0.1, "q_offset": 0, "q_first": -9}
    plain = AttentionProblem(**{**sizes, **kinds, **wide}, alignment="tensor_map")  # type: ignore
    problem = with_features(plain, {}, {})
    if second == "cuda":
        with pytest.raises(cuflash.UnsupportedError, match="window with cuda: as a test has it"):
            plan(problem, LIMITS["90"])
        return
    chosen = plan(problem, LIMITS["90"])
    assert chosen.algorithm == "fa2"
    assert ("fa3", "window with fa3: as a test has it") in chosen.rejected
    with pytest.raises(cuflash.UnsupportedError, match="window with fa3"):
        plan(problem, LIMITS["90"], algorithm="fa3")


def test_all_features_together_are_not_refused() -> None:
    """The test leaves out the first feature of every refused pair."""
    one_of_each = {pair.first for pair in REFUSED}
    check_refused(name for name in FEATURES if name not in one_of_each)
