"""Programs compiled for GPUs in a process of its own; prints what was found as JSON lines. Run by test_aot.

The process must not have Triton's interpreter on, and a compiler that gives up takes only this process with it.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gefen_jax import gefen, state_sharding
from gefen_jax.fused import clip_by_global_norm, fused_chain
from gefen_pallas import aot, compiled

GPT2 = {"wte": (50257, 768), "wpe": (1024, 768), "f": {"scale": (768,), "bias": (768,)}} | {
    f"h{i}": {
        "a": (768,),
        "b": (768,),
        "qkv": (768, 2304),
        "qkv_b": (2304,),
        "o": (768, 768),
        "o_b": (768,),
        "c": (768,),
        "d": (768,),
        "up": (768, 3072),
        "up_b": (3072,),
        "down": (3072, 768),
        "down_b": (768,),
    }
    for i in range(12)
}
_LAYER = {
    "q": (2048, 2048),
    "k": (2048, 512),
    "v": (2048, 512),
    "o": (2048, 2048),
    "gate": (2048, 8192),
    "up": (2048, 8192),
    "down": (8192, 2048),
    "n1": (2048,),
    "n2": (2048,),
}
LLAMA = {"embed": (128256, 2048), "norm": (2048,)} | {f"layer{i}": _LAYER for i in range(16)}
SCANNED = {"embed": (128256, 2048), "norm": (2048,), "layers": {name: (16, *shape) for name, shape in _LAYER.items()}}
RATE = optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100)


def shapes(tree, dtype="float32"):
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), tree, is_leaf=is_shape)


def report(name, program, size, leaves, seconds):
    large, small = aot.by_size(program.text, 1 << 14)
    kernels = {name: aot.assemble(ptx)._asdict() for name, ptx in program.kernels.items()}
    line = {
        "name": name,
        "large": large,
        "small": sum(small.values()),
        "copies": program.copies,
        "leaves": leaves,
        "lines": len(program.text.splitlines()),
        "seconds": seconds,
        "temporary": program.temporary / size,
        "aliased": program.aliased / size,
        "kernels": kernels,
    }
    print(json.dumps(line), flush=True)


def step(name, tree, *, form="apply", target="h100", dtype="float32", chain=False, **arguments):
    params = shapes(tree, dtype)
    mask = jax.tree.map(lambda p: len(p.shape) > 1, params)
    tx = gefen(RATE, weight_decay=0.1, mask=mask, implementation="triton", **arguments)
    tx = fused_chain(clip_by_global_norm(1.0), tx) if chain else tx
    state = jax.eval_shape(tx.init, params)
    start = time.perf_counter()
    if form == "apply":
        program = aot.compile_for(target, tx.apply, params, params, state, donate=(1, 2))
    else:
        program = aot.compile_for(target, tx.update, params, state, params, donate=(0, 1))
    leaves = jax.tree.leaves(params)
    report(name, program, sum(leaf.size for leaf in leaves), len(leaves), time.perf_counter() - start)


def train_step():
    """A whole step of a network: its gradients alone, and with the optimizer."""
    tx = gefen(1e-3, implementation="triton")
    params = shapes({f"w{i}": (512, 512) for i in range(8)})

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return (x * x).mean()

    def training(params, state, x):
        return tx.apply(jax.grad(loss)(params, x), params, state)

    x = jax.ShapeDtypeStruct((256, 512), "float32")
    size = 8 * 512 * 512
    report("gradients", aot.compile_for("h100", jax.grad(loss), params, x), size, 8, 0)
    state = jax.eval_shape(tx.init, params)
    report("training", aot.compile_for("h100", training, params, state, x, donate=(0, 1)), size, 8, 0)


def several_gpus():
    """Blocks inside the shards of four GPUs: each device steps its own, in one launch."""
    mesh = aot.mesh_of("h100", 4)
    params = shapes({f"w{i}": (512, 768) for i in range(6)} | {"b": (768,), "odd": (5003,)})
    specs = {name: P("x") if name != "odd" else P() for name in params}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    tx = gefen(RATE, weight_decay=0.1, second_moment="full", implementation="triton", shardings=shardings)
    state = jax.eval_shape(tx.init, params)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    params = jax.tree.map(place, params, shardings)
    state = jax.tree.map(place, state, state_sharding(state, shardings))
    start = time.perf_counter()
    program = aot.compile_for(mesh, tx.apply, params, params, state, donate=(1, 2))
    size = sum(leaf.size for leaf in jax.tree.leaves(params)) / 4
    report("four GPUs", program, size, len(params), time.perf_counter() - start)


def select_among_all():
    """The portable way to find a leaf's pointers."""
    original = compiled.Compiled
    compiled.Compiled = lambda: original(own_parameters=False)
    step("portable selection", {f"w{i}": (256, 512) for i in range(16)})
    compiled.Compiled = original


