"""The errors that rounding alone causes in the results of a case.

A backend rounds P before ``P v`` and ``P^T dO``, dS before ``dS k`` and
``dS^T q``, and the output before delta, each by up to u of its dtype. Scores,
dP and delta are dot products in the compute dtype. Each is off by about c u of
the sum of its terms' magnitudes, where c is the ratio of the two dtypes' u. For every
row of every result :class:`Truth` holds E, the root of the sum of the squares
of these contributions, in units of u::

    s_ij   = scale sum_c |q_ic k_jc|        t_ij = sum_c |dO_ic v_jc|
    lse_i    E^2 = c^2 sum_j P_ij^2 s_ij^2
    out_i    E^2 = sum_j P_ij^2 (|v_j|^2 + c^2 s_ij^2 |v_j - out_i|^2)
             + f^2 |sum_j |v_j||^2 + c^2 x_i^2 |out_i|^2 where there is a sink
    dv_j     E^2 = sum_i P_ij^2 r_ij |dO_i|^2,  r_ij = 1 + c^2 (s_ij + |lse_i|)^2
    dq_i     E^2 = scale^2 (sum_j D_ij |k_j|^2 + e_i |sum_j P_ij k_j|^2)
    dk_j     E^2 = scale^2 sum_i (D_ij + P_ij^2 e_i) |q_i|^2
             D_ij = dS_ij^2 r_ij + c^2 P_ij^2 t_ij^2 + f^2 (dP_ij - delta_i)^2
             e_i  = sum_c (dO_ic out_ic)^2 + sum_j (P_ij^2 dP_ij^2 + c^2 dS_ij^2 s_ij^2)
                    + c^2 (sum_c |dO_ic out_ic|)^2
                    + f^2 (sum_c |dO_ic| sum_j |v_jc|)^2 where there is a sink
    dsink    E = F + c sqrt(n) sum_i |P_is g_i| + c sum_i P_is x_i |sum_c dO_ic out_ic|
             n rows, g_i = delta_i - dlse_i
             F^2 = sum_i P_is^2 (e_i + g_i^2 (c^2 y_i^2 + E(lse_i)^2))
             P_is = exp(sink - lse_i), y_i = 1 + |lse_i| + 2 |sink - lse_i|

e_i is the square of delta's error: the saved output, from which delta is computed, has the rounding
of P, the error of the scores and its own rounding. f is the loss, in u, where P is flushed to zero
in the compute dtype. In the output it is the factor by which a sink reduces a row's weights, which
are up to ``MOST_WEIGHT`` before. Magnitudes below ``SMALLEST`` count as ``SMALLEST``. x_i is how
far the row's largest score lies below the sink, or 0: the row is multiplied by exp(-x_i), and the
rounding of x_i, by up to u x_i, affects all its weights by the same factor. Roundings are
independent, so squares add up. There is an exception: if all rows are the same row ("equal"), or
all keys are the same key ("zeros"), each has the same error. Then n errors add up to n times one,
not sqrt(n) times, and a sum of n terms drifts one way, by ``SUM_DRIFT`` u of the compute dtype for
each term. Under dropout the columns of such an output, which are one number, are rounded alike: e_i
gets (sum_c |dO_ic out_ic|)^2.

A soft cap C turns scores into z_ij, with slopes g_ij = 1 - z_ij^2 / C^2. Then
s_ij is multiplied by g_ij, and dS is P (dP - delta) g. The slope errs by
G_ij = c + 2 c s_ij |z_ij| / C^2 (in wide dtypes, 4 h g replaces the first c),
and D_ij gets P^2 (dP - delta)^2 G^2. The tanh errs by h, in u. Equal scores have
the same error, so with w_ij = h |z_ij| the squares of these sums are added to the
errors of lse, out, delta, dv, dq and dk. The term 2 |z| / C^2 is there in 16-bit
dtypes alone, which compute the slope from the tanh::

    sum_j P_ij w_ij         sum_j P_ij w_ij |v_j - out_i|    sum_j P_ij |dP_ij - delta_i| w_ij
    sum_i P_ij W_ij |dO_i|  scale sum P |dP - delta| (W g + w 2 |z| / C^2) |k_j| or |q_i|

W_ij = w_ij + sum_j P_ij w_ij: the weights err by the log-sum-exp too.
P in the term of t_ij, and beside e_i, is multiplied by g and by the error of g.

With ALiBi's slope a and distances d_ij, s_ij has one more term, |a| d_ij, which is not
multiplied by g_ij. With m_ij = d_ij P_ij (dP_ij - delta_i) the gradient of a has the error::

    dslope   E = F + c (sqrt(keys) + sqrt(rows)) sum_ij |m_ij|
             F^2 = sum_ij (m_ij^2 c^2 (s_ij + 1 + |lse_i|)^2 + d_ij^2 (c^2 P_ij^2 t_ij^2
                   + (f^2 + P_ij^2 where it is rounded) (dP_ij - delta_i)^2))
                   + sum_i ((sum_j d_ij P_ij)^2 e_i + (sum_j m_ij)^2 (E(lse_i)^2 + c^2 lse_i^2)
                   + (sum_j |m_ij| W_ij)^2)

P is rounded to 16 bits before this sum if there is a soft cap. A bias counts in s_ij as slopes do.
The error of its gradient, from dS_ij before slopes, is that of the slopes' gradient with 1 in place
of d_ij, summed over the broadcast axes. The growth of long sums is not modelled: for 16-bit dtypes
it is below u; float32 and float64 are therefore compared with plain NumPy in the same dtype, which
:func:`~tests.kit.plain.plain` computes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .case import OF_FEATURES, OF_HEADS, Case
from .head_errors import ErrorsOfHead, alike_terms
from .limits import SUM_DRIFT, UNIT

__all__ = ["model_of"]


def model_of(
    case: Case, inputs: Mapping[str, np.ndarray], results: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    squares = {
        name: np.zeros(result.shape if name in OF_FEATURES else result.shape[:3])
        for name, result in results.items()
    }
    long = {n: np.zeros_like(squares[n]) for n in OF_FEATURES if n in squares}  # no squares
    with np.errstate(invalid="ignore", over="ignore"):
        for b, h in np.ndindex(case.batch, case.heads_q):
            kv = h // case.group
            head = ErrorsOfHead(case, inputs, results, b, h)
            squares["lse"][b, h], squares["out"][b, h] = head.lse(), head.out()
            if "dq" in squares:
                squares["dq"][b, h], dk, dv = head.gradients()
                squares["dk"][b, kv] += dk
                squares["dv"][b, kv] += dv
            for name in long.keys() & {*OF_HEADS}:
                at = (b, h)[-squares[name].ndim :]
                square, of_sum = head.sink() if name == "dsinks" else head.alibi()
                squares[name][at] += square
                long[name][at] += of_sum
            if "dbias" in long:
                for total, of_head in zip((squares, long), head.bias(), strict=True):
                    _reduced_into(total["dbias"], b, h, of_head)
        terms, unit = alike_terms(case), UNIT[case.statistics.name] / UNIT[case.dtype]
        model = {
            name: np.sqrt(square * max(1, terms.get(name, 1))) for name, square in squares.items()
        }
        model |= {name: np.sqrt(squares[name]) + of_sum for name, of_sum in long.items()}
        for name in model.keys() - long.keys():
            drift = SUM_DRIFT * unit * terms[name]
            rows = results[name].astype(np.float64)
            size = np.abs(rows) if name == "lse" else np.sqrt((rows**2).sum(axis=-1))
            model[name] += np.where(model[name] > 0, drift * np.nan_to_num(size, posinf=0), 0)
        return model


def _reduced_into(total: np.ndarray, b: int, h: int, pairs: np.ndarray) -> None:
    """Add the pairs of a head to an array that broadcasts against all pairs."""
    whole = total.reshape((1,) * (4 - total.ndim) + total.shape)
    place = whole[b % whole.shape[0], h % whole.shape[1]]
    place += pairs.sum(axis=tuple(a for a in (0, 1) if place.shape[a] == 1), keepdims=True)
