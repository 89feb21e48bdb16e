"""Attention between two kernels of Numba, on the same memory.

You learn that arrays of Numba need no copy. On the CPU functions of `numba.njit` and cuflash work
on the same NumPy arrays. On a GPU cuflash takes the device arrays of `numba.cuda` by the CUDA
array interface, and writes to one that is given as `out`.

The kernel before attention rotates queries and keys by their positions (Su et al., "RoFormer",
2021). The one after it divides every row of the output by its length. Both are written once, as
Python for one row, and compiled twice.

    python examples/numba_arrays.py                 # NumPy and numba.njit, some seconds
    python examples/numba_arrays.py --arrays cuda   # numba.cuda, on a GPU
"""

import argparse
import math
import sys

import numba
import numpy as np

import cuflash

#: (batch, seqlen, heads, head_dim)
SIZES = {"numpy": (2, 200, 4, 32), "cuda": (4, 4096, 8, 64)}


def rotate_row(row, position):
    """Turn pair i, the elements i and half + i, by an angle that grows with the position."""
    half = len(row) // 2
    for i in range(half):
        angle = position * 10000.0 ** (-i / half)
        x, y = row[i], row[half + i]
        row[i] = x * math.cos(angle) - y * math.sin(angle)
        row[half + i] = x * math.sin(angle) + y * math.cos(angle)


def normalize_row(row, position):
    """Divide by the length."""
    squares = 0.0
    for i in range(len(row)):
        squares += row[i] * row[i]
    for i in range(len(row)):
        row[i] /= math.sqrt(squares)


def for_rows_on_the_cpu(function):
    """A function that changes every row of a NumPy array, (batch, seqlen, heads, head_dim)."""
    of_row = numba.njit(function)

    @numba.njit
    def loop(x):
        batch, seqlen, heads, _ = x.shape
        for b in range(batch):
            for position in range(seqlen):
                for h in range(heads):
                    of_row(x[b, position, h], position)

    return loop


def cuda_target():
    """`numba.cuda`; Numba loads what its kernels need when it compiles the first one."""
    try:
        from numba import cuda

        if not cuda.is_available():
            sys.exit("numba.cuda finds no CUDA device")
        cuda.jit("void(int32)")(lambda _: None)
    except (ImportError, AttributeError) as error:  # what an old one asks of a newer NumPy
        sys.exit(
            f"Numba's CUDA target cannot be loaded ({type(error).__name__}: {error}); Numba is "
            f"{numba.__version__}, NumPy {np.__version__}: install versions that fit"
        )
    return cuda


def for_rows_on_the_gpu(function):
    """A function that changes every row of a device array; a thread takes a row."""
    from numba import cuda

    of_row = cuda.jit(function, device=True)

    @cuda.jit
    def kernel(x):
        batch, seqlen, heads, _ = x.shape
        row = cuda.grid(1)
        if row < batch * seqlen * heads:
            position = row // heads % seqlen
            of_row(x[row // (heads * seqlen), position, row % heads], position)

    def launch(x):
        rows = math.prod(x.shape[:3])
        kernel[-(-rows // 128), 128](x)

    return launch


def address(x):
    """Where an array begins, in host or in device memory."""
    interface = "__array_interface__" if isinstance(x, np.ndarray) else "__cuda_array_interface__"
    return getattr(x, interface)["data"][0]


def expected(q, k, v):
    """The same in float64 with whole matrices, by NumPy and `cuflash.reference`."""
    half = q.shape[-1] // 2
    angles = np.arange(q.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
    turns = np.exp(1j * angles)[:, None]
    q, k = ((x[..., :half] + 1j * x[..., half:]) * turns for x in (q, k))
    q, k = (np.concatenate([x.real, x.imag], axis=-1) for x in (q, k))
    out, _ = cuflash.reference.attention(q, k, v.astype(float), causal=True)
    return out / np.linalg.norm(out, axis=-1, keepdims=True)


def main(argv=None):
    """Run the three, and return the error and whether anything was copied."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--arrays", choices=SIZES, default="numpy")
    arrays = parser.parse_args(argv).arrays
    rng = np.random.default_rng(0)
    host = [rng.standard_normal(SIZES[arrays], np.float32) for _ in range(3)]
    if arrays == "numpy":
        for_rows, copied = for_rows_on_the_cpu, np.copy
    else:
        for_rows, copied = for_rows_on_the_gpu, cuda_target().to_device
    q, k, v, out = (copied(x) for x in (*host, np.zeros_like(host[0])))
    before = address(out)

    rotate, normalize = for_rows(rotate_row), for_rows(normalize_row)
    rotate(q)
    rotate(k)
    returned = cuflash.attention(q, k, v, causal=True, out=out)
    normalize(out)

    batch = slice(0, 1)  # the reference holds whole matrices, so it gets one text
    found = out if isinstance(out, np.ndarray) else out.copy_to_host()
    error = np.abs(found[batch] - expected(*(x[batch] for x in host))).max()
    same = returned is out and address(out) == before
    print(f"{type(q).__module__}.{type(q).__name__} of shape {q.shape}: rotate, attend, normalize")
    print(f"largest error beside float64: {error:.0e}")
    print(f"the output is the array that was given: {same}")
    return {"error": float(error), "same": same}


if __name__ == "__main__":
    main()
