"""What a plan does to a running optimizer state: `calibrate`, and `plan_from_state` for the way back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gefen_jax import checks, learn, moments, paths, state
from gefen_jax.choices import WHERE, check_choice
from gefen_jax.learn import Progress, Request
from gefen_jax.plan import LeafPlan, Options, Plan
from gefen_jax.reasons import EMPTY
from gefen_jax.sharding import automatic, fit_spec
from gefen_jax.state import Format, GefenState, decisions, leaf_plan
from gefen_jax.update import Leaf


def calibrate(opt_state: Any, grads_or_plan: Any, *, where: str = "auto", progress: Progress | None = None) -> Any:
    """Give a state the structure and the codebook that the first gradients support.

    Call it once, outside jit, on what ``tx.init(params)`` returned. Every `GefenState` in any nesting of Optax wrappers
    is replaced, all by one common plan and codebook. A state that has already taken steps keeps them: its moments are
    decoded and encoded anew under the new structure, one leaf at a time. With the plan that is already in force
    nothing changes, bit for bit.

    Args:
      opt_state: an optimizer state that holds at least one `GefenState`.
      grads_or_plan: the gradients of one step, as `learn_plan` takes them (or a list of such trees), or a `Plan`.
      where: whether gradients are read on the "host" or on their "device", as in `learn_plan`.
      progress: called after each leaf with (path, leaves done, leaves in all).

    Returns:
      The optimizer state with its Gefen states replaced. Their shapes change; structure and dtypes do not.

    Raises:
      ValueError: if there is no Gefen state, a gradient or a planned leaf is missing, the plan has another rule or
        number of bits, or every gradient is zero or non-finite. Nothing is changed then.
      TypeError: inside jit, or for gradients that are not real floating-point arrays.

    Examples:
      >>> import gefen_jax, optax
      >>> params = {"kernel": jnp.zeros((256, 512))}
      >>> tx = optax.chain(optax.clip_by_global_norm(1.0), gefen_jax.gefen(1e-3))
      >>> grads = {"kernel": jax.random.normal(jax.random.key(0), (256, 512))}
      >>> opt_state = calibrate(tx.init(params), grads)
      >>> plan_from_state(opt_state).leaves["kernel"].mu
      ('tile', (1, 256))
    """
    check_choice("where", where, WHERE)
    nodes, tree = jax.tree.flatten(opt_state, is_leaf=state.is_gefen)
    found = [(i, node) for i, node in enumerate(nodes) if state.is_gefen(node)]
    if not found:
        raise ValueError(
            "calibrate: there is no Gefen state in this optimizer state: pass what tx.init(params) returned, for a tx "
            "made with gefen(...) or scale_by_gefen(...)"
        )
    formats = [state.known_format(node, "calibrate") for _, node in found]
    if isinstance(grads_or_plan, Plan):
        plan = grads_or_plan
    else:
        plan = _learn([node for _, node in found], formats, grads_or_plan, where, progress)
    _check_plan_fits(plan, [node for _, node in found], formats)
    for (i, node), words in zip(found, formats):
        nodes[i] = _replan(node, words, plan)
    return jax.tree.unflatten(tree, nodes)


def plan_from_state(opt_state: Any, format: Any = None) -> Plan:
    """The plan in force in a state: its structure is in the shapes, the rest in the ``format`` words.

    Args:
      opt_state: an optimizer state with concrete Gefen states; or the metadata of a checkpoint of one (any nesting of
        dicts, lists and tuples whose leaves have ``shape`` and ``dtype``).
      format: for metadata, the restored ``format`` array: a few bytes, read first. A list of them where there are
        several Gefen states (`optax.partition`), in the order of `jax.tree.leaves`.

    Returns:
      A `Plan` whose codebook is the state's; None if only metadata is known (the state then brings it).

    Raises:
      ValueError: if there is no Gefen state, several disagree, or ``format`` is missing or does not fit.

    Examples:
      >>> import gefen_jax
      >>> opt_state = gefen_jax.gefen(1e-3, second_moment="block").init({"kernel": jnp.zeros((256, 512))})
      >>> plan_from_state(opt_state).leaves["kernel"].nu
      ('tile', (256, 1))
    """
    nodes = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_gefen_like) if _is_gefen_like(node)]
    if not nodes:
        raise ValueError("plan_from_state: there is no Gefen state in this optimizer state or metadata")
    given = list(format) if isinstance(format, list | tuple) else [format] * len(nodes)
    if len(given) != len(nodes):
        raise ValueError(f"plan_from_state: {len(given)} formats for {len(nodes)} Gefen states: give one for each")
    plans = []
    for node, other in zip(nodes, given):
        fields = node if isinstance(node, Mapping) else node._asdict()
        words = state.read_words(fields["format"])
        known = words is not None
        if words is None:
            if other is None:
                raise ValueError(
                    "plan_from_state: shapes alone do not tell rule, bits and reasons: restore the state's 'format' "
                    "array (a few bytes) and pass it as the second argument"
                )
            words = state.decode_format(jax.device_get(paths.single(other)))
        codebook = np.asarray(jax.device_get(paths.single(fields["codebook"]))) if known else None
        plans.append(_plan_of(fields, words, codebook))
    first = plans[0]
    leaves = {path: leaf for plan in plans for path, leaf in plan.leaves.items()}
    for other in plans[1:]:
        same_words = first.codebook is None or np.array_equal(first.codebook, other.codebook)  # type: ignore[arg-type]
        if (first.rule, first.bits, first.codec) != (other.rule, other.bits, other.codec) or not same_words:
            raise ValueError(
                "plan_from_state: the Gefen states differ in rule, bits or codebook, so one plan cannot describe them: "
                "pass them one at a time"
            )
    return dataclasses.replace(first, leaves=leaves)


def _plan_of(fields: Mapping[str, Any], words: Format, codebook: np.ndarray | None) -> Plan:
    columns = [jax.tree.leaves(fields[name]) for name in Leaf._fields]
    names = paths.names(fields["mu_scale"])  # statistics are bare where Flax boxes mu
    if isinstance(fields["count"], Mapping):  # metadata of NNX: every array in a box, now a dict
        names = [name.removesuffix("value").removesuffix("/") for name in names]
    if any(len(column) != len(words.leaves) for column in columns):
        raise ValueError(
            f"plan_from_state: the format describes {len(words.leaves)} leaves, the state has {len(columns[0])}: they "
            "belong to different states"
        )
    leaves = {
        path: leaf_plan(path, Leaf(*leaf), word, words.rule)
        for path, leaf, word in zip(names, zip(*columns), words.leaves)
    }
    return Plan(words.rule, words.second_moment, words.min_size, words.bits, codebook, None, leaves, codec=words.codec)


def _is_gefen_like(node: Any) -> bool:
    return state.is_gefen(node) or (isinstance(node, Mapping) and set(GefenState._fields) <= set(node))


def _options(words: Format, leaves: Mapping[str, LeafPlan]) -> Options:
    axes = {path: leaf.axes for path, leaf in leaves.items() if leaf.axes is not None}
    return Options(words.rule, words.second_moment, words.bits, words.min_size, None, axes or None, codec=words.codec)


def _learn(states: list[GefenState], formats: list[Format], grads: Any, where: str, progress: Progress | None) -> Plan:
    held = {path for node in states for path in paths.names(node.mu)}
    one_tree = held <= set(paths.names(grads))  # parameters may themselves be a list
    columns = [paths.named_leaves(tree) for tree in ([grads] if one_tree else learn.trees_of(grads))]
    known = [dict(column) for column in columns]
    requests: dict[str, Request] = {}
    for node, words in zip(states, formats):
        leaves = decisions(node, words)
        options = _options(words, leaves)
        for path, leaf in leaves.items():
            if any(path not in column for column in known):
                raise ValueError(
                    f"calibrate: no gradient for {path!r}, which the optimizer state holds: pass the gradients of "
                    "the same tree of parameters"
                )
            gradients = [column[path] for column in known]
            checks.check_gradients([[(path, gradient)] for gradient in gradients])
            empty = 0 in gradients[0].shape and leaf.shape == (1,) * len(gradients[0].shape)
            if tuple(gradients[0].shape) != leaf.shape and not empty:
                raise ValueError(
                    f"calibrate: the gradient of {path!r} has shape {tuple(gradients[0].shape)}, the parameter "
                    f"{leaf.shape}: pass the gradients of the parameters that tx.init saw"
                )
            requests.setdefault(path, Request(path, gradients, options, leaf.reason if leaf.exact else None))
    first = next(iter(requests.values())).options if requests else Options()
    if len({(words.rule, words.bits, words.codec) for words in formats}) > 1:
        raise ValueError("calibrate: the Gefen states differ in rule or bits: calibrate them one at a time")
    return learn.decide(list(requests.values()), first, progress, where)


def _check_plan_fits(plan: Plan, states: list[GefenState], formats: list[Format]) -> None:
    for node, words in zip(states, formats):
        if (plan.rule, plan.bits, plan.codec) != (words.rule, words.bits, words.codec):
            raise ValueError(
                f"calibrate: the plan has rule {plan.rule!r} and {plan.bits} bits, the state rule {words.rule!r} and "
                f"{words.bits} bits: learn the plan with those of the optimizer"
            )
        for path, leaf in decisions(node, words).items():
            if path not in plan.leaves:
                raise ValueError(
                    f"calibrate: parameter {path!r} is not in the plan, which was made for another tree: learn a plan "
                    "from gradients of this one"
                )
            planned = plan.leaves[path]
            empty = planned.reason == leaf.reason == EMPTY and len(planned.shape) == len(leaf.shape)
            if planned.shape != leaf.shape and not empty:
                raise ValueError(
                    f"calibrate: the plan was made for shape {planned.shape} of {path!r}, which has {leaf.shape}: "
                    "learn a plan for this model"
                )
    known = {path for node in states for path in paths.names(node.mu)}
    for path in plan.leaves:
        if path not in known and not any(checks.is_under(path, checks.masked_paths(node.mu)) for node in states):
            raise ValueError(
                f"calibrate: the plan's leaf {path!r} is in no Gefen state: it was made for another tree of parameters"
            )


def _replan(node: GefenState, words: Format, plan: Plan) -> GefenState:
    """``node`` under ``plan``."""
    current = decisions(node, words)
    words_now = paths.single(node.codebook)
    new_words = words_now
    if plan.codebook is not None and not np.array_equal(plan.codebook, jax.device_get(words_now)):
        new_words = _placed(np.asarray(plan.codebook, np.float32), words_now)
    leaves = []
    for (path, old), leaf in zip(current.items(), node.leaves()):
        new = plan.leaves[path]
        same = (old.mu, old.nu) == (new.mu, new.nu) and (new_words is words_now or old.exact)
        leaves.append(leaf if same or 0 in new.shape else _convert_leaf(leaf, old, new, words_now, new_words, plan))
    options = Options(plan.rule, plan.second_moment, plan.bits, plan.min_size, codec=plan.codec)
    wanted = state.encode_format(options, [plan.leaves[path] for path in current])
    format_words = paths.single(node.format)
    if not np.array_equal(wanted, jax.device_get(format_words)):
        format_words = _placed(wanted, format_words)
    boxed = {
        name: jax.tree.unflatten(jax.tree.structure(getattr(node, name)), [array])
        for name, array in (("codebook", new_words), ("format", format_words))
    }
    return node.with_leaves(leaves, **boxed)


def _placed(x: np.ndarray, like: Any) -> jax.Array:
    """``x`` where ``like`` is, which may be a NumPy array; as free to move as it, or the next step compiles twice."""
    return jax.device_put(x, like.sharding) if getattr(like, "committed", False) else jnp.asarray(x)


def _convert_leaf(leaf: Leaf, old: LeafPlan, new: LeafPlan, words: jax.Array, new_words: jax.Array, plan: Plan) -> Leaf:
    placed = getattr(leaf.mu, "sharding", None)  # a restored state may hold NumPy arrays
    sharding = placed if isinstance(placed, NamedSharding) else None
    statistic = leaf.nu.dtype if plan.rule == "reference" else jnp.float32
    encoding = Options(plan.rule, bits=plan.bits, codec=plan.codec)
    return _converter(old, new, encoding, statistic, sharding)(leaf, words, new_words)


@functools.lru_cache(maxsize=1024)
def _converter(
    old: LeafPlan, new: LeafPlan, encoding: Options, statistic: Any, sharding: NamedSharding | None
) -> Callable[[Leaf, jax.Array, jax.Array], Leaf]:
    """Moments decoded, and encoded under another structure and codebook: compiled once for all leaves of a kind."""

    def convert(leaf: Leaf, words: jax.Array, new_words: jax.Array) -> Leaf:
        m, v = moments.decode_moments(leaf, old, words)
        return moments.encode_moments(m, v, new, new_words, encoding, statistic)

    if sharding is None:
        return jax.jit(convert)
    placed = Leaf(*(fit_spec(x, sharding) for x in (state.mu_shape(new, encoding.bits), *new.statistics())))  # type: ignore[arg-type]
    return jax.jit(functools.partial(automatic, convert, out_sharding=placed), out_shardings=placed)
