"""Whether a result is right, row by row; the numbers are in ``limits``.

Rules, each with the worst ratio it saw and the most it allows:

shape      shape and dtype of the case.
nonfinite  NaN and infinities where the truth has them. Where the truth is beyond the dtype's
           largest number, infinity and a number near it are both right.
zero       results without any error in the model (dead rows, keys that no query sees) are 0.
row        16-bit dtypes: |x - r| / (u (|r| + E)) of every row, with E of ``error_model``.
plain      float32 and float64: the same ratio, as a root mean square over a tile of 64 rows
           of one head, against twice that of plain NumPy in the same dtype over the same rows,
           plus one unit. A single row of plain NumPy is often exact by luck. Four things remove
           that luck: the tile, the worse of two orders of adding, all heads where they err more
           than this one, and the unit.
bias       16-bit dtypes, normal values: the error of a whole head in the direction of the truth,
           relative to what independent errors of its rows would give. The limit is higher for a
           head whose truth lies in few rows.
           The errors of flushed rows, and of copies of one key that dropout keeps, add up.
           A row whose terms cancel has no direction except the remainder in float64. The rule
           does not apply where a function of the scores is approximated: equal scores then have
           equal errors.
features   the gradients of arrays of features: each number is judged as a row is. The gradient of
           a bias is also judged by the rules for matrices.
lse        every value by itself, in the compute dtype, whatever the dtype of the case.
"""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from . import limits
from .case import OF_FEATURES, Case
from .oracle import Truth
from .verdict import REGISTRY, Registry, Result, Verdict

__all__ = ["REGISTRY", "Registry", "Result", "Verdict", "compare"]


def compare(truth: Truth, name: str, got: np.ndarray, registry: Registry = REGISTRY) -> Result:
    """Judge one result.

    Parameters
    ----------
    truth : Truth
        The truth of the case and its inputs.
    name : {"out", "lse", "dq", "dk", "dv", "dalibi_slopes", "dbias", "dsinks"}
        Which result.
    got : ndarray
        In the case's layout.
    """
    case, expected = truth.case, truth.results[name]
    verdicts = [_shape(case, name, got)]
    if verdicts[0].passed:
        wide = case.heads_first(name, got).astype(expected.dtype)
        verdicts.append(_nonfinite(case, name, wide, expected))
        # A row that wrongly is or is not finite has no error to measure.
        usable = np.isfinite(wide) & np.isfinite(expected)
        with np.errstate(over="ignore"):
            if name == "dbias":
                verdicts += _pairs(truth, wide, usable)
            elif name in OF_FEATURES:
                verdicts.append(_features(truth, name, wide, usable))
            elif name == "lse":
                verdicts.append(_lse(truth, wide, usable))
            else:
                verdicts += _rows(truth, name, wide, usable)
        got = wide
    registry.add(case, name, verdicts)
    return Result(case, name, tuple(verdicts), got, expected)


def _shape(case: Case, name: str, got: np.ndarray) -> Verdict:
    dtypes = [case.dtype_of(name)]
    if name == "out" and case.storage.itemsize == 2:
        dtypes.append(np.dtype(np.float32))  # out_dtype
    right = got.shape == case.shape(name) and got.dtype in dtypes
    said = f"got {got.shape} {got.dtype}, expected {case.shape(name)} {dtypes[0]}"
    return Verdict("shape", 0.0 if right else np.inf, detail=said)


def _nonfinite(case: Case, name: str, got: np.ndarray, expected: np.ndarray) -> Verdict:
    info = ml_dtypes.finfo(case.dtype_of(name))
    near = float(info.max) * (1 - 4 * limits.UNIT[case.dtype])
    with np.errstate(invalid="ignore"):
        either = np.isinf(got) & (np.abs(expected) >= near) & (np.sign(got) == np.sign(expected))
    same = (np.isnan(got) == np.isnan(expected)) & (
        np.where(np.isinf(got), got, 0) == np.where(np.isinf(expected), expected, 0)
    )
    return _every("nonfinite", same | either)


def _every(rule: str, right: np.ndarray) -> Verdict:
    wrong = np.argwhere(~right)
    if not wrong.size:
        return Verdict(rule, 0.0)
    said = f"{len(wrong)} of {right.size} elements"
    return Verdict(rule, np.inf, index=tuple(map(int, wrong[0][:3])), detail=said)


