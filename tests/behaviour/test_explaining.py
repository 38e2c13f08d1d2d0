"""`explain` and `blocks`: every reason once, totals that add up, and text that can be read."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from behaviour_cases import normal, structured, tree

from gefen_jax import blocks, calibrate, explain, gefen, learn_plan, plan_from_state
from gefen_jax.explain import HEAD
from gefen_jax.reasons import EXPLANATIONS, REASONS


def reasons(opt_state, **kw):
    return {row.path: row.reason for row in explain(opt_state, **kw).rows}


def learned(grads, **kw):
    """State calibrated with these gradients."""
    return calibrate(gefen(1e-3, **kw).init(jax.tree.map(jnp.zeros_like, grads)), grads)


def forced():
    """A state for every reason: reason -> (state, path of the leaf that has it)."""
    good, kernel = structured(0)["dense"]["kernel"], (96, 192)
    bad = {"zero": jnp.zeros(kernel), "flat": normal(5, kernel), "nan": normal(6, kernel).at[3, 3].set(jnp.nan)}
    fresh = gefen(1e-3, full_precision="head").init(
        {"kernel": jnp.zeros(kernel), "bias": jnp.zeros(9), "head": jnp.zeros((96, 192)), "empty": jnp.zeros((0, 3))}
    )
    calibrated = learned({"good": good, **bad})
    singles = gefen(1e-3, min_size=0, axes={"w": (1, 1)}).init({"w": jnp.zeros((64, 1))})
    return {
        "learned": (calibrated, "good"),
        "shape rule": (fresh, "kernel"),
        "small": (fresh, "bias"),
        "full precision": (fresh, "head"),
        "zero gradient": (calibrated, "zero"),
        "flat gradient": (calibrated, "flat"),
        "non-finite gradient": (calibrated, "nan"),
        "no elements": (fresh, "empty"),
        "blocks of one element": (singles, "w"),
        "no gradient yet": (gefen(1e-3, rule="reference").init({"w": jnp.zeros((4, 8))}), "w"),
    }


def test_every_reason_is_given_and_explained():
    states = forced()
    assert list(states) == list(REASONS) == list(EXPLANATIONS)
    for reason, (opt_state, path) in states.items():
        found = explain(opt_state)
        assert {row.path: row.reason for row in found.rows}[path] == reason
        assert found.legend()[reason] == EXPLANATIONS[reason]
        assert blocks(opt_state)[path].reason == reason
        assert plan_from_state(opt_state).leaves[path].reason == reason
        assert f"{reason}  " in str(found)


STATES = {
    "small tree": lambda: gefen(1e-3).init(tree(0)),
    "four bits": lambda: gefen(1e-3, bits=4).init(tree(0)),
    "block": lambda: gefen(1e-3, second_moment="block", min_size=0).init(tree(0)),
    "full": lambda: gefen(1e-3, second_moment="full").init(tree(0)),
    "reference": lambda: gefen(1e-3, rule="reference").init(tree(0, dtype=jnp.bfloat16)),
    "learned": lambda: learned(structured(0)),
    "empty leaf and scalar": lambda: gefen(1e-3, min_size=0).init({"e": jnp.zeros((0, 3)), "s": jnp.zeros(())}),
    "no leaves": lambda: gefen(1e-3).init({}),
    "wrapped": lambda: optax.chain(optax.clip(1.0), optax.MultiSteps(gefen(1e-3), 2)).init(tree(0)),
    "two groups": lambda: optax.partition(
        {"a": gefen(1e-3), "b": gefen(1e-4, bits=4)}, {"dense": "a", "table": "b"}
    ).init(tree(0)),
}


@pytest.mark.parametrize("which", STATES)
def test_totals_are_the_summed_bytes(which):
    opt_state = STATES[which]()
    found = explain(opt_state)
    held = [node for node in jax.tree.leaves(opt_state, is_leaf=is_gefen) if is_gefen(node)]
    arrays = jax.tree.leaves(held)
    assert found.bytes == sum(x.nbytes for x in arrays)
    common = sum(node.count.nbytes + node.format.nbytes + node.codebook.nbytes for node in held)
    assert sum(row.bytes for row in found.rows) == found.bytes - common
    decided = blocks(opt_state)
    real = [row for row in found.rows if decided[row.path].reason != "no elements"]
    assert found.parameters == sum(math.prod(decided[row.path].shape) for row in real)
    assert found.adam_bytes == 8 * found.parameters
    for row in real:
        assert row.bytes_per_parameter == row.bytes / math.prod(row.shape)


def is_gefen(node):
    return type(node).__name__ == "GefenState"


@pytest.mark.parametrize("which", [name for name in STATES if name != "no leaves"])
def test_an_abstract_state_has_the_same_shapes_and_bytes(which):
    concrete = STATES[which]()
    abstract = jax.eval_shape(lambda: concrete)
    found, known = explain(abstract), explain(concrete)
    sizes = [(row.path, row.bytes, row.first_moment, row.second_moment, row.statistics) for row in found.rows]
    expected = [(row.path, row.bytes, row.first_moment, row.second_moment, row.statistics) for row in known.rows]
    if which != "empty leaf and scalar":
        assert sizes == expected
        assert [row.shape for row in found.rows] == [row.shape for row in known.rows]
        assert found.parameters == known.parameters
    assert found.bytes == known.bytes
    assert {row.reason for row in found.rows} == {"unknown"}
    assert (found.rule, found.codebook, found.count) == ("unknown", "unknown", None)
    assert "an abstract state has shapes only" in str(found)
    with pytest.raises(ValueError, match="the state is abstract or traced; its plan has the structure"):
        blocks(abstract)


def test_packed_shapes_that_an_abstract_state_cannot_tell_need_the_parameters():
    params = {"odd": jnp.zeros((2000, 5)), "vector": jnp.zeros(9000), "kernel": jnp.zeros((96, 192))}
    tx = gefen(1e-3, bits=4, second_moment="block")
    abstract = jax.eval_shape(tx.init, params)
    with pytest.raises(ValueError, match=r"packed codes of 'odd' have shape \(1000, 5\), .*pass the parameters"):
        explain(abstract)
    found = explain(abstract, params)
    assert {row.path: row.shape for row in found.rows} == {path: leaf.shape for path, leaf in params.items()}
    assert [row.first_moment[:6] for row in found.rows] == ["4 bits"] * 3
    assert explain(tx.init(params)).parameters == found.parameters


def test_a_stack_of_states_is_to_be_taken_apart_first():
    stacked = jax.vmap(gefen(1e-3).init)(jax.tree.map(lambda x: jnp.stack([x, x]), tree(0)))
    for function in (explain, blocks, plan_from_state):
        with pytest.raises(ValueError, match=r"a stack of states \(made under jax\.vmap\): take one out of it first"):
            function(stacked)
    assert explain(jax.tree.map(lambda x: x[0], stacked)) == explain(gefen(1e-3).init(tree(0)))


def test_traced_states_can_be_explained():
    seen = []
    jax.jit(lambda s: (seen.append(explain(s)), s)[1])(gefen(1e-3).init(tree(0)))
    assert seen[0].bytes == explain(gefen(1e-3).init(tree(0))).bytes


class TestParams:
    """The second argument."""

    def test_names_what_no_gefen_state_holds(self):
        params = tree(0)
        opt_state = optax.masked(gefen(1e-3), {"dense": True, "table": False}).init(params)
        found = explain(opt_state, params)
        row = found.rows[-1]
        assert (row.path, row.reason, row.bytes, row.shape) == ("table", "not held", 0, (640, 16))
        assert found.parameters == explain(opt_state).parameters == 192 + 96 * 192
        assert "no Gefen state holds this parameter" in str(found)

    def test_gives_the_shape_of_what_has_no_elements(self):
        params = {"e": jnp.zeros((0, 3)), "w": jnp.zeros(5)}
        opt_state = gefen(1e-3).init(params)
        assert explain(opt_state).rows[0].shape == (0, 0)
        assert explain(opt_state, params).rows[0].shape == (0, 3)
        assert explain(opt_state, params).parameters == 5
        assert explain(opt_state).rows[0].bytes_per_parameter == 0

    def test_of_another_model_are_refused(self):
        with pytest.raises(ValueError, match=r"parameter 'table' has shape \(16, 640\), the state was made for"):
            explain(gefen(1e-3).init(tree(0)), tree(0) | {"table": jnp.zeros((16, 640))})

    def test_may_be_abstract(self):
        found = explain(gefen(1e-3).init(tree(0)), jax.eval_shape(lambda: tree(0)))
        assert found == explain(gefen(1e-3).init(tree(0)))


def test_text_is_a_table_a_legend_and_totals():
    params = {
        "block": {"attention": {"kernel": jnp.zeros((96, 4, 48))}, "norm": {"scale": jnp.zeros(96)}},
        "thin": jnp.zeros((2, 8192)),
    }
    opt_state = gefen(1e-3).init(params)
    lines = str(explain(opt_state)).splitlines()
    assert max(len(line) - len("block/attention/kernel") for line in lines[:5]) <= 110
    assert lines[0].split() == list(itertools.chain(*(cell.split() for cell in HEAD)))
    assert lines[2].split()[:2] == ["block/attention/kernel", "96x4x48"]
    assert "96 rows x 192 columns" in lines[2]
    assert "shape rule, no split" in lines[4]
    assert any(line.startswith("no split") and "no rows and columns worth factoring" in line for line in lines)
    assert any(line.startswith("runs as jnp") and "exact Adam" in line for line in lines)
    assert lines[-1].startswith("34,912 parameters, ")
    assert "prior (not calibrated), 0 steps taken" in lines[-1]


def test_text_tells_what_was_learned():
    found = explain(learned(structured(0)))
    assert found.codebook == "256 words, learned"
    assert "no split" not in str(explain(learned({"w": structured(0)["dense"]["kernel"]})))


def test_count_and_implementation_are_told():
    tx = gefen(1e-3)
    opt_state = optax.tree.set(tx.init(tree(0)), count=jnp.int32(7))
    assert "7 steps taken" in str(explain(opt_state))
    assert "1 step taken" in str(explain(optax.tree.set(opt_state, count=jnp.int32(1))))
    large = tx.init({"w": jnp.zeros((512, 512))})
    expected = "chunked" if jax.default_backend() == "cpu" and jax.device_count() == 1 else "jnp"
    assert explain(large).rows[0].implementation == expected
    assert (explain(large, implementation="jnp").rows[0].implementation, explain(large, implementation="jnp").rows[
        0].because) == ("jnp", "asked for")  # fmt: skip


def test_html_is_escaped_and_whole():
    found = explain(gefen(1e-3).init({"<script>": jnp.zeros(3), "w&v": jnp.zeros((96, 192))}))
    text = found._repr_html_()
    assert "&lt;script&gt;" in text
    assert "<script>" not in text
    assert "w&amp;v" in text
    assert text.count("<tr>") == text.count("</tr>") == 3
    assert EXPLANATIONS["small"] in text
    assert "2 parameters" not in text


def test_a_tree_that_is_one_array_has_a_name():
    assert "(the tree itself)" in str(explain(gefen(1e-3).init(jnp.zeros(3))))
    assert explain(gefen(1e-3).init({})).rows == ()
    assert "0 parameters" in str(explain(gefen(1e-3).init({})))


def test_blocks_are_the_plan():
    plan = learn_plan(structured(0))
    tx = optax.chain(optax.clip(1.0), optax.masked(gefen(1e-3, plan=plan), {"dense": True, "table": False}))
    found = blocks(tx.init(tree(0)))
    assert found == {path: leaf for path, leaf in plan.leaves.items() if path != "table"}
    both = optax.partition({"a": gefen(1e-3), "b": gefen(1e-3, bits=4)}, {"dense": "a", "table": "b"}).init(tree(0))
    assert set(blocks(both)) == {"dense/bias", "dense/kernel", "table"}
    with pytest.raises(ValueError, match="there is no Gefen state"):
        blocks(optax.adam(1e-3).init(tree(0)))


def test_blocks_of_axes_and_reference_are_those_that_were_decided():
    declared = gefen(1e-3, min_size=0, axes={"w": (1, 1)}).init({"w": jnp.zeros((4, 64, 32))})
    assert blocks(declared)["w"].axes == (1, 1)
    grads = {"w": np.repeat(np.exp(np.random.default_rng(0).normal(size=64)), 16).reshape(32, 32).astype(np.float32)}
    plan = learn_plan(grads, rule="reference")
    opt_state = gefen(1e-3, plan=plan).init({"w": jnp.zeros((32, 32))})
    assert blocks(opt_state)["w"].nu == plan.leaves["w"].nu == ("flat", plan.periods["w"])
    assert plan.periods["w"] > 1


def test_a_pattern_that_matches_nothing_is_told():
    """`full_precision` may name leaves of another part of the model, so it is no error."""
    params = {"head": jnp.zeros((96, 192)), "trunk": jnp.zeros((96, 192))}
    hit, miss = gefen(1e-3, full_precision="head"), gefen(1e-3, full_precision="haed")
    assert explain(hit.init(params), tx=hit).unmatched is None
    found = explain(miss.init(params), tx=miss)
    assert found.unmatched == "haed"
    for text in (str(found), found._repr_html_()):
        assert "full_precision" in text
        assert "matches no path here" in text
