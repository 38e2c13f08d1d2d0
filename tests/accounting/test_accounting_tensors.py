"""Bytes of pytrees: against NumPy, against live arrays, over shapes and dtypes, shared, donated, sharded."""

import gc
import math

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from step_models import OPTIMIZERS, model

from gefen_jax.accounting import live_bytes, optimizer_states, tensors, tree_bytes
from gefen_jax.accounting.tensors import physical_bytes

PAIRS = [
    ("mlp", "adamw"),
    ("mlp", "gefen"),
    ("cnn", "adamw bf16"),
    ("cnn", "gefen"),
    ("gpt", "clipped"),
    ("gpt", "gefen"),
    ("llama", "sm3"),
    ("llama", "gefen"),
    ("qwen", "adafactor"),
]


@pytest.mark.parametrize(("model_name", "optimizer"), PAIRS)
def test_bytes_equal_live_arrays(model_name, optimizer):
    gc.collect()
    before = live_bytes()
    _, params, batch = model(model_name)
    state = OPTIMIZERS[optimizer].init(params)
    grads = jax.tree.map(jnp.copy, params)
    gc.collect()
    report = tensors(parameters=params, optimizer_state=state, gradients=grads, batch=batch)
    assert live_bytes() - before == report.device_bytes
    assert report.device_bytes == sum(array.nbytes for array in unique((params, state, grads, batch)))


def unique(tree):
    """Arrays of a tree, those with one buffer once (jit may return one buffer for equal constants)."""
    return {array.unsafe_buffer_pointer(): array for array in jax.tree.leaves(tree)}.values()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=7),
            st.sampled_from(["float32", "bfloat16", "float16", "uint8", "int32", "bool", "complex64", "float8_e4m3fn"]),
        ),
        max_size=6,
    )
)
def test_tree_bytes_against_numpy(leaves):
    sizes = {"bfloat16": 2, "float8_e4m3fn": 1}
    expected = sum(math.prod(s) * sizes.get(d, np.dtype(d).itemsize if d not in sizes else 0) for s, d in leaves)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves]
    arrays = [np.zeros(shape, getattr(ml_dtypes, dtype, dtype)) for shape, dtype in leaves]
    assert tree_bytes(shapes) == tree_bytes(arrays) == expected
    report = tensors(anything=shapes)
    assert report.bytes == report.device_bytes == report.total_bytes == expected
    assert sum(row["bytes"] for row in report.group_by("dtype")) == expected


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (7, 4), (8, 4)])
def test_four_bit_types_are_packed(count, expected):
    assert physical_bytes((count,), "int4") == physical_bytes((count,), "uint4") == expected


def test_four_bit_argument_equals_the_compiled_size():
    x = jnp.ones((5, 3), jnp.int4)
    compiled = jax.jit(lambda x: x.astype(jnp.float32)).lower(x).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == tree_bytes(x) == 8


def test_leaves_that_are_no_jax_arrays_count_as_jit_receives_them():
    tree = {"numpy": np.zeros((3,), np.float64), "int": 3, "float": 1.5, "none": None, "key": jax.random.key(0)}
    sizes = {row["group"]: row["bytes"] for row in tensors(x=tree).group_by("path")}
    assert sizes == {"numpy": 12, "int": 4, "float": 4, "key": 8}


def test_a_leaf_that_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"leaf a/b: found str, expected an array"):
        tensors(parameters={"a": {"b": "text"}})


def test_shared_buffers_count_once():
    x = jnp.arange(12.0)
    report = tensors(parameters={"a": x, "tied": x}, optimizer_state=[x, jnp.zeros(3)])
    assert report.bytes == 3 * 48 + 12
    assert report.device_bytes == 48 + 12
    assert [leaf.status for leaf in report.leaves] == ["", "alias of parameters: a", "alias of parameters: a", ""]
    assert any("counted once" in note for note in report.notes)


def test_two_array_objects_with_one_buffer_count_once():
    x = jnp.arange(8.0)
    view = jax.device_put(x, x.sharding, may_alias=True)
    assert view is not x
    assert tensors(x={"a": x, "b": view}).device_bytes == 32


