"""Gradients on the host, for the modules that learn from them."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

CHUNK = 1 << 18
"""Elements converted at a time: small beside any leaf worth learning from, large beside a loop's overhead."""


def as_floating(grad: npt.ArrayLike) -> npt.NDArray[np.generic]:
    """``grad`` as a NumPy array.

    Raises:
      TypeError: it is not real floating point (``ml_dtypes`` count as such).
    """
    array = np.asarray(grad)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"a gradient must be real floating point, found {array.dtype}")
    return array


def chunks(grad: npt.NDArray[np.generic], size: int = CHUNK) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Parts of the C-ordered gradient as (first flat index, fresh float32 vector of at most ``size`` elements).

    Only an array that is not C-contiguous is copied as a whole, in its own dtype.
    """
    flat = grad.reshape(-1)
    for start in range(0, flat.size, size):
        with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite, which the callers judge
            yield start, flat[start : start + size].astype(np.float32)
