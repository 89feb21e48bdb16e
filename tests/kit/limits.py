"""Every number that decides whether a result passes, with its reason. There are no others.

"Correct" below is ``tests/unit/emulation.py`` without a bug, run over every
family of values, lengths 1 to 2048, head dims 8 to 128, masked, offset and
grouped. Device figures are to be added beside these when they are measured.
"""

from __future__ import annotations

import math

import numpy as np

from .case import Case

#: u: the largest relative error of one rounding to nearest. By definition.
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}

#: Magnitude below which a rounding errs by u of this number, not of its own magnitude. float16
#: keeps subnormal numbers, so the magnitude is its smallest normal number. float32 flushes them
#: (CuPy compiles with -ftz=true), and bfloat16 is made from float32: up to 2^-126 is lost, so the
#: magnitude is 2^-126 / u. float64: small enough not to matter, large enough to be squared.
SMALLEST = {
    "float16": 2.0**-14,
    "bfloat16": 2.0**-118,
    "float32": 2.0**-102,
    "float64": 2.0**-500,
}

#: Largest weight of a key before a row is normalised. A row's reference follows its maximum late
#: in 16-bit kernels (``slack`` and ``most_weight`` of ``tile/softmax.cuh``).
MOST_WEIGHT = {"float16": 2.0**12, "bfloat16": 2.0**12, "float32": 1.0, "float64": 1.0}

#: Relative error of a soft cap's tanh. For bfloat16 it is the error of the instruction in the PTX
#: manual; for other dtypes a few units in the last place of the compute dtype, the errors of tanhf
#: and tanh in the CUDA manual.
TANH = {"bfloat16": 2.0**-11, "float16": 2.0**-22, "float32": 2.0**-22, "float64": 2.0**-51}


def exact(case: Case) -> bool:
    """Whether no function of the scores errs by more than a few units of the compute dtype."""
    return not (case.softcap and TANH[case.dtype] > 16 * UNIT[case.statistics.name])


#: 16-bit dtypes: the most of |x - r| / (u (|r| + E)) in any row, with E of ``error_model``.
#: Correct: out 0.74, dq 1.57, dk 1.45, dv 0.97 (each the worst of 24,000 rows; medians 0.3). One
#: row of dq depends on one rounding of delta, so its tail is that of a single random number: 2
#: is more than 5 of its standard deviations. Gradients of numbers for each head have this limit in
#: all dtypes. Correct, in the NumPy backend: dalibi_slopes 1.24, the worst of 13,000 cases, with a
#: single query.
ROW_LIMIT = {"out": 1.0} | dict.fromkeys(
    ("dq", "dk", "dv", "dalibi_slopes", "dbias", "dsinks"), 2.0
)
#: The same for a single number of the gradient of a bias, whose error is not averaged over a row.
PAIR_LIMIT = 4.0

#: float32 and float64: a 64-row tile's RMS of the same ratio may be twice that of plain NumPy
#: over the same rows (the rule of the project), plus one unit. The unit is for luck: plain NumPy
#: is sometimes exact where a correct tile errs by 1.4 (one query, three keys). In 20,000 tiles,
#: correct code had 0.90 of its limit in float32 and 0.87 in float64, both at single rows of
#: outliers; 0.73 otherwise. Plain NumPy itself errs by 0.3 to 2 units, and by 10 in sums of
#: thousands of terms. In float32 the unit is one and a half: a product of 8 terms by three tf32
#: products errs by 1.34 units on average, from the parts that they leave out; multiply and add
#: errs by 1.02. From 16 terms on the two err alike.
PLAIN_FACTOR = 2.0
PLAIN_UNITS = {"float32": 1.5, "float64": 1.0}
PLAIN_ROWS = 64


def plain_scatter(rows: int) -> float:
    """The factor that a tile of fewer rows may have: 1 for 64 rows, 2 for a single one.

    With thousands of keys the error of a row of dq is one random number: the error of delta's sum.
    Plain NumPy's error of the same row is another one. The root mean square of n rows scatters as
    1 / sqrt(n). A correct row of one query and 3,565 keys had 1.79 times the limit of 64 rows.
    """
    return 1 + (math.sqrt(PLAIN_ROWS / rows) - 1) / (math.sqrt(PLAIN_ROWS) - 1)


