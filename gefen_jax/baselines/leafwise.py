"""What every baseline shares: Adam's direction, named leaves, and the errors about them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from gefen_jax import paths
from gefen_jax.update import Scalar, bias_correction

Leafwise = TypeVar("Leafwise", bound=tuple[Any, ...])


def adam_direction(mu: jax.Array, nu: jax.Array, count: jax.Array, b1: Scalar, b2: Scalar, eps: Scalar) -> jax.Array:
    """Bias-corrected ``mu / (sqrt(nu) + eps)`` in float32 (Kingma and Ba, arXiv 1412.6980, Algorithm 1).

    Args:
      mu: float32, first moment after this step's gradient.
      nu: float32, second moment, of a shape that broadcasts with ``mu``.
      count: int32 scalar, steps taken, this one included.
      b1, b2, eps: Adam's.
    """
    mu_hat = mu / bias_correction(b1, count)
    nu_hat = nu / bias_correction(b2, count)
    return mu_hat / (jnp.sqrt(nu_hat) + eps)


def unzip(results: Any, kind: type[Leafwise]) -> Leafwise:
    """Turns a tree of ``kind`` tuples into one ``kind`` of trees."""

    def field(i: int) -> Any:
        return jax.tree.map(lambda result: result[i], results, is_leaf=lambda x: isinstance(x, kind))

    return kind(*(field(i) for i in range(len(kind._fields))))  # type: ignore[attr-defined]


def check_hyperparameters(b1: Scalar, b2: Scalar, eps: Scalar) -> None:
    """Refuses values outside their range, and dtypes in which they lose their meaning.

    Raises:
      ValueError: for a number out of range (numbers only: arrays may be traced), or a bfloat16 or float16 array,
        in which ``b2 = 0.999`` is 1 and ``eps = 1e-8`` is 0.
    """
    for name, value in (("b1", b1), ("b2", b2), ("eps", eps)):
        dtype = getattr(value, "dtype", None)
        if dtype is not None and jnp.finfo(dtype).bits < 32:
            raise ValueError(
                f"{name} arrived as {dtype}, which is too coarse for it; "
                "with optax.inject_hyperparams pass hyperparam_dtype=jnp.float32"
            )
        if isinstance(value, int | float):
            if name == "eps" and not value > 0:
                raise ValueError(f"eps must be above 0 (a zero gradient divides by it), found {value}")
            if name != "eps" and not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, found {value}")


def check_params(params: Any) -> None:
    """Refuses leaves that are not real floating-point arrays.

    Raises:
      TypeError: names the first such leaf.
    """
    for path, leaf in paths.named_leaves(params):
        _check_floating(path, leaf, "parameter")


def check_gradients(updates: Any, mu: Any, shape_of: Callable[[jax.Array, jax.Array], tuple[int, ...]]) -> None:
    """Refuses gradients that do not fit the state.

    Args:
      updates: the gradients.
      mu: the state's first moments, one array per parameter.
      shape_of: of a gradient and its moment, the shape that the moment ought to have.

    Raises:
      ValueError: a gradient is missing, ``None``, new, or of another shape.
      TypeError: a gradient is complex or an integer.
    """
    found = jax.tree.leaves_with_path(updates, is_leaf=lambda leaf: leaf is None)
    gradients = {paths.name(path): gradient for path, gradient in found}
    moments = dict(paths.named_leaves(mu))
    for path, moment in moments.items():
        gradient = gradients.get(path)
        if gradient is None:
            raise ValueError(
                f"leaf {path!r} has optimizer state but no gradient; give zeros, "
                "or leave frozen parameters out with optax.masked or optax.partition"
            )
        _check_floating(path, gradient, "gradient")
        if shape_of(gradient, moment) != moment.shape:
            raise ValueError(
                f"leaf {path!r}: a gradient of shape {gradient.shape} does not fit the state, whose first moment "
                f"has shape {moment.shape} ({moment.dtype}); was it made for other parameters?"
            )
    for path, gradient in gradients.items():
        if gradient is not None and path not in moments:
            raise ValueError(f"leaf {path!r} has a gradient but no optimizer state; call init with it")


def check_min_size(min_size: int | None, default: int = 4096) -> int:
    """``min_size`` or its default.

    Raises:
      TypeError: it is not an ``int``, as under `optax.inject_hyperparams`, which makes arrays of numbers.
    """
    if min_size is None:
        return default
    if not isinstance(min_size, int):
        raise TypeError(
            f"min_size must be an int, found {type(min_size).__name__}; "
            'with optax.inject_hyperparams pass static_args=("min_size",)'
        )
    return min_size


def check_pattern(name: str, pattern: str | None) -> None:
    """Refuses what is neither ``None`` nor a regular expression.

    Raises:
      TypeError, ValueError: name the argument.
    """
    if pattern is None:
        return
    if not isinstance(pattern, str):
        raise TypeError(f"{name} must be a regular expression searched in leaf paths, found {type(pattern).__name__}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name} {pattern!r} is not a regular expression: {error}") from error


def _check_floating(path: str, leaf: Any, what: str) -> None:
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        raise TypeError(f"leaf {path!r}: the {what} must be real floating point, found {jnp.result_type(leaf)}")
