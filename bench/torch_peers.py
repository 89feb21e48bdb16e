"""PyTorch's attention and FlashAttention-4 on the memory of CuPy arrays.

Tensors share memory with the arrays through DLPack, and the work runs on CuPy's current stream. A
timed backward pass is autograd's; its forward pass runs once, before it is timed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import ml_dtypes

from . import flex
from .cases import Case
from .inputs import Inputs
from .lengths import lengths_of

__all__ = ["BACKENDS", "Backend", "arrays", "direct", "to_cupy", "to_torch"]

HALF = ("float16", "bfloat16")
#: The most elements of a score matrix for PyTorch's plain backend, which keeps several.
MOST_SCORES = 2**28

#: A forward pass of (batch, seqlen, heads, head_dim) tensors and of a case's arrays by keyword; the
#: result has the same layout.
Forward = Callable[..., Any]


@dataclass(frozen=True)
class Backend:
    """One implementation that takes tensors."""

    name: str
    label: str
    version: Callable[[], str]
    takes: Callable[[Case], bool]
    forward_of: Callable[[Case], Forward]

    def supports(self, case: Case) -> bool:
        """Whether the backend computes the case; only our own calls are timed with given tiles."""
        masked = case.causal or case.window_size is not None or case.mask == "causal"
        aligned = not masked or case.seqlen_q == case.seqlen_kv
        return case.blocks is None and aligned and self.takes(case)

    def prepare(self, case: Case, inputs: Inputs) -> Callable[[], Any]:
        """The timed call: the output, or the gradients, as tensors."""
        return _prepare(self.forward_of, case, inputs)


def _torch() -> Any:
    return importlib.import_module("torch")


def to_torch(array: Any) -> Any:
    """A tensor on the memory of a CuPy (or NumPy) array."""
    torch = _torch()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(array)


def to_cupy(tensor: Any) -> Any:
    """A CuPy array on the memory of a tensor."""
    import cupy

    torch = _torch()
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return cupy.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    return cupy.from_dlpack(tensor)


def arrays(result: Any) -> Sequence[Any]:
    """The results of a call as CuPy arrays."""
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    return [to_cupy(tensor) for tensor in tensors]


@contextlib.contextmanager
def _same_stream(torch: Any) -> Iterator[None]:
    """Run PyTorch's work on CuPy's stream, where the spin and the events of the timer are."""
    import cupy

    pointer = cupy.cuda.get_current_stream().ptr
    # Address 0 is the legacy stream, which is PyTorch's default stream.
    stream = torch.cuda.ExternalStream(pointer) if pointer else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        yield


@contextlib.contextmanager
def _determinism(torch: Any, wanted: bool) -> Iterator[None]:
    """Ask PyTorch for deterministic algorithms, without its filling of uninitialized memory."""
    if not wanted:
        yield
        return
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _prepare(
    forward_of: Callable[[Case], Forward], case: Case, inputs: Inputs
) -> Callable[[], Any]:
    torch = _torch()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    backward = case.op == "backward"
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.features(case)}
    wanted = ("q", "k", "v", *case.gradients) if backward else ()
    with _same_stream(torch), _determinism(torch, case.deterministic):
        tensors = {n: to_torch(array).requires_grad_(n in wanted) for n, array in given.items()}
        dout, leaves = to_torch(inputs.matrices(case)[3]), [tensors[name] for name in wanted]
        forward = forward_of(case)
        out = forward(**tensors) if backward else None

    def call() -> Any:
        with _same_stream(torch), _determinism(torch, case.deterministic):
            if backward:
                return torch.autograd.grad(out, leaves, dout, retain_graph=True)
            with torch.no_grad():
                return forward(**tensors)

    return call


def _sdpa(name: str) -> Callable[[Case], Forward]:
    def forward(case: Case, q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None) -> Any:
        choice = importlib.import_module("torch.nn.attention")
        functional = importlib.import_module("torch.nn.functional")
        options: dict[str, Any] = {"is_causal": case.causal}
        options["enable_gqa"] = case.heads_q != case.heads_kv
        if case.dropout_p:
            options["dropout_p"] = case.dropout_p
        if bias is not None:
            options["attn_mask"] = bias.expand(case.batch, -1, -1, -1)
        if mask is not None:  # not expanded: PyTorch converts all its elements to numbers first
            options["attn_mask"] = mask
        with choice.sdpa_kernel(getattr(choice.SDPBackend, name)):
            out = functional.scaled_dot_product_attention(
                *(tensor.transpose(1, 2) for tensor in (q, k, v)), **options
            )
        return out.transpose(1, 2)

    return lambda case: functools.partial(forward, case)


def direct(name: str) -> tuple[Callable[..., Any], Callable[[], AbstractContextManager[Any]]]:
    """A backend's own function of q, k and v, and the context in which a program would call it.

    PyTorch's takes (batch, heads, seqlen, head_dim), FlashAttention-4's (batch,
    seqlen, heads, head_dim). Both run on PyTorch's current stream.
    """
    torch = _torch()
    if name == "fa4":
        return importlib.import_module("flash_attn.cute").flash_attn_func, torch.no_grad

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        choice = importlib.import_module("torch.nn.attention")
        backend = getattr(choice.SDPBackend, f"{name.upper()}_ATTENTION")
        with torch.no_grad(), choice.sdpa_kernel(backend):
            yield

    functional = importlib.import_module("torch.nn.functional")
    return functional.scaled_dot_product_attention, around


#: Keywords of FlashAttention-4 with the same names as in rows, besides ``causal``.
_FA4_KEYWORDS = ("deterministic", "window_size", "softcap")


def _flash_attention_4(case: Case) -> Forward:
    return functools.partial(_of_flash_attention_4, case)


def _of_flash_attention_4(
    case: Case, q: Any, k: Any, v: Any, sinks: Any = None, **offsets: Any
) -> Any:
    package = importlib.import_module("flash_attn.cute")
    if case.lengths is not None:
        return _packed_by_flash_attention_4(package, case, q, k, v, **offsets)
    function = package.flash_attn_func
    options = {n: value for n, value in case.peer_options.items() if n in _FA4_KEYWORDS}
    if sinks is not None:
        options["learnable_sink"] = sinks
    result = function(q, k, v, causal=case.causal, **options)
    return result[0] if isinstance(result, tuple) else result


def _packed_by_flash_attention_4(
    package: Any, case: Case, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any
) -> Any:
    """Packed sequences; unlike ours, this call needs the longest length on the host."""
    longest = max(lengths_of(case.lengths or ""))
    result = package.flash_attn_varlen_func(
        *(tensor[0] for tensor in (q, k, v)),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_kv,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=case.causal,
    )
    return result[0] if isinstance(result, tuple) else result


def _torch_version() -> str:
    torch = _torch()
    if not torch.cuda.is_available():
        raise RuntimeError("this PyTorch has no usable CUDA device")
    return f"torch {torch.__version__}"


def _cudnn_version() -> str:
    return f"{_torch_version()}, cudnn {_torch().backends.cudnn.version()}"


def _fa4_version() -> str:
    _torch_version()
    package = importlib.import_module("flash_attn.cute")
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:  # unpacked by hand
        return str(getattr(package, "__version__", "unknown"))


def _half(case: Case) -> bool:
    return case.dtype in HALF


def _plain(case: Case) -> bool:
    return set(case.features) <= {"dropout"}


def _in_flash_attention_4(features: tuple[str, ...]) -> bool:
    one = features == ("packed_lengths",)
    return one or {"window", "softcap", "sinks"}.issuperset(features)


def _biased(case: Case) -> bool:
    """Whether the case has no feature, or only dropout, or only a bias or a mask and no causal."""
    given = {feature for feature in case.features if feature != "dbias"}
    alone = given in (set(), {"bias"}, {"mask"}) and not (given and case.causal)
    return alone or given == {"dropout"}


BACKENDS = (
    Backend(
        "flash",
        "torch flash",
        _torch_version,
        lambda case: _half(case) and _plain(case),
        _sdpa("FLASH_ATTENTION"),
    ),
    Backend(
        "cudnn",
        "torch cudnn",
        _cudnn_version,
        lambda case: _half(case) and _biased(case) and not case.dbias,
        _sdpa("CUDNN_ATTENTION"),
    ),
    Backend(
        "efficient",
        "torch efficient",
        _torch_version,
        lambda case: case.dtype != "float64" and _biased(case),
        _sdpa("EFFICIENT_ATTENTION"),
    ),
    Backend(
        "math",
        "torch math",
        _torch_version,
        lambda case: case.scores <= MOST_SCORES and _biased(case),
        _sdpa("MATH"),
    ),
    Backend(
        "fa4",
        "flash-attn-4",
        _fa4_version,
        lambda case: _half(case) and _in_flash_attention_4(case.features),
        _flash_attention_4,
    ),
    Backend("flex", "torch flex", _torch_version, flex.takes, flex.flex_attention),
)
