"""Plans that contradict the arguments, belong to another tree or come from a damaged file."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from behaviour_cases import same, structured, tree

from gefen_jax import LeafPlan, Plan, calibrate, gefen, learn_plan, plan_from_state


@pytest.fixture(scope="module")
def plan():
    return learn_plan(structured(0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rule": "reference"}, "rule='reference' contradicts the plan, which was made with rule='gefen'"),
        ({"second_moment": "block"}, "second_moment='block' contradicts the plan, .* second_moment='auto'"),
        ({"bits": 4}, "bits=4 contradicts the plan, which was made with bits=8"),
        ({"codec": "companding"}, "codec='companding' contradicts the plan, which was made with codec='table'"),
        ({"min_size": 0}, "min_size=0 contradicts the plan, which was made with min_size=4096"),
        ({"full_precision": "table"}, "full_precision asks for exact Adam in 'table', which the plan quantises"),
        ({"full_precision": lambda path, leaf: leaf.ndim == 2}, "full_precision asks for exact Adam in 'dense/kernel'"),
        ({"axes": {"table": (0, 1)}}, r"axes\['table'\]=\(0, 1\) contradicts the plan, which has None"),
        ({"axes": {"table": 3}}, r"axes\['table'\] = 3 does not fit the parameter's shape \(640, 16\)"),
        ({"axes": {"nowhere": (0, 1)}}, r"axes\['nowhere'\]=.* contradicts the plan"),
    ],
)
def test_arguments_that_contradict_the_plan_are_refused_at_construction(plan, given, message):
    with pytest.raises(ValueError, match=message):
        gefen(1e-3, plan=plan, **given)


def test_arguments_that_agree_with_the_plan_are_fine(plan):
    gefen(1e-3, plan=plan, rule="gefen", second_moment="auto", bits=8, min_size=4096, full_precision="bias")


@pytest.mark.parametrize("name", ["bits", "min_size"])
def test_an_array_beside_a_plan_is_told_apart_inside_jit(plan, name):
    def init(value):
        return gefen(1e-3, plan=plan, **{name: value}).init(tree(0))

    with pytest.raises(ValueError, match=f"{name} must be .*inject_hyperparams: add '?{name}"):
        jax.jit(init)(jnp.int32(8))


def test_a_plan_for_another_tree_is_refused_by_init(plan):
    shapes = {"dense": {"bias": (192,), "kernel": (96, 192)}}
    with pytest.raises(ValueError, match="the plan has a leaf 'table' that the parameters lack"):
        gefen(1e-3, plan=plan).init(tree(0, shapes))
    with pytest.raises(ValueError, match="parameter 'head' is not in the plan: learn the plan from gradients of the"):
        gefen(1e-3, plan=plan).init(tree(0, {**shapes, "table": (640, 16), "head": (8,)}))
    with pytest.raises(
        ValueError, match=r"'table' that the parameters lack.*'tables' is not in the plan: was the tree"
    ):
        gefen(1e-3, plan=plan).init(tree(0, {**shapes, "tables": (640, 16)}))


@pytest.mark.parametrize("shape", [(640, 8), (16, 640), (640, 16, 1), (640,)])
def test_a_plan_for_another_shape_is_refused_by_init_and_calibrate(plan, shape):
    params = tree(0, {"dense": {"bias": (192,), "kernel": (96, 192)}, "table": shape})
    with pytest.raises(ValueError, match=r"'table' has shape .*, the plan was made for \(640, 16\): learn a plan for"):
        gefen(1e-3, plan=plan).init(params)
    with pytest.raises(ValueError, match=r"the plan was made for shape \(640, 16\) of 'table', which has"):
        calibrate(gefen(1e-3).init(params), plan)


def test_calibrate_refuses_another_shape_whatever_the_reason():
    """Both leaves are small, so both plans keep them exact: only the shapes tell them apart."""
    plan = plan_from_state(gefen(1e-3).init({"w": jnp.zeros(32)}))
    with pytest.raises(ValueError, match=r"the plan was made for shape \(32,\) of 'w', which has \(64,\)"):
        calibrate(gefen(1e-3).init({"w": jnp.zeros(64)}), plan)


def test_calibrate_refuses_a_plan_of_another_tree(plan):
    smaller = gefen(1e-3).init(tree(0, {"dense": {"bias": (192,), "kernel": (96, 192)}}))
    with pytest.raises(ValueError, match="the plan's leaf 'table' is in no Gefen state"):
        calibrate(smaller, plan)
    larger = gefen(1e-3).init(tree(0, {"dense": {"bias": (192,), "kernel": (96, 192)}, "table": (640, 16), "z": (3,)}))
    with pytest.raises(ValueError, match="parameter 'z' is not in the plan, which was made for another tree"):
        calibrate(larger, plan)


@pytest.mark.parametrize("other", [{"rule": "reference"}, {"bits": 4}, {"codec": "companding"}])
def test_calibrate_refuses_a_plan_of_another_rule_width_or_codec(plan, other):
    opt_state = gefen(1e-3, **other).init(tree(0))
    before = jax.tree.map(np.array, opt_state)
    with pytest.raises(ValueError, match=r"calibrate: the plan has rule 'gefen'.* the state (has )?rule"):
        calibrate(opt_state, plan)
    same(opt_state, before)


def file_of(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def test_a_saved_plan_comes_back_whole(plan, tmp_path):
    loaded = Plan.load(file_of(plan, tmp_path))
    assert loaded == plan
    np.testing.assert_array_equal(loaded.counts, plan.counts)
    same(gefen(1e-3, plan=loaded).init(tree(0)), gefen(1e-3, plan=plan).init(tree(0)))
    with pytest.raises(KeyError, match="scores come from learn_plan, not from a file"):
        loaded.scores("table")
    with pytest.raises(KeyError, match="'tabel' is not in the plan, whose leaves are 'dense/bias'"):
        plan.scores("tabel")
    with pytest.raises(ValueError, match="periods exist for rule 'reference'; this plan has rule 'gefen': see tiles"):
        _ = plan.periods


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(plan, tmp_path, share):
    path = file_of(plan, tmp_path)
    text = path.read_text()
    path.write_text(text[: int(len(text) * share)])
    with pytest.raises(ValueError, match=r"plan\.json: no plan that this version can read"):
        Plan.load(path)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00\x01", b"\x80" * 100])
def test_a_binary_file_is_refused(tmp_path, data):
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"plan\.json: "):
        Plan.load(path)


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")


def set_leaf(**values):
    return lambda data: data["leaves"]["table"].update(values)


def put(name, value):
    return lambda data: data.update({name: value})


def edit_codebook(edit):
    def change(data):
        words = np.array(data["codebook"])
        data["codebook"] = edit(words).tolist()

    return change


DAMAGE = {
    "no object": (lambda data: [data], "expected a JSON object with format 'gefen-jax plan 1', found 'list'"),
    "no format": (lambda data: data.pop("format"), "expected a JSON object with format"),
    "later format": (put("format", "gefen-jax plan 2"), "found 'gefen-jax plan 2'"),
    "no leaves": (lambda data: data.pop("leaves"), "no 'leaves'"),
    "leaves a list": (put("leaves", []), "no plan that this version can read"),
    "leaf a number": (lambda data: data["leaves"].update(table=3), "no plan that this version can read"),
    "rule": (put("rule", "adam"), "rule must be one of"),
    "second moment": (put("second_moment", "rows"), "second_moment must be one of"),
    "bits": (put("bits", 3), "bits must be one of"),
    "bits of another codebook": (put("bits", 4), "a codebook of 4 bits has 16 words; found an array of shape"),
    "min_size": (put("min_size", -1), "min_size must be"),
    "no number": (put("min_size", "many"), "no plan that this version can read"),
    "short codebook": (edit_codebook(lambda words: words[:-1]), "a codebook of 8 bits has 256 words"),
    "unsorted codebook": (edit_codebook(lambda words: np.concatenate([words[:1], words[:0:-1]])), "ascending"),
    "NaN in codebook": (edit_codebook(lambda words: np.where(words == 0, np.nan, words)), "must be finite"),
    "codebook's ends": (edit_codebook(lambda words: words * 0.5), "ends must be -1 and 1; found -0.5 and 0.5"),
    "codebook without 0": (edit_codebook(lambda words: np.linspace(-1, 1, 256)), "word 127 must be exactly 0"),
    "codec": (put("codec", "uniform"), "codec must be one of 'table', 'companding'; found 'uniform'"),
    "no codec": (lambda data: data.pop("codec"), "no 'codec'"),
    "codec of other words": (put("codec", "companding"), "words of codec 'companding' must have its closed form"),
    "codebook of text": (put("codebook", "words"), "no plan that this version can read"),
    "counts": (put("counts", [1, 2, 3]), r"counts must be 4096 whole numbers >= 0; found shape \(3,\)"),
    "reason": (set_leaf(reason="whim"), "reason of leaf 'table' must be one of 'learned', .*; found 'whim'"),
    "exact for no reason": (set_leaf(mu=["full"], nu=["full"]), "plan of leaf 'table' contradicts itself"),
    "small but quantised": (set_leaf(reason="small"), "leaf 'table' contradicts itself: its first moment is kept as"),
    "exact with factors": (set_leaf(mu=["full"], reason="small", nu=["factored", 0, 1]), "keeps a full second moment"),
    "tile of another shape": (set_leaf(mu=["tile", [1, 256]]), r"'table' .*tiles of shape \(1, 256\) do not divide"),
    "tile of another rank": (set_leaf(mu=["tile", [16]]), "leaf 'table' contradicts itself: tiles of shape"),
    "tile of 0": (set_leaf(mu=["tile", [0, 16]]), "leaf 'table' contradicts itself: tiles"),
    "runs under the wrong rule": (set_leaf(nu=["flat", 64]), "rule 'gefen' keeps no moments as"),
    "cut beyond the rank": (set_leaf(nu=["factored", 1, 1]), "leaf 'table' .*1 batch and 1 row axes leave .* no rows"),
    "negative cut": (set_leaf(nu=["factored", -1, 1]), "leaf 'table' contradicts itself: -1 batch"),
    "half a cut": (set_leaf(nu=["factored", 0]), "leaf 'table' contradicts itself"),
    "structure": (set_leaf(nu=["rows"]), r"unknown structure \['rows'\]"),
    "empty structure": (set_leaf(mu=[]), "no plan that this version can read"),
    "negative shape": (set_leaf(shape=[-640, 16]), "leaf 'table' contradicts itself"),
    "text in shape": (set_leaf(shape=["a", 16]), "no plan that this version can read"),
    "counts too large": (lambda data: data["counts"].insert(0, 10**30), "no plan that this version can read"),
    "infinite shape": (set_leaf(shape=[float("inf"), 16]), "no plan that this version can read"),
    "no reason": (lambda data: data["leaves"]["table"].pop("reason"), "no 'reason'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_by_name(plan, tmp_path, damage):
    change, message = DAMAGE[damage]
    path = file_of(plan, tmp_path)
    data = json.loads(path.read_text())
    changed = change(data)
    path.write_text(json.dumps(changed if isinstance(changed, list) else data))
    with pytest.raises(ValueError, match=rf"plan\.json: no plan that this version can read: .*{message}|{message}"):
        Plan.load(path)


def test_text_nested_beyond_reading_is_refused():
    with pytest.raises(ValueError, match="no plan that this version can read"):
        Plan.loads("[" * 100_000)


@pytest.mark.parametrize("length", [0, -4, 7])
def test_runs_of_the_reference_rule_must_divide_their_leaf(length):
    leaf = LeafPlan((6, 8), ("flat", length), ("flat", length), "learned")
    with pytest.raises(ValueError, match=r"plan of leaf 'w' contradicts itself: runs of .* do not divide"):
        Plan("reference", "auto", 0, 8, None, None, {"w": leaf})


def test_the_reference_rule_keeps_no_leaf_exact():
    """Its step knows codes alone."""
    leaf = LeafPlan((6, 8), ("full",), ("full",), "full precision")
    with pytest.raises(ValueError, match="plan of leaf 'w' contradicts itself: rule 'reference' has no exact Adam"):
        Plan("reference", "auto", 0, 8, None, None, {"w": leaf})


def test_a_plan_edited_in_the_program_is_checked_too(plan):
    wrong = dataclasses.replace(plan.leaves["table"], nu=("tile", (3, 16)))
    with pytest.raises(ValueError, match="plan of leaf 'table' contradicts itself"):
        dataclasses.replace(plan, leaves={**plan.leaves, "table": wrong})


class TestPlanFromState:
    """The way back from a state, or from a checkpoint's metadata."""

    def test_needs_a_gefen_state(self):
        with pytest.raises(ValueError, match="there is no Gefen state in this optimizer state or metadata"):
            plan_from_state({"mu": jnp.zeros(3)})

    def test_needs_the_format_of_an_abstract_state(self):
        abstract = jax.eval_shape(gefen(1e-3).init, tree(0))
        with pytest.raises(ValueError, match="shapes alone do not tell rule, bits and reasons: restore the state's"):
            plan_from_state(abstract)

    @pytest.mark.parametrize("other", [{"a": (192,)}, {"a": (192,), "b": (96, 192), "c": (640, 16), "d": (2,)}])
    def test_refuses_the_format_of_another_state(self, other):
        abstract = jax.eval_shape(gefen(1e-3).init, tree(0))
        with pytest.raises(ValueError, match=r"the format describes . leaves, the state has 3"):
            plan_from_state(abstract, gefen(1e-3).init(tree(0, other)).format)

    def test_refuses_what_is_no_format(self):
        abstract = jax.eval_shape(gefen(1e-3).init, tree(0))
        with pytest.raises(ValueError, match=r"format is a uint32 vector; found float32\[3\]"):
            plan_from_state(abstract, np.zeros(3, np.float32))

    def test_refuses_states_that_no_single_plan_describes(self):
        states = (gefen(1e-3).init(tree(0)), gefen(1e-3, bits=4).init(tree(0)))
        with pytest.raises(ValueError, match="the Gefen states differ in rule, bits or codebook"):
            plan_from_state(states)

    def test_gives_back_the_plan_in_force(self, plan):
        assert plan_from_state(gefen(1e-3, plan=plan).init(tree(0))) == plan
