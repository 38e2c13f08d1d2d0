"""A step of another schedule against the one over whole arrays, and against float64."""

import float64
import jax
import numpy as np
from trees import bits_of, gradients, leaves

from gefen_jax import explain, scale_by_gefen


def check_twin(implementation, options, params, slack=0.0):
    """From one state, both steps give the same second moment, scales and directions to a few ulps, and the same codes
    but for numbers that lie between two words to rounding: those are rare, and either word is nearest.

    ``slack`` is what directions may differ by, relatively, where second moments are not added in the same order: half
    of what row factors, column factors and their mean may.
    """
    whole, twin = (scale_by_gefen(min_size=0, implementation=i, **options) for i in ("jnp", implementation))
    state = whole.init(params)
    ran = {row.path: row.implementation for row in explain(state, implementation=implementation).rows}
    assert set(ran.values()) == {implementation}, ran
    words = np.asarray(state.codebook)
    one, other = jax.jit(whole.update), jax.jit(twin.update)
    h, parted, count = float64.Hyper(), 0, 0
    for t in (1, 2, 3):
        g = gradients(params, t)
        (d, new), (e, found) = one(g, state), other(g, state)
        assert bits_of(new.count) == bits_of(found.count)
        for (path, leaf, before), a, b in zip(leaves(state), new.leaves(), found.leaves()):
            old = float64.read(leaf, before, words)
            _, moments = float64.step(leaf, old, g[path], t, h)
            error, gain = float64.rounding_of(leaf, old, moments, g[path], t, h)
            for x, y in zip(a[1:], b[1:]):
                np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-6, err_msg=path)
            first, second = (np.asarray(x[path]).astype(np.float64) for x in (d, e))
            ulp = {"float32": 2 * float64.ULP, "bfloat16": 2.0**-7, "float16": 2.0**-9}[params[path].dtype.name]
            smallest = 2.0**-24 if params[path].dtype == np.float16 else 0
            assert np.all(np.abs(first - second) <= error * gain + (2 * ulp + slack) * np.abs(first) + smallest), (
                path,
                t,
            )
            parted += int(np.sum(np.asarray(a.mu) != np.asarray(b.mu)))
            count += a.mu.size
            if "codec" not in options:
                float64.check_step(leaf, before, b, g[path], e[path], t, words, h)
        state = new
    assert parted <= 1e-4 * count
