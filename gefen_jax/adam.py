"""Coming and going: a running `optax.adamw` state becomes a Gefen state, and back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from gefen_jax import moments, paths, state
from gefen_jax.plan import LeafPlan, Options
from gefen_jax.sharding import automatic, fit_spec
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
      Optax's schedules go on at that step count too. Everything else in ``opt_state`` is left alone: gradients
      accumulated by `optax.MultiSteps` are not carried over.

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

    def fill(node: GefenState) -> GefenState:
        leaves, count = [], node.count
        words = state.known_format(node, "from_adam_state")
        for (path, decision), leaf in zip(decisions(node, words).items(), node.leaves()):
            if path not in kept:
                raise ValueError(f"from_adam_state: the Adam state has no moments of {path!r}")
            mu, nu, count = kept[path]
            _check_shape("from_adam_state", path, mu, decision)
            leaves.append(leaf if 0 in mu.shape else _encode(mu, nu, leaf, decision, node.codebook, words))
        return node.with_leaves(leaves, count=_counted(count))

    if not state.gefen_states(opt_state):
        raise ValueError("from_adam_state: no Gefen state in the state to fill")
    return _fill(opt_state, GefenState, fill, adams[0].count)


def to_adam_state(opt_state: Any, adam_state: Any) -> Any:
    """Leave: the moments of a running Gefen state, in an Adam state's structure.

    Args:
      opt_state: an optimizer state that holds Gefen states.
      adam_state: the state to fill, from ``optax.adamw(...).init(params)`` in any nesting of wrappers.

    Returns:
      ``adam_state`` with decoded first moments, second moments (blocks and factors spread over their elements), and the
      step count, also in Optax's schedules. Dtypes and placement are those of ``adam_state``.

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
    nodes = state.gefen_states(opt_state)
    if not nodes:
        raise ValueError("to_adam_state: no Gefen state in the running state")
    for node in nodes:
        words = state.known_format(node, "to_adam_state")
        for (path, decision), leaf in zip(decisions(node, words).items(), node.leaves()):
            kept[path] = (leaf, decision, node)

    def fill(node: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        mus, nus, count = [], [], node.count
        for (path, mu), nu in zip(paths.named_leaves(node.mu), jax.tree.leaves(node.nu)):
            if path not in kept:
                raise ValueError(f"to_adam_state: the Gefen state has no moments of {path!r}")
            leaf, decision, owner = kept[path]
            count = owner.count
            _check_shape("to_adam_state", path, mu, decision)
            m, v = (mu, nu) if 0 in mu.shape else _decode(leaf, decision, owner.codebook, mu, nu)
            mus.append(m)
            nus.append(v)
        tree = jax.tree.structure(node.mu)
        return node._replace(count=_counted(count), mu=jax.tree.unflatten(tree, mus), nu=jax.tree.unflatten(tree, nus))

    _adam_states(adam_state)
    return _fill(adam_state, optax.ScaleByAdamState, fill, nodes[0].count)


def _encode(mu: Any, nu: Any, leaf: Leaf, decision: LeafPlan, words: jax.Array, format: state.Format) -> Leaf:
    statistic = leaf.nu.dtype if format.rule == "reference" else jnp.dtype(jnp.float32)
    encoding = Options(format.rule, bits=format.bits, codec=format.codec)
    return _encoder(decision, encoding, statistic, _mesh_sharding(leaf.mu) or _mesh_sharding(mu))(mu, nu, words)


@functools.lru_cache(maxsize=1024)
def _encoder(decision: LeafPlan, encoding: Options, statistic: Any, home: NamedSharding | None) -> Any:
    """Adam's moments of a leaf as Gefen's, compiled once for all leaves of a kind."""

    def encode(m: jax.Array, v: jax.Array, words: jax.Array) -> Leaf:
        m, v = m.astype(jnp.float32), v.astype(jnp.float32)
        return moments.encode_moments(m, v, decision, words, encoding, statistic)

    if home is None:
        return jax.jit(encode)
    placed = Leaf(*(fit_spec(x, home) for x in (state.mu_shape(decision, encoding.bits), *decision.statistics())))  # type: ignore[arg-type]
    return jax.jit(functools.partial(automatic, encode, out_sharding=placed), out_shardings=placed)


def _decode(leaf: Leaf, decision: LeafPlan, words: jax.Array, mu: Any, nu: Any) -> tuple[jax.Array, jax.Array]:
    home = _mesh_sharding(mu) or _mesh_sharding(leaf.mu)
    return _decoder(decision, jnp.dtype(mu.dtype), jnp.dtype(nu.dtype), home)(leaf, words)


@functools.lru_cache(maxsize=1024)
def _decoder(decision: LeafPlan, mu: Any, nu: Any, home: NamedSharding | None) -> Any:
    """Gefen's moments of a leaf as Adam's in these dtypes, compiled once for all leaves of a kind."""

    def decode(leaf: Leaf, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        m, v = moments.decode_moments(leaf, decision, words)
        return m.astype(mu), v.astype(nu)

    if home is None:
        return jax.jit(decode)
    placed = (fit_spec(decision.shape, home),) * 2
    return jax.jit(functools.partial(automatic, decode, out_sharding=placed), out_shardings=placed)


def _mesh_sharding(x: Any) -> NamedSharding | None:
    """Where ``x`` lies on a mesh; None for other arrays, of NumPy too."""
    placed = getattr(x, "sharding", None)
    return placed if isinstance(placed, NamedSharding) else None


def _counted(count: Any) -> jax.Array:
    """A copy of a step count: states that share a buffer cannot both be donated."""
    return jnp.array(count, jnp.int32, copy=True)


def _check_shape(who: str, path: str, mu: Any, decision: LeafPlan) -> None:
    if 0 not in mu.shape and tuple(mu.shape) != decision.shape:
        raise ValueError(f"{who}: the Adam moments of {path!r} have shape {tuple(mu.shape)}, Gefen's {decision.shape}")


def _adam_states(tree: Any) -> list[optax.ScaleByAdamState]:
    is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
    found = [node for node in jax.tree.leaves(tree, is_leaf=is_adam) if is_adam(node)]
    if not found:
        raise ValueError(
            "there is no Adam state (optax.ScaleByAdamState) in this optimizer state: pass that of optax.adamw, "
            "optax.adam or optax.scale_by_adam"
        )
    return found


def _fill(tree: Any, kind: type, fill: Any, count: Any) -> Any:
    """``tree`` with its nodes of one kind filled, and the step counts of Optax's schedules set."""

    def visit(node: Any) -> Any:
        if isinstance(node, kind):
            return fill(node)
        if _is_schedule(node):
            return node._replace(count=_counted(count))
        if _is_injected(node):
            counts = jax.tree.map(walk, node.hyperparams_states, is_leaf=_is_schedule)
            return node._replace(count=_counted(count), hyperparams_states=counts, inner_state=walk(node.inner_state))
        return node

    def walk(part: Any) -> Any:
        of_interest = lambda node: isinstance(node, kind) or _is_schedule(node) or _is_injected(node)  # noqa: E731
        return jax.tree.map(visit, part, is_leaf=of_interest)

    return walk(tree)


def _is_schedule(node: Any) -> bool:
    """Whether a state is a step count and nothing else."""
    return getattr(node, "_fields", None) == ("count",)


def _is_injected(node: Any) -> bool:
    """Whether a state is that of `optax.inject_hyperparams`."""
    return {"count", "hyperparams_states", "inner_state"} <= set(getattr(node, "_fields", ()))
