"""Adam-mini: one second moment per dense block of the Hessian (head, output neuron, token), not per element.

Source: Zhang et al., "Adam-mini: use fewer learning rates to gain more", arXiv 2406.16793.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gefen_jax import paths
from gefen_jax.baselines import leafwise
from gefen_jax.baselines.mini_rules import DEFAULT_RULES, Rule, Sharing, check_rules, sharing


class AdamMiniState(NamedTuple):
    """State of `scale_by_adam_mini`; each tree has one array per parameter.

    Attributes:
      count: int32 scalar, steps taken.
      mu: float32 first moments of the parameter's shape.
      nu: float32, the mean of the squared gradient over each block: the shape of the leaf's view, with 1 where an axis
        is shared (see `Rule`).
    """

    count: jax.Array  # type: ignore[assignment]
    mu: Any
    nu: Any


class _Leaf(NamedTuple):
    update: Any
    mu: Any
    nu: Any


def scale_by_adam_mini(
    b1: leafwise.Scalar = 0.9,
    b2: leafwise.Scalar = 0.999,
    eps: leafwise.Scalar = 1e-8,
    *,
    rules: tuple[Rule, ...] = DEFAULT_RULES,
    sizes: Mapping[str, int] | None = None,
    scanned: str | None = None,
) -> optax.GradientTransformation:
    """Rescales by Adam with a second moment shared within each block of parameters.

    Which elements share is decided by `Rule`, from the leaf's path and rank:

    ===================================  =============================  ====================================
    parameter (Flax layout)              shape                          one second moment per
    ===================================  =============================  ====================================
    query, key                           (in, head * head_dim)          head (``sizes`` must tell its size)
    query, key                           (in, head, head_dim)           head
    fused qkv                            (in, heads of q, k and v)      head (``sizes`` must tell its size)
    fused qkv                            (in, 3, head, head_dim)        head
    value                                (in, out), (in, head, dim)     output neuron
    attention output                     (in, out), (head, dim, out)    output neuron
    any other kernel, LoRA factors       (in, out)                      output neuron
    embedding, learned positions         (token, feature)               token
    output head                          (in, token)                    token
    convolution                          (height, width, in, out)       tensor
    norm scale                           any                            tensor
    bias                                 any                            element
    ===================================  =============================  ====================================

    A fused qkv kernel is divided by heads throughout, its value part too, because no axis tells them apart. A leaf
    that no rule covers is an error; put a rule of your own before the defaults.

    Args:
      b1, b2, eps: Adam's.
      rules: tried in order; the first whose pattern is found in the path decides.
      sizes: lengths of named axes that a rule splits, such as ``{"head_dim": 64}``.
      scanned: regular expression; leaves in whose path it is found have a leading axis of stacked layers, which
        keeps its own second moments; the rules see the rest of the shape.

    Returns:
      An Optax transformation with state `AdamMiniState`; updates have the gradient's dtype.

    Raises:
      ValueError: a hyperparameter out of range; a malformed rule; a leaf without a rule, of a rank its rule does not
        know or whose axis cannot be split; gradients that do not fit the state (all name the leaf or rule).
      TypeError: a complex or integer leaf (names it).

    Examples:
      >>> params = {"query": {"kernel": jnp.ones((8, 6))}, "mlp": {"kernel": jnp.ones((8, 6))}}
      >>> state = scale_by_adam_mini(sizes={"head_dim": 3}).init(params)
      >>> jax.tree.map(jnp.shape, state.nu)
      {'mlp': {'kernel': (1, 6)}, 'query': {'kernel': (1, 2, 1)}}
    """
    leafwise.check_hyperparameters(b1, b2, eps)
    leafwise.check_pattern("scanned", scanned)
    check_rules(rules)

    def shared(path: Any, leaf: jax.Array) -> Sharing:
        return sharing(paths.name(path), leaf.shape, rules, sizes, scanned)

    def update_leaf(path: Any, g: jax.Array, mu: jax.Array, nu: jax.Array, count: jax.Array) -> _Leaf:
        view, reduced, nu_shape = shared(path, g)
        if nu.shape != nu_shape:
            raise ValueError(
                f"leaf {paths.name(path)!r}: the rules give a second moment of shape {nu_shape}, the state has "
                f"{nu.shape}; update with the rules, sizes and scanned that init had"
            )
        g = jnp.asarray(g)
        g32 = g.astype(jnp.float32).reshape(view)
        square = jnp.sum(g32 * g32, axis=reduced, keepdims=True) / max(1, math.prod(view[i] for i in reduced))
        moment = b1 * mu.reshape(view) + (1 - b1) * g32
        nu = b2 * nu + (1 - b2) * square
        update = leafwise.adam_direction(moment, nu, count, b1, b2, eps)
        return _Leaf(update.reshape(g.shape).astype(g.dtype), moment.reshape(g.shape), nu)

    def init_fn(params: Any) -> AdamMiniState:
        leafwise.check_params(params)
        mu = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        nu = jax.tree.map_with_path(lambda path, p: jnp.zeros(shared(path, p).nu_shape, jnp.float32), params)
        return AdamMiniState(jnp.zeros([], jnp.int32), mu, nu)

    def update_fn(updates: Any, state: AdamMiniState, params: Any = None) -> tuple[Any, AdamMiniState]:
        del params
        leafwise.check_gradients(updates, state.mu, lambda g, mu: g.shape)
        count = optax.safe_increment(state.count)
        step = functools.partial(update_leaf, count=count)
        leaves = leafwise.unzip(jax.tree.map_with_path(step, updates, state.mu, state.nu), _Leaf)
        return leaves.update, AdamMiniState(count, leaves.mu, leaves.nu)

    return optax.GradientTransformation(init_fn, update_fn)


def adam_mini(
    learning_rate: optax.ScalarOrSchedule,
    b1: leafwise.Scalar = 0.9,
    b2: leafwise.Scalar = 0.999,
    eps: leafwise.Scalar = 1e-8,
    weight_decay: leafwise.Scalar = 1e-4,
    mask: Any | Callable[[Any], Any] | None = None,
    *,
    rules: tuple[Rule, ...] = DEFAULT_RULES,
    sizes: Mapping[str, int] | None = None,
    scanned: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam-mini with decoupled weight decay: a little over 4 bytes of state per parameter.

    Args:
      learning_rate: number, array or schedule.
      b1, b2, eps, rules, sizes, scanned: see `scale_by_adam_mini`.
      weight_decay, mask: see `optax.adamw`. (The PyTorch original leaves biases and norms undecayed by itself; here
        ``mask`` says so, as elsewhere in Optax.)

    Examples:
      >>> own = Rule(r"experts/w1$", "expert in out -> expert out")
      >>> tx = adam_mini(1e-3, rules=(own, *DEFAULT_RULES), sizes={"head_dim": 64})
      >>> jax.tree.map(jnp.shape, tx.init({"experts": {"w1": jnp.ones((4, 8, 6))}})[0].nu)
      {'experts': {'w1': (4, 1, 6)}}
    """
    return optax.chain(
        scale_by_adam_mini(b1, b2, eps, rules=rules, sizes=sizes, scanned=scanned),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
