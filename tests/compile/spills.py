"""The bytes that kernels spill: of 96 keys, with a block mask, text or lengths, and rare ones.

Each number is the larger one of two compilers.
"""

from __future__ import annotations

__all__ = ["MORE_SPILLS"]

#: Gradients of wide heads whose scores are queries x keys.
_ACROSS_SPILLS = {
    f"sm_90-fa3-backward-{dtype}-d192-causal-64x96{order}-waits": 8
    for dtype in ("bfloat16", "float16")
    for order in ("", "-ordered")
}

#: Rare kernels of FlashAttention-1 with values wider than keys, which no record has.
_WIDE_VALUES_SPILLS = {
    "sm_100-fa1-backward-float32-d32-causal-dv128": 548,
    "sm_90-fa1-backward-float32-d16-causal-dv32": 268,
    "sm_90-fa1-backward-float32-d32-causal-dv64": 268,
}

#: Kernels with a block mask. Backward passes spill in the load role, which walks along lists.
#: Forward passes spill if the call also has a staged bias.
_BLOCK_MASK_SPILLS = {
    "sm_90-fa3-backward-bfloat16-d128-causal-block_mask-128-128-dropout-64x128": 32,
    "sm_90-fa3-backward-bfloat16-d128-causal-block_mask-64-64-64x128": 160,
    "sm_90-fa3-backward-bfloat16-d128-full-block_mask-128-128-64x128": 28,
    "sm_90-fa3-backward-bfloat16-d128-full-mask-bfloat16-1-1-block_mask-128-128-64x128": 84,
    "sm_90-fa3-backward-bfloat16-d192-causal-block_mask-128-64-64x64": 32,
    "sm_90-fa3-backward-bfloat16-d192-full-dv128-block_mask-128-128-64x128": 24,
    "sm_90-fa3-backward-bfloat16-d256-full-block_mask-128-128-64x64": 28,
    "sm_90-fa3-backward-bfloat16-d64-causal-block_mask-64-64-128x128": 8,
    "sm_90-fa3-backward-bfloat16-d64-full-bias-bfloat16-bfloat16-1-1-block_mask-128-128"
    "-128x128": 28,
    "sm_90-fa3-backward-bfloat16-d64-full-block_mask-128-128-128x128": 8,
    "sm_90-fa3-backward-bfloat16-d96-causal-block_mask-128-64-64x128": 64,
    "sm_90-fa3-backward-bfloat16-d96-full-block_mask-128-128-64x128": 28,
    "sm_90-fa3-backward-float16-d64-causal-block_mask-128-128-128x128": 8,
    "sm_90-fa3-forward-bfloat16-d64-full-bias-bfloat16-bfloat16-1-1-block_mask-128-128"
    "-192x128": 122,
}

#: Kernels with a function of scores: forward passes if it reads a table, and backward passes if
#: another feature or the widths need registers too.
_TEXT_SPILLS = {
    "sm_90-fa3-backward-bfloat16-d128-causal-score_mod-bfloat16-28b03568-alibi-bfloat16-1"
    "-64x128": 120,
    "sm_90-fa3-backward-bfloat16-d128-full-score_mod-bfloat16-8f9d8ec7-mask-bfloat16-1-1"
    "-64x128": 80,
    "sm_90-fa3-backward-bfloat16-d192-causal-dv128-score_mod-bfloat16-8f9d8ec7-64x128": 16,
    "sm_90-fa3-forward-bfloat16-d192-causal-dv128-score_mod-bfloat16-8f9d8ec7-128x128": 24,
    "sm_90-fa3-forward-bfloat16-d256-causal-score_mod-bfloat16-8f9d8ec7-128x64": 24,
}

