"""What fits: budgets against arithmetic by hand, largest microbatches, the paper's figures, absent GPUs."""

import math
import os
import subprocess
import sys

import jax
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_jax import gefen
from gefen_jax.accounting import (
    DECODERS,
    LAYOUTS,
    PRECISIONS,
    TARGETS,
    Activations,
    TargetUnavailableError,
    analytic_activations,
    find_device,
    make_target,
    paper_microbatches,
    paper_states,
    what_fits,
)
from gefen_jax.accounting.fits import Budget, layer_bytes, sharded_bytes
from gefen_jax.accounting.paper import memory_window
from gefen_jax.accounting.targets import target_config
from gefen_jax.baselines import build

GIB = 2**30
ADAMW = optax.adamw(1e-3)
PARAMS = {
    "embedding": jax.ShapeDtypeStruct((1000, 64), "float32"),
    "layer_0": {"kernel": jax.ShapeDtypeStruct((64, 512), "float32"), "bias": jax.ShapeDtypeStruct((513,), "float32")},
    "layer_1": {"kernel": jax.ShapeDtypeStruct((512, 64), "float32"), "bias": jax.ShapeDtypeStruct((63,), "float32")},
}
COUNT = 64000 + 2 * 32768 + 513 + 63


def budget(layout, precision, **options):
    fits = what_fits(
        PARAMS,
        {"adamw": ADAMW},
        Activations(1000.0),
        memory=GIB,
        mesh=8,
        layouts=[layout],
        precisions=[precision],
        **options,
    )
    return fits.budgets[0]


def test_replicated_budget_by_hand():
    fp32, mixed, half = (budget("replicated", name) for name in PRECISIONS)
    assert (fp32.parameters, fp32.gradients, fp32.state) == (4 * COUNT, 4 * COUNT, 8 * COUNT + 4)
    assert (fp32.compute_copy, fp32.gathered, fp32.host) == (0, 0, 0)
    assert (mixed.parameters, mixed.gradients, mixed.state) == (4 * COUNT, 4 * COUNT, 8 * COUNT + 4)
    assert mixed.compute_copy == 2 * COUNT
    assert (half.parameters, half.gradients, half.state) == (2 * COUNT, 2 * COUNT, 4 * COUNT + 4)
    assert fp32.peak(3) == 16 * COUNT + 4 + 3000
    assert budget("replicated", "bf16 + fp32 master", remat=True).compute_copy == 2 * 64000


def test_fsdp_budget_by_hand():
    # everything splits by 8 but the two biases of odd length
    one = (64000 + 2 * 32768) // 8 + 513 + 63
    fsdp = budget("fsdp", "bf16 + fp32 master")
    assert (fsdp.parameters, fsdp.gradients, fsdp.state) == (4 * one, 4 * one, 8 * one + 4)
    assert fsdp.compute_copy == 0
    assert fsdp.gathered == 2 * 2 * 64000 + 4 * 64000  # two gathered in bfloat16, one's gradients in float32
    assert layer_bytes(PARAMS) == 4 * 64000
    assert sharded_bytes(PARAMS, 1) == 4 * COUNT


