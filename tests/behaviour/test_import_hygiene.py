"""Importing and building does nothing a program did not ask for: no other library, no output, no device."""

import os
import subprocess
import sys
import textwrap

import pytest


def python(program, **environment):
    """Run a program in a fresh interpreter, away from the repository; its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


NOT_NEEDED = ("flax", "matplotlib", "numba", "orbax", "rich", "sklearn", "triton", "jax_triton", "torch", "equinox")


def test_import_loads_nothing_else_and_prints_nothing():
    program = f"""
        import sys, gefen_jax
        loaded = sorted(set(sys.modules) & set({NOT_NEEDED!r}))
        assert not loaded, loaded
    """
    assert python(program) == ("", "")


def test_building_and_stepping_need_no_optional_library_and_print_nothing():
    """Every optional library is blocked: importing one would raise."""
    program = f"""
        import sys
        sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))
        import jax, jax.numpy as jnp
        from gefen_jax import blocks, calibrate, explain, gefen, plan_from_state
        params = {{"w": jnp.ones((96, 128)), "b": jnp.ones(128)}}
        tx = gefen(1e-3)
        state = tx.init(params)
        updates, state = jax.jit(tx.update)(params, state, params)
        str(explain(state)), blocks(state)
        calibrate(state, plan_from_state(state))
    """
    assert python(program) == ("", "")


def test_the_core_runs_without_kernels():
    program = """
        import sys
        sys.modules["gefen_pallas"] = None
        import jax, jax.numpy as jnp
        from gefen_jax import gefen
        params = {"w": jnp.ones((96, 128))}
        tx = gefen(1e-3)
        jax.jit(tx.update)(params, tx.init(params), params)
    """
    assert python(program) == ("", "")


def test_import_and_construction_touch_no_device():
    """With a platform that does not exist, the first use of a device raises."""
    program = """
        import jax, optax
        from gefen_jax import LeafPlan, Plan, gefen, scale_by_gefen
        gefen(1e-3), scale_by_gefen(), optax.chain(optax.clip(1.0), gefen(optax.linear_schedule(1e-3, 0, 10)))
        leaf = LeafPlan((96, 128), ("tile", (1, 128)), ("factored", 0, 1), "shape rule")
        plan = Plan.loads(Plan("gefen", "auto", 4096, 8, None, None, {"w": leaf}).dumps())
        gefen(1e-3, plan=plan)
        try:
            jax.devices()
        except RuntimeError:
            pass
        else:
            raise AssertionError("the platform exists")
    """
    assert python(program, JAX_PLATFORMS="nonexistent") == ("", "")


def test_learning_loads_numba_and_shows_no_progress_unless_asked():
    program = """
        import sys, numpy as np
        from gefen_jax import learn_plan
        grads = {"w": np.random.default_rng(0).standard_normal((96, 128), np.float32)}
        learn_plan(grads)
        assert "numba" in sys.modules
        seen = []
        learn_plan(grads, progress=lambda *call: seen.append(call))
        assert seen == [("w", 1, 1)], seen
    """
    assert python(program) == ("", "")


def test_the_main_module_runs_only_as_a_program():
    assert python("import gefen_jax.__main__") == ("", "")


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"]])
def test_the_command_answers(arguments):
    done = subprocess.run([sys.executable, "-m", "gefen_jax", *arguments], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "gefen-jax" in done.stdout


def test_public_names():
    """Each is documented with an example that the doctests run; the data types say what they hold."""
    program = """
        import inspect, gefen_jax
        names = [name for name, found in vars(gefen_jax).items() if name[0] != "_" and not inspect.ismodule(found)]
        for name in names:
            found = getattr(gefen_jax, name)
            assert ("Attributes:" if inspect.isclass(found) else "Examples:") in found.__doc__, name
        print(*sorted(names))
    """
    assert python(program)[0].split() == [
        *("GefenState", "LeafPlan", "Plan", "advise", "apply", "blocks", "calibrate", "clip_by_global_norm"),
        *("diagnose", "explain", "from_adam_state", "fused_chain", "gefen", "learn_plan", "plan_from_state"),
        *("scale_by_gefen", "state_sharding", "to_adam_state"),
    ]
