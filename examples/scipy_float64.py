"""Float64 attention inside an optimisation by SciPy.

You learn to give `scipy.optimize.minimize` a function and its exact gradient that go through
attention. Kernel regression is attention: the prediction at a point is the mean of known values,
weighted by exp(-|distance|^2 / 2) and divided by the sum of the weights. Here L-BFGS learns the
matrix W in which distances are measured (Weinberger and Tesauro, "Metric Learning for Kernel
Regression", 2007). The values depend on one direction of six, and W finds it.

L-BFGS needs to see ever smaller gradients. In float64 it can go on until they all but vanish;
the same problem in float32 has to stop much earlier.

    python examples/scipy_float64.py                 # NumPy, some seconds
    python examples/scipy_float64.py --arrays cupy   # more points, on a GPU
"""

import argparse
import importlib

import numpy as np
from scipy.optimize import check_grad, minimize

import cuflash

POINTS = {"numpy": 300, "cupy": 8192}
DIRECTION = np.array([2.0, 1.0, 0.0, 0.0, -1.0, 0.0]) / 6**0.5


class KernelRegression:
    """Mean squared error at some points, predicted from others, as a function of W."""

    def __init__(self, points, dtype, xp):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((2 * points, len(DIRECTION)))
        y = np.sin(2 * x @ DIRECTION)[:, None] + 0.1 * rng.standard_normal((2 * points, 1))
        self.xp, self.dtype = xp, dtype
        self.asked, self.known = xp.split(xp.asarray(x, dtype), 2)
        self.truth, self.values = xp.split(xp.asarray(y, dtype), 2)

    def __call__(self, w):
        """Error and gradient, in the float64 that SciPy wants."""
        xp = self.xp
        w = xp.asarray(w.reshape(len(DIRECTION), -1), self.dtype)
        a, b = self.asked @ w, self.known @ w
        # -|a - b|^2 / 2 is a b^T - |b|^2 / 2 and a number for each row, which softmax ignores. So
        # a further column, 1 in q and -|b|^2 / 2 in k, makes the scores.
        q = xp.concatenate([a, xp.ones_like(a[:, :1])], axis=1)
        k = xp.concatenate([b, -(b * b).sum(axis=1, keepdims=True) / 2], axis=1)
        predicted, pullback = cuflash.attention_vjp(q, k, self.values, scale=1.0, wrt=("q", "k"))
        error = predicted - self.truth
        dq, dk = pullback(2 * error / len(error))
        dw = self.asked.T @ dq[:, :-1] + self.known.T @ (dk[:, :-1] - dk[:, -1:] * b)
        dw = dw if xp is np else dw.get()
        return float((error * error).mean()), dw.ravel().astype(np.float64)


def main(argv=None):
    """Check the gradient, optimise in both precisions, and return what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--arrays", choices=POINTS, default="numpy")
    arrays = parser.parse_args(argv).arrays
    xp, start = importlib.import_module(arrays), np.eye(len(DIRECTION)).ravel()
    loss = KernelRegression(POINTS[arrays], "float64", xp)
    error = check_grad(lambda w: loss(w)[0], lambda w: loss(w)[1], start)
    print(f"scipy.optimize.check_grad: {error:.0e}")
    found = {"gradient_error": float(error), "before": loss(start)[0]}
    print(f"mean squared error where W is the identity: {found['before']:.4f}")
    for dtype in ("float64", "float32"):
        loss = KernelRegression(POINTS[arrays], dtype, xp)
        options = {"gtol": 1e-9, "ftol": 0, "maxiter": 1000}
        best = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
        slope = float(np.abs(best.jac).max())
        directions, sizes, _ = np.linalg.svd(best.x.reshape(len(DIRECTION), -1))
        aligned = float(abs(directions[:, 0] @ DIRECTION))
        print(f"{dtype}: error {best.fun:.4f}, largest gradient {slope:.0e}, {best.nit} iterations")
        print(f"  sizes of W: {np.round(sizes, 2)}; cosine with the true direction {aligned:.4f}")
        found[dtype] = {"error": best.fun, "gradient": slope, "aligned": aligned}
    return found


if __name__ == "__main__":
    main()
