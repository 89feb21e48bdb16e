"""The arrays of a case, from its seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .case import TENSORS, Case
from .seen import LENGTHS, lengths_of
from .strides import Strides, strided_view

__all__ = ["arrays", "as_storage", "operands", "raise_scores", "strided", "tensor"]

_Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def arrays(case: Case, *names: str) -> dict[str, np.ndarray]:
    """The named inputs of a case, in its dtype, layout and strides.

    Parameters
    ----------
    case : Case
        Its family of values determines q, k, v and dout. Families that scale q, k and v do not
        scale dout: float16 gradients would overflow.
    *names : str
        Of "q", "k", "v", "dout", "dlse" and ``case.operands``; by default q, k, v and dout.
    """
    return {name: tensor(case, name) for name in names or ("q", "k", "v", "dout")}


def tensor(case: Case, name: str) -> np.ndarray:
    """One input of a case; it does not depend on the shapes of other inputs."""
    if name == "dropout_seed":
        return np.asarray(case.dropout_seed)
    if name in LENGTHS:
        return lengths_of(case, name)
    index = (*TENSORS, "dlse", "sinks", "alibi_slopes", "bias", "mask").index(name)
    generator = np.random.default_rng([case.seed, index])
    shape = list(case.shape(name))
    if name == "dlse":
        return generator.standard_normal(shape).astype(case.statistics)
    if name == "sinks":
        return _sinks(case, generator).astype(case.dtype_of(name))
    if name == "alibi_slopes":
        return _slopes(generator, tuple(shape)).astype(case.dtype_of(name))
    if name == "bias":
        values = _bias(case, generator, tuple(shape)).astype(case.dtype_of(name))
        return strided(values, case.recipe(name))
    if name == "mask":
        return strided(_mask(case, generator, tuple(shape)), case.recipe(name))
    for axis in case.recipe(name).broadcast:
        shape[axis] = min(shape[axis], 1)
    values = as_storage(case, _family(case, name)(generator, tuple(shape)))
    return strided(np.broadcast_to(values, case.shape(name)), case.recipe(name))


def operands(case: Case, **given: np.ndarray | None) -> dict[str, np.ndarray]:
    """The arrays beside q, k and v: the given ones, else the case's own."""
    found = {}
    for name in case.operands:
        array = given.get(name)
        found[name] = tensor(case, name) if array is None else array
    return found


def _sinks(case: Case, generator: np.random.Generator) -> np.ndarray:
    """Sinks that mostly weigh as much as all keys; sometimes nothing, little, or far more."""
    likely = math.log1p(case.seqlen_kv) + generator.standard_normal(case.heads_q)
    odd = generator.choice([-math.inf, -40.0, 20.0, 0.0], case.heads_q)
    return np.where(generator.random(case.heads_q) < 0.25, odd, likely)


def _slopes(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Mostly slopes as models have, 1 to 2^-8; sometimes 0, negative, or so large that the nearest
    key dominates.

    Some neighbouring heads have slopes of different signs.
    """
    likely = 2.0 ** generator.uniform(-8, 0, shape)
    odd = generator.choice([0.0, -(2.0**-6), -0.5, 4.0], shape)
    return np.where(generator.random(shape) < 0.3, odd, likely)


def _bias(case: Case, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of the size of scores; minus infinity for one in five if the case says so."""
    values = generator.standard_normal(shape)
    if case.bias.endswith("-inf"):
        values[generator.random(shape) < 0.2] = -np.inf
    return values


def _mask(case: Case, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """True for two pairs in three, with some rows and keys hidden entirely.

    Or in blocks: a third is hidden entirely, a third shows all pairs.
    """
    seen: np.ndarray = generator.random(shape) < 2 / 3
    *ahead, rows, keys = (1,) * (2 - len(shape)) + shape
    if case.mask.endswith("-blocks"):
        blocks = (*ahead, -(-rows // 64), -(-keys // 64))
        kind = generator.integers(0, 3, blocks).repeat(64, axis=-2).repeat(64, axis=-1)
        kind = kind[..., :rows, :keys].reshape(shape)
        return (kind == 2) | ((kind == 1) & seen)
    whole = seen.reshape(*ahead, rows, keys)
    for axis, size in ((-2, rows), (-1, keys)):
        if size > 1:
            hidden = generator.random((*ahead, size)) < 0.1
            whole &= ~np.expand_dims(hidden, -1 if axis == -2 else -2)
    return seen


def as_storage(case: Case, values: np.ndarray) -> np.ndarray:
    """Values rounded to the case's dtype."""
    return values.astype(case.storage)


def raise_scores(x: dict[str, np.ndarray], tile: int, doublings: float) -> None:
    """Make weights grow ``2**doublings`` times every 16 keys, in a kernel's order of visits.

    A kernel visits tiles of keys from the last on, and the keys of a tile from the first on. Its
    running maxima then rise all the time, sometimes in the first part of a tile and sometimes in
    another. The arrays are contiguous (batch, seqlen, heads, head_dim), with the default scale.
    """
    length, head_dim = x["k"].shape[1], x["k"].shape[3]
    keys = np.arange(length)
    visited = (length - 1) // tile - keys // tile
    step = doublings * np.log(2) * np.sqrt(head_dim) / 4
    x["q"][..., 0] = 4
    x["k"][..., 0] = (step * (visited * (tile // 16) + keys % tile // 16))[None, :, None]


def strided(values: np.ndarray, recipe: Strides) -> np.ndarray:
    """The same values with the strides of the recipe; constant along its broadcast axes."""
    placement = recipe.place(values.shape)
    view: np.ndarray = strided_view(np.zeros(placement.extent, values.dtype), placement)
    view[...] = values
    return view


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.standard_normal(shape)


def _times(factor: float) -> _Draw:
    return lambda generator, shape: factor * _normal(generator, shape)


def _sparse_integers(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Integers from -2 to 2 in one place of four, else zeros: sums of products are exact."""
    kept = generator.random(shape) < 0.25
    return np.where(kept, generator.integers(-2, 3, shape), 0).astype(np.float64)


def _outliers(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """One element of each row 16 times as large; 100 times would overflow float16 gradients."""
    values = _normal(generator, shape)
    if values.size:
        columns = generator.integers(0, shape[-1], (*shape[:-1], 1))
        np.put_along_axis(values, columns, 16 * _normal(generator, columns.shape), axis=-1)
    return values


def _equal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, generator.choice([0.5, -0.75, 1.25]))


def _signed_zeros(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.choice([-0.0, 0.0], shape)


def _positive(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Sums do not cancel, so the error of long sums shows. For 1.5 see ``limits``."""
    return 1.5 + 0.25 * _normal(generator, shape)


def _nothing(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape)


#: The draws of a family for q, k, v and dout; tensors that are not named are normal.
_FAMILIES: dict[str, dict[str, _Draw]] = {
    "normal": {},
    "small": dict.fromkeys("qkv", _times(1e-3)),
    "x8": dict.fromkeys("qkv", _times(8)),
    "x30": dict.fromkeys("qkv", _times(30)),
    "integers": dict.fromkeys(("q", "k", "v", "dout"), _sparse_integers),
    "outliers": dict.fromkeys(("q", "k", "v", "dout"), _outliers),
    "equal": dict.fromkeys(("q", "k", "v", "dout"), _equal),
    "zeros": dict.fromkeys(("q", "k", "v", "dout"), _signed_zeros),
    "zero_q": {"q": _nothing},
    "positive_v": {"v": _positive},
}


def _family(case: Case, name: str) -> Any:
    return _FAMILIES[case.values].get(name, _normal)
