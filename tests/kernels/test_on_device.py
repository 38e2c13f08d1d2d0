"""What is learned from gradients where they lie is what is learned from them on the host."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_jax import _slabs, calibrate, codebook, gefen, learn, learn_plan, on_device, periods

DATA = Path(__file__).parents[1] / "data"
PERIODS = json.loads((DATA / "period.json").read_text())["cases"]
CODEBOOKS = [case for case in json.loads((DATA / "codebook.json").read_text())["cases"] if case["kind"] == "gradients"]
RNG = np.random.default_rng


@pytest.fixture
def small(monkeypatch):
    """Small arrays are worth a program too."""
    monkeypatch.setattr(on_device, "FEW", 100)


@pytest.fixture(scope="module")
def stored():
    with np.load(DATA / "period.npz") as shared, np.load(DATA / "codebook.npz") as own:
        return dict(shared) | dict(own)


def gradient(stored, key, dtype):
    return stored[key].view(ml_dtypes.bfloat16) if dtype == "bfloat16" else stored[key]


# -------------------------------------------------------------------------------- rule "reference"


def test_golden_periods(stored, monkeypatch):
    """All 130: the same period where the device decides, and it leaves few to the host: ties, and errors."""
    monkeypatch.setattr(on_device, "FEW", 500)
    left = []
    for case in PERIODS:
        grad = gradient(stored, case["key"] + "/grad", case["dtype"])
        if not on_device.takes([grad], "device"):
            continue
        cand, score, certain = on_device.scores(on_device.prepare(grad))
        if not certain:
            left.append(case["key"])
            continue
        assert periods.choose_period(cand, score, grad.size) == case["period"], case["key"]
        np.testing.assert_allclose(score, stored[case["key"] + "/score"], rtol=1e-12, atol=1e-13)
    assert len(left) <= 8, left


@pytest.mark.parametrize("case", CODEBOOKS, ids=lambda case: case["key"])
def test_golden_counts(stored, case, small):
    total = np.zeros(4096, np.int64)
    for leaf in case["tensors"]:
        key = f"{leaf['name']}/grad" if case["grads_in"] == "period.npz" else f"{case['key']}/grad/{leaf['name']}"
        array = on_device.prepare(gradient(stored, key, leaf["dtype"]))
        total += on_device.reference_histogram(array, leaf["period"])
    np.testing.assert_array_equal(total, stored[case["key"] + "/counts"])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 40), st.sampled_from([0, 0.5, 0.9]))
def test_what_is_certain_does_not_change(seed, count, alike):
    """Scores moved by less than half the doubt choose as before; many are alike up to such differences."""
    rng = RNG(seed)
    cand = np.cumprod(np.full(count, 2, np.int64)) if count < 12 else np.arange(1, count + 1)
    score = np.round(rng.random(count), 1) + rng.random(count) * on_device.DOUBT * (rng.random(count) < alike)
    if on_device.is_certain(cand, score):
        n = int(np.lcm.reduce(cand))
        moved = score + (rng.random(count) - 0.5) * on_device.DOUBT * 0.99
        assert periods.choose_period(cand, moved, n) == periods.choose_period(cand, score, n)


def test_what_is_not_certain_is_left_to_the_host(small, monkeypatch):
    brought = []
    original = learn._to_host
    monkeypatch.setattr(learn, "_to_host", lambda g: brought.append(g.size) or original(g))
    grad = RNG(0).normal(size=(40, 24)).astype(np.float32)
    plan = learn_plan(jnp.asarray(grad), rule="reference", where="device")
    assert not brought
    monkeypatch.setattr(on_device, "is_certain", lambda cand, score: False)
    assert plan == learn_plan(jnp.asarray(grad), rule="reference", where="device")
    assert brought == [grad.size]


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_one_magnitude_has_period_one(value, small):
    _, score, certain = on_device.scores(on_device.prepare(np.full((84, 60), value, np.float32)))
    assert certain
    assert not score.any()


def outcome(grads, where, **options):
    """The plan, or the error's message."""
    try:
        return learn_plan(grads, where=where, **options)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_is_not_finite_has_the_same_outcome(value, small):
    grad = RNG(0).normal(size=(40, 24)).astype(np.float32)
    grad[3, 5] = value
    everywhere = jnp.full((40, 24), value)
    for grads in (jnp.asarray(grad), everywhere):
        assert outcome(grads, "device", rule="reference") == outcome(grads, "host", rule="reference")
    assert "not finite" in outcome(everywhere, "device", rule="reference")


# -------------------------------------------------------------------------------- rule "gefen"


SHAPES = [
    (5003,),
    (6000,),
    (1, 5003),
    (64, 96),
    (64, 101),
    (101, 64),
    (2048, 3),
    (3, 40, 60),
    (7, 12, 5, 16),
    (3, 3, 24, 32),
    (2, 3, 4, 15, 16),
]


