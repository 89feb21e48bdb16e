"""The result of attention_vjp: gradients, now or later, here or in another process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuflash


def _arrays(dtype: Any, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((2, 5, 6, 4)).astype(dtype) for _ in range(4)]


@given(
    dtype=st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "causal": st.booleans(),
            "scale": st.floats(0.01, 2),
            "q_offset": st.integers(-3, 3),
            "layout": st.sampled_from(["bshd", "bhsd"]),
            "deterministic": st.booleans(),
            "algorithm": st.sampled_from(["auto", "fa1", "fa2"]),
            "out_dtype": st.just("float32"),
        },
    ),
    with_dlse=st.booleans(),
)
def test_it_is_the_backward_pass_of_the_same_call(
    dtype: Any, options: dict[str, Any], with_dlse: bool
) -> None:
    q, k, v, dout = _arrays(dtype)
    options["backend"] = "numpy"
    if np.dtype(dtype).itemsize != 2:
        options.pop("out_dtype", None)
    (out, lse), pullback = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    given = {"dlse": np.ones_like(lse)} if with_dlse else {}
    again = {name: value for name, value in options.items() if name != "out_dtype"}
    expected = cuflash.attention_backward(dout, q, k, v, out, lse, **given, **again)
    for pull in (pullback, pickle.loads(pickle.dumps(pullback)), pullback):
        for got, grad in zip(pull(dout, **given), expected, strict=True):
            assert got.dtype == dtype
            assert got.tobytes() == grad.tobytes()


_THERE = """
import pickle, sys
pullback, dout = pickle.load(sys.stdin.buffer)
pickle.dump(pullback(dout), sys.stdout.buffer)
"""


def test_it_works_in_another_process(root: Path) -> None:
    q, k, v, dout = _arrays(np.float32)
    _, pullback = cuflash.attention_vjp(q, k, v, causal=True, backend="numpy")
    done = subprocess.run(
        [sys.executable, "-c", _THERE],
        input=pickle.dumps((pullback, dout)),
        stdout=subprocess.PIPE,
        cwd=root,
        check=True,
    )
    for got, grad in zip(pickle.loads(done.stdout), pullback(dout), strict=True):
        assert np.array_equal(got, grad)


def test_what_is_wrong_is_said_when_it_is_called() -> None:
    q, k, v, dout = _arrays(np.float32)
    _, pullback = cuflash.attention_vjp(q, k, v, backend="numpy")
    with pytest.raises(cuflash.ArgumentValueError, match=r"^dout: got shape"):
        pullback(dout[:, :4])
    with pytest.raises(cuflash.ArgumentTypeError, match=r"^dlse: got "):
        pullback(dout, "text")
    with pytest.raises(cuflash.ArgumentTypeError, match=r"^dout: got "):
        pullback(None)
