"""Six ways to run one optimizer step, for any Optax optimizer: the rungs that the field climbed.

A rung is ``step(params, opt_state, grads) -> (params, opt_state)`` over a whole tree. All rungs of an optimizer compute
the same numbers, up to rounding, but for two: "per tensor" hands every tensor over alone, so an optimizer that looks at
several (a global norm) is another one there; "flat buffer" shows it one long vector, so one that looks at rows and
columns (Gefen, Adafactor, Muon) is another one there.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gefen_jax import gefen
from gefen_jax.baselines import PEERS, build
from gefen_jax.lab.errors import UsageError

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
RATE = 1e-3

RUNGS: Mapping[str, str] = MappingProxyType(
    {
        "eager": "every operation on every tensor is a program of its own",
        "per tensor": "one jitted program per tensor",
        "tree-wise": "two programs over all tensors: update, then optax.apply_updates",
        "whole step": "one program, parameters and state donated",
        "flat buffer": "one program that sees one concatenated tensor (optax.flatten)",
        "fused": "one program, the optimizer's own apply: kernels on a GPU, a loop per tensor on a CPU",
    }
)
"""Name -> what it is, from the lowest up."""


class Optimizer(NamedTuple):
    """An optimizer to climb with.

    Attributes:
      name: as asked for.
      plain: for all rungs but the last.
      fused: for the last rung, with an ``apply``; None: there is no such rung.
      why: why there is no fused rung.
    """

    name: str
    plain: optax.GradientTransformation
    fused: Any = None
    why: str = ""


class Climber(NamedTuple):
    """A rung, compiled for its arguments and ready to run.

    Attributes:
      rung: its name.
      step: runs it; donates params and opt_state on all rungs but "eager".
      opt_state: to start with, in the rung's own form.
      programs: the compiled programs of a step and how often it runs each; none for "eager".
    """

    rung: str
    step: Step
    opt_state: Any
    programs: list[tuple[int, Any]]


def find(name: str) -> Optimizer:
    """The optimizer of that name: Gefen, one of the comparison's, or any of Optax's that needs only a learning rate.

    Raises:
      UsageError: there is none, or it cannot make a step from (grads, opt_state, params).

    Examples:
      >>> find("lion").name, find("lion").fused is None, find("gefen").fused is None
      ('lion', True, False)
    """
    if name == "gefen":
        # Whole arrays below the last rung: what a kernel or a chunked loop adds is then the last rung's.
        return Optimizer(name, gefen(RATE, implementation="jnp"), gefen(RATE))
    why = f"{name} has no kernel of its own: the whole step is what XLA fuses"
    if name in PEERS:
        return Optimizer(name, build(name, RATE), None, why)
    make: Any = getattr(optax, name, None) or getattr(optax.contrib, name, None)
    try:
        tx = make(learning_rate=RATE)
        one = jax.ShapeDtypeStruct((8, 8), "float32")
        jax.eval_shape(whole_step(tx), one, jax.eval_shape(tx.init, one), one)
    except Exception as error:  # whatever a foreign constructor or update raises
        known = [other for other in known_names() if other != name]
        near = difflib.get_close_matches(name, known, 3) or ["gefen", *PEERS]
        problem = f"optax has no {name}" if make is None else f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(
            f"unknown optimizer {name!r} ({problem:.200}); choose one that needs only a learning rate, such as: "
            f"{', '.join(near)}"
        ) from error
    return Optimizer(name, tx, None, why)


def known_names() -> list[str]:
    """Gefen, the comparison's, and whatever in Optax is built from a learning rate."""
    found = {"gefen", *PEERS}
    for name, make in vars(optax).items():
        if inspect.isfunction(make) and "learning_rate" in inspect.signature(make).parameters:
            found.add(name)
    return sorted(found)


def whole_step(tx: optax.GradientTransformation) -> Step:
    """Update and apply_updates in one function."""

    def step(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def transformation(optimizer: Optimizer, rung: str) -> Any:
    """What a rung runs, or None where the optimizer has no such rung."""
    if rung == "fused":
        return optimizer.fused
    return optax.flatten(optimizer.plain) if rung == "flat buffer" else optimizer.plain


def one_program(tx: Any, rung: str) -> Step:
    """The function that the rungs "whole step", "flat buffer" and "fused" compile."""
    if rung != "fused":
        return whole_step(tx)
    return lambda params, opt_state, grads: tx.apply(grads, params, opt_state)


def prepare(optimizer: Optimizer, rung: str, params: Any, grads: Any) -> Climber | None:
    """Compile a rung for real parameters and gradients; None where the optimizer has no such rung."""
    tx = transformation(optimizer, rung)
    if tx is None:
        return None
    if rung == "per tensor":
        return _per_tensor(tx, params, grads)
    opt_state = tx.init(params)
    if rung == "eager":
        return Climber(rung, whole_step(tx), opt_state, [])
    if rung == "tree-wise":
        return _tree_wise(tx, opt_state, params, grads)
    program = compiled(one_program(tx, rung), (0, 1), params, opt_state, grads)
    return Climber(rung, program, opt_state, [(1, program)])


def compiled(function: Callable[..., Any], donate: tuple[int, ...], *arguments: Any) -> Any:
    """The compiled program of a function."""
    return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def _per_tensor(tx: Any, params: Any, grads: Any) -> Climber:
    leaves = jax.tree.leaves(params)
    tree: Any = jax.tree.structure(params)
    states = [tx.init(p) for p in leaves]
    keys = [(p.shape, p.dtype) for p in leaves]
    programs: dict[Any, Any] = {}
    for key, p, state, g in zip(keys, leaves, states, jax.tree.leaves(grads)):
        if key not in programs:
            programs[key] = compiled(whole_step(tx), (0, 1), p, state, g)

    def step(params: Any, states: list[Any], grads: Any) -> tuple[Any, list[Any]]:
        columns = zip(keys, jax.tree.leaves(params), states, jax.tree.leaves(grads))
        new = [programs[key](p, state, g) for key, p, state, g in columns]
        return tree.unflatten([p for p, _ in new]), [state for _, state in new]

    return Climber("per tensor", step, states, [(keys.count(key), program) for key, program in programs.items()])


def _tree_wise(tx: Any, opt_state: Any, params: Any, grads: Any) -> Climber:
    def update(opt_state: Any, grads: Any, params: Any) -> tuple[Any, Any]:
        return tx.update(grads, opt_state, params)[::-1]  # the state first: it is what the donated state pairs with

    def apply(params: Any, updates: Any) -> Any:
        return optax.apply_updates(params, updates)

    first = compiled(update, (0,), opt_state, grads, params)
    second = compiled(apply, (0,), params, jax.eval_shape(update, opt_state, grads, params)[1])

    def step(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
        opt_state, updates = first(opt_state, grads, params)
        return second(params, updates), opt_state

    return Climber("tree-wise", step, opt_state, [(1, first), (1, second)])


def copied(tree: Any) -> Any:
    """New arrays with the same values, so that a step may take the old ones."""
    return jax.block_until_ready(jax.tree.map(jnp.copy, tree))


def climbers(optimizer: Optimizer, params: Any, grads: Any) -> list[Climber]:
    """All rungs that the optimizer has, prepared."""
    found = map(functools.partial(prepare, optimizer, params=params, grads=grads), RUNGS)
    return [climber for climber in found if climber is not None]
