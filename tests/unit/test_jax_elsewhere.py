"""The errors of ``cuflash.jax.attention`` on platforms and processes that it does not support."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cuflash

from .jax_case import draw, jax

attention = pytest.importorskip("cuflash.jax", reason="JAX is not installed").attention

X = (2, 5, 4, 8)


def _function(x: Any) -> Any:
    return attention(x, x, x).sum()


@pytest.mark.parametrize("function", [_function, jax.grad(_function)], ids=["forward", "both"])
@pytest.mark.parametrize("platforms", [("tpu",), ("rocm",), ("cpu", "tpu"), ("cpu", "cuda")])
def test_other_platforms(function: Any, platforms: tuple[str, ...]) -> None:
    (x,) = draw(X, dtype="float32")
    says = (
        "cuflash.jax.attention is compiled for one platform, cpu or cuda; "
        f"this computation is for {', '.join(platforms)}: use jax.nn.dot_product_attention there"
    )
    with pytest.raises(cuflash.UnsupportedError, match=re.escape(says)):
        jax.jit(function).trace(x).lower(lowering_platforms=platforms)


@pytest.mark.parametrize("platforms", [None, ["cpu"], ["cpu", "cuda"], ["tpu"]], ids=str)
def test_export(platforms: Any) -> None:
    export = pytest.importorskip("jax.export")
    (x,) = draw(X, dtype="float32")
    for function in (_function, jax.grad(_function)):
        with pytest.raises(
            cuflash.UnsupportedError, match=r"jax.export cannot take .*: what is exported runs in"
        ):
            export.export(jax.jit(function), platforms=platforms)(x)


def test_a_serialised_executable() -> None:
    serialise = pytest.importorskip("jax.experimental.serialize_executable").serialize
    (x,) = draw(X, dtype="float32")
    with pytest.raises(cuflash.UnsupportedError, match="cannot be serialised: its kernels are"):
        serialise(jax.jit(_function).lower(x).compile())


def test_a_place_in_a_computation_is_not_pickled() -> None:
    from cuflash.jax.call import Call
    from cuflash.jax.site import Site
    from cuflash.options import Options

    with pytest.raises(cuflash.UnsupportedError, match="cannot be serialised"):
        pickle.dumps(Site(Call("forward", Options(layout="bshd")), "cpu"))


_INTERRUPTED = """
import os, signal, threading, jax
from cuflash import dispatch
from cuflash.jax import attention

jax.config.update("jax_cpu_enable_async_dispatch", False)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

def interrupt(plan):  # inside of the callback, on the thread that waits for it
    if threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGINT)

x = jax.numpy.ones((1, 64, 2, 8))
call = jax.jit(lambda x: attention(x, x, x))
try:
    with dispatch.observe(interrupt):
        for _ in range(3000):  # the runtime may call back on a thread of its own
            jax.block_until_ready(call(x))
except RuntimeError as error:
    print("INTERNAL" in str(error), "KeyboardInterrupt" in str(error))
except KeyboardInterrupt:
    print("itself")
"""


def test_an_interrupt_inside_jit_is_an_internal_error_of_the_runtime(root: Path) -> None:
    """The interrupt is raised on the thread that waits for the callback, as the docstring says."""
    command = [sys.executable, "-c", _INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.stdout.strip() == "True True", done.stdout + done.stderr
