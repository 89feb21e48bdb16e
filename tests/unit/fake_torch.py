"""A fake PyTorch that computes nothing and records its calls, in order."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

__all__ = ["FakeTensor", "FakeTorch", "fake_torch"]


class FakeTensor:
    """A tensor in the memory of a NumPy array."""

    def __init__(self, array: Any, dtype: str | None = None) -> None:
        self.array, self.dtype, self.requires_grad = array, dtype or array.dtype.name, False

    def view(self, dtype: str) -> FakeTensor:
        return FakeTensor(self.array, dtype)

    def transpose(self, one: int, two: int) -> FakeTensor:
        return FakeTensor(self.array.swapaxes(one, two), self.dtype)

    def expand(self, *sizes: int) -> FakeTensor:
        pairs = zip(sizes, self.array.shape, strict=True)
        shape = [have if size < 0 else size for size, have in pairs]
        return FakeTensor(np.broadcast_to(self.array, shape), self.dtype)

    def __getitem__(self, place: Any) -> Any:
        return self.array[place]

    def requires_grad_(self, wanted: bool) -> FakeTensor:
        self.requires_grad = wanted
        return self

    def detach(self) -> FakeTensor:
        return FakeTensor(self.array, self.dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class FakeTorch(ModuleType):
    """The fake module ``torch``, with its switches."""

    int16, bfloat16, __version__ = "int16", "bfloat16", "9.9"

    def __init__(self) -> None:
        super().__init__("torch")
        self.calls: list[tuple[str, Any]] = []
        self.state = {"stream": "none", "deterministic": False, "backend": None, "grad": True}
        self.backends = SimpleNamespace(
            cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)),
            cudnn=SimpleNamespace(version=lambda: 91900),
        )
        self.utils = SimpleNamespace(deterministic=SimpleNamespace(fill_uninitialized_memory=True))
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            ExternalStream=lambda pointer: f"external {pointer}",
            default_stream=lambda: "default",
            stream=lambda stream: self._with(stream=stream),
        )
        self.compiler = SimpleNamespace(donated_buffer=True)
        self.autograd = SimpleNamespace(grad=self._grad)

    @contextlib.contextmanager
    def _with(self, **changes: Any) -> Iterator[None]:
        before = dict(self.state)
        self.state |= changes
        try:
            yield
        finally:
            self.state |= {name: before[name] for name in changes}

    def from_dlpack(self, array: Any) -> FakeTensor:
        return FakeTensor(np.from_dlpack(array))

    def no_grad(self) -> Any:
        return self._with(grad=False)

    def set_float32_matmul_precision(self, precision: str) -> None:
        self.state["precision"] = precision

    def use_deterministic_algorithms(self, wanted: bool) -> None:
        fills = self.utils.deterministic.fill_uninitialized_memory
        self.state["deterministic"] = wanted
        self.state["fills"] = wanted and fills

    def scaled_dot_product_attention(self, *tensors: FakeTensor, **options: Any) -> FakeTensor:
        shapes = [tensor.array.shape for tensor in tensors]
        self.calls.append(("sdpa", {"options": options, "shapes": shapes, **self.state}))
        return tensors[2]

    def flash_attn_func(self, *tensors: FakeTensor, **options: Any) -> Any:
        shapes = [tensor.array.shape for tensor in tensors]
        self.calls.append(("fa4", {"options": options, "shapes": shapes, **self.state}))
        return tensors[2], "lse"

    def compile(self, function: Any, **options: Any) -> Any:
        self.calls.append(("compile", {**options, **self.state}))
        return function

    def create_block_mask(self, visible: Any, *sizes: Any) -> Any:
        return "mask", visible(0, 0, 3, 3), visible(0, 0, 2, 3), sizes

    def flex_attention(self, *tensors: FakeTensor, **options: Any) -> FakeTensor:
        shapes = [tensor.array.shape for tensor in tensors]
        self.calls.append(("flex", {"options": options, "shapes": shapes, **self.state}))
        return tensors[2]

    def _grad(self, out: Any, inputs: Any, dout: Any, **options: Any) -> Any:
        wanted = [tensor.requires_grad for tensor in inputs]
        self.calls.append(("grad", {"options": options, "wanted": wanted, **self.state}))
        return inputs


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """Replaces torch and flash_attn, with CuPy's current stream at address 7."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    fake = FakeTorch()
    names = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    attention = SimpleNamespace(
        SDPBackend=SimpleNamespace(**{name: name for name in names}),
        sdpa_kernel=lambda backend: fake._with(backend=backend),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setitem(sys.modules, "torch.nn", ModuleType("torch.nn"))
    monkeypatch.setitem(sys.modules, "torch.nn.attention", attention)
    monkeypatch.setitem(sys.modules, "torch.nn.functional", fake)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.flex_attention", fake)
    dynamo = SimpleNamespace(reset=lambda: fake.calls.append(("reset", {})))
    monkeypatch.setitem(sys.modules, "torch._dynamo", dynamo)
    monkeypatch.setitem(sys.modules, "torch._functorch.config", fake.compiler)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=7))
    monkeypatch.setattr(cupy, "from_dlpack", np.from_dlpack)
    return fake
