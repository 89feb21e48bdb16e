"""Boolean masks on the device: long lists of tiles, prepared runs, graphs, other libraries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash

from ..kit.case import Case
from ..kit.compare import compare
from ..kit.data import arrays
from ..kit.oracle import judge
from .common import Hog, jitter, skip_without

_RESULTS = ("out", "lse", "dq", "dk", "dv")
#: Widths of every form of fa3's passes.
_WIDTHS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
_FORMS = [
    *(("fa3", dims, ordered) for dims in _WIDTHS for ordered in (False, True)),
    *(("fa2", (64, 64), ordered) for ordered in (False, True)),
    ("fa2", (128, 128), False),
    ("fa1", (64, 64), False),
]


class Documents:
    """Documents in one sequence: queries see only the keys of their document, which lie elsewhere.

    A tile of queries then sees a few distant tiles of keys, more than a word of bits covers.
    """

    def __init__(self, cp: Any, dims: tuple[int, int], heads: tuple[int, int] = (4, 2)) -> None:
        generator = np.random.default_rng(list(dims))
        lengths = generator.integers(1, 800, 26)
        order = generator.permutation(len(lengths))
        ends = np.cumsum(lengths)
        self.queries = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        starts = np.empty_like(lengths)
        starts[order] = np.cumsum(lengths[order]) - lengths[order]
        self.keys = [slice(start, start + n) for start, n in zip(starts, lengths, strict=True)]
        length = int(ends[-1])
        self.case = Case(1, *heads, length, length, *dims, dtype="float16", mask="11qk")
        self.x = arrays(self.case, "q", "k", "v", "dout", "dlse")
        mask = np.zeros(self.case.shape("mask"), bool)
        for q, k in zip(self.queries, self.keys, strict=True):
            mask[:, :, q, k] = True
        self.given = {name: cp.asarray(array) for name, array in self.x.items()}
        self.mask = cp.asarray(mask)

    def results(self, algorithm: Any, deterministic: bool = False) -> tuple[Any, ...]:
        """The results of both passes."""
        x, options = self.given, {"algorithm": algorithm, "mask": self.mask}
        qkv = (x["q"], x["k"], x["v"])
        out, lse = cuflash.attention(*qkv, return_lse=True, **options)
        options |= {"dlse": x["dlse"], "deterministic": deterministic}
        return out, lse, *cuflash.attention_backward(x["dout"], *qkv, out, lse, **options)

    def check(self, results: tuple[Any, ...]) -> None:
        """Compare every sequence with its truth."""
        found = dict(zip(_RESULTS, (array.get() for array in results), strict=True))
        for q, k in zip(self.queries, self.keys, strict=True):
            length = q.stop - q.start
            case = replace(self.case, seqlen_q=length, seqlen_kv=length, mask="")
            own = {name: self._own(name, x, q, k) for name, x in self.x.items()}
            truth = judge(case, own)
            for name, array in found.items():
                compare(truth, name, self._own(name, array, q, k)).check()

    def _own(self, name: str, array: np.ndarray, q: slice, k: slice) -> np.ndarray:
        if name in ("lse", "dlse"):
            return array[:, :, q]
        return array[:, k if name in ("k", "v", "dk", "dv") else q]


@pytest.mark.parametrize(("algorithm", "dims", "ordered"), _FORMS)
def test_sequences_in_one(cp: Any, algorithm: str, dims: tuple[int, int], ordered: bool) -> None:
    skip_without(algorithm)
    documents = Documents(cp, dims)
    documents.check(documents.results(algorithm, ordered))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_any_order_of_events_gives_the_same_bits(cp: Any, hog: Hog, dims: tuple[int, int]) -> None:
    """All results but dq, with random waits and beside copies that take the bandwidth."""
    skip_without("fa3")
    documents = Documents(cp, dims)
    with jitter():
        expected = documents.results("fa3")
        documents.check(expected)
        for _ in range(20):
            hog.copy()
            for name, got, first in zip(_RESULTS, documents.results("fa3"), expected, strict=True):
                assert name == "dq" or bool((got == first).all()), name


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "fa3"])
@pytest.mark.parametrize("axes", ["11qk", "b11k", "1hq1"])
def test_a_graph_sees_another_mask(
    cp: Any, problem: dict[str, Any], algorithm: str, axes: str
) -> None:
    """Every run summarises the mask again."""
    skip_without(algorithm)
    sizes = dict(zip("bhqk", (2, 4, 300, 333), strict=True))
    rng = np.random.default_rng(3)
    shape = tuple(sizes.get(axis, 1) for axis in axes)
    first, second = (cp.asarray(rng.random(shape) < 0.5) for _ in range(2))
    options: dict[str, Any] = {"algorithm": algorithm}
    expected = [cuflash.attention(**problem, mask=mask, **options) for mask in (first, second)]
    assert bool((expected[0] != expected[1]).any())
    mask, out = first.copy(), cp.full_like(problem["q"], np.nan)
    prepared = cuflash.prepare(*problem.values(), mask=mask, **options)
    workspace = cp.full(prepared.workspace_bytes, 255, np.uint8)
    memory = {"out": out, "workspace": workspace}
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cuflash.attention(**problem, mask=mask, **options, **memory)
        graph = stream.end_capture()
        for new, result in zip((first, second), expected, strict=True):
            mask[...] = new
            out.fill(np.nan)
            graph.launch()
            stream.synchronize()
            assert bool((out == result).all())
    named = {**problem, "mask": second, "out": out}
    out.fill(np.nan)
    pointers = {name: array.data.ptr for name, array in named.items()}
    prepared.run(pointers, workspace=workspace.data.ptr)
    assert bool((out == expected[1]).all())


def test_a_mask_of_torch(cp: Any, problem: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    mask = cp.asarray(np.random.default_rng(3).random((300, 333)) < 0.5)
    expected = cuflash.attention(**problem, mask=mask)
    given = {name: torch.as_tensor(array, device="cuda") for name, array in problem.items()}
    out = cuflash.attention(**given, mask=torch.as_tensor(mask.get()).cuda())
    assert bool((cp.asarray(out) == expected).all())


def test_a_mask_of_jax(cp: Any, problem: dict[str, Any]) -> None:
    """A mask as an argument of a compiled function, in both passes."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no CUDA backend here")
    with problem["q"].device:  # JAX leaves the last device as the current one
        _check_a_mask_of_jax(cp, jax, problem)


def _check_a_mask_of_jax(cp: Any, jax: Any, problem: dict[str, Any]) -> None:
    from cuflash.jax import attention

    mask = np.random.default_rng(3).random((2, 1, 300, 333)) < 0.5
    out, lse = cuflash.attention(**problem, mask=cp.asarray(mask), return_lse=True)
    given, options = (out, *problem.values(), out, lse), {"mask": cp.asarray(mask)}
    grads = cuflash.attention_backward(*given, **options, deterministic=True)

    def both(mask: Any, *qkv: Any) -> Any:
        options = {"mask": mask, "deterministic_gradients": True}
        found, pull = jax.vjp(lambda *qkv: attention(*qkv, **options), *qkv)
        return found, *pull(found)

    qkv = (jax.numpy.asarray(array.get()) for array in problem.values())
    for got, expected in zip(jax.jit(both)(mask, *qkv), (out, *grads), strict=True):
        assert np.asarray(got).tobytes() == expected.get().tobytes()
