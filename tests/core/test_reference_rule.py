"""Rule "reference" against the reference's own trajectories: structure, codebook, every state, both ways to step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import CASES, DATA, load, runners

from gefen_jax import learn_plan
from gefen_jax.quantization import nearest

ids = [case["key"] for case in CASES]
FLOAT32_DRIFT = {2: 3e-6, 10: 3e-6, 200: 3e-5}
"""FORMAT.md: float32 parameters after that many steps, relative to max(|p|, 1e-3)."""


def exact(a):
    return np.asarray(a).astype(np.float64)


def assert_as_stored(case, names, params, state, recorded, tolerance):
    """Codes and magnitudes equal; second moments and parameters to the stated tolerances, bf16 and fp16 to the bit."""
    low = case.info["dtype"] != "float32"
    for name in names:
        stored = {what: case.stored[f"{name}/{what}@{recorded}"] for what in ("p", "codes", "mag", "vmean")}
        where = f"{name} after step {recorded}"
        np.testing.assert_array_equal(np.ravel(state.mu[name]), stored["codes"].ravel(), err_msg=where)
        np.testing.assert_array_equal(np.ravel(state.mu_scale[name]), stored["mag"].ravel(), err_msg=where)
        nu, p = exact(state.nu[name]).ravel(), exact(params[name])
        np.testing.assert_allclose(nu, exact(stored["vmean"]).ravel(), rtol=0 if low else 4e-7, err_msg=where)
        assert params[name].dtype == state.nu[name].dtype == state.mu_scale[name].dtype == case.info["dtype"]
        error = np.abs(p - exact(stored["p"]))
        allowed = 0 if low else tolerance(name, np.abs(exact(stored["p"])))
        assert np.all(error <= allowed), (where, error.max())


@pytest.mark.parametrize("info", CASES, ids=ids)
def test_plan_has_the_references_periods_and_codebook(info):
    case = load(info)
    plan = learn_plan(case.first(), rule="reference")
    expected = {leaf["name"]: leaf["period"] for leaf in info["leaves"] if leaf["name"] in plan.leaves}
    assert plan.periods == expected
    np.testing.assert_allclose(plan.codebook, case.words, rtol=0, atol=1e-6)
    # A leaf whose first gradient comes later takes its period from that one.
    for i, leaf in enumerate(info["leaves"]):
        first = case.grads[leaf["name"]][int(np.argmax(case.present[:, i]))]
        late = learn_plan({leaf["name"]: first}, rule="reference")
        assert late.periods == {leaf["name"]: leaf["period"]}
        structure = late.leaves[leaf["name"]]
        blocks = leaf["period_one_divisor"] or leaf["period"]
        assert structure.mu == ("flat", blocks)
        assert structure.nu == (("full",) if leaf["period"] == 1 else ("flat", leaf["period"]))


@pytest.mark.parametrize("info", CASES, ids=ids)
def test_trajectory(info):
    """From the initial parameters, by `apply` and by `update`; then single steps from the reference's own states."""
    case = load(info)
    tried = 0
    for runner in runners(case):
        follow(case, runner)
        tried += single_steps(case, runner)
    assert tried > 0


def follow(case, runner):
    """Free-running, by `apply` and by `update` with `optax.apply_updates`.

    `update` returns fl(q - p), q the new parameter: off by at most half an ulp of the update u, 2^-24 |u|. Adding it to
    p again and rounding gives the float32 nearest to q + e with |e| <= 2^-24 |u|; q itself is at distance |e|, so the
    result is at most 2 |e| <= 2^-23 |u| from q. (bf16 and fp16: u is exact and the result is q.)
    """
    low = case.info["dtype"] != "float32"
    drift = FLOAT32_DRIFT[case.info["steps"]]

    def tolerance(name, size):
        return drift * np.maximum(size, 1e-3)

    leaf = case.names.index(runner.names[0])
    applied = updated = runner.params
    state = runner.state
    for step in range(case.info["steps"]):
        if case.present[step, leaf]:
            before = applied
            applied, updated, state, (added, updates, same) = runner(applied, updated, state, step)
            assert same
            for name in runner.names:
                u, moved = np.asarray(updates[name]), exact(applied[name])
                assert u.dtype == np.float32
                np.testing.assert_allclose(u, moved - exact(before[name]), rtol=2.0**-23, atol=0)
                assert np.all(np.abs(exact(added[name]) - moved) <= (0 if low else 2.0**-23 * np.abs(exact(u)))), name
        recorded = step + 1
        if recorded in case.info["recorded"] and f"{runner.names[0]}/codes@{recorded}" in case.stored:
            assert_as_stored(case, runner.names, applied, state, recorded, tolerance)
            assert_as_stored(case, runner.names, updated, state, recorded, tolerance)


def single_steps(case, runner):
    """Number of steps tried from a stored state to the next one.

    A float32 parameter may be off by some four ulps of the update, which is at most the sum of the old and the new one.
    """
    leaf, tried = case.names.index(runner.names[0]), 0
    for before in case.info["recorded"]:
        has_state = f"{runner.names[0]}/codes@{before}" in case.stored
        if before + 1 not in case.info["recorded"] or not has_state or not case.present[before, leaf]:
            continue
        old, state = runner.at(before)

        def tolerance(name, size, old=old):
            return 2.0**-22 * (size + np.abs(exact(old[name])))

        new, _, state, _ = runner(old, old, state, before)
        assert_as_stored(case, runner.names, new, state, before + 1, tolerance)
        tried += 1
    return tried


def test_dead_elements_reproduce_the_blow_up():
    """The reference lets weights without gradient run away in leaves of period 1; so must its rule here."""
    case = load(next(info for info in CASES if info["key"] == "fp32_dead_elements_p1_10"))
    moved = np.abs(case.stored["dead/p@10"] - case.p0["dead"])
    never = np.all(case.grads["dead"] == 0, axis=0)
    assert moved[never].max() > 100 * case.info["groups"][0]["lr"]


@pytest.mark.parametrize("key", ["random", "uniform", "padded"])
def test_nearest_code(key):
    with np.load(DATA / "quantize.npz") as stored:
        codebook, values, indices = (stored[f"{key}/{what}"] for what in ("codebook", "values", "indices"))
    codes = np.asarray(jax.jit(nearest)(jnp.asarray(values), jnp.asarray(codebook)))
    np.testing.assert_array_equal(codes, indices)
    assert codes.dtype == np.uint8
    assert np.isnan(values).any()
