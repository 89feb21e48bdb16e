"""The options of a run of the demo."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentValueError
from .model import Shape

__all__ = ["DTYPES", "PRESETS", "Options"]

#: The types that q, k and v may be cast to. The number is the largest allowed
#: error of a gradient against the float64 oracle, relative to the largest element:
#: about ten times the measured error from rounding in attention.
DTYPES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Options:
    """A run of the demo.

    Attributes
    ----------
    steps : int
        Number of steps of the optimizer.
    batch, seqlen : int
        Number of sequences in a step, and of bytes in a sequence.
    layers, heads, head_dim : int
        Sizes of the network.
    dtype : str
        The type that q, k and v are cast to; everything else is float32.
    algorithm, backend : str
        As for :func:`cuflash.attention`.
    seed : int
        Seed of the weights and of the order of the text.
    learning_rate : float
        The largest learning rate of the schedule.
    compared : int
        Number of steps over which the demo times every generation of attention,
        and attention by hand, in the same network; 0 for none.
    generate : int
        Number of bytes that the trained network writes, with a cache and without;
        0 for none.
    """

    steps: int
    batch: int
    seqlen: int
    layers: int
    heads: int
    head_dim: int
    dtype: str
    algorithm: str = "auto"
    backend: str = "auto"
    seed: int = 0
    learning_rate: float = 3e-3
    compared: int = 0
    generate: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seqlen", "layers", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ArgumentValueError(name, str(getattr(self, name)), "a positive number")
        if self.head_dim % 2:
            raise ArgumentValueError(
                "head_dim", str(self.head_dim), "an even number: rotary positions turn pairs"
            )
        if self.compared < 0:
            raise ArgumentValueError("compared", str(self.compared), "a number of steps, or 0")
        if self.generate < 0:
            raise ArgumentValueError("generate", str(self.generate), "a number of bytes, or 0")
        if self.seed < 0:
            raise ArgumentValueError("seed", str(self.seed), "a number that is not negative")
        if self.dtype not in DTYPES:
            raise ArgumentValueError("dtype", repr(self.dtype), f"one of {', '.join(DTYPES)}")

    @property
    def shape(self) -> Shape:
        """Sizes of the network."""
        return Shape(self.layers, self.heads, self.head_dim)

    @property
    def window(self) -> tuple[int, int]:
        """The ``window_size`` for longer texts: a query sees as many keys as in training."""
        return self.seqlen - 1, 0

    @property
    def tokens(self) -> int:
        """Bytes of a step."""
        return self.batch * self.seqlen


#: The presets by the name that ``--size`` takes. "small" takes a minute or two on one CPU
#: core, "gpu" on a large GPU.
PRESETS = {
    "small": Options(
        steps=2000,
        batch=8,
        seqlen=128,
        layers=3,
        heads=4,
        head_dim=16,
        dtype="float32",
        learning_rate=4e-3,
    ),
    "gpu": Options(
        steps=400,
        batch=16,
        seqlen=2048,
        layers=6,
        heads=8,
        head_dim=64,
        dtype="float16",
        backend="cuda",
        learning_rate=2e-3,
        compared=20,
    ),
}
