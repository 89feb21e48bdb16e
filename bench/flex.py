"""FlexAttention of PyTorch: its kernels are compiled for what a case adds to the scores."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .cases import Case

__all__ = ["flex_attention", "takes"]


def takes(case: Case) -> bool:
    """Cases of slopes or of a bias; a mask comes with slopes alone."""
    alone = case.window_size is None and case.softcap is None and not case.sinks
    one = case.causal if case.alibi else case.bias and not case.causal
    return case.dtype in ("float16", "bfloat16") and alone and one and case.alibi != case.bias


def flex_attention(case: Case) -> Callable[..., Any]:
    """The forward pass of (batch, seqlen, heads, head_dim) tensors and the array of the feature.

    It is compiled at its first call, whole or not at all, and for this case alone: what was
    compiled before is forgotten, as the compiler takes but a few cases of one function.
    """
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    importlib.import_module("torch._dynamo").reset()
    # What is saved for a backward pass has to last for many.
    config: Any = importlib.import_module("torch._functorch.config")
    config.donated_buffer = False
    mask = None
    if case.causal:
        lengths = case.seqlen_q, case.seqlen_kv
        mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, *lengths)
    shared = case.heads_q != case.heads_kv

    def attend(q: Any, k: Any, v: Any, mask: Any, **given: Any) -> Any:
        added = _added(**given)
        return flex.flex_attention(q, k, v, score_mod=added, block_mask=mask, enable_gqa=shared)

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)

    def forward(q: Any, k: Any, v: Any, **given: Any) -> Any:
        out = compiled(*(tensor.transpose(1, 2) for tensor in (q, k, v)), mask, **given)
        return out.transpose(1, 2)

    return forward


def _added(alibi_slopes: Any = None, bias: Any = None) -> Callable[..., Any]:
    """What changes a score.

    A bias is read as it is, its place in the batch by a tensor: a view of it, or a place that is a
    number, has no gradient.
    """
    if alibi_slopes is not None:
        return lambda score, b, h, i, j: score - alibi_slopes[h] * (i - j)
    return lambda score, b, h, i, j: score + bias[b * 0, h, i, j]