def _lse(truth: Truth, got: np.ndarray, usable: np.ndarray) -> Verdict:
    case, zero = truth.case, np.zeros_like(got)
    expected = np.where(usable, truth.results["lse"], zero)
    error = np.abs(np.where(usable, got, zero) - expected).astype(np.float64)
    unit = limits.UNIT[case.statistics.name]
    allowed = limits.LSE_RELATIVE * np.maximum(1, np.abs(expected))
    allowed = (allowed + limits.LSE_PER_KEY * case.seqlen_kv) * (unit / limits.UNIT["float32"])
    # E is in u of the storage; the scores' part, which determines lse, is in u of the compute type.
    scores = limits.LSE_SCORES * limits.UNIT[case.dtype] * truth.model["lse"]
    allowed = allowed + np.where(usable, scores, 0)
    return _worst("lse", error / allowed.astype(np.float64), 1.0)


def _features(truth: Truth, name: str, got: np.ndarray, usable: np.ndarray) -> Verdict:
    """|x - r| / (u (|r| + E)) of every number; |r| is rounded to its own dtype."""
    expected, model, unit = truth.results[name], truth.model[name], limits.UNIT[truth.case.dtype]
    smallest = limits.SMALLEST[truth.case.dtype_of(name).name]
    smallest = np.where(model + np.abs(expected) > 0, smallest, 0)
    own = limits.UNIT[truth.case.dtype_of(name).name] if name == "dbias" else unit
    allowed = own * np.maximum(np.abs(expected), smallest) + unit * model
    error = np.where(usable, got - expected, 0)
    ratio = np.where(allowed > 0, np.abs(error) / np.where(allowed > 0, allowed, 1), error != 0)
    limit = limits.PAIR_LIMIT if name == "dbias" else limits.ROW_LIMIT[name]
    return _worst("features", ratio.astype(np.float64), limit)


def _pairs(truth: Truth, got: np.ndarray, usable: np.ndarray) -> list[Verdict]:
    """The gradient of a bias: number by number, and as rows of a matrix."""
    name, case = "dbias", truth.case
    single = _features(truth, name, got, usable)
    if case.dtype_of(name).itemsize < case.storage.itemsize:
        return [single]  # most of its error is its own rounding
    lacking = (1,) * (4 - got.ndim)

    def matrix(array: np.ndarray) -> np.ndarray:
        return array.reshape(lacking + array.shape)

    model = np.sqrt((matrix(truth.model[name]) ** 2).sum(axis=-1))
    whole = replace(
        truth,
        results={name: matrix(truth.results[name])},
        model={name: model},
        plain=tuple({name: matrix(one[name])} for one in truth.plain),
    )
    of_rows = _rows(whole, name, matrix(got), matrix(usable))
    return [single, *(replace(one, index=one.index[len(lacking) :]) for one in of_rows)]


def _rows(truth: Truth, name: str, got: np.ndarray, usable: np.ndarray) -> list[Verdict]:
    case, expected, model = truth.case, truth.results[name], truth.model[name]
    finite = usable.all(axis=-1) & np.isfinite(model)
    verdicts = [_every("zero", (got == 0).all(axis=-1) | ~finite | (model > 0))]
    size = np.where(finite, _size(truth, name), 0)
    ratio = _ratio(truth, name, got, finite)
    if truth.plain:
        plain = [_ratio(truth, name, p[name].astype(expected.dtype), finite) for p in truth.plain]
        units = limits.PLAIN_UNITS[truth.case.dtype]
        return [*verdicts, _plain(ratio, np.maximum(*plain), units, _deviates(case, name))]
    verdicts.append(_worst("row", ratio, limits.ROW_LIMIT[name]))
    if case.values == "normal" and limits.exact(case):
        verdicts.append(_bias(truth, name, np.where(usable, got - expected, 0), size))
    return verdicts


def _size(truth: Truth, name: str) -> np.ndarray:
    """|r| + E of every row; in live rows smaller magnitudes count as the smallest number."""
    model = truth.model[name]
    smallest = np.where(model > 0, limits.SMALLEST[truth.case.dtype], 0)[..., None]
    return _norm(np.maximum(np.abs(truth.results[name]), smallest)) + model