def test_offloaded_budget_by_hand():
    offload = budget("offload", "fp32")
    assert (offload.state, offload.host) == (0, 8 * COUNT + 4)
    assert offload.gathered == 2 * 2 * 4 * 64000  # both moments of the embedding, and as much on its way
    both = budget("fsdp+offload", "fp32")
    assert (both.state, both.host) == (0, 8 * ((64000 + 2 * 32768) // 8 + 513 + 63) + 4)


def test_without_accumulation_gradients_replace_activations():
    plain = budget("replicated", "fp32", accumulate=False)
    assert plain.peak(1) == 12 * COUNT + 4 + 4 * COUNT  # activations are smaller than the gradients
    assert plain.peak(10**6) == 12 * COUNT + 4 + 10**9


def test_work_space_of_the_update_counts_where_activations_are_smaller():
    own = Budget("x", "replicated", "fp32", 100, 100, 200, 0, 0, 500, 0, Activations(30.0))
    assert own.peak(1) == 400 + 500
    assert own.peak(20) == 400 + 600
    compiled = budget("replicated", "fp32", compile_update=True)
    assert compiled.update_temporaries < 1000


def test_axis_named_fsdp_shards():
    options = {"layouts": ["fsdp"], "precisions": ["fp32"], "memory": GIB}
    named = what_fits(PARAMS, {"adamw": ADAMW}, Activations(1.0), mesh={"data": 4, "fsdp": 2}, **options)
    plain = what_fits(PARAMS, {"adamw": ADAMW}, Activations(1.0), mesh=2, **options)
    assert named.budgets[0].parameters == plain.budgets[0].parameters
    assert "data=4 x fsdp=2" in str(named)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.floats(1, 10**8), st.floats(-(10**6), 10**8), st.integers(0, 2 * 10**9), st.booleans())
def test_the_largest_microbatch_is_the_largest(state, slope, fixed, memory, accumulate):
    own = Budget("x", "replicated", "fp32", 10**6, 10**6, state, 0, 0, 0, 0, Activations(slope, fixed), accumulate)
    largest = own.largest(memory)
    assert largest == 0 or own.peak(largest) <= memory
    assert own.peak(largest + 1) > memory or largest >= 1 << 20


def test_all_optimizers_layouts_and_precisions_of_a_known_model():
    decoder = DECODERS["gpt2-1b"]
    names = ("adamw", "adamw_bf16", "adafactor", "sm3", "adam_mini", "adam8bit", "adam4bit")
    optimizers = {n: build(n, 1e-3, **({"sizes": {"head_dim": 64}} if n == "adam_mini" else {})) for n in names}
    fits = what_fits(
        decoder.parameters(),
        optimizers | {"gefen": gefen(1e-3)},
        lambda precision: analytic_activations(decoder, 1024, precision.compute),
        memory=find_device("a100-40gb"),
        mesh={"fsdp": 8},
    )
    assert len(fits.rows) == 8 * len(LAYOUTS) * len(PRECISIONS)
    table = {(r["optimizer"], r["layout"], r["precision"]): r for r in fits.rows}
    per_parameter = {n: table[n, "replicated", "fp32"]["state"] / decoder.count for n in (*names, "gefen")}
    expected = {
        "adamw": 8,
        "adamw_bf16": 6,
        "adafactor": 0.01,
        "sm3": 4,
        "adam_mini": 4,
        "adam8bit": 2.03,
        "adam4bit": 1.04,
    }
    assert per_parameter == pytest.approx(expected | {"gefen": 1.02}, abs=0.02)
    for (name, layout, precision), row in table.items():
        assert row["microbatch"] == fits.microbatch(name, layout, precision)
        assert table["gefen", layout, precision]["microbatch"] >= table["adamw", layout, precision]["microbatch"]
        assert row["microbatch"] <= table[name, "fsdp", precision]["microbatch"] or layout.startswith("fsdp")
        if row["microbatch"]:
            assert row["peak"] <= fits.available
        else:
            assert row["peak"] > fits.available
    assert fits.microbatch("adamw", "replicated", "fp32") < fits.microbatch("gefen", "replicated", "fp32")
    assert "Advice: adamw, replicated, fp32: microbatch" in str(fits)
    assert "with optimizer adafactor" in fits.advice


def test_advice_on_what_dominates():
    fits = what_fits(
        PARAMS,
        {"adamw": ADAMW},
        Activations(10**8),
        memory=GIB,
        layouts=["replicated"],
        precisions=["fp32"],
        usable=1.0,
    )
    assert fits.rows[0]["microbatch"] == (GIB - 16 * COUNT - 4) // 10**8 == 10
    assert "Activations dominate: recomputing layers" in fits.advice


def test_wrong_requests_are_refused():
    def fits(**options):
        return what_fits(PARAMS, {"adamw": ADAMW}, Activations(1.0), memory=GIB, **options)

    with pytest.raises(ValueError, match="layouts: found 'zero', expected some of 'replicated'"):
        fits(layouts=["zero"])
    with pytest.raises(ValueError, match="precisions: found 'fp8', expected some of 'fp32'"):
        fits(precisions=["fp8"])
    with pytest.raises(ValueError, match=r"usable: found 1\.5"):
        fits(usable=1.5)


# the paper


def test_states_of_the_paper():
    """11.2 and 1.5 GiB at 1.5 B parameters, 97 GiB at 13 B, 6.5 GiB saved per billion: arXiv 2606.13894."""
    report = paper_states(ADAMW, gefen(1e-3))
    adamw, ours, large, saved = report.rows
    assert round(adamw["our_value"], 1) == round(adamw["rule_value"], 1) == adamw["paper_value"] == 11.2
    assert round(ours["rule_value"], 1) == ours["paper_value"] == 1.5
    assert 1.40 < ours["our_value"] < 1.45  # 1.019 bytes a parameter instead of 1.07
    assert round(large["our_value"]) == round(large["rule_value"]) == large["paper_value"] == 97
    assert round(saved["our_value"], 1) == round(saved["rule_value"], 1) == saved["paper_value"] == 6.5
    assert ours["our_value"] * GIB / DECODERS["llama-1.5b"].count < 1.07
    assert "float32 statistics, but fewer of them" in str(report)


def test_microbatches_of_the_paper():
    fsdp, ddp = paper_microbatches(ADAMW, gefen(1e-3))
    by_setting = {(r["devices"], r["tokens"], r["precision"]): r for r in fsdp.rows}
    # Llama 3's length, flash attention, float32 masters, 8 devices of 40 GiB: 2 instead of 1, as the paper says
    assert by_setting[8, 8192, "bf16 + fp32 master"]["40 GiB"] == "1 / 2"
    for row in fsdp.rows:  # the saving per device shrinks with the number of devices, the range of memory with it
        assert row["AdamW - Gefen"] == pytest.approx(6.98 * DECODERS["llama-1.5b"].count / row["devices"], rel=0.01)
        assert row["to"] - row["claim holds from"] <= row["AdamW - Gefen"] + 1
        assert int(row["80 GiB"].split(" / ")[1]) >= int(row["80 GiB"].split(" / ")[0])
    for row in ddp.rows:  # 13 to 21 GiB: AdamW fits on 40 and 80 GiB, whatever the precision
        assert 13 * GIB < row["claim holds from"] < row["to"] < 21 * GIB
        assert all(not row[size].startswith("0 /") for size in ("40 GiB", "80 GiB"))
    assert "none of these devices" in str(ddp)
    assert "8 x 40 GiB, 8192 tokens" in str(fsdp)


def test_memory_window_by_hand():
    first = Budget("a", "replicated", "fp32", 100, 0, 0, 0, 0, 0, 0, Activations(10.0))
    second = Budget("b", "replicated", "fp32", 85, 0, 0, 0, 0, 0, 0, Activations(10.0))
    low, high = memory_window(first, 1, second, 2)
    assert (low, high) == (110, 115)
    for memory in (low, high - 1):
        assert (first.largest(memory), second.largest(memory)) == (1, 2)
    assert (first.largest(high), second.largest(high)) == (1, 3)
    low, high = memory_window(first, 0, second, 2)
    assert (low, high) == (105, 110)


# GPUs that are not there


def test_descriptions_hold_the_published_figures():
    for name, chip in TARGETS.items():
        text = target_config(name)
        assert f'device_description_str: "{chip.description}"' in text
        assert f"memory_bandwidth: {int(find_device(name).bandwidth)}" in text
        assert math.isclose(chip.memory, find_device(name).memory, rel_tol=0.1)
        assert find_device(chip.description) == find_device(name)


def test_unknown_target():
    with pytest.raises(ValueError, match="unknown target 'v100'; known: a100"):
        make_target("v100")


def test_missing_wheels_are_said_loudly(monkeypatch):
    from jax.experimental import topologies

    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(TargetUnavailableError) as error:
        make_target("h100")
    text = str(error.value)
    assert f"pip install jax-cuda12-plugin=={jax.__version__}" in text
    assert "set JAX_PLATFORMS=cpu before jax is imported (found JAX_PLATFORMS=None)" in " ".join(text.split())


ABSENT_GPU = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from gefen_jax.accounting import TARGETS, make_target, step_memory, tree_bytes
def step(params, x):
    return params - 0.1 * jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p)))(params)
