"""The problems that are timed; tests use the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

__all__ = ["CASES", "Case", "select"]


@dataclass(frozen=True)
class Case:
    """One problem: (batch, seqlen, heads, head_dim), self-attention."""

    op: str  # forward or backward
    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    seqlen_q: int
    seqlen_kv: int
    causal: bool
    algorithm: str

    @property
    def flops(self) -> float:
        """Of the matrix products, half of the square if causal, 2.5 times that backward."""
        pairs = self.batch * self.heads_q * self.seqlen_q * self.seqlen_kv
        forward = 2.0 * pairs * (self.head_dim + self.head_dim_v)
        return forward * (0.5 if self.causal else 1.0) * (2.5 if self.op == "backward" else 1.0)

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"{self.algorithm} {self.op} {self.dtype} {self.batch}x{self.seqlen_q}x{self.heads_q}"
            f"x{self.head_dim} {mask}"
        )


def _square(
    op: str, dtype: str, batch: int, heads: int, dim: int, seqlen: int, causal: bool, name: str
) -> Case:
    return Case(op, dtype, batch, heads, heads, dim, dim, seqlen, seqlen, causal, name)


def _fa1() -> list[Case]:
    """FlashAttention-1 where its one block a head fills the chip, and where it does not."""
    return [
        _square(op, "float16", batch, heads, dim, seqlen, causal, "fa1")
        for (batch, heads, seqlen), dim, causal, op in product(
            ((16, 16, 2048), (8, 16, 4096), (1, 16, 4096)),
            (64, 128),
            (False, True),
            ("forward", "backward"),
        )
    ]


#: Sets of cases by name.
CASES: dict[str, Callable[[], list[Case]]] = {"fa1": _fa1}


def select(names: str) -> list[Case]:
    """The cases of the sets in a comma-separated list."""
    unknown = [name for name in names.split(",") if name not in CASES]
    if unknown:
        raise SystemExit(f"--cases: no set {unknown[0]!r}; there are {', '.join(CASES)}")
    return [case for name in names.split(",") for case in CASES[name]()]
