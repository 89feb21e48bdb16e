"""Features of this folder in the kernels: sources, compilation and results."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cuflash.cuda.source import find_sources, translation_unit
from cuflash.planning.problem import DTYPES as CUDA_DTYPES

from ..compile.nvrtc import build
from ..emulator.apart import apart
from ..emulator.build import begin, compiler
from .case import DTYPES, judge
from .kernels import KERNELS, TenantKernels

_PASSES = ("forward", "backward")
_BY_NAME = {one.name: one for one in KERNELS}


@pytest.mark.skipif(compiler() is None, reason="there is no g++ to compile with")
@pytest.mark.in_turns(by="name", days=6)
@pytest.mark.parametrize("name", _BY_NAME)
def test_against_float64(name: str) -> None:
    kernels = _BY_NAME[name]
    begun = [begin(config) for config in kernels.configs().values()]
    for one in begun:
        one.result()  # a child of this process does not share kernels being compiled
    apart(partial(_check, kernels))


def _check(kernels: TenantKernels) -> None:
    for one in kernels.calls():
        truth, got = judge(one), kernels.run(one)
        assert got.keys() == truth.keys()
        for name, expected in truth.items():
            result = got[name].astype(np.float64)
            seen = np.isfinite(expected)
            np.testing.assert_array_equal(np.isfinite(result), seen, f"{name} {one}")
            error = np.abs(result[seen] - expected[seen]).max(initial=0)
            size = np.abs(expected[seen]).max(initial=1)
            assert error <= DTYPES[one.dtype][1] * size, f"{name} {error / size} {one}"


@pytest.mark.parametrize("name", _BY_NAME)
def test_sources_name_the_terms_in_the_order_of_the_table(name: str) -> None:
    kernels = _BY_NAME[name]
    terms = {
        "softcap": f"cuflash::SoftcapTerm<{CUDA_DTYPES[kernels.dtype].cuda}>",
        "parity": "cuflash::ParityTerm",
        "tilt": "cuflash::TiltTerm<float>",
    }
    used = [term for feature, term in terms.items() if getattr(kernels.used, feature) is not None]
    configs = kernels.configs()
    for kernel, config in configs.items():
        text = translation_unit(config, find_sources())
        main = kernel.endswith(("/forward", "/backward"))
        assert (f"using Score = cuflash::ScoreChain<{', '.join(used)}>;" in text) == main
        assert ("struct ParityTerm" in text) == (main and kernels.used.parity is not None)
        assert ("struct TiltTerm" in text) == (main and kernels.used.tilt is not None)
    assert {k.split("/")[1] for k in configs if not k.startswith("steps")} >= {
        "forward",
        "backward",
    }


def _compiled() -> dict[str, TenantKernels]:
    """Every generation on sm_90, and the older two on sm_75, with all features."""
    every = [one for one in KERNELS if one.used.sinks and one.head_dim == 64]
    old = [replace(one, architecture="75") for one in every if one.algorithm == "fa1"]
    return {one.name: one for one in (*every, *old)}


_ROWS = [(n, f"{one.algorithm}/{p}") for n, one in _compiled().items() for p in _PASSES]


@pytest.mark.parametrize(("name", "kernel"), _ROWS)
def test_nvrtc_compiles_them(name: str, kernel: str) -> None:
    made = build(_compiled()[name].configs()[kernel])
    assert made.registers > 0
    assert "C75" not in made.log, made.log  # products of fa3 one after the other
