"""One gradient that is not finite: whatever it reaches becomes NaN, and nothing else leaps."""

import jax
import numpy as np
import pytest

from gefen_jax import gefen

SHAPE, RATE = (64, 1024), 1e-2
OPTIONS = [{}, {"bits": 4}, {"second_moment": "block"}, {"second_moment": "full"}, {"codec": "companding"}]
WAYS = ("jnp", "chunked", "numba", "pallas")


@pytest.mark.parametrize("implementation", WAYS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "options",
    [{}, {"bits": 4}, {"second_moment": "block"}, {"second_moment": "full"}, {"codec": "companding"}],
    ids=str,
)
def test_a_bad_gradient_shows_and_nothing_leaps(options, bad, implementation):
    """A factored leaf is lost as a whole, another as far as its blocks; in the step itself and in those after it."""
    tx = gefen(RATE, weight_decay=0.0, implementation=implementation, **options)
    params = start = {"w": jax.random.normal(jax.random.key(0), SHAPE)}
    state, step = tx.init(params), jax.jit(tx.apply)
    params, state = step({"w": start["w"]}, params, state)
    grads = [jax.random.normal(jax.random.key(seed), SHAPE) for seed in (1, 2)]
    for g in (grads[0].at[3, 700].set(bad), grads[1]):
        params, state = step({"w": g}, params, state)
        moved = np.abs(np.asarray(params["w"]) - np.asarray(start["w"]))
        if np.isnan(bad):
            assert np.isnan(moved[3, 700])
        if tx.options.second_moment == "auto":
            assert np.isnan(moved).all()
        finite = moved[np.isfinite(moved)]
        assert (finite <= 10 * RATE).all()
