"""Weight-decay masks over trees made of lists and tuples, where a list of booleans must not pass for a boolean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gefen_jax import gefen

TREES = {
    "list": [jnp.ones((4, 3)), [jnp.ones(3)]],
    "tuple": (jnp.ones((4, 3)), (jnp.ones(3),)),
    "list in dict": {"a": [jnp.ones((4, 3)), jnp.ones(3)]},
}


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("form", ["tree", "function"])
def test_masks_decay_what_adamw_decays(kind, form):
    params = TREES[kind]
    tree = jax.tree.map(lambda p: p.ndim > 1, params)
    mask = tree if form == "tree" else lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    grads = jax.tree.map(jnp.zeros_like, params)
    found, wanted = (
        tx.update(grads, tx.init(params), params)[0]
        for tx in (gefen(0.5, weight_decay=0.1, mask=mask), optax.adamw(0.5, weight_decay=0.1, mask=mask))
    )
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(ours, theirs, atol=1e-7)
    assert float(jax.tree.leaves(found)[0][0, 0]) == pytest.approx(-0.05)
