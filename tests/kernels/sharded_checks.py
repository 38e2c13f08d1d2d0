"""Kernels and several devices, in a process with four of them. Run by test_sharded."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gefen_jax import gefen, implementation, state_sharding

mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
params = {"w": jax.random.normal(jax.random.key(0), (64, 256)), "b": jnp.ones(64)}
grads = jax.tree.map(lambda p: 0.1 * p + 0.01, params)
spec = {"w": P("d", None), "b": P("d")}
tx = gefen(1e-2, second_moment="full", implementation="pallas")
state = tx.init(params)
expected, _ = gefen(1e-2, second_moment="full", implementation="jnp").apply(grads, params, state)
placed = {name: NamedSharding(mesh, s) for name, s in spec.items()}
state_specs = jax.tree.map(lambda s: s.spec, state_sharding(state, placed))


def local(checked):
    return jax.jit(
        jax.shard_map(
            tx.apply, mesh=mesh, in_specs=(spec, spec, state_specs), out_specs=(spec, state_specs), check_vma=checked
        )
    )


seen = []
original = implementation.choose
implementation.choose = lambda *args, **options: seen.append(original(*args, **options)) or seen[-1]
for checked, name in ((False, "pallas"), (True, "jnp")):  # Pallas has no rule for varying axes
    seen.clear()
    found, _ = local(checked)(grads, params, state)
    for key in params:
        np.testing.assert_allclose(found[key], expected[key], atol=3e-6)
    assert {chosen for chosen, _ in seen} == {name}, seen

# Outside shard_map a kernel would gather what is sharded: whole arrays are stepped in jax.numpy instead.
seen.clear()
given = [jax.device_put(x, placed) for x in (grads, params)]
compiled = jax.jit(tx.apply).lower(*given, jax.device_put(state, state_sharding(state, placed))).compile()
assert "all-gather" not in compiled.as_text()
assert {chosen for chosen, _ in seen} == {"jnp"}
assert all("several devices" in why for _, why in seen)

# Statistics that devices share are not for kernels either.
seen.clear()
factored = gefen(1e-2, implementation="pallas")
state = factored.init(params)
state_specs = jax.tree.map(lambda s: s.spec, state_sharding(state, placed))
tx = factored
local(True)(grads, params, state)
assert ("jnp", "no kernel: its statistics are shared between devices") in seen, seen
print("passed")
