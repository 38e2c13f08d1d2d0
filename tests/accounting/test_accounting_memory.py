"""Compiled steps: bytes by category equal XLA's figures exactly; donation; errors that help."""

import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_models import OPTIMIZERS, model, train_step

from gefen_jax.accounting import StepError, compiled_memory, live_after, step_memory, tensors, tree_bytes
from gefen_jax.accounting.memory import POINTER_BYTES

PAIRS = [
    ("mlp", "adamw"),
    ("mlp", "gefen"),
    ("cnn", "adamw bf16"),
    ("gpt", "clipped"),
    ("gpt", "gefen"),
    ("llama", "sm3"),
    ("qwen", "adafactor"),
]


@pytest.mark.parametrize(("model_name", "optimizer_name"), PAIRS)
def test_bytes_equal_the_compiled_figures(model_name, optimizer_name):
    loss, params, batch = model(model_name)
    optimizer = OPTIMIZERS[optimizer_name]
    state = jax.eval_shape(optimizer.init, params)
    report = step_memory(train_step(loss, optimizer), params, state, batch, donate_argnums=(0, 1))
    expected = {"parameters": params, "optimizer state": state, "batch": batch}
    assert {name: size for name, (_, size, _) in report.categories.items()} == {
        name: tensors(x=tree).bytes for name, tree in expected.items()
    }
    stats = report.program.compiled.memory_analysis()
    unread = {"qwen": 26 * 4}.get(model_name, 0)  # Adafactor keeps a placeholder for each factor a leaf does not have
    assert report.unused_bytes == unread
    assert report.argument_bytes - unread == report.memory.arguments == stats.argument_size_in_bytes
    assert report.unexplained_bytes == 0
    assert report.output_bytes + POINTER_BYTES * report.output_count == report.memory.outputs
    assert report.donated_bytes == tree_bytes((params, state)) == report.memory.aliased + unread
    assert report.memory.peak == (
        stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes + stats.temp_size_in_bytes
    )
    real = jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), state)
    assert live_after(report.program.compiled, params, real, batch) == report.live_bytes
    rows = {row["what"]: row["bytes"] for row in report.rows}
    assert rows.pop("peak") == sum(rows.values())


def test_peak_holds_the_temporaries_that_the_raw_field_leaves_out():
    loss, params, batch = model("gpt")
    memory = step_memory(jax.grad(loss), params, batch).memory
    assert memory.temporaries > 0
    assert memory.peak >= memory.arguments + memory.temporaries
    assert memory.xla_peak is not None


def test_arguments_that_the_step_never_reads_are_shown():
    report = step_memory(lambda params, unused: params * 2, jnp.ones(100), jnp.ones(33))
    assert (report.argument_bytes, report.memory.arguments, report.unused_bytes) == (532, 400, 132)
    assert {"what": "arguments never read (dropped)", "bytes": -132}.items() <= report.rows[2].items()


def test_donation_that_cannot_be_used_is_reported():
    report = step_memory(lambda params, x: jnp.sum(params) + x, jnp.ones(1000), 1.0, donate_argnums=0)
    assert report.donated_bytes == 4000
    assert report.memory.aliased == 0
    assert any("4000 B" in note or "3.91 KiB donated, only 0 B reused" in note for note in report.notes)
    assert any("donated buffers were not usable" in note for note in report.notes)


