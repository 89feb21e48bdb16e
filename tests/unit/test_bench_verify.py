"""The verification tells right results from wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.cases import Case, select
from bench.inputs import Inputs, make_inputs
from bench.verify import SAMPLE, WHOLE, WRONG, Truth, _sample

from .test_bench_measure import BACKWARD, CASE, _right
from .whole_attention import whole_attention


def _outputs(case: Case, inputs: Inputs) -> list[Any]:
    """The right output, or the right gradients."""
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
    # Results of other heads of keys are wrong, and so are results with reversed heads.
    wrong = _outputs(case, others)
    for place, output in enumerate(right):
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


FEATURES: list[dict[str, Any]] = [
    {"window_size": (5, 0)},
    {"window_size": (3, 4)},
    {"window_size": (None, 2)},
    {"window_size": (6, 2), "causal": True},
    {"window_size": (2, 0), "seqlen_q": 50},  # the first queries see no key
    {"sinks": True, "causal": True},
    {"sinks": True, "window_size": (5, 0)},
    {"softcap": 0.7, "causal": True},
    {"softcap": 1.5, "window_size": (5, 0)},
    {"alibi": True, "causal": True},
    {"alibi": True, "seqlen_q": 30},
    {"bias": True},
    {"bias": True, "dbias": True, "causal": True},
    {"bias": True, "dbias": True, "softcap": 0.7, "sinks": True, "alibi": True},
]


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_features_are_verified(case: Case, features: dict[str, Any]) -> None:
    case = replace(case, **{"batch": 2, "heads_q": 4, "dtype": "float16", **features})
    inputs = make_inputs(case, np)
    right = whole_attention(case, inputs)
    truth = Truth(case, inputs)
    assert 0 < truth.worst_ratio(right) < 1
    for place, output in enumerate(right):
        wrong = output.copy()
        wrong[..., -1] += np.float16(2)
        assert truth.worst_ratio([*right[:place], wrong, *right[place + 1 :]]) > truth.limit


@pytest.mark.parametrize("case", [CASE, BACKWARD], ids=str)
@pytest.mark.parametrize(
    ("features", "others"),
    [
        ({"window_size": (5, 0)}, {"window_size": (4, 0)}),
        ({"window_size": (5, 0)}, {"window_size": (6, 0)}),
        ({"window_size": (5, 3)}, {"window_size": (5, 2)}),
        ({"window_size": (5, 3)}, {"window_size": None}),
        ({"sinks": True}, {"sinks": False}),
        ({"softcap": 0.7}, {"softcap": None}),
        ({"softcap": 0.7}, {"softcap": 0.9}),
        ({"alibi": True}, {"alibi": False}),
        ({"bias": True}, {"bias": False}),
    ],
)
def test_another_problem_is_no_answer(
    case: Case, features: dict[str, Any], others: dict[str, Any]
) -> None:
    case = replace(case, **{"dtype": "float16", **features})
    inputs = make_inputs(case, np)
    answer = whole_attention(replace(case, **others), inputs)
    truth = Truth(case, inputs)
    if case.sinks and case.op == "backward":
        with pytest.raises(ValueError, match="longer"):
            truth.worst_ratio(answer)
        answer.append(whole_attention(case, inputs)[-1])
    assert truth.worst_ratio(answer) > truth.limit


EXTRAS = "softcap,softcap-backward,alibi,alibi-backward,bias,bias-backward"


@pytest.mark.parametrize("case", [case for case in select(EXTRAS) if not case.dbias], ids=str)
def test_a_timed_call_that_leaves_out_its_extra_is_told(case: Case) -> None:
    """Short sequences and two heads suffice to see whether the extra changes the results."""
    case = replace(case, batch=1, heads_q=2, heads_kv=2, seqlen_q=256, seqlen_kv=256)
    inputs = make_inputs(case, np)
    truth = Truth(case, inputs)
    assert truth.worst_ratio(whole_attention(case, inputs)) < 1
    assert truth.worst_ratio(whole_attention(case.plain, inputs)) > truth.limit


@pytest.mark.parametrize("rows", [40, WHOLE + 10])
def test_the_gradient_of_a_bias_is_of_all_batch_entries(rows: int) -> None:
    case = replace(BACKWARD, dtype="bfloat16", batch=3, bias=True, dbias=True, seqlen_q=rows)
    inputs = make_inputs(case, np)
    right, truth = whole_attention(case, inputs), Truth(case, inputs)
    assert 0 < truth.worst_ratio(right) < 1
    matrices = {name: getattr(inputs, name)[:1] for name in ("q", "k", "v", "dout")}
    of_first = whole_attention(replace(case, batch=1), replace(inputs, **matrices))[-1]
    assert truth.worst_ratio([*right[:-1], of_first]) > truth.limit
    for head in (0, -1):
        wrong = right[-1].copy()
        wrong[0, head, -1, -1] += np.asarray(1, wrong.dtype)
        assert truth.worst_ratio([*right[:-1], wrong]) > truth.limit


def test_the_gradient_of_sinks_is_of_all_batch_entries() -> None:
    case = replace(BACKWARD, dtype="float16", batch=2, sinks=True)
    inputs = make_inputs(case, np)
    right, truth = whole_attention(case, inputs), Truth(case, inputs)
    first = Inputs(*(a[:1] for a in (inputs.q, inputs.k, inputs.v, inputs.dout)), inputs.sinks)
    of_first = whole_attention(replace(case, batch=1), first)[-1]
    assert truth.worst_ratio([*right[:-1], of_first]) > WRONG
    assert truth.worst_ratio([*right[:-1], np.full_like(of_first, np.nan)]) == np.inf
