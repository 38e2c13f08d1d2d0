"""The counters and the checks that the GPU benchmarks rest on."""

import jax
import jax.numpy as jnp
import optax
import pytest

from gefen_jax import gefen
from gefen_jax.lab import bench_gpu, bench_launches
from gefen_pallas import aot

HLO = """HloModule m, is_scheduled=true

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %c.1 = f32[8]{0} copy(%p)
}

ENTRY %main (a: f32[100,200], b: s32[]) -> (f32[100,200], s32[]) {
  %a = f32[100,200]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %fused = s32[] fusion(%b), kind=kLoop, calls=%f
  %reduced = f32[] fusion(%a, /*index=1*/%fused), kind=kInput, calls=%g
  %called = f32[8]{0} call(%reduced), to_apply=%inner
  %kernel = (f32[100,200]{1,0}, s32[]) custom-call(%a, %fused), custom_call_target="triton_kernel_call_ffi"
  %room = f32[4]{0} custom-call(), custom_call_target="AllocateBuffer"
  %first = f32[100,200]{1,0} get-tuple-element(%kernel), index=0
  ROOT %out = (f32[100,200]{1,0}, s32[]) tuple(%first, %fused)
}
"""


def test_launches_are_counted_by_kind_and_size():
    assert aot.launches(HLO) == {"fusion": 2, "copy": 1, "triton": 1}
    large, small = aot.by_size(HLO, 1000)
    assert large == {"fusion": 1, "triton": 1}, "what reads a large array is large"
    assert small == {"fusion": 1, "copy": 1}


def test_the_launch_table():
    rows = [
        bench_launches.Row("adamw: eager", 2373, None, None, None, None),
        bench_launches.Row("gefen", 2, 3, 0, 0.125, 6.2),
    ]
    assert bench_launches.show(rows).splitlines()[2:] == [
        "adamw: eager      2373      -       -             -        -",
        "gefen                2      3       0         0.125      6.2",
    ]


def test_eager_operations_are_counted():
    tx = optax.sgd(1e-2)
    form = bench_launches.Form("sgd", lambda g, p, s: tx.update(g, s, p), tx.init, "eager")
    assert bench_launches.count(form, {"w": jax.ShapeDtypeStruct((4, 4), "float32")}, "h100").large >= 1


def test_right_paths_pass_and_wrong_ones_do_not():
    shapes = {"w": jax.ShapeDtypeStruct((64, 256), "float32"), "b": jax.ShapeDtypeStruct((32,), "float32")}
    tx = gefen(bench_gpu.RATE, weight_decay=bench_gpu.DECAY, implementation="jnp")
    assert bench_gpu.check(bench_gpu.Path_("right", tx.init, tx.apply), shapes) < bench_gpu.WRONG

    def off(grads, params, state):
        params, state = tx.apply(grads, params, state)
        return jax.tree.map(lambda p: p.at[..., 0].add(1e-4), params), state

    def unwritten(grads, params, state):
        params, state = tx.apply(grads, params, state)
        return jax.tree.map(lambda p: p.at[..., 0].set(jnp.nan), params), state

    for wrong in (off, unwritten):
        assert not bench_gpu.check(bench_gpu.Path_("wrong", tx.init, wrong), shapes) < bench_gpu.WRONG


@pytest.mark.slow
def test_the_gpu_run_ends_on_a_cpu(tmp_path, capsys):
    import argparse
    import json

    parser = argparse.ArgumentParser()
    bench_gpu.add_arguments(parser)
    out = tmp_path / "out.jsonl"
    assert bench_gpu.run(parser.parse_args(["--out", str(out)])) == 0
    assert "NO GPU" in capsys.readouterr().out
    assert len({json.loads(line)["subject"] for line in out.read_text().splitlines()}) >= 9