def test_what_lives_after_a_step_with_useless_donation_and_unread_arguments():
    def step(params, x, unread):
        return jnp.sum(params) + x

    args = jnp.ones(1000), jnp.ones(7), jnp.ones(33)
    report = step_memory(step, *args, donate_argnums=(0, 2))
    jitted = jax.jit(step, donate_argnums=(0, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        assert live_after(jitted, *args) == report.live_bytes


def test_no_donation_is_pointed_out():
    loss, params, batch = model("mlp")
    optimizer = OPTIMIZERS["adamw"]
    report = step_memory(train_step(loss, optimizer), params, optimizer.init(params), batch)
    assert any("nothing is donated" in note for note in report.notes)


def test_static_arguments_of_plain_and_jitted_steps():
    def step(params, steps, mode, x):
        return params * steps + x if mode == "add" else params

    plain = step_memory(step, jnp.ones(8), 3, "add", jnp.ones(8), static_argnums=(1, 2), donate_argnums=0)
    jitted = step_memory(jax.jit(step, static_argnums=(1, 2), donate_argnums=0), jnp.ones(8), 3, "add", jnp.ones(8))
    for report in (plain, jitted):
        assert report.argument_bytes == report.memory.arguments == 64
        assert report.donated_bytes == 32
        assert set(report.categories) == {"parameters", "batch"}


def test_categories_inside_a_train_state_and_by_pattern():
    class State(dict):
        pass

    state = {
        "params": jnp.ones((4, 4)),
        "opt_state": {"mu": jnp.ones((4, 4))},
        "step": jnp.int32(0),
        "ema": jnp.ones(4),
    }

    def step(state, batch, rng):
        moved = state["params"] - state["opt_state"]["mu"] + batch.sum() + state["ema"]
        return state | {"params": moved, "step": state["step"] + rng}

    report = step_memory(step, state, jnp.ones(3), jnp.int32(1), categories={r"/ema$": "average"})
    sizes = {name: size for name, (_, size, _) in report.categories.items()}
    assert sizes == {
        "average": 16, "optimizer state": 64, "parameters": 64, "state": 4, "batch": 12, "rng": 4,
    }  # fmt: skip
    assert report.argument_bytes == report.memory.arguments


def test_nnx_step():
    nnx = pytest.importorskip("flax.nnx")
    module = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
    wrapped = nnx.Optimizer(module, OPTIMIZERS["adamw"], wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model)
        optimizer.update(model, grads)

    report = step_memory(step, module, wrapped, jnp.ones((2, 6)))
    assert report.categories["parameters"][1] == 4 * 35
    assert report.categories["batch"][1] == 48
    assert report.unexplained_bytes == 0


def test_steps_that_cannot_be_traced_or_compiled():
    with pytest.raises(StepError, match=r"step: found int"):
        step_memory(3)

    def branches(params):
        return params if params.sum() > 0 else -params

    with pytest.raises(StepError, match=r"branches cannot be traced for cpu: TracerBoolConversionError") as error:
        step_memory(branches, jnp.ones(3))
    assert "keep Python branches on values" in str(error.value)
    with pytest.raises(StepError, match=r"cannot be traced"):
        step_memory(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(StepError, match=r"cannot be traced"):
        step_memory(lambda a, mode: a, jnp.ones(3), "train")
    with pytest.raises(StepError, match=r"is jitted already"):
        step_memory(jax.jit(lambda a: a), jnp.ones(3), donate_argnums=0)


def test_a_backend_without_memory_analysis():
    class Compiled:
        def memory_analysis(self):
            return None

    with pytest.raises(ValueError, match="this backend does not offer it"):
        compiled_memory(Compiled())


SHARDED = """
    import jax, jax.numpy as jnp, optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from gefen_jax.accounting import live_after, live_bytes, step_memory, tensors
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    params = {"w": jax.device_put(jnp.ones((64, 32)), split), "b": jax.device_put(jnp.ones(32), whole)}
    batch = jax.device_put(jnp.ones((16, 64)), split)
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = optimizer.init(params)
    live = live_bytes()
    report = tensors(parameters=params, optimizer_state=state, batch=batch)
    assert live == report.total_bytes, (live, report.total_bytes)
    assert report.device_bytes == 2 * (64 * 32 // 4 + 32) * 4 + 4 * 64 * 4
    def step(params, opt_state, batch):
        grads = jax.grad(lambda p: jnp.mean((batch @ p["w"] + p["b"]) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state
    keep = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=keep)
    memory = step_memory(jitted, params, state, batch)
    assert memory.argument_bytes == memory.memory.arguments == report.device_bytes
    assert memory.donated_bytes == memory.memory.aliased
    assert live_after(jitted, params, state, batch) == memory.live_bytes * memory.devices == live
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (params, state, batch))
    assert step_memory(jitted, *shapes).memory == memory.memory
    print("sharded step accounted")
"""


def test_sharded_step_on_several_devices():
    """In a process of its own: the number of CPU devices is fixed when JAX starts."""
    code = "import os\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'\n" + textwrap.dedent(
        SHARDED
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert "sharded step accounted" in done.stdout, done.stderr[-2000:]
