"""Coming and going: a running `optax.adamw` state becomes a Gefen state, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from gefen_jax import moments, paths, state
from gefen_jax.plan import LeafPlan, Options
from gefen_jax.state import GefenState, decisions
from gefen_jax.update import Leaf


def from_adam_state(adam_state: Any, opt_state: Any) -> Any:
    """Continue an Adam run with Gefen: the moments of a running Adam state, in a Gefen state's structure.

    Args:
      adam_state: state of `optax.adamw`, `optax.adam` or `optax.scale_by_adam` in any nesting of wrappers.
      opt_state: the state to fill, from ``tx.init(params)`` of the new transformation (calibrated or not).

    Returns:
      ``opt_state`` with every Gefen state holding Adam's moments and step count. Each first moment is within half a
      codebook gap times its block's maximum of Adam's; second moments become means of their block, row and column.
      Everything else in ``opt_state`` is left alone.

    Raises:
      ValueError: if either holds no such state, or a parameter has no Adam moments of its shape.

    Examples:
      >>> import gefen_jax
      >>> params = {"w": jnp.ones((128, 256))}
      >>> adamw, gefen = optax.adamw(1e-3), gefen_jax.gefen(1e-3)
      >>> _, running = adamw.update(jax.tree.map(jnp.ones_like, params), adamw.init(params), params)
      >>> int(from_adam_state(running, gefen.init(params)).count)
      1
    """
    adams = _adam_states(adam_state)
    kept = {
        path: (mu, nu, adam.count)
        for adam in adams
        for (path, mu), nu in zip(paths.named_leaves(adam.mu), jax.tree.leaves(adam.nu))
    }

    def fill(node: Any) -> Any:
        if not isinstance(node, GefenState):
            return node
        leaves, count = [], node.count
        words = state.known_format(node, "from_adam_state")
        for (path, decision), leaf in zip(decisions(node, words).items(), node.leaves()):
            if path not in kept:
                raise ValueError(f"from_adam_state: the Adam state has no moments of {path!r}")
            mu, nu, count = kept[path]
            _check_shape("from_adam_state", path, mu, decision)
            leaves.append(leaf if 0 in mu.shape else _encode(mu, nu, leaf, decision, node.codebook, words))
        return node.with_leaves(leaves, count=jnp.asarray(count, jnp.int32))

    return _map_nodes(fill, opt_state, GefenState, "from_adam_state: no Gefen state in the state to fill")


def to_adam_state(opt_state: Any, adam_state: Any) -> Any:
    """Leave: the moments of a running Gefen state, in an Adam state's structure.

    Args:
      opt_state: an optimizer state that holds Gefen states.
      adam_state: the state to fill, from ``optax.adamw(...).init(params)`` in any nesting of wrappers.

    Returns:
      ``adam_state`` with decoded first moments, second moments (blocks and factors spread over their elements), and the
      step count, also in the states of schedules. Dtypes are those of ``adam_state``.

    Raises:
      ValueError: if either holds no such state, or a parameter has no Gefen moments of its shape.

    Examples:
      >>> import gefen_jax
      >>> params = {"w": jnp.ones((128, 256))}
      >>> adamw, gefen = optax.adamw(1e-3), gefen_jax.gefen(1e-3)
      >>> _, running = gefen.update(jax.tree.map(jnp.ones_like, params), gefen.init(params), params)
      >>> float(to_adam_state(running, adamw.init(params))[0].mu["w"][0, 0])
      0.1...
    """
    kept: dict[str, Any] = {}
    nodes = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_gefen) if _is_gefen(node)]
    if not nodes:
        raise ValueError("to_adam_state: no Gefen state in the running state")
    for node in nodes:
        words = state.known_format(node, "to_adam_state")
        for (path, decision), leaf in zip(decisions(node, words).items(), node.leaves()):
            kept[path] = (leaf, decision, node)

    def fill(node: Any) -> Any:
        if isinstance(node, optax.ScaleByScheduleState):
            return node._replace(count=nodes[0].count)
        if not isinstance(node, optax.ScaleByAdamState):
            return node
        mus, nus = [], []
        for (path, mu), nu in zip(paths.named_leaves(node.mu), jax.tree.leaves(node.nu)):
            if path not in kept:
                raise ValueError(f"to_adam_state: the Gefen state has no moments of {path!r}")
            leaf, decision, owner = kept[path]
            _check_shape("to_adam_state", path, mu, decision)
            m, v = (mu, nu) if 0 in mu.shape else moments.decode_moments(leaf, decision, owner.codebook)
            mus.append(jnp.asarray(m, mu.dtype))
            nus.append(jnp.asarray(v, nu.dtype))
        tree = jax.tree.structure(node.mu)
        return node._replace(count=nodes[0].count, mu=tree.unflatten(mus), nu=tree.unflatten(nus))

    kinds = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    _adam_states(adam_state)
    return _map_nodes(fill, adam_state, kinds, "to_adam_state: no Adam state in the state to fill")


def _encode(mu: Any, nu: Any, leaf: Leaf, decision: LeafPlan, words: jax.Array, format: state.Format) -> Leaf:
    statistic = leaf.nu.dtype if format.rule == "reference" else jnp.float32

    def encode(m: jax.Array, v: jax.Array) -> Leaf:
        m, v = m.astype(jnp.float32), v.astype(jnp.float32)
        encoding = Options(format.rule, bits=format.bits, codec=format.codec)
        return moments.encode_moments(m, v, decision, words, encoding, statistic)

    placed = None
    if isinstance(leaf.mu, jax.Array) and isinstance(leaf.mu.sharding, NamedSharding):
        placed = jax.tree.map(lambda x: x.sharding, leaf)
    return jax.jit(encode, out_shardings=placed)(mu, nu)


def _check_shape(who: str, path: str, mu: Any, decision: LeafPlan) -> None:
    if 0 not in mu.shape and tuple(mu.shape) != decision.shape:
        raise ValueError(f"{who}: the Adam moments of {path!r} have shape {tuple(mu.shape)}, Gefen's {decision.shape}")


def _is_gefen(node: Any) -> bool:
    return isinstance(node, GefenState)


def _adam_states(tree: Any) -> list[optax.ScaleByAdamState]:
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
    found = [node for node in jax.tree.leaves(tree, is_leaf=is_adam) if is_adam(node)]
    if not found:
        raise ValueError(
            "there is no Adam state (optax.ScaleByAdamState) in this optimizer state: pass that of optax.adamw, "
            "optax.adam or optax.scale_by_adam"
        )
    return found


def _map_nodes(function: Any, tree: Any, kinds: Any, missing: str) -> Any:
    """``function`` of every node of these kinds; an error if there is none."""
    nodes, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, kinds))
    if not any(isinstance(node, kinds) for node in nodes):
        raise ValueError(missing)
    return structure.unflatten([function(node) for node in nodes])