#: Kernels with lengths in device memory.
_LENGTHS_SPILLS = {
    "sm_90-fa2-backward-bfloat16-d128-band-packed_lengths-ordered": 56,
    "sm_90-fa2-forward-bfloat16-d128-band-packed_lengths": 24,
    "sm_90-fa3-backward-bfloat16-d128-causal-packed_lengths-64x128": 28,
    "sm_90-fa3-backward-bfloat16-d128-causal-packed_lengths-alibi-bfloat16-0-64x128": 88,
    "sm_90-fa3-backward-bfloat16-d128-causal-used_lengths-alibi-bfloat16-1-64x128": 124,
    "sm_90-fa3-backward-bfloat16-d128-full-packed_lengths-64x128-ordered": 28,
    "sm_90-fa3-backward-bfloat16-d128-full-used_lengths-mask-bfloat16-1-1-64x128": 44,
    "sm_90-fa3-backward-bfloat16-d64-band-packed_lengths-128x128-ordered": 24,
    "sm_90-fa3-backward-bfloat16-d64-band-used_lengths-128x128-converts32-ordered": 8,
    "sm_90-fa3-backward-bfloat16-d64-causal-packed_lengths-dropout-128x128": 56,
    "sm_90-fa3-backward-bfloat16-d64-causal-used_lengths-dropout-128x128": 8,
    "sm_90-fa3-forward-bfloat16-d128-causal-packed_lengths-192x80": 80,
    "sm_90-fa3-forward-bfloat16-d128-causal-packed_lengths-alibi-bfloat16-0-192x80": 80,
    "sm_90-fa3-forward-bfloat16-d128-causal-packed_lengths-sinks-bfloat16-192x80": 80,
    "sm_90-fa3-forward-bfloat16-d128-causal-used_lengths-192x80": 36,
    "sm_90-fa3-forward-bfloat16-d128-causal-used_lengths-alibi-bfloat16-0-192x80": 36,
    "sm_90-fa3-forward-bfloat16-d128-causal-used_lengths-sinks-bfloat16-192x80": 36,
    "sm_90-fa3-forward-bfloat16-d128-full-packed_lengths-192x80": 84,
    "sm_90-fa3-forward-bfloat16-d128-full-used_lengths-192x80": 48,
    "sm_90-fa3-forward-bfloat16-d256-causal-packed_lengths-128x64": 8,
    "sm_90-fa3-forward-bfloat16-d64-band-packed_lengths-192x128": 80,
    "sm_90-fa3-forward-bfloat16-d64-band-used_lengths-192x128": 52,
    "sm_90-fa3-forward-bfloat16-d64-causal-packed_lengths-192x128": 80,
    "sm_90-fa3-forward-bfloat16-d64-causal-packed_lengths-dropout-192x128": 80,
    "sm_90-fa3-forward-bfloat16-d64-causal-used_lengths-192x128": 36,
    "sm_90-fa3-forward-bfloat16-d64-causal-used_lengths-dropout-192x128": 36,
    "sm_90-fa3-forward-bfloat16-d64-full-packed_lengths-192x128": 80,
    "sm_90-fa3-forward-bfloat16-d64-full-used_lengths-192x128": 44,
    "sm_90-fa3-forward-bfloat16-d64-full-used_lengths-bias-bfloat16-bfloat16-1-1-192x128": 84,
    "sm_90-fa3-forward-bfloat16-d96-causal-packed_lengths-192x96": 80,
    "sm_90-fa3-forward-bfloat16-d96-causal-used_lengths-192x96": 36,
    "sm_90-fa3-forward-float16-d128-full-used_lengths-192x80": 48,
    "sm_90-fa3-forward-float16-d64-causal-packed_lengths-192x128": 80,
    "sm_90-fa3-forward-float16-d64-causal-used_lengths-192x128": 36,
    # Caches: the loading thread spills where a multiprocessor has three blocks.
    "sm_90-fa3-forward-bfloat16-to-float32-d64-causal-used_lengths-alibi-bfloat16-0-cached_keys"
    "-kv_chunks-64x64": 72,
    "sm_90-fa3-forward-bfloat16-to-float32-d64-full-used_lengths-cached_keys-packed_group-kv_chunks"
    "-64x64": 72,
    **{
        f"sm_90-fa3-forward-{name}-to-float32-d64-{how.format(name)}-kv_chunks-64x64": spilled
        for name in ("bfloat16", "float16")
        for how, spilled in (
            ("full-float8-used_lengths-cached_keys-packed_group", 60),
            ("causal-float8-used_lengths-alibi-{}-0-cached_keys", 64),
        )
    },
}

#: All of them.
MORE_SPILLS = {
    **_ACROSS_SPILLS,
    **_BLOCK_MASK_SPILLS,
    **_TEXT_SPILLS,
    **_LENGTHS_SPILLS,
    **_WIDE_VALUES_SPILLS,
}