def wrappers():
    """Inside the control flow of Optax's wrappers, of scan, and under vmap."""
    params = shapes({"w": (64, 256), "b": (300,)})
    inner = gefen(1e-2, implementation="triton")
    inject = optax.inject_hyperparams(gefen, static_args=("mask", "full_precision", "implementation"))
    stacked = jax.tree.map(lambda p: jax.ShapeDtypeStruct((5, *p.shape), p.dtype), params)
    wrapped = {
        "MultiSteps": optax.MultiSteps(inner, 4),
        "apply_if_finite": optax.apply_if_finite(inner, 3),
        "masked": optax.masked(inner, {"w": True, "b": False}),
        "inject_hyperparams": inject(learning_rate=1e-2, implementation="triton"),
    }
    programs = {
        name: aot.compile_for("h100", tx.update, params, jax.eval_shape(tx.init, params), params, donate=(0, 1))
        for name, tx in wrapped.items()
    }

    def scanned(params, state, grads):
        return jax.lax.scan(lambda carry, g: (inner.apply(g, *carry), None), (params, state), grads)[0]

    state = jax.eval_shape(inner.init, params)
    programs["scan"] = aot.compile_for("h100", scanned, params, state, stacked, donate=(0, 1))
    states = jax.eval_shape(jax.vmap(inner.init), stacked)
    programs["vmap"] = aot.compile_for("h100", jax.vmap(inner.apply), stacked, stacked, states)
    found = {name: program.text.count('custom_call_target="triton_kernel_call') for name, program in programs.items()}
    print(json.dumps({"name": "wrappers", "kernels": found}), flush=True)


GROUPS = {
    "wrappers": wrappers,
    "forms": lambda: [
        step(f"{second} {form}", GPT2, form=form, second_moment=second)
        for second in ("auto", "block", "full")
        for form in ("apply", "update")
    ],
    "targets": lambda: [step(target, GPT2, target=target) for target in ("a100", "h200", "b200")],
    "many": lambda: [step("2,000 leaves", {f"w{i}": (128, 128) for i in range(2000)}, second_moment="full")],
    "more": lambda: [
        step("bfloat16", GPT2, dtype="bfloat16"),
        step("four bits", GPT2, bits=4),
        step("companding", GPT2, codec="companding", second_moment="block"),
        step("clipped", GPT2, chain=True),
        step("llama", LLAMA, dtype="bfloat16"),
        step("scanned", SCANNED, dtype="bfloat16"),
        step("odd", {"a": (5003, 4099), "b": (1, 50257), "c": (64, 4099), "d": (7, 1031), "e": (300, 511)}),
        step("16 leaves", {f"w{i}": (128, 256) for i in range(16)}),
        step("600 leaves", {f"w{i}": (128, 256) for i in range(600)}),
        several_gpus(),
        select_among_all(),
        train_step(),
    ],
}

if __name__ == "__main__":
    for group in sys.argv[1:]:
        GROUPS[group]()