#: 16-bit dtypes, normal values: the most of |<x - r, r>| / (u sqrt(sum_i |r_i|^2 (|r_i| + E_i)^2))
#: in a head: errors of rows must be independent. Correct: 0.52. A gradient 1 % too large passes
#: ROW_LIMIT in bfloat16 and gives 2.7 or more here from 70 rows on.
BIAS_LIMIT = 1.0


def bias_scatter(name: str, rows: np.ndarray) -> np.ndarray:
    """The factor on the limit of a head with its truth in a few rows: 1 for 64 rows and more.

    If a head's truth lies in one row, its error is that row's error, which ``ROW_LIMIT`` judges.
    With four keys, where one row has nearly all of dk, both rules give 0.97. The error of a head of
    n rows scatters as 1 / sqrt(n).
    """
    beyond = np.sqrt(PLAIN_ROWS / np.clip(rows, 1, PLAIN_ROWS)) - 1
    return 1 + (ROW_LIMIT[name] - 1) * beyond / (math.sqrt(PLAIN_ROWS) - 1)


#: A row of the truth whose norm is below this fraction of E is only what remains when its float64
#: terms cancel. With one key, dS is 0 whether dropout keeps the key or not.
CANCELLED = 2.0**-40

#: Relative error of a long sum, per term, in u of the accumulator, with one sign: tensor cores
#: truncate when they add, once for every 8 or 16 terms (by half a unit on average).
SUM_DRIFT = 1 / 8

#: lse: error allowed relative to max(1, |lse|), and for each key in the sum; float32. float64
#: scales both by 2^-29. The project gives both; correct code has 0.06 of them. The error of the
#: scores themselves is added, E of ``error_model``: a score of 1 that remains of terms of 1,000
#: (values x30) is off by 1e-4 in any float32 product. E overestimates a standard deviation by a
#: factor of three at most, and lse is judged value by value, so three times E is allowed. Correct
#: code: the largest of 4,000 was 0.94 of E.
LSE_RELATIVE = 1e-5
LSE_PER_KEY = 2.0**-24
LSE_SCORES = 3.0

#: Identities: the most deviation, in units of the root of the sum of squares of the roundings in a
#: sum, each as large as u allows. Roundings are 0.3 to 0.4 of that on average, so 3 is 8 standard
#: deviations or more.
DEVIATIONS = 3.0

#: Identities and logit shift: the allowed error is this number + sqrt(n) + sqrt(head_dim), in u of
#: the compute dtype and relative to the terms. It covers sums of n and of head_dim terms and a few
#: operations around them.
OPERATIONS = 8.0

#: Census: error of exp(lse) in u of the compute dtype, per unit of max(1, lse). The approximate
#: base-2 logarithm of PTX errs by 2^-22 = 4u; ln 2 and the store add one rounding each.
CENSUS_UNITS = 6.0

#: One-hot: gap between the winning logit and the next, so that exp(-gap) is 0 in float32 (below
#: 2^-150) and float64 (below 2^-1075).
ONE_HOT_GAP = {"float32": 120.0, "float64": 800.0}

#: The shifts of the logits. -1e5 lies below the stand-ins for minus infinity seen in the field
#: (-1e4, -5e4); -120 lies below ln of the smallest float32.
SHIFTS = (-1e5, -3e4, -1e3, -120.0, 120.0, 1e3, 3e4)

#: Finite differences of the reference: a central difference of step h errs by h^2 times a third
#: derivative, here 1e-10, and by the rounding of the differenced values over h, here 1e-11. The
#: worst of 270 with unit normal data: 6e-11 of the norms of gradient and direction.
DIFFERENCE_STEP = 1e-5
DIFFERENCE_LIMIT = 1e-8

#: Reference against itself in longdouble, or against loops: relative, in u of float64. Sums of
#: 100 terms at most, and exp of logits below 10.
REFERENCE_UNITS = 100.0

#: How far results may be from float64, relative to a tensor's largest number, for a feature that
#: the error model does not know: block masks.
OF_LARGEST = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}
