"""The measures of a network: the gradients' errors, and the loss of byte pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .model import Network, Parameters
from .options import Options
from .passes import Attention, ReferenceAttention
from .text import BYTES, Text, sequences

__all__ = ["bigram_loss", "gradient_errors"]

#: The most bytes of a batch and of a sequence in the check of the gradients:
#: the oracle's work grows with the square of the length, in float64.
_CHECKED, _LONGEST = 2048, 1024
#: The weight, in counts of pairs, of a byte's own frequency (``s`` in :func:`bigram_loss`).
_PRIOR = 10.0


def gradient_errors(
    options: Options, text: Text, attention: Attention, xp: Any
) -> dict[str, float]:
    """Return the distance of every gradient of one batch from the float64 oracle.

    The oracle is the same network, with the same weights, in float64 NumPy
    and with attention from its definition (:mod:`cuflash.reference`).

    Returns
    -------
    dict
        Largest absolute error of each matrix's gradient, divided by the
        largest element of the oracle's gradient. The columns of q, k and v
        have entries of their own.
    """
    seqlen = min(options.seqlen, _LONGEST)
    starts = text.starts(1, min(options.batch, _CHECKED // seqlen), seqlen, options.seed)[0]
    tokens, targets = sequences(text.training, starts, seqlen, np)
    parameters = Parameters.drawn(options.shape, options.seed, "float32", xp)
    found = Parameters(options.shape, "float32", xp)
    network = Network(parameters, attention, xp)
    network.gradients(xp.asarray(tokens), xp.asarray(targets), found)
    exact = Parameters(options.shape, "float64", np)
    oracle = Network(parameters.copied("float64", np), ReferenceAttention(), np)
    oracle.gradients(tokens, targets, exact)
    pairs = zip(_parts(found.copied("float64", np)), _parts(exact), strict=True)
    return {
        name: float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        for (name, ours), (_, theirs) in pairs
    }


def bigram_loss(text: Text, seqlen: int) -> float:
    """Return the held-out loss of a model that counts byte pairs in the training text.

    The probability of b after a is ``(count(ab) + s p(b)) / (count(a.) + s)``,
    with ``p(b) = (count(b) + 1) / (bytes + 256)``.
    """
    pairs = np.zeros((BYTES, BYTES))
    np.add.at(pairs, (text.training[:-1], text.training[1:]), 1)
    single = np.bincount(text.training, minlength=BYTES) + 1.0
    single /= single.sum()
    likelihood = (pairs + _PRIOR * single) / (pairs.sum(axis=1, keepdims=True) + _PRIOR)
    return -float(np.log(likelihood[text.held_out_windows(seqlen)]).mean())


def _parts(gradients: Parameters) -> Iterator[tuple[str, Any]]:
    for name, matrix in gradients.matrices.items():
        kind, _, layer = name.partition(" ")
        if kind == "qkv":
            for part, columns in zip("qkv", np.split(matrix, 3, axis=1), strict=True):
                yield f"{part} {layer}", columns
        else:
            yield name, matrix
