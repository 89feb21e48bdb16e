"""What is timed is right: the verification tells it from what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.cases import Case
from bench.inputs import Inputs, make_inputs
from bench.verify import SAMPLE, WHOLE, WRONG, Truth, _sample

from .test_bench_measure import BACKWARD, CASE, _right


def _outputs(case: Case, inputs: Inputs) -> list[Any]:
    """The output, or the gradients."""
    right = _right(case, inputs)
    return [right] if case.op == "forward" else list(right)


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seqlen", [40, WHOLE + 150])
def test_the_verification_tells_right_from_wrong(case: Case, dtype: str, seqlen: int) -> None:
    case = replace(case, dtype=dtype, seqlen_q=seqlen, seqlen_kv=seqlen, causal=True)
    inputs = make_inputs(case, np)
    truth = Truth(case, inputs)
    outputs = _outputs(case, inputs)
    assert 0 < truth.worst_ratio(outputs) < 2
    for place, output in enumerate(outputs):
        for at in ((0, 0, 0), (-1, -1, -1)):  # the first and the last row
            wrong = output.copy()
            wrong[at] += np.asarray(2.0, wrong.dtype)
            others = [*outputs[:place], wrong, *outputs[place + 1 :]]
            assert truth.worst_ratio(others) > WRONG / 2, (place, at)


def test_a_long_sequence_is_sampled_from_end_to_end() -> None:
    assert list(_sample(WHOLE)) == list(range(WHOLE))
    rows = _sample(16384)
    assert (rows[0], rows[-1], len(rows)) == (0, 16383, SAMPLE)
    assert set(rows % 64) == set(range(64))


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=str)
def test_heads_that_share_keys_are_verified(case: Case) -> None:
    case = replace(case, heads_q=6, heads_kv=3, dtype="float16")
    inputs = make_inputs(case, np)
    right = _outputs(case, inputs)
    truth = Truth(case, inputs)
    assert 0 < truth.worst_ratio(right) < 2
    others = replace(inputs, k=np.roll(inputs.k, 1, axis=2), v=np.roll(inputs.v, 1, axis=2))
    wrong = _outputs(case, others)  # of another head of keys
    for place, output in enumerate(right):  # and of another head of queries, or of keys
        for bad in (wrong[place], output[:, :, ::-1]):
            assert truth.worst_ratio([*right[:place], bad, *right[place + 1 :]]) > WRONG


def test_gradients_of_shared_keys_are_of_all_heads_that_share_them() -> None:
    case = replace(BACKWARD, heads_q=6, heads_kv=3, dtype="float16")
    inputs = make_inputs(case, np)
    dq, dk, dv = _outputs(case, inputs)
    truth = Truth(case, inputs)
    single = replace(case, heads_q=3)
    one = replace(inputs, q=inputs.q[:, :, ::2], dout=inputs.dout[:, :, ::2])
    _, dk_of_one, dv_of_one = _outputs(single, one)
    for wrong in ((dq, dk_of_one, dv), (dq, dk, dv_of_one)):
        assert truth.worst_ratio(wrong) > WRONG
