"""AdamW over one vector, with warm-up, cosine decay and clipping."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["AdamW", "learning_rate"]

_BETA1, _BETA2, _EPSILON = 0.9, 0.98, 1e-8
_CLIP = 1.0


class AdamW:
    """AdamW (Loshchilov and Hutter 2019); nothing in a step waits for the device.

    Parameters
    ----------
    parameters : array, (size,)
        The parameters, which :meth:`step` changes.
    decay : float
        Weight decay; a step multiplies it by the learning rate.
    xp : module
        ``numpy`` or ``cupy``.
    """

    def __init__(self, parameters: Any, decay: float, xp: Any) -> None:
        self._parameters, self._decay, self._xp = parameters, decay, xp
        self._mean = xp.zeros_like(parameters)
        self._square = xp.zeros_like(parameters)
        self._scratch = xp.empty_like(parameters)
        self._steps = 0

    def step(self, gradients: Any, rate: float) -> None:
        """Take one step, with the gradients' norm clipped to 1; overwrites the gradients."""
        xp, scratch = self._xp, self._scratch
        self._steps += 1
        norm = xp.sqrt(gradients @ gradients)
        gradients *= xp.minimum(_CLIP / (norm + _EPSILON), 1)
        self._mean *= _BETA1
        self._mean += xp.multiply(gradients, 1 - _BETA1, out=scratch)
        self._square *= _BETA2
        gradients *= gradients
        self._square += xp.multiply(gradients, 1 - _BETA2, out=scratch)
        # Both averages start from zeros; these factors correct for it.
        first, second = 1 - _BETA1**self._steps, 1 - _BETA2**self._steps
        xp.sqrt(self._square, out=scratch)
        scratch += _EPSILON * math.sqrt(second)
        xp.divide(self._mean, scratch, out=scratch)
        scratch *= rate * math.sqrt(second) / first
        self._parameters *= 1 - rate * self._decay
        self._parameters -= scratch


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step.

    The rate grows linearly to ``peak`` over a twentieth of the steps, then
    falls along half a cosine to a twentieth of ``peak``.
    """
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