def planted(shape, seed=0, zeros=0.0, dtype=np.float32):
    """A gradient with scales of its own along its first and its last axis, and with zeros."""
    rng = RNG((seed, *shape))
    first = np.exp(rng.normal(size=(shape[0],) + (1,) * (len(shape) - 1)))
    last = np.exp(0.5 * rng.normal(size=shape[-1:]))
    grad = first * last * rng.normal(size=shape) * (rng.random(shape) >= zeros)
    return (1e-4 * grad).astype(dtype)


def assert_same_plan(found, expected):
    """Structure, reasons and counts are equal; surveys but for the last digits of sums."""
    assert found == expected
    np.testing.assert_array_equal(found.counts, expected.counts)
    for path, survey in expected.candidates.items():
        other = found.candidates[path]
        assert [c.structure for c in other.candidates] == [c.structure for c in survey.candidates]
        for field in ("explained", "spread"):
            mine, theirs = ([getattr(c, field) for c in x.candidates] for x in (other, survey))
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-9 * math.prod(survey.shape))
        assert other.counted == survey.counted
        np.testing.assert_allclose(other.noise, survey.noise, rtol=1e-10)


def on_both(grads, **options):
    host, device = (learn_plan(grads, where=where, **options) for where in ("host", "device"))
    assert_same_plan(device, host)
    return host


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("second_moment", ["auto", "block"])
def test_the_plan_is_that_of_the_host(shape, second_moment, small):
    on_both(jnp.asarray(planted(shape)), second_moment=second_moment)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("zeros", [0.3, 0.9])
def test_several_gradients_and_zeros(count, zeros, small):
    trees = [jnp.asarray(planted((48, 96), seed, zeros)) for seed in range(count)]
    trees[0] = trees[0].at[3].set(0).at[:, 5].set(0)
    on_both(trees)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e25])
def test_types_and_magnitudes(dtype, scale, small):
    """Where the type does not reach, values are subnormal, 0 or infinite: on both sides alike."""
    grad = RNG(1).normal(size=(48, 96)) * np.exp(RNG(2).normal(size=(48, 1)))
    with np.errstate(over="ignore"), jax.enable_x64(True):
        grads = jnp.asarray((grad * scale).astype(dtype))
    found = [outcome(grads, where) for where in ("host", "device")]
    assert isinstance(found[0], str) == (dtype == np.float16 and scale != 1)
    assert found[0] == found[1]
    if not isinstance(found[0], str):
        assert_same_plan(found[1], found[0])


def test_subnormal_numbers_count(small):
    grad = (RNG(0).integers(-9, 10, size=(64, 96)) * 2.0**-149).astype(np.float32)
    on_both(jnp.asarray(grad))


@pytest.mark.parametrize("name", ["explained", "counts"])
def test_a_difference_would_be_seen(name, small, monkeypatch):
    """The comparison above fails if one bin or one sum is off."""
    if name == "counts":
        original = on_device._bins
        monkeypatch.setattr(on_device, "_bins", lambda *args: original(*args).at[7].add(1))
    else:
        monkeypatch.setattr(on_device, "FLOOR", 1e-10)
        jax.clear_caches()
    with pytest.raises(AssertionError):
        on_both(jnp.asarray(planted((64, 104))))
    if name == "explained":
        jax.clear_caches()


@pytest.mark.parametrize(
    ("shape", "slab"), [((64, 96), 1000), ((6000,), 500), ((3, 40, 60), 3000), ((7, 12, 5, 16), 3000)], ids=str
)
def test_slabs_do_not_matter(shape, slab, small, monkeypatch):
    grads = jnp.asarray(planted(shape, zeros=0.2))
    whole = learn_plan(grads, where="device")
    monkeypatch.setattr(_slabs, "SLAB", slab)
    array = on_device.prepare(grads)
    assert len(list(_slabs.slabs(array, range(array.ndim)))) > 1
    assert_same_plan(learn_plan(grads, where="device"), whole)


def test_calibration_on_the_device_gives_the_same_state(small):
    params = {"w": jnp.ones((64, 96)), "b": jnp.ones(7)}
    grads = jax.tree.map(lambda p: jnp.asarray(planted(p.shape)), params)
    for rule in ("gefen", "reference"):
        state = gefen(1e-3, rule=rule).init(params)
        found, expected = (calibrate(state, grads, where=where) for where in ("device", "host"))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    with pytest.raises(ValueError, match="where must be one of"):
        calibrate(state, grads, where="gpu")


def test_nothing_large_travels(small, monkeypatch):
    """Under rule "gefen" no array beyond `FEW` elements is brought to the host; host gradients all are."""
    brought = []
    original = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: brought.extend(jax.tree.leaves(x)) or original(x))
    monkeypatch.setattr(learn, "_to_host", lambda gradient: pytest.fail("a gradient went to the host"))
    learn_plan({"a": jnp.asarray(planted((64, 96))), "b": jnp.asarray(planted((6000,)))}, where="device")
    assert brought
    assert max(x.size for x in brought) <= codebook.BINS + 1
