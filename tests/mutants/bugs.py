"""The planted bugs: small edits, and the test that kills each.

``find`` stands exactly once in the file (a test holds it to that), so a bug
cannot rot away when the code changes.
"""

from __future__ import annotations

from . import (
    alibi,
    bias,
    bias_staged,
    block_mask,
    caches,
    caches_host,
    dropout,
    dropout_fa3,
    fa1,
    fa2,
    fa2_backward,
    fa2_one_stage,
    fa2_ordered,
    fa2_wide,
    fa3,
    fa3_backward,
    fa3_backward_clear,
    fa3_backward_parts,
    fa3_backward_rows,
    fa3_backward_serial,
    fa3_order,
    fa3_stay,
    float8,
    host,
    host_calls,
    jax_caches,
    jax_native,
    key_chunks,
    lengths_host,
    mask,
    packed_fa3,
    packed_lengths,
    packed_lists,
    packed_queries,
    pages,
    products,
    score_mod,
    score_mod_host,
    sinks,
    softcap,
    states,
    terms,
    used_lengths,
    windows,
)
from .bug import Bug

__all__ = ["BUGS", "EMULATED_BUGS", "HOPPER_BUGS", "Bug"]

#: Those that pytest kills, or the emulator.
BUGS = (
    *fa1.BUGS,
    *fa2.BUGS,
    *fa2_backward.BUGS,
    *fa2_one_stage.BUGS,
    *fa2_ordered.BUGS,
    *fa2_wide.BUGS,
    *alibi.BUGS,
    *bias.BUGS,
    *dropout.BUGS,
    *mask.BUGS,
    *block_mask.BUGS,
    *caches.BUGS,
    *caches_host.BUGS,
    *float8.BUGS,
    *products.BUGS,
    *score_mod.BUGS,
    *score_mod_host.BUGS,
    *sinks.BUGS,
    *softcap.BUGS,
    *states.BUGS,
    *terms.BUGS,
    *packed_lengths.BUGS,
    *packed_lists.BUGS,
    *packed_queries.BUGS,
    *pages.BUGS,
    *used_lengths.BUGS,
    *lengths_host.BUGS,
    *windows.BUGS,
    *host.BUGS,
    *host_calls.BUGS,
    *jax_native.BUGS,
    *jax_caches.BUGS,
    *key_chunks.BUGS,
    *fa3_stay.HOST,
)
#: Those of FlashAttention-3, in records of their own: of a GPU of compute capability 9.0, see
#: ``hopper``, and of the emulator.
HOPPER_BUGS = (
    *fa3.BUGS,
    *fa3_backward.BUGS,
    *fa3_backward_clear.BUGS,
    *fa3_backward_serial.BUGS,
    *fa3_backward_parts.BUGS,
    *fa3_backward_rows.BUGS,
)
#: More of FlashAttention-3, which a GPU would not show every time: of the emulator alone.
EMULATED_BUGS = (
    *fa3_order.BUGS,
    *fa3_stay.BUGS,
    *alibi.HOPPER,
    *bias_staged.BUGS,
    *block_mask.HOPPER,
    *dropout_fa3.BUGS,
    *float8.HOPPER,
    *key_chunks.HOPPER,
    *packed_fa3.BUGS,
    *score_mod.HOPPER,
    *sinks.HOPPER,
    *softcap.HOPPER,
    *terms.HOPPER,
    *used_lengths.HOPPER,
    *windows.HOPPER,
)
