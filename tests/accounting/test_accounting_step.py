"""Activations, phases, time and utilization of a step, and the account of it all."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from step_models import GPT, LLAMA, OPTIMIZERS, model, train_step

from gefen_jax.accounting import (
    DEVICES,
    Activations,
    Device,
    ProfilerError,
    StepError,
    account,
    analytic_activations,
    compiled_activations,
    count_flops,
    decoder_loss,
    decoder_tokens,
    find_device,
    measure,
    measure_cpu,
    phases,
    profile,
    residuals,
    traced_activations,
    tree_bytes,
    update_temporaries,
    utilization,
)

# activations


def test_residuals_of_a_small_loss_by_hand():
    def loss(params, x):
        return jnp.sum(jnp.sin(x @ params["w"]) * params["gain"])

    params = {"w": jnp.ones((5, 3)), "gain": jnp.ones((3,))}
    kept = residuals(loss, params, jnp.ones((4, 5)))
    # sin(xw) for the gain, cos(xw) * gain's chain for w: two arrays of (4, 3), and the broadcast gain (1, 3)
    assert kept.bytes == 2 * 4 * 3 * 4 + 3 * 4
    assert kept.argument_bytes == 4 * 5 * 4  # x
    assert {row["operation"] for row in kept.rows} == {"sin", "cos", "broadcast_in_dim"}
    assert all("test_accounting_step.py" in row["where"] for row in kept.rows)


def test_a_linear_loss_keeps_nothing_but_its_input():
    kept = residuals(lambda w, x: jnp.sum(x @ w), jnp.ones((5, 3)), jnp.ones((4, 5)))
    assert (kept.bytes, kept.argument_bytes) == (0, 80)


def test_residuals_through_jit_scan_and_auxiliary_output():
    @jax.jit
    def loss(w, x):
        y, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=6)
        return jnp.sum(y), y

    kept = residuals(loss, jnp.ones((8, 8)), jnp.ones((4, 8)), has_aux=True)
    stacked = [item for item in kept.kept if item.shape[:1] == (6,)]
    assert {item.shape for item in stacked} == {(6, 4, 8)}
    assert kept.bytes >= 2 * 6 * 4 * 8 * 4


def test_checkpoint_keeps_only_the_inputs_of_layers():
    params, tokens = GPT.parameters(), decoder_tokens(2, 16)
    whole = residuals(partial(decoder_loss, GPT), params, tokens)
    short = residuals(partial(decoder_loss, GPT, remat=True), params, tokens)
    per_layer = 2 * 16 * GPT.width * 4
    assert short.bytes < 0.5 * whole.bytes
    assert sum(row["bytes"] for row in short.rows if row["shape"] == (2, 16, GPT.width)) >= per_layer


@pytest.mark.parametrize("decoder", [GPT, LLAMA])
def test_the_closed_form_lies_below_what_the_trace_keeps(decoder):
    length, loss = 24, partial(decoder_loss, decoder)
    closed = analytic_activations(decoder, length, "float32")
    traced = traced_activations(lambda p, t: loss(p, t), decoder.parameters(), lambda n: decoder_tokens(n, length))
    assert closed.bytes(4) <= traced.bytes(4) <= 4 * closed.bytes(4)
    assert residuals(loss, decoder.parameters(), decoder_tokens(4, length)).bytes == pytest.approx(traced.bytes(4))


def test_closed_form_by_hand():
    # per token: 4 width, qkv, attention's output, 2 hidden, heads x length, float32; ends: 2 width, 2 vocabulary
    length = 24
    layer = 4 * 48 + 3 * 48 + 48 + 2 * 192 + 3 * length
    expected = 4 * length * (layer + 2 * 48 + 2 * 131)
    assert GPT.activation_bytes(length, "float32", attention="materialised") == expected
    layer = 4 * 48 + (48 + 2 * 24) + 48 + 3 * 128
    expected = length * (2 * layer + 4 * 4 + 2 * (2 * 48) + 137 * 8)
    assert LLAMA.activation_bytes(length, "bfloat16", attention="fused") == expected
    with pytest.raises(ValueError, match="attention: found 'flash'"):
        GPT.activation_bytes(8, attention="flash")


def test_compiled_activations_follow_the_microbatch():
    loss, params, _ = model("mlp")
    shapes = lambda n: (jax.ShapeDtypeStruct((n * 64, 33), "float32"), jax.ShapeDtypeStruct((n * 64, 10), "float32"))  # noqa: E731
    line = compiled_activations(loss, params, shapes)
    assert line.per_sequence > 64 * 4 * 64
    assert "compiled for cpu" in line.source


def test_activations_are_never_negative():
    assert Activations(10.0, -25.0).bytes(2) == 0.0


# phases


@pytest.fixture(scope="module")
def small_phases():
    loss, params, batch = model("mlp")
    optimizer = OPTIMIZERS["adamw"]
    return phases(loss, optimizer, params, optimizer.init(params), batch, run=True, repeats=2), loss, params, batch


def test_phases_have_the_bytes_of_their_arguments(small_phases):
    report, _, params, batch = small_phases
    parameters, state = tree_bytes(params), 2 * tree_bytes(params) + 4
    assert (report.parameter_bytes, report.state_bytes, report.batch_bytes) == (parameters, state, tree_bytes(batch))
    assert report.phase("forward").memory.arguments == parameters + tree_bytes(batch)
    assert report.phase("update").memory.arguments == 2 * parameters + state
    assert report.phase("apply").memory.arguments == 2 * parameters
    assert report.phase("update").memory.aliased == parameters + state
    assert report.phase("forward").peak == report.phase("forward").memory.peak + state
    assert report.phase("apply").resident == state + tree_bytes(batch)
    assert report.whole.memory.arguments == parameters + state + tree_bytes(batch)
    assert report.optimizer_traffic == 3 * parameters + 2 * state


def test_phases_count_the_work_of_the_step(small_phases):
    report, loss, params, batch = small_phases
    parts = sum(report.phase(name).flops for name in ("forward + backward", "update", "apply"))
    assert parts == report.whole.flops
    assert report.phase("forward").flops == count_flops(loss, params, batch).total
    assert all(row["time"] > 0 for row in report.rows)
    assert report.optimizer_seconds == report.phase("update").seconds + report.phase("apply").seconds
    with pytest.raises(KeyError, match="no phase 'sideways'"):
        report.phase("sideways")


def test_phases_from_shapes_and_with_auxiliary_output():
    loss, params, batch = model("mlp")
    optimizer = optax.sgd(0.1)
    shapes = jax.eval_shape(lambda: (params, batch))
    report = phases(lambda p, b: (loss(p, b), b), optimizer, shapes[0], optimizer.init(params), shapes[1], has_aux=True)
    assert report.whole.seconds is None
    assert "-" in str(report)


def test_update_work_space_of_adamw_is_nothing_and_of_adafactor_something():
    shapes = {"w": jax.ShapeDtypeStruct((256, 384), "float32")}
    assert update_temporaries(optax.adamw(1e-3), shapes) < 100
    assert update_temporaries(optax.adafactor(1e-3), shapes) >= 256 * 384


# time


def test_measure_repeats_steps_that_donate():
    step = jax.jit(lambda params, x: (params + x, x.sum()), donate_argnums=0)
    params = jnp.ones(8)
    timing = measure(step, params, jnp.ones(8), repeats=4)
    assert len(timing.seconds) == 4
    assert not params.is_deleted()
    with pytest.raises(TypeError, match="found a shape"):
        measure(step, jax.ShapeDtypeStruct((8,), "float32"), jnp.ones(8))
    with pytest.raises(ValueError, match="repeats: found 0"):
        measure(step, params, params, repeats=0)


def test_utilization_by_hand():
    report = utilization(
        2.0,
        int(1e15),
        DEVICES["a100"],
        jnp.bfloat16,
        devices=4,
        hardware_flops=int(1.25e15),
        optimizer_bytes=int(2.039e12),
        optimizer_seconds=0.5,
    )
    assert report.mfu == pytest.approx(1e15 / 2 / (4 * 312e12))
    assert report.hfu == pytest.approx(1.25 * report.mfu)
    assert report.bandwidth_use == pytest.approx(2.0 / 4)
    assert len(report.rows) == 4
    with pytest.raises(ValueError, match="seconds: found 0"):
        utilization(0.0, 1, DEVICES["a100"])
    with pytest.raises(ValueError, match="no peak FLOP/s for int8, only for bfloat16"):
        utilization(1.0, 1, DEVICES["a100"], "int8")


def test_profile_counts_events_of_the_program():
    step = jax.jit(lambda a, b: jnp.sort(jnp.sin(a @ b)).sum(axis=0) @ b)
    args = jnp.ones((64, 64)), jnp.ones((64, 64))
    report = profile(step, *args, steps=2)
    program = step.lower(*args).compile().as_text()
    assert all(f"%{row['event']} = " in program for row in report.rows)  # names of instructions, nothing else
    assert "sort" in " ".join(row["event"] for row in report.rows)
    assert report.events_per_step >= 2
    assert {row["per step"] for row in report.rows} == {1.0}  # no loop: every instruction once a step


def test_no_profiler_is_said(monkeypatch):
    step = jax.jit(lambda a: a + 1)
    monkeypatch.delattr(jax.profiler, "ProfileData")
    with pytest.raises(ProfilerError, match=r"no jax\.profiler\.ProfileData; use measure"):
        profile(step, jnp.ones(3))


def test_a_profiler_in_use_is_said(tmp_path):
    step = jax.jit(lambda a: a + 1)
    with jax.profiler.trace(str(tmp_path)), pytest.raises(ProfilerError, match="is another profile being taken"):
        profile(step, jnp.ones(3))


def test_a_profile_without_events_is_said(monkeypatch):
    monkeypatch.setattr("gefen_jax.accounting.timing._events", lambda data: {})
    with pytest.raises(ProfilerError, match="recorded no executor event"):
        profile(jax.jit(lambda a: a + 1), jnp.ones(3))


# devices


def test_devices_are_found_by_name_kind_and_as_they_are():
    assert find_device("H100").name == "h100"
    kinds = {
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
        "NVIDIA L4": "l4",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "TPU v4": "tpu-v4",
        "TPU v5 lite": "tpu-v5e",
        "TPU v5p": "tpu-v5p",
        "TPU v6 lite": "tpu-v6e",
    }
    assert {kind: find_device(kind).name for kind in kinds} == kinds
    mine = Device("mine", {"float32": 1.0}, 1.0, 1)
    assert find_device(mine) is mine
    assert find_device("mine", {**DEVICES, "mine": mine}) is mine
    for unknown in ("abacus", "NVIDIA L40S", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GB200"):
        with pytest.raises(ValueError, match=r"unknown device .*known: a100, .*Device\(name"):
            find_device(unknown)


def test_this_cpu_is_measured():
    device = measure_cpu(size=128, repeats=2)
    assert device.peak("float32") > 1e8
    assert device.peak("bfloat16") > 1e6
    assert 1e8 < device.bandwidth < 1e13
    assert device.memory > 2**28


# everything in one call


def test_account_of_a_training_step():
    loss, params, batch = model("mlp")
    optimizer = OPTIMIZERS["adamw"]
    step = jax.jit(train_step(loss, optimizer), donate_argnums=(0, 1))
    report = account(
        step,
        params,
        optimizer.init(params),
        batch,
        loss=loss,
        optimizer=optimizer,
        alternatives={"lion": optax.lion(1e-3), "gefen": OPTIMIZERS["gefen"]},
        run=True,
        device=Device("test", {"float32": 1e12}, 1e11, 2**30),
        repeats=2,
    )
    parts = report.parts
    assert parts["parameters"] == tree_bytes(params)
    assert parts["optimizer state"] == 2 * tree_bytes(params) + 4
    assert sum(parts.values()) == report.memory.memory.peak
    assert report.flops.model <= 3 * count_flops(loss, params, batch).model
    assert report.utilization.model_flops == report.flops.model
    assert report.utilization.mfu <= report.utilization.hfu
    assert report.profile.events_per_step > 1
    assert report.live_after == report.memory.live_bytes
    assert report.alternatives["lion"] == tree_bytes(params) + 4
    assert "The peak is" in report.advice
    assert "an optimizer with a smaller state (gefen" in report.advice
    data = json.loads(report.to_json())
    assert [section["title"].split()[0] for section in data["sections"]] == [
        "Memory", "Kept", "Phases", "FLOPs", "Utilization", "Profile",
    ]  # fmt: skip
    assert str(report).count("\n\n") == 6


def test_account_from_shapes_only():
    loss, params, batch = model("mlp")
    optimizer = OPTIMIZERS["gefen"]
    shapes = jax.eval_shape(lambda: (params, optimizer.init(params), batch))
    report = account(train_step(loss, optimizer), *shapes, donate_argnums=(0, 1))
    assert report.utilization is None
    assert report.memory.unexplained_bytes == 0
    assert report.undonated == 0


def test_account_points_out_missing_donation():
    loss, params, batch = model("mlp")
    optimizer = OPTIMIZERS["adamw"]
    report = account(train_step(loss, optimizer), params, optimizer.init(params), batch)
    assert report.undonated == 3 * tree_bytes(params) + 4
    assert "donate the parameters and the optimizer state" in report.advice


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple


def test_account_of_a_train_state():
    loss, params, batch = model("mlp")
    optimizer = OPTIMIZERS["adamw"]

    def step(state, batch):
        params, opt_state, _ = train_step(loss, optimizer)(state.params, state.opt_state, batch)
        return State(state.step + 1, params, opt_state)

    state = State(jnp.int32(0), params, optimizer.init(params))
    report = account(step, state, batch, loss=loss, optimizer=optimizer, donate_argnums=0)
    assert report.phases.parameter_bytes == tree_bytes(params)
    assert report.memory.categories["state"][1] == 4
    assert report.memory.donated_bytes == report.memory.memory.aliased


def test_a_missing_profiler_does_not_lose_the_account(monkeypatch):
    monkeypatch.delattr(jax.profiler, "ProfileData")
    report = account(lambda params, x: params * x, jnp.ones(9), jnp.ones(9), run=True, repeats=1, device="h100")
    assert report.profile is None
    assert any("no jax.profiler.ProfileData" in note for note in report.notes)


def test_wrong_requests_are_refused_at_once():
    step = lambda params, x: params * x  # noqa: E731
    with pytest.raises(ValueError, match="unknown device 'abacus'"):
        account(step, jnp.ones(3), jnp.ones(3), device="abacus")
    with pytest.raises(StepError, match="no argument holds the parameters and the optimizer state alone"):
        account(lambda a, b: a * b, jnp.ones(3), jnp.ones(3), loss=lambda p, b: p.sum(), optimizer=optax.sgd(0.1))
    report = account(
        lambda a, b: a * b, jnp.ones(3), jnp.ones(3), loss=lambda p, b: (p * b).sum(), categories={"^a$": "parameters"}
    )
    assert report.activations.argument_bytes == 12


def test_what_an_unjitted_step_donates_is_donated_in_its_run_too():
    arrays = jnp.ones(4096), jnp.ones(4096)
    report = account(
        lambda params, x: params * x,
        *arrays,
        donate_argnums=0,
        run=True,
        repeats=1,
        profile_steps=0,
        device="h100",
    )
    assert report.live_after == report.memory.live_bytes == 2 * 4 * 4096
