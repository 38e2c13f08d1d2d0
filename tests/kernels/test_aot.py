"""What a GPU would run, from programs compiled for it on the CPU: launches, copies, memory, registers, parameters."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

MISSING = [name for name in ("jax_triton", "jax_cuda12_plugin") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: NOTHING IS COMPILED FOR A GPU in this run"
)
REGISTERS = 80
CODE = 48 << 10
"""Bytes of machine code of a kernel. Compile time is bounded through this and the length of XLA's program, not by a
clock: the larger of the two GPT-2 kernels takes 39 KiB, and its step two seconds on two quiet cores."""


def compiled(group):
    script = pathlib.Path(__file__).with_name("aot_checks.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, str(script), group], capture_output=True, text=True, env=environment, timeout=540
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = map(json.loads, done.stdout.splitlines())
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="module")
def forms():
    return compiled("forms")


@pytest.fixture(scope="module")
def more():
    return compiled("more")


def check(found, *, launches, small=3, temporary=0.3, aliased=5.0, spills=0, code=CODE):
    """Kernels and nothing else touch the parameters; every pointer stands where kernels look for it."""
    assert found["large"] == {"triton": launches}
    assert found["copies"] == 0
    assert found["small"] <= small
    assert found["temporary"] <= temporary
    assert found["aliased"] >= aliased
    assert found["lines"] <= 300 + 12 * found["leaves"]
    for kernel in found["kernels"].values():
        assert kernel["registers"] <= REGISTERS
        assert 4 << 10 <= kernel["code"] <= code
        assert max(kernel["spills"], kernel["stack"]) <= spills
        assert kernel["parameters"] == [[8 * i, 8] for i in range(len(kernel["parameters"]))]


@pytest.mark.parametrize("form", ["apply", "update"])
@pytest.mark.parametrize(
    ("second", "launches", "temporary"), [("auto", 2, 0.15), ("block", 1, 1e-3), ("full", 1, 1e-3)]
)
def test_gpt2_in_one_launch_or_two(forms, second, launches, temporary, form):
    found = forms[f"{second} {form}"]
    check(found, launches=launches, temporary=temporary)
    assert found["leaves"] == 148
    print(f"{second} {form}: {found['seconds']:.1f} s to trace, lower and compile; {found['kernels']}")


def test_other_gpus():
    found = compiled("targets")
    assert set(found) == {"a100", "h200", "b200"}
    for line in found.values():
        check(line, launches=2, temporary=0.15)


@pytest.mark.parametrize(
    ("name", "launches", "aliased", "spills"),
    [("bfloat16", 2, 3.0, 0), ("four bits", 2, 4.5, 0), ("companding", 1, 5.0, 32)],
)
def test_dtypes_and_codecs(more, name, launches, aliased, spills):
    check(more[name], launches=launches, aliased=aliased, spills=spills)


def test_clipping_adds_the_launch_that_reads_the_norm(more):
    found = more["clipped"]
    assert found["large"] == {"triton": 3}
    assert found["small"] <= 4  # the norm's counter is a fourth


@pytest.mark.parametrize("name", ["llama", "scanned"])
def test_llama(more, name):
    check(more[name], launches=2, aliased=3.0)


def test_odd_shapes(more):
    """Scalar accesses and loops spill a few registers once per tile."""
    check(more["odd"], launches=2, spills=32, code=96 << 10)


def test_more_leaves_than_a_launch_holds(more):
    found = more["600 leaves"]
    check(found, launches=4, small=4)


def test_two_thousand_leaves():
    """The fewest launches that the limit of leaves allows: 512 in each."""
    check(compiled("many")["2,000 leaves"], launches=4)


def test_code_does_not_grow_with_the_number_of_leaves(more):
    few, many = more["16 leaves"], more["600 leaves"]
    check(few, launches=2)
    for name, kernel in few["kernels"].items():
        assert many["kernels"][name]["code"] <= 1.05 * kernel["code"]


def test_shards_on_several_gpus(more):
    """One launch per device, and nothing between devices: no operation but the kernel's touches anything large."""
    check(more["four GPUs"], launches=1, spills=32)


def test_portable_selection(more):
    check(more["portable selection"], launches=2)


def test_a_training_step_is_its_gradients_and_the_step(more):
    gradients, training = more["gradients"], more["training"]
    assert training["large"].pop("triton") == 2
    assert sum(training["large"].values()) <= sum(gradients["large"].values())
    assert training["large"].get("copy", 0) <= gradients["large"].get("copy", 0)


def test_wrappers_and_control_flow():
    """Kernels everywhere but under vmap, which takes the plain step."""
    kernels = compiled("wrappers")["wrappers"]["kernels"]
    assert kernels.pop("vmap") == 0
    assert set(kernels.values()) == {2}
