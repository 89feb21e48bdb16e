"""All public functions have the arguments in the table of features."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

import cuflash
from cuflash import ScoreMod, cli, reference
from cuflash.calls_to_come import Calls
from cuflash.compile_ahead import kernels_of
from cuflash.features.table import FEATURES, with_features
from cuflash.options import Differentiable, Options, check_options
from cuflash.planning.kernel import KernelConfig
from cuflash.planning.problem import AttentionProblem
from cuflash.tensors import QKV, differentiable, tensors

from ..architectures import LIMITS

FUNCTIONS: list[Callable[..., Any]] = [
    cuflash.attention,
    cuflash.attention_backward,
    cuflash.attention_vjp,
    cuflash.prepare,
    cuflash.explain,
]
#: Functions that take arguments of the backward pass.
OF_GRADIENTS = [f for f in FUNCTIONS if f is not cuflash.attention]
#: For each feature, the fields of ``Calls`` that ask for its kernels. ``python -m cuflash compile``
#: has options of the same names, except that ``masks`` is ``--mask``.
COMPILED: dict[str, dict[str, Any]] = {
    "window": {"masks": ("left", "band")},
    "used_lengths": {"used_lengths": (False, True)},
    "packed_lengths": {"packed": (False, True)},
    "softcap": {"softcap": (False, True)},
    "score_mod": {"score_mod": (None, ScoreMod("return -s;"))},
    "alibi": {"alibi": (False, True)},
    "bias": {"bias": (None, "qk", "1")},
    "mask": {"mask_array": (None, "qk", "1")},
    "block_mask": {"block_mask": (None, (128, 128))},
    "sinks": {"sinks": ("float16", "float32")},
    "dropout": {"dropout": (False, True)},
}
#: Arguments whose option has another name: ``compile`` has ``--mask`` for the bounds of the keys.
OPTIONS = {"mask": "mask_array"}


def _arguments() -> list[str]:
    """The arguments of all features; one that may be a number or an array counts once."""
    return [name for feature in FEATURES.values() for name in feature.arguments]


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def _options(command: str) -> set[str]:
    (commands,) = (
        action
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return set(commands.choices[command]._option_string_actions)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", _arguments())
def test_every_function_takes_every_argument(function: Callable[..., Any], name: str) -> None:
    parameter = _parameters(function)[name]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert parameter.default is None
    assert name in (function.__doc__ or "")


@pytest.mark.parametrize("function", [reference.attention, reference.attention_backward])
@pytest.mark.parametrize("name", _arguments())
def test_the_reference_takes_every_argument(function: Callable[..., Any], name: str) -> None:
    parameter = _parameters(function)[name]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert parameter.default is None
    assert name in (function.__doc__ or "")


@pytest.mark.parametrize("function", OF_GRADIENTS, ids=lambda f: f.__name__)
def test_every_function_of_gradients_takes_wrt(function: Callable[..., Any]) -> None:
    parameter = _parameters(function)["wrt"]
    assert (parameter.kind, parameter.default) == (inspect.Parameter.KEYWORD_ONLY, QKV)


def test_overloads_take_what_their_function_takes() -> None:
    for function in (cuflash.attention, cuflash.attention_vjp):
        own = _parameters(function)
        every = _overloads(function)
        assert len(every) == 2
        for names, returns in every:
            assert names == [*own]
            assert returns


def _overloads(function: Callable[..., Any]) -> list[tuple[list[str], str]]:
    """Parameters and the return type of every overload, from the source."""
    import ast

    module = ast.parse(inspect.getsource(inspect.getmodule(function)))  # type: ignore[arg-type]
    found = []
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            arguments = [*node.args.args, *node.args.kwonlyargs]
            assert node.returns is not None
            found.append(([a.arg for a in arguments], ast.unparse(node.returns)))
    return found


@pytest.mark.parametrize("name", _arguments())
def test_the_command_line_explains_every_argument(name: str) -> None:
    assert f"--{OPTIONS.get(name, name).replace('_', '-')}" in _options("explain")


def test_the_command_line_explains_wrt() -> None:
    assert "--wrt" in _options("explain")


@pytest.mark.parametrize("feature", FEATURES)
def test_kernels_of_every_feature_are_compiled_ahead(feature: str) -> None:
    """Every feature has an option, and its kernels are listed only if the option asks for them."""
    options = {option[2:].replace("-", "_") for option in _options("compile")}
    assert COMPILED[feature].keys() <= options | {"masks"}
    plain = Calls(((64, 64),), ("float16",), seqlens=((512, 512),))
    asked = replace(plain, **COMPILED[feature])
    names = [_features(kernel) for kernel in kernels_of(asked, LIMITS["90"])]
    assert any(feature in present for present in names)
    names = [_features(kernel) for kernel in kernels_of(plain, LIMITS["90"])]
    assert not any(feature in present for present in names)


def _features(kernel: KernelConfig) -> set[str]:
    return {feature.name for feature in kernel.features}


def test_what_may_be_differentiated_is_what_the_type_says() -> None:
    assert get_args(Differentiable) == differentiable()
    assert {f"d{name}" for name in differentiable()} < set(tensors())


def test_the_arguments_of_features_are_of_one_feature_and_no_base_keyword() -> None:
    arguments = _arguments()
    assert len(set(arguments)) == len(arguments)
    assert not set(arguments) & {*Options.__dataclass_fields__, *QKV}


def test_keywords_of_features_come_in_the_order_of_the_table() -> None:
    options = check_options(window_size=[3, None], causal=True)
    assert options.more == (("window_size", (3, None)),)
    assert options.keyword("window_size") == (3, None)
    assert check_options(window_size=None) == Options()


def _problem(**changed: Any) -> AttentionProblem:
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 2, "seqlen_q": 8, "seqlen_kv": 8}
    kinds = {"storage": "float16", "output": "float16", "mask": "full", "operation": "forward"}
    wide = {"head_dim": 64, "head_dim_v": 64, "scale": 0.1, "q_offset": 0}
    return AttentionProblem(**{**sizes, **kinds, **wide, **changed})  # type: ignore[arg-type]


def test_a_problem_without_features_has_no_uses() -> None:
    assert with_features(_problem(), {}, {}).uses == ()
    assert with_features(_problem(mask="causal"), {}, {}).uses == ()


def test_a_window_is_used_where_there_is_a_first_key() -> None:
    for mask in ("left", "band"):
        problem = with_features(_problem(mask=mask, q_first=-3), {}, {})
        assert problem.features == ("window",)
        assert problem.uses[0].numbers == (("first", -3),)
        assert problem.uses[0].compiled == ()
