"""Planted bugs in attention sinks."""

from __future__ import annotations

from .bug import Bug, row
from .hopper_problems import CAUSAL

__all__ = ["BUGS", "HOPPER"]

_FEATURE = "cuda_src/features/sinks.cuh"
_GRADIENT = "cuda_src/steps/sink_gradient.cu"
_SCORE = "cuda_src/tile/score.cuh"

_NUMPY = "tests/property/test_sinks.py::test_against_float64[numpy-fa2-float16-d64-dv64-causal]"
_TESTS = "tests/property/test_sinks.py::"
_AGAINST = "test_sinks.py::test_against_float64"
_DEAD = "test_sinks.py::test_rows_that_see_no_key_are_their_sink"
_INFINITE = "test_sinks.py::test_a_sink_that_is_not_finite_comes_out_of_its_head_alone"
_ROWS = {
    "fa1": "fa1-sm_90-float16-d64-dv64-causal-sinks-float32",
    "fa2": "fa2-sm_90-float16-d64-dv64-causal-sinks-float16",
    "fa3": "fa3-sm_90-float16-d64-dv64-causal-sinks-float16-filled",
}


def _bug(
    name: str, file: str, find: str, replace: str, of: str = "fa2", emulated: str = _AGAINST
) -> Bug:
    tests = {
        _AGAINST: f"{_TESTS}test_against_float64[cuda-{of}-float16-d64-dv64-causal]",
        _DEAD: f"{_TESTS}test_rows_that_see_no_key_are_their_sink[float16-cuda-{of}]",
    }
    return Bug(name, file, find, replace, tests[emulated], row(_ROWS[of], emulated))


BUGS = (
    Bug(
        "the factor of a row with a sink may be flushed to 0",
        "cuda_src/tile/numeric.cuh",
        "return __int_as_float(0x00800000);",
        "return __int_as_float(1);",
        f"{_TESTS}test_a_sink_that_is_not_finite_comes_out_of_its_head_alone[inf-float16-cuda-fa2]",
        row(f"inf-{_ROWS['fa2']}", _INFINITE),
    ),
    Bug(
        "the NumPy backend does not rescale outputs for the sink",
        "cuflash/tiled_numpy/steps.py",
        "state.out *= np.exp(of_keys - total)",
        "state.out *= np.exp(0 * total)",
        _NUMPY,
    ),
    Bug(
        "the gradient of the sinks has the wrong sign in the NumPy backend",
        "cuflash/tiled_numpy/gradient_rows.py",
        "-self._sink_weights() *",
        "self._sink_weights() *",
        _NUMPY,
    ),
    _bug(
        "the sink's weight is doubled",
        _FEATURE,
        "sum = sum * keep + Logits<Config>::exponential(sink - offset);",
        "sum = sum * keep + Compute(2) * Logits<Config>::exponential(sink - offset);",
    ),
    _bug(
        "the sink takes nothing of the output",
        _FEATURE,
        "return keep;",
        "return Compute(1);",
    ),
    _bug(
        "all heads have the first one's sink",
        _FEATURE,
        "static_cast<const T*>(params.sinks.sinks)[head]",
        "static_cast<const T*>(params.sinks.sinks)[0]",
    ),
    _bug(
        "the sink is taken for a number in units of log 2",
        _FEATURE,
        "Logits<Config>::from_natural(given);",
        "given;",
    ),
    _bug(
        "the sink is measured from the maximum of the keys",
        _FEATURE,
        "const Compute offset = subtrahend(top);",
        "const Compute offset = subtrahend(reference);",
        "fa1",
    ),
    _bug(
        "a row that sees no key is not dead where it has a sink",
        _SCORE,
        "if (Mask<Config>::sees_nothing(seq, row)) return -infinity<Compute>();",
        "",
        "fa2",
        _DEAD,
    ),
    _bug(
        "delta of rows that see no key reaches the sink",
        _GRADIENT,
        "if (!Mask<Config>::sees_nothing(seq, row)) return;",
        "return;",
        "fa1",
        _DEAD,
    ),
    _bug(
        "dlse of rows that see no key does not reach the sink",
        _GRADIENT,
        "delta = -*row_number<Statistics>(params.dlse, seq, head, row);",
        "",
    ),
    _bug(
        "the gradient of the sinks has the wrong sign",
        _GRADIENT,
        "return weight * -delta;",
        "return weight * delta;",
    ),
    _bug(
        "the gradient of the sinks is of one batch entry",
        _GRADIENT,
        "entry < entries_of<Config>(params);",
        "entry < 1;",
        "fa1",
    ),
    _bug(
        "half of the rows are not added to the gradient of the sinks",
        "cuda_src/steps/block_sum.cuh",
        "for (int distance = threads / 2;",
        "for (int distance = threads / 4;",
    ),
    _bug(
        "fa1 does not rescale outputs for the sink",
        "cuda_src/fa1/forward_steps.cuh",
        "inverse_of(x, kept.value[m][group]);",
        "inverse_of(x, Compute(1));",
        "fa1",
    ),
    _bug(
        "fa2 does not rescale outputs for the sink",
        "cuda_src/fa2/forward_store.cuh",
        "inverse_of(sum, keep.value[m][group]);",
        "inverse_of(sum, Compute(1));",
    ),
)

#: Bugs of FlashAttention-3, which only the emulator runs.
HOPPER = (
    Bug(
        "fa3 does not rescale outputs for the sink",
        "cuda_src/fa3/forward_store.cuh",
        "inverse_of(sum, keep);",
        "inverse_of(sum, 1.0f);",
        CAUSAL,
        row(_ROWS["fa3"], _AGAINST),
    ),
)
