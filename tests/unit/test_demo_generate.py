"""The demo generates a text with a paged cache and one without, and compares them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import cuflash
from cuflash.demo import Options, decoder, run
from cuflash.demo.generate import Generated, generate
from cuflash.demo.model import Parameters
from cuflash.demo.options import DTYPES
from cuflash.demo.text import Text

#: Options for a text that spans several pages and windows.
_TINY = Options(
    steps=1,
    batch=4,
    seqlen=20,
    layers=2,
    heads=2,
    head_dim=8,
    dtype="float32",
    backend="numpy",
    learning_rate=1e-2,
    generate=60,
)


def _parameters(options: Options, xp: Any = np) -> Parameters:
    """Parameters of a network that was not trained but is as confident as a trained one."""
    parameters = Parameters.drawn(options.shape, 1, "float32", xp)
    parameters["head"][...] *= 20
    return parameters


def _shown(options: Options, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:
    pairs = Text.split("pairs", b"aabb" * 1000)
    monkeypatch.setattr("cuflash.demo.main.read_text", lambda: pairs)
    printed = io.StringIO()
    return run(options, Console(file=printed, width=300)), printed.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_choose_the_same_bytes(dtype: str) -> None:
    options = replace(_TINY, dtype=dtype)
    generated = generate(_parameters(options), options, np)
    assert not generated.wrong
    assert dtype != "float32" or generated.recomputed == generated.text
    assert len(generated.text) == 60
    assert len(set(generated.text)) > 10
    assert len(generated.rates) == 2
    assert min(generated.rates.values()) > 0


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("length", [1, 16, 33])
def test_a_prompt_of_any_length_is_read_at_once(count: int, length: int) -> None:
    options = replace(_TINY, generate=count)
    prompt = bytes(range(100, 100 + length))
    generated = generate(_parameters(options), options, np, prompt)
    assert (generated.prompt, len(generated.text)) == (prompt, count)
    assert not generated.wrong


def test_a_seed_gives_the_same_text_again_and_another_gives_another() -> None:
    parameters = _parameters(_TINY)
    texts = [
        generate(parameters, options, np).text for options in (_TINY, _TINY, replace(_TINY, seed=1))
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def _shorter(k_cache: Any, given: dict[str, Any]) -> Any:
    return {"cache_seqlens": np.maximum(given["cache_seqlens"] - 1, 0)}


def _longer(k_cache: Any, given: dict[str, Any]) -> Any:
    return {"cache_seqlens": given["cache_seqlens"] + 1}


def _table(k_cache: Any, given: dict[str, Any]) -> Any:
    """Exchange the first two pages of the table, once the text reaches the third page."""
    table = given["page_table"].copy()
    if given["cache_seqlens"][0] >= 2 * decoder.PAGE:
        table[0, :2] = table[0, 1::-1]
    return {"page_table": table}


def _unmoved(k_cache: Any, given: dict[str, Any]) -> Any:
    return dict.fromkeys(("rotary_cos", "rotary_sin", "rotary_interleaved"))


def _halves(k_cache: Any, given: dict[str, Any]) -> Any:
    return {"rotary_interleaved": False}


def _unbounded(k_cache: Any, given: dict[str, Any]) -> Any:
    return {"window_size": None}


def _emptied(k_cache: Any, given: dict[str, Any]) -> Any:
    k_cache[:1] = 0
    return {}


def _broken(how: Callable[[Any, dict[str, Any]], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Any, k_cache: Any, *arrays: Any, **given: Any) -> Any:
        changed = {**given, **how(k_cache, given)}
        return cuflash.attention_with_kvcache(q, k_cache, *arrays, **changed)

    monkeypatch.setattr(decoder, "attention_with_kvcache", wrong)


@pytest.mark.parametrize(
    "how", [_shorter, _longer, _table, _unmoved, _halves, _unbounded, _emptied]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_broken_cache_is_noticed(how: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(_TINY, dtype=dtype)
    _broken(how, monkeypatch)
    assert generate(_parameters(options), options, np).wrong


def test_a_tie_is_a_byte_that_differs_where_logits_do_not() -> None:
    apart = np.array([0, 0.01, 0.02, np.nan], np.float32)
    generated = Generated(b"", b"abcd", {}, b"aBcd", apart, np.full(4, 0.01, np.float32))
    assert (generated.ties, generated.wrong) == (1, [2, 3])


def test_the_demo_shows_the_text_and_both_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    good, printed = _shown(replace(_TINY, steps=150), monkeypatch)
    assert good
    shown = printed[printed.index("60 bytes drawn") :]
    for part in ("The statement ", "with a paged cache, call by call", "recomputed for every byte"):
        assert part in shown
    assert "both ways choose the same 60 bytes" in shown
    _, printed = _shown(replace(_TINY, generate=0), monkeypatch)
    assert "bytes drawn" not in printed


def test_the_demo_fails_on_a_broken_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(_shorter, monkeypatch)
    good, printed = _shown(replace(_TINY, steps=150), monkeypatch)
    assert not good
    assert "the cache is NOT right" in printed
    assert "beats both" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_device_replays_one_graph(dtype: str) -> None:
    import cupy

    options = replace(_TINY, dtype=dtype, head_dim=16, backend="cuda", generate=200)
    generated = generate(_parameters(options, cupy), options, cupy)
    assert not generated.wrong
    assert "with a paged cache, one graph, replayed" in generated.rates
