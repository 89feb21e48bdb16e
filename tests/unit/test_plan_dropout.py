"""Plans with dropout: the numbers in a plan, and in the parameters of its launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.features.table import with_features
from cuflash.features.use import Operand
from cuflash.planning.plan import plan
from cuflash.planning.problem import AttentionProblem

from ..architectures import LIMITS
from .bias_case import kernel_of
from .fake_device import ADDRESS, FakeDevice, fake_device

__all__ = ["fake_device"]

#: Gradients of FlashAttention-3 take only the tiles that fit all lengths.
pytestmark = pytest.mark.usefixtures("any_lengths")

_Q, _KV = (2, 24, 4, 64), (2, 32, 2, 64)
_WIDTHS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]


def _problem(
    p: float = 0.25,
    seed: int | None = 7,
    words: int = 0,
    draws: tuple[int, int] | None = None,
    more: dict[str, Operand] | None = None,
    **changed: Any,
) -> AttentionProblem:
    """A forward pass that drops weights."""
    sizes = {"batch": 3, "heads_q": 4, "heads_kv": 2, "seqlen_q": 500, "seqlen_kv": 700}
    kinds = {"storage": "float16", "mask": "full", "operation": "forward"}
    wide = {"head_dim": 64, "head_dim_v": 64, "scale": 0.125, "q_offset": 0}
    every = {**sizes, **kinds, **wide, "alignment": "tensor_map", **changed}
    plain = AttentionProblem(output=every["storage"], **every)
    arrays = dict(more or {})
    keywords: dict[str, Any] = {"dropout_p": p}
    if words:
        arrays["dropout_seed"] = Operand("dropout_seed", "uint32", (words,))
    else:
        keywords["dropout_seed"] = seed
    return with_features(plain, keywords, arrays, 200, draws)


@pytest.mark.parametrize(
    ("p", "limit"), [(0.25, 12288), (0.1, 14746), (2.0**-14, 16383), (1e-6, 16384), (0.9999, 2)]
)
def test_the_share_that_is_kept(p: float, limit: int) -> None:
    """The share is rounded once; the limit of the draws and the factor follow from the result."""
    (use,) = _problem(p).uses
    numbers = dict(use.numbers)
    assert numbers["limit"] == limit
    assert numbers["inverse_keep"] == numbers["inverse_keep_single"] == 2**14 / limit
    assert use.shown == f"dropout {p:g}"
    assert use.unit is None
    assert use.compiled == ()


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1, 2**32, 2**64 - 1])
def test_the_words_of_an_integer(seed: int) -> None:
    (use,) = _problem(seed=seed).uses
    numbers = dict(use.numbers)
    assert numbers["key0"] + 2**32 * numbers["key1"] == seed
    assert numbers["words"] == 0
    assert not use.operands


@pytest.mark.parametrize("words", [2, 4])
def test_the_words_of_an_array(words: int) -> None:
    (use,) = _problem(words=words).uses
    assert dict(use.numbers)["words"] == words
    (operand,) = use.operands
    assert (operand.name, operand.shape) == ("dropout_seed", (words,))


def test_which_entries_and_heads_draw_for_themselves() -> None:
    for draws, expected in ((None, (3, 4)), ((5, 32), (5, 32)), ((0, 1), (1, 1))):
        numbers = dict(_problem(draws=draws).uses[0].numbers)
        assert (numbers["entries"], numbers["heads"]) == expected


def test_a_place_in_a_larger_call_is_no_part_of_a_seed_of_its_own() -> None:
    assert dict(_problem(words=6, draws=(2, 4)).uses[0].numbers)["words"] == 6
    with pytest.raises(cuflash.ArgumentValueError, match=r"\(6,\); expected \(2,\) or \(4,\)"):
        _problem(words=6)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_kernels_depend_on_nothing_but_that_weights_are_dropped(
    algorithm: Any, operation: Any
) -> None:
    """p, the seed and its place change no kernel, and kernels without weights have no dropout."""
    of = [_problem(operation=operation), _problem(0.5, 2**40, operation=operation)]
    of += [_problem(words=n, operation=operation, draws=(2, 9)) for n in (2, 4, 6)]
    plans = [plan(problem, LIMITS["90"], algorithm=algorithm) for problem in of]
    configs = [[launch.config for launch in chosen.launches] for chosen in plans]
    assert all(one == configs[0] for one in configs)
    plain = plan(replace(of[0], uses=()), LIMITS["90"], algorithm=algorithm)
    for config, other in zip(configs[0], (x.config for x in plain.launches), strict=True):
        names = [feature.name for feature in config.features]
        assert names == ["dropout"] * (config.kernel in ("forward", "backward"))
        if not names:
            assert config == replace(other, waits=False)


@pytest.mark.parametrize("dims", _WIDTHS)
@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_every_width_runs_on_the_newest_generation(dims: Any, operation: Any, mask: str) -> None:
    for dtype in ("float16", "bfloat16"):
        problem = _problem(
            operation=operation, head_dim=dims[0], head_dim_v=dims[1], storage=dtype, mask=mask
        )
        assert plan(problem, LIMITS["90"]).algorithm == "fa3"


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_the_gradient_of_a_bias_drops_too(algorithm: Any) -> None:
    """Its kernel does not keep terms of the bias in registers: there are not enough for both."""
    bias = {"bias": Operand("bias", "float16", (1, 4, 500, 700))}
    of = _problem(more=bias, operation="backward", wrt=("q", "k", "v", "bias"))
    chosen = plan(of, LIMITS["90"], algorithm=algorithm)
    config = kernel_of(chosen, "bias_gradient").config
    assert [feature.name for feature in config.features] == ["bias", "dropout"]
    assert dict(config.constants)["keeps_terms"] == 0


def test_it_comes_last() -> None:
    more = {
        "sinks": Operand("sinks", "float16", (4,)),
        "mask": Operand("mask", "bool", (1, 4, 500, 700)),
    }
    problem = _problem(more=more, mask="band", q_first=-9)
    assert problem.features == ("window", "mask", "sinks", "dropout")
    assert str(problem).endswith("mask 1x4x500x700 dropout 0.25 mask bool sinks float16")


def _launched(fake: FakeDevice, operation: Any, seed: Any, **options: Any) -> Any:
    """The parameters of a call's launches, by kernel, and the addresses of its arrays."""
    ready = cuflash.prepare(
        *(_Q, _KV, _KV),
        operation=operation,
        dtype="float16",
        dropout_p=0.25,
        dropout_seed=seed,
        **options,
    )
    launcher = ready._launcher
    places = {name: ADDRESS * (i + 10) for i, name in enumerate(launcher.names)}
    launcher.run(tuple(places.values()), 3 * ADDRESS, 0)
    names = [launch.config.kernel for launch in ready.plan.launches]
    return dict(zip(names, fake.launched, strict=True)), places


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
def test_what_a_launch_brings(fake_device: FakeDevice, algorithm: Any, operation: Any) -> None:
    for seed, words in ((2**33 + 5, 0), ((2,), 2), (((4,), "uint32"), 4)):
        fake_device.launched.clear()
        launched, places = _launched(fake_device, operation, seed, algorithm=algorithm)
        one = launched[operation]["dropout"]
        assert one["limit"] == 12288
        assert one["inverse_keep"] == 2**14 / 12288
        assert one["inverse_keep_single"] == np.float32(2**14 / 12288)
        assert one["words"] == words
        assert one["dropout_seed"] == places.get("dropout_seed", 0)
        assert (words > 0) == ("dropout_seed" in places)
        assert (one["key0"], one["key1"]) == ((0, 0) if words else (5, 2))
        assert (one["entries"], one["heads"]) == (2, 4)


def test_a_prepared_run_has_its_seed_at_a_word(fake_device: FakeDevice) -> None:
    ready = cuflash.prepare(_Q, _KV, _KV, dtype="float16", dropout_p=0.25, dropout_seed=(2,))
    assert ready.tensors["dropout_seed"].nbytes == 8
    pointers = dict.fromkeys(("q", "k", "v", "out", "lse"), ADDRESS)
    ready.run({**pointers, "dropout_seed": ADDRESS + 4}, workspace=ADDRESS)
    with pytest.raises(cuflash.ArgumentValueError, match="expected a multiple of 4"):
        ready.run({**pointers, "dropout_seed": ADDRESS + 2}, workspace=ADDRESS)
    with pytest.raises(cuflash.ArgumentValueError, match="got no dropout_seed"):
        ready.run(pointers, workspace=ADDRESS)