def _ratio(truth: Truth, name: str, got: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """|x - r| / (u (|r| + E)) of every row, 0 where there is nothing to measure."""
    error = np.where(usable[..., None], got - truth.results[name], 0)
    allowed = limits.UNIT[truth.case.dtype] * np.where(usable, _size(truth, name), 0)
    return np.where(allowed > 0, _norm(error) / np.where(allowed > 0, allowed, 1), 0)


def _norm(rows: np.ndarray) -> np.ndarray:
    return np.sqrt((rows.astype(np.float64) ** 2).sum(axis=-1))


def _norm_of_small(rows: np.ndarray) -> np.ndarray:
    """The same for squares that may underflow: products of small results and their errors."""
    largest = rows.max(axis=-1, keepdims=True, initial=0)
    return largest[..., 0] * _norm(rows / np.where(largest > 0, largest, 1))


def _spread(rows: np.ndarray) -> np.ndarray:
    """The number of rows over which a sum of squares is spread: n for n equal rows, 1 for one."""
    largest = rows.max(axis=-1, keepdims=True, initial=0)
    squares = (rows / np.where(largest > 0, largest, 1)) ** 2
    total = (squares**2).sum(axis=-1)
    return np.where(total > 0, squares.sum(axis=-1) ** 2 / np.where(total > 0, total, 1), 1)


def _worst(rule: str, ratio: np.ndarray, limit: float) -> Verdict:
    if not ratio.size:
        return Verdict(rule, 0.0, limit)
    index = np.unravel_index(np.argmax(ratio), ratio.shape)
    return Verdict(rule, float(ratio[index]), limit, tuple(map(int, index)))


def _deviates(case: Case, name: str) -> int:
    """The most rows of a head with independent errors.

    All keys share the error of the log-sum-exp of each query that sees them. If q and k of a head
    hold one number each, queries that see equally many keys share the error of their scores.
    """
    of_keys = name in ("dk", "dv")
    queries = case.seqlen_q
    by_pair = case.alibi or case.bias or case.mask or case.dropout
    if case.values == "equal" and not by_pair:
        queries = min(queries, case.seqlen_kv + 1)
    return queries * case.group if of_keys else queries


def _plain(ratio: np.ndarray, plain: np.ndarray, units: float, deviates: int) -> Verdict:
    """Tile by tile; the last tile of 64 reaches back into the one before it."""
    rows, length = limits.PLAIN_ROWS, ratio.shape[2]
    worst = Verdict("plain", 0.0)
    for start in range(0, length, rows) if ratio.size else ():
        tile = slice(max(0, min(start, length - rows)), start + rows)
        squares, own = ((x[:, :, tile] ** 2).mean(axis=2) for x in (ratio, plain))
        level = np.sqrt(np.maximum(own, own.mean()))
        allowed = units + limits.PLAIN_FACTOR * level
        scatter = limits.plain_scatter(max(1, min(length, rows, deviates)))
        found_by_head = np.sqrt(squares) / (allowed * scatter)
        b, h = np.unravel_index(np.argmax(found_by_head), squares.shape)
        found = float(found_by_head[b, h])
        if found > worst.ratio:
            row = tile.start + int(np.argmax(ratio[b, h, tile]))
            worst = Verdict("plain", found, index=(int(b), int(h), row))
    return worst


def _bias(truth: Truth, name: str, error: np.ndarray, size: np.ndarray) -> Verdict:
    case, expected = truth.case, truth.results[name]
    cancelled = _norm(expected) < limits.CANCELLED * truth.model[name]
    expected = np.where(cancelled[..., None], 0, expected)
    along = np.abs((error * expected).sum(axis=(2, 3)))
    length = _norm(expected)
    alike = length < limits.SMALLEST[case.dtype] * np.sqrt(expected.shape[-1])
    if name == "out" and case.dropout:
        begin, end = case.visible_ranges()
        alike |= end - begin == 1
    single = np.where(alike, 0, length * size)
    independent = _norm_of_small(single) * limits.bias_scatter(name, _spread(single))
    # A number lost below the smallest one, or replaced by it, has the sign of the truth. If dropout
    # keeps one key, all rows are v over the kept share, and have the same error.
    independent += np.where(alike, length * size, 0).sum(axis=2)
    terms = case.seqlen_kv if name in ("out", "dq") else case.seqlen_q * case.group
    drift = limits.SUM_DRIFT * terms * limits.UNIT[case.statistics.name]
    allowed = limits.UNIT[case.dtype] * independent + drift * (expected**2).sum(axis=(2, 3))
    ratio = np.where(allowed > 0, along / np.where(allowed > 0, allowed, 1), 0)
    return _worst("bias", ratio, limits.BIAS_LIMIT)
