"""FlexAttention of PyTorch: its kernels are compiled for the change of scores of a case."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .case import CAP
from .cases import Case
from .masks import BLOCK

__all__ = ["flex_attention", "takes"]


def takes(case: Case) -> bool:
    """Whether a case has exactly one feature, which it supports; only slopes come with causal."""
    one = [feature for feature in case.features if feature != "dbias"]
    known = one in (["alibi"], ["bias"], ["mask"], ["block_mask"], ["score_mod"])
    return case.dtype in ("float16", "bfloat16") and known and case.causal == case.alibi


def flex_attention(case: Case) -> Callable[..., Any]:
    """The forward pass of (batch, seqlen, heads, head_dim) tensors and of the feature's array.

    The first call compiles it, as a whole or not at all, and for this case only; earlier
    compilations are discarded, because the compiler keeps few variants of one function. That call
    also makes the block mask.
    """
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    importlib.import_module("torch._dynamo").reset()
    # The saved tensors of a backward pass are used many times.
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False
    shared = case.heads_q != case.heads_kv
    made: list[Any] = []  # the block mask

    def attend(q: Any, k: Any, v: Any, blocks: Any, **given: Any) -> Any:
        added = _capped if case.score_mod else _added(**given)
        return flex.flex_attention(q, k, v, score_mod=added, block_mask=blocks, enable_gqa=shared)

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)

    def forward(
        q: Any, k: Any, v: Any, mask: Any = None, block_mask: Any = None, **given: Any
    ) -> Any:
        if not made:
            made.append(_block_mask(flex, case, block_mask if case.block_mask else mask))
        out = compiled(*(tensor.transpose(1, 2) for tensor in (q, k, v)), *made, **given)
        return out.transpose(1, 2)

    return forward


def _block_mask(flex: Any, case: Case, mask: Any) -> Any:
    """FlexAttention's mask: the blocks with visible pairs, and the function that decides about a
    pair; None if all pairs are visible."""
    if not case.causal and case.mask is None and not case.block_mask:
        return None
    entries = case.batch if case.mask == "padding" else None
    return flex.create_block_mask(
        _visible(case, mask), entries, None, case.seqlen_q, case.seqlen_kv
    )


def _visible(case: Case, mask: Any) -> Callable[..., Any]:
    """A function that says whether a query sees a key, by the array or by a causal comparison."""
    if case.causal or case.mask == "causal":
        return lambda b, h, i, j: i >= j
    if case.mask == "padding":
        of_keys = mask[:, 0, 0]
        return lambda b, h, i, j: of_keys[b, j]
    if case.block_mask:
        of_blocks = mask[0, 0]
        return lambda b, h, i, j: of_blocks[i // BLOCK, j // BLOCK]
    of_pairs = mask[0, 0]
    return lambda b, h, i, j: of_pairs[i, j]


def _capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return CAP * importlib.import_module("torch").tanh(score / CAP)


def _added(alibi_slopes: Any = None, bias: Any = None) -> Callable[..., Any] | None:
    """The function that changes a score, or None.

    The function indexes the bias itself, and its batch axis by a tensor (``b * 0``): with a view of
    the bias, or a plain number as the index, FlexAttention gives no gradient.
    """
    if alibi_slopes is not None:
        return lambda score, b, h, i, j: score - alibi_slopes[h] * (i - j)
    if bias is None:
        return None
    return lambda score, b, h, i, j: score + bias[b * 0, h, i, j]