def test_donated_arrays_no_longer_exist():
    x = jnp.ones((16, 16))
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(x))
    report = tensors(parameters=x)
    assert (report.bytes, report.device_bytes, report.leaves[0].status) == (1024, 0, "donated")


def test_sharded_trees_per_device_and_in_total():
    mesh = AbstractMesh((2, 4), ("data", "fsdp"))
    tree = {
        "split": jax.ShapeDtypeStruct((16, 6), "float32", sharding=NamedSharding(mesh, PartitionSpec("fsdp"))),
        "both": jax.ShapeDtypeStruct((8, 4), "bfloat16", sharding=NamedSharding(mesh, PartitionSpec("fsdp", "data"))),
        "whole": jax.ShapeDtypeStruct((5,), "float32", sharding=NamedSharding(mesh, PartitionSpec())),
    }
    report = tensors(parameters=tree)
    by_path = {leaf.path: leaf for leaf in report.leaves}
    assert {name: leaf.device_bytes for name, leaf in by_path.items()} == {"split": 96, "both": 8, "whole": 20}
    assert {name: leaf.total_bytes for name, leaf in by_path.items()} == {"split": 768, "both": 64, "whole": 160}
    assert by_path["split"].devices == 8


def test_shardings_given_apart():
    mesh = AbstractMesh((4,), ("fsdp",))
    rows, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    shapes = {"w": jax.ShapeDtypeStruct((8, 3), "float32"), "b": jax.ShapeDtypeStruct((3,), "float32")}
    report = tensors(parameters=shapes, state=shapes, shardings={"parameters": {"w": rows, "b": whole}, "state": whole})
    assert [row["per device"] for row in report.rows] == [24 + 12, 96 + 12]
    with pytest.raises(ValueError, match="shardings for parameters"):
        tensors(parameters=shapes, shardings={"parameters": [rows]})


def test_an_indivisible_sharding_is_named():
    sharding = NamedSharding(AbstractMesh((4,), ("fsdp",)), PartitionSpec("fsdp"))
    with pytest.raises(ValueError, match=r"leaf a: found shape \(6, 2\), which .* does not divide"):
        tensors(parameters={"a": jax.ShapeDtypeStruct((6, 2), "float32", sharding=sharding)})


def test_host_memory_is_apart():
    x = jnp.ones(64)
    host = jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    report = tensors(parameters=x, optimizer_state=host)
    assert (report.device_bytes, report.host_bytes) == (256, 256)


def test_flax_boxes_do_not_change_paths():
    nnx = pytest.importorskip("flax.nnx")
    module = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    assert {leaf.path for leaf in tensors(parameters=nnx.state(module)).leaves} == {"bias", "kernel"}


def test_report_as_text_html_and_json():
    report = tensors(parameters={"a": jnp.ones((3, 4))}, largest=1, by="dtype")
    assert "float32" in str(report)
    assert "Largest 1 of 1 leaves" in str(report)
    assert report._repr_html_().count("<table>") == 2
    assert report.to_dict()["rows"][0]["bytes"] == 48
    with pytest.raises(ValueError, match="group_by: found 'size'"):
        report.group_by("size")


@pytest.mark.parametrize("model_name", ["mlp", "llama"])
def test_optimizer_states_equal_the_real_ones(model_name):
    _, params, _ = model(model_name)
    report = optimizer_states(params, OPTIMIZERS)
    for name, optimizer in OPTIMIZERS.items():
        state = optimizer.init(params)
        assert report.states[name] == (len(jax.tree.leaves(state)), sum(x.nbytes for x in jax.tree.leaves(state)))


def test_adamw_costs_eight_bytes_a_parameter_and_a_counter():
    shapes = {"w": jax.ShapeDtypeStruct((1021, 3), "float32")}
    assert optimizer_states(shapes, {"adamw": optax.adamw(1e-3)}).states["adamw"] == (3, 8 * 3063 + 4)
