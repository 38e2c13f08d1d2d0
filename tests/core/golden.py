"""The reference's trajectories (tests/data/FORMAT.md), and how to run the library along them."""

import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from gefen_jax import Plan, gefen, learn_plan, plan_from_state
from gefen_jax.plan import reference_leaf
from gefen_jax.state import GefenState

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "traj.json").read_text())["cases"]
SEPARATE = ("fp32_missing_grads_10", "fp32_two_groups_10")
"""Cases that need one optimizer per leaf: leaves differ in their steps or in their hyper-parameters."""


class Case(NamedTuple):
    """One case with its arrays in their own dtype.

    Attributes:
      info: its entry in traj.json.
      names: leaves in order.
      grads: by leaf, [steps, ...].
      p0: initial parameters by leaf.
      present: bool [steps, leaves].
      words: the codebook that the reference learned.
      stored: every array of the case by "LEAF/what@step".
    """

    info: dict
    names: list[str]
    grads: dict
    p0: dict
    present: np.ndarray
    words: np.ndarray
    stored: dict

    def first(self) -> dict:
        """Gradients of step 1, of the leaves that have one there."""
        return {name: self.grads[name][0] for i, name in enumerate(self.names) if self.present[0, i]}

    def rate(self, step: int, leaf: int) -> np.float32:
        """Learning rate of a step (0 is the first)."""
        return np.float32((self.info["lrs"] or [])[step] if self.info["lrs"] else self.info["groups"][leaf]["lr"])


def load(info: dict) -> Case:
    """The arrays of a case."""
    key, bf16 = info["key"], info["dtype"] == "bfloat16"
    with np.load(DATA / "traj.npz") as archive:
        stored = {name.removeprefix(key + "/"): archive[name] for name in archive.files if name.startswith(key + "/")}
    stored = {n: a.view(ml_dtypes.bfloat16) if bf16 and a.dtype == np.uint16 else a for n, a in stored.items()}
    names = [leaf["name"] for leaf in info["leaves"]]
    grads = {name: stored[f"{name}/grads"] for name in names}
    p0 = {name: stored[f"{name}/p0"] for name in names}
    return Case(info, names, grads, p0, stored["present"], stored["codebook"], stored)


class Runner:
    """One optimizer over some leaves of a case, as one jitted step that does everything at once.

    The step takes and returns parameters by apply, parameters by update, and state. It adds what one update from the
    first parameters leads to, that update, and whether both ways gave the same state.
    """

    def __init__(self, case: Case, names: list[str], words: np.ndarray):
        self.case, self.names = case, names
        group = case.info["groups"][case.names.index(names[0])]
        periods = {leaf["name"]: leaf["period"] for leaf in case.info["leaves"]}
        leaves = {name: reference_leaf(case.p0[name].shape, periods[name], "learned") for name in names}
        plan = Plan("reference", "auto", 0, 8, words, None, leaves)
        rates = case.info["lrs"]
        schedule = None if rates is None else lambda count: jnp.asarray(rates, jnp.float32)[count]

        def build(rate):
            betas = group["beta1"], group["beta2"], group["eps"]
            return gefen(schedule or rate, *betas, weight_decay=group["weight_decay"], plan=plan)

        def step(applied, updated, state, grads, rate):
            tx = build(rate)
            moved, new = tx.apply(grads, applied, state)
            updates, other = tx.update(grads, state, applied)
            added = optax.apply_updates(applied, updates)
            away, _ = tx.update(grads, state, updated)
            same = jnp.all(
                jnp.stack([jnp.array_equal(*pair) for pair in zip(jax.tree.leaves(new), jax.tree.leaves(other))])
            )
            return moved, optax.apply_updates(updated, away), new, (added, updates, same)

        self.params = {name: jnp.asarray(case.p0[name]) for name in names}
        self.state = build(group["lr"]).init(self.params)
        self.step = jax.jit(step)
        assert plan_from_state(self.state).periods == plan.periods

    def __call__(self, applied: dict, updated: dict, state: GefenState, step: int) -> tuple:
        """Step number ``step`` (0 is the first) of the case."""
        grads = {name: self.case.grads[name][step] for name in self.names}
        return self.step(applied, updated, state, grads, self.case.rate(step, self.case.names.index(self.names[0])))

    def at(self, recorded: int) -> tuple[dict, GefenState]:
        """Parameters and state as the reference stored them after ``recorded`` steps."""
        case, state = self.case, self.state

        def tree(what, like):
            found = {name: case.stored[f"{name}/{what}@{recorded}"] for name in self.names}
            return {name: jnp.asarray(found[name].reshape(like[name].shape)) for name in self.names}

        return tree("p", self.params), state._replace(
            count=jnp.int32(case.present[:recorded, case.names.index(self.names[0])].sum()),
            mu=tree("codes", state.mu),
            mu_scale=tree("mag", state.mu_scale),
            nu=tree("vmean", state.nu),
        )


def runners(case: Case) -> list[Runner]:
    """The optimizers of a case: one for the whole tree, with the codebook learned from it, where the case allows it."""
    groups = [[name] for name in case.names] if case.info["key"] in SEPARATE else [case.names]
    words = learn_plan(case.first(), rule="reference").codebook
    return [Runner(case, names, words) for names in groups]
