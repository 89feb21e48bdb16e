"""Planted bugs in the order of FlashAttention-3's products, copies and threads.

Products of a warpgroup and the copy engine run beside the threads, and see numbers that threads
wrote only after a fence. On a GPU a missing wait or fence is a matter of nanoseconds, and most runs
are right all the same. The emulator runs products and copies as late as it may and hides from them
what is not fenced, so only the emulator shows these bugs for sure.

Two edits are not here. With shared keys, a missing wait for the stage of dS has no effect, because
the exchange of weights implies it. The emulator does not know the fences after the initialisation
of barriers.
"""

from __future__ import annotations

from .bug import Bug
from .hopper_problems import CAUSAL, GRADIENTS, NARROW, SERIAL_GRADIENTS, SHARED_GRADIENTS

__all__ = ["BUGS"]

_KERNEL = "cuda_src/fa3/backward.cu"
_CLEAR = "cuda_src/fa3/backward_clear.cuh"
_SERIAL = "cuda_src/fa3/backward_serial.cuh"
_FORWARD = "cuda_src/fa3/forward_math.cuh"
_MATH = "cuda_src/fa3/backward_math.cuh"
_WIDE = "cuda_src/fa3/backward_wide.cuh"

_FENCE = "    ptx::fence_async_shared();\n"
_HANDED_ON = "    __syncwarp();\n    arrive_warp<Config>(c.shared.ds_full[score_ring.stage]);\n"
#: The code after dS of a whole step; a hidden step waits for all products there.
_BESIDE = "\n    ptx::wgmma_wait<2>();\n"
_ENDS = "    end_step<Config>(stage);\n"


def _wait(pending: int) -> str:
    return f"    ptx::wgmma_wait<{pending}>();\n"


def _hold(name: str) -> str:
    return f"    ptx::wgmma_hold({name}.value[0]);\n"


def _swapped(name: str, file: str, first: str, second: str, test: str, follows: str = "") -> Bug:
    """A bug that exchanges two pieces of code; ``follows`` is the code after them."""
    return Bug(name, file, first + second + follows, second + first + follows, test)


def _unfenced(name: str, file: str, fence: str, follows: str, test: str) -> Bug:
    """A bug that removes the fence before ``follows``."""
    return Bug(name, file, fence + follows, follows, test)


def _early(name: str, file: str, pending: int, held: str, test: str, inner: bool = False) -> Bug:
    """A bug that waits for one product too few, in the function or in an ``inner`` block."""
    margin = "  " if inner else ""
    waits = [margin + _wait(count) + margin + _hold(held) for count in (pending, pending + 1)]
    return Bug(name, file, *waits, test)


def _overwritten(name: str, file: str, test: str, follows: str = "") -> Bug:
    """A bug that does not wait until the stage of dS is free."""
    wait = "wait_empty<Config>(c.shared.ds_empty[score_ring.stage], score_ring.phase);"
    return Bug(name, file, wait + follows, follows, test)


_FENCES = (
    _unfenced("dS has no fence", _MATH, _FENCE, _HANDED_ON + _BESIDE, GRADIENTS),
    _swapped(
        *("dS is fenced when it has been handed on", _MATH, _FENCE, _HANDED_ON, GRADIENTS),
        follows=_BESIDE,
    ),
    _unfenced("dS of shared keys has no fence", _WIDE, _FENCE, _HANDED_ON, SHARED_GRADIENTS),
    _unfenced(
        "dS of serial score tiles has no fence",
        _SERIAL,
        _FENCE,
        "    // All of the warpgroup's dS is written",
        SERIAL_GRADIENTS,
    ),
    _unfenced(
        "zeros of dead queries have no fence", _MATH, _FENCE, "    jitter<Config>();\n", GRADIENTS
    ),
    _unfenced(
        "zeros that are copied have no fence",
        _CLEAR,
        "  ptx::fence_async_shared();\n",
        "  __syncwarp();\n",
        GRADIENTS,
    ),
    _unfenced(
        "cleared sums have no fence",
        _CLEAR,
        "  ptx::fence_async_global();\n",
        "  jitter<Config>();\n",
        GRADIENTS,
    ),
    _unfenced(
        "products begin before their registers are there",
        _FORWARD,
        "    ptx::wgmma_fence();\n",
        "#pragma unroll\n    for (int key = 0;",
        CAUSAL,
    ),
)

_FORWARD_WAITS = (
    _early("scores are not waited for", _FORWARD, 1, "scores", CAUSAL),
    _swapped(
        "weights change while they are multiplied",
        _FORWARD,
        _wait(0) + _hold("state.output") + "    release_v();\n",
        "    exponentiate(state, scores, change);\n",
        NARROW,
    ),
    _swapped(
        "V is released while it is multiplied",
        _FORWARD,
        _wait(0) + _hold("state.output"),
        "    release_v();\n",
        NARROW,
        "    exponentiate(",
    ),
    _swapped(
        "V of the last block is released while it is multiplied",
        _FORWARD,
        _wait(0) + _hold("state.output"),
        "    release_v();\n",
        NARROW,
        "    store_rows(",
    ),
)

_BACKWARD_WAITS = (
    _early("S is not waited for", _MATH, 1, "p", GRADIENTS, inner=True),
    _early("dP is not waited for", _MATH, 0, "dp", GRADIENTS, inner=True),
    _early("dQ is added while it is computed", _MATH, 2, "dq", GRADIENTS),
    _early("dQ of shared keys is added while it is computed", _WIDE, 1, "dq", SHARED_GRADIENTS),
    _early("S of serial score tiles is not waited for", _SERIAL, 0, "p", SERIAL_GRADIENTS),
    _swapped("a step ends while Q is multiplied", _MATH, _wait(0) + _hold("dk"), _ENDS, GRADIENTS),
    _swapped(
        "a step of serial score tiles ends while Q is multiplied",
        _SERIAL,
        _wait(0) + _hold("dk") + _hold("dq"),
        _ENDS,
        SERIAL_GRADIENTS,
    ),
    Bug(
        "dQ of the last step is not waited for",
        _KERNEL,
        "  ptx::wgmma_wait<0>();\n  ptx::wgmma_hold(dq.value[0]);\n  if",
        "  if",
        GRADIENTS,
    ),
    Bug("cleared sums are not waited for", _CLEAR, "  ptx::bulk_wait();\n", "", GRADIENTS),
)

_PLACES = (
    _overwritten(
        *("dS is overwritten while dQ reads it", _MATH, GRADIENTS),
        follows="\n      if constexpr (Config::Weights::drops) {",
    ),
    _overwritten(
        "dS of serial score tiles is overwritten while dQ reads it", _SERIAL, SERIAL_GRADIENTS
    ),
)

_OPERANDS = (
    Bug(
        "one warp multiplies other keys than its warpgroup",
        _FORWARD,
        "v_place.stage * (sizeof(typename Types::VPanels) / 16);",
        "v_place.stage * (sizeof(typename Types::VPanels) / 16) + threadIdx.x / 96 % 4 / 3 * 128;",
        CAUSAL,
    ),
)

#: The bugs that a GPU need not show.
BUGS = (*_FENCES, *_FORWARD_WAITS, *_BACKWARD_WAITS, *_PLACES, *_OPERANDS)