shapes = jax.ShapeDtypeStruct((1024, 512), "float32"), jax.ShapeDtypeStruct((64, 1024), "float32")
for name in ("a100", "h100", "h200", "b200", "l4", "rtx4090"):
    target = make_target(name)
    report = step_memory(step, *shapes, donate_argnums=0, target=target)
    assert report.argument_bytes == report.memory.arguments == tree_bytes(shapes)
    assert report.memory.aliased == 1024 * 512 * 4
    assert report.program.platform == name
    assert target.mesh.devices.flat[0].device_kind == TARGETS[name].description
target = make_target("h100", {"fsdp": 4})
split = NamedSharding(target.mesh, P("fsdp"))
params = jax.ShapeDtypeStruct((1024, 512), "float32", sharding=split)
report = step_memory(jax.jit(step, out_shardings=split, donate_argnums=0), params, shapes[1], target=target)
assert report.memory.arguments == 1024 * 512 * 4 // 4 + 64 * 1024 * 4 == report.argument_bytes
print("compiled for absent GPUs")
"""


def test_compiles_for_absent_gpus():
    """In a process of its own: the plugin has to be told before JAX is imported that there is no GPU."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", ABSENT_GPU], capture_output=True, text=True, timeout=600, env=environment
    )
    if "TargetUnavailableError" in done.stderr:
        pytest.skip("needs the wheel jax-cuda12-plugin of this jax, and ptxas")
    assert "compiled for absent GPUs" in done.stdout, done.stderr[-3000:]
