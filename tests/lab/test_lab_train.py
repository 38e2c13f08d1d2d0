"""The training loop against a loop written out, the schedule, the tasks, and what a record keeps."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gefen_jax.lab import models, optimizers, record, tasks, train
from gefen_jax.lab.data import DataError, Text, load_images
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.vision import MLPConfig

CONFIG = models.preset("gpt-tiny")
logits_of = jax.jit(models.logits, static_argnums=0)
RANDOM = np.random.default_rng(0)
TEXT = Text(*(RANDOM.integers(97, 123, size=n).astype(np.uint8) for n in (3000, 500)), "letters")


@pytest.fixture(scope="module")
def task():
    return tasks.text_task(CONFIG, TEXT, windows=40)


@pytest.fixture(scope="module")
def params():
    return models.init(CONFIG, jax.random.key(0))


def cross_entropy(logits, labels):
    """In float64 NumPy, mean over everything."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top
    return (log_sum[..., 0] - np.take_along_axis(logits, np.asarray(labels, int)[..., None], -1)[..., 0]).mean()


# ----------------------------------------------------------------------------------------------- tasks


def test_text_windows_and_labels(task):
    batch = task.train(np.array([0, 2968 - 1]))
    assert batch.inputs.shape == batch.labels.shape == (2, 32)
    np.testing.assert_array_equal(batch.inputs[0], TEXT.train[:32])
    np.testing.assert_array_equal(batch.labels[1], TEXT.train[-32:])  # the last window ends with the text
    assert task.train_examples == 2968
    assert len(task.validation_index) == 40
    assert task.validation_index[0] == 0
    assert task.validation_index[-1] == 500 - 33
    assert task.validation(task.validation_index).labels.shape == (40, 32)


def test_loss_equals_numpy(task, params):
    batch = task.train(np.arange(5))
    expected = cross_entropy(logits_of(CONFIG, params, batch.inputs), batch.labels)
    assert float(jax.jit(task.loss)(params, batch)) == pytest.approx(expected, rel=1e-6)


def test_batches_are_a_function_of_their_arguments(task):
    first, again, other = (list(task.batches(3, 4, seed)) for seed in (7, 7, 8))
    for a, b in zip(first, again):
        np.testing.assert_array_equal(a.inputs, b.inputs)
    assert not np.array_equal(first[0].inputs, other[0].inputs)
    assert not np.array_equal(first[0].inputs, first[1].inputs)
    # the first batches of a longer run are those of a shorter one
    np.testing.assert_array_equal(next(task.batches(9, 4, 7)).inputs, first[0].inputs)


def test_image_task_trains_on_digits():
    images = load_images("digits")
    config = MLPConfig((8, 8, 1), 10, (16,))
    task = tasks.image_task(config, images, examples=100)
    tx = optimizers.build("adamw", config, 2e-2, 200)
    run = train.prepare(task, tx, models.init(config, jax.random.key(0)), next(task.batches(1, 32, 0)), chunk=50)
    events = list(train.fit(task, run, task.batches(200, 32, 0), 200, 200))
    assert events[0].validation.accuracy < 0.4
    assert events[-1].validation.accuracy > 0.8
    assert [event.step for event in events] == [0, 50, 100, 150, 200]


def test_wrong_tasks():
    short = Text(TEXT.train, TEXT.validation[:32], "short")
    with pytest.raises(DataError, match="32 bytes of train or validation text, but the model reads windows of 33"):
        tasks.text_task(CONFIG, short)
    with pytest.raises(ValueError, match="bytes need a vocabulary of 256, found 255"):
        tasks.text_task(dataclasses.replace(CONFIG, vocab=255), TEXT)
    images = load_images("digits")
    with pytest.raises(ValueError, match="does not fit images of shape"):
        tasks.image_task(MLPConfig((8, 8, 3), 10), images)
    with pytest.raises(ValueError, match="10 classes, but the model has 9"):
        tasks.image_task(MLPConfig((8, 8, 1), 9), images)


# ------------------------------------------------------------------------------------------------ loop


def written_out(task, tx, params, batches):
    """The loop in three separate parts, without donation or scan."""
    gradient, update = jax.jit(jax.value_and_grad(task.loss)), jax.jit(tx.update)
    opt_state, losses = tx.init(params), []
    for batch in batches:
        loss, grads = gradient(params, batch)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses, params


@pytest.mark.parametrize("chunk", [1, 2])
def test_fit_is_the_loop_written_out(task, params, chunk):
    tx = optimizers.build("adamw", CONFIG, 1e-2, 6)
    batches = list(task.batches(6, 4, 0))
    expected, last = written_out(task, tx, params, batches)
    run = train.prepare(task, tx, params, batches[0], chunk=chunk)
    events = list(train.fit(task, run, batches, steps=6, every=4))
    np.testing.assert_allclose(np.concatenate([event.losses for event in events]), expected, rtol=1e-5)
    assert [event.step for event in events] == list(range(0, 7, chunk))
    assert [event.step for event in events if event.validation] == [0, 4, 6]
    validation = task.validation(task.validation_index)
    logits = logits_of(CONFIG, last, validation.inputs)
    assert events[-1].validation.loss == pytest.approx(cross_entropy(logits, validation.labels), rel=1e-5)
    right = float((np.argmax(np.asarray(logits), -1) == validation.labels).mean())
    assert events[-1].validation.accuracy == pytest.approx(right, abs=2 / validation.labels.size)
    assert all(event.seconds > 0 for event in events[1:])


def test_the_given_parameters_survive_and_the_step_writes_in_place(task, params):
    before = jax.tree.map(np.array, params)
    run = train.prepare(task, optimizers.build("adamw", CONFIG, 1e-2, 4), params, next(task.batches(1, 4, 0)))
    list(train.fit(task, run, task.batches(4, 4, 0), 4, 4))
    jax.tree.map(np.testing.assert_array_equal, params, before)
    count, leaves = models.count(params), 16
    assert run.state_bytes == 8 * count + 2 * 4  # two moments in float32, AdamW's and the schedule's counters
    assert run.memory.aliased == 12 * count + 2 * 4  # every parameter and all of the state
    assert len(jax.tree.leaves(params)) == leaves
    assert run.memory.peak > 12 * count


def test_calibration_sees_the_first_gradients(task, params):
    seen = []

    def calibrate(opt_state, grads):
        seen.append(grads)
        return opt_state

    first = next(task.batches(1, 4, 0))
    train.prepare(task, optimizers.build("adamw", CONFIG, 1e-2, 4), params, first, calibrate)
    expected = jax.jit(jax.grad(task.loss))(params, first)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), seen[0], expected)


def test_wrong_loops(task, params):
    run = train.prepare(task, optimizers.build("sgd", CONFIG, 1e-2, 4), params, next(task.batches(1, 4, 0)), chunk=2)
    with pytest.raises(ValueError, match="steps 5 and every 2 must be multiples of the chunk 2"):
        next(train.fit(task, run, [], 5, 2))
    with pytest.raises(ValueError, match="the batches ended before step 4 of 4"):
        list(train.fit(task, run, task.batches(3, 4, 0), 4, 2))


# ------------------------------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 600])
def test_schedule(steps):
    schedule = optimizers.warmup_cosine(2.0, steps)
    rates = np.array([schedule(step) for step in range(steps)])
    rise = max(1, round(0.05 * steps))
    np.testing.assert_allclose(rates[:rise], 2.0 * np.arange(1, rise + 1) / rise, rtol=1e-6)
    assert (np.diff(rates[rise - 1 :]) <= 0).all()
    if steps > 2:
        assert rates[-1] == pytest.approx(0.2, rel=1e-5)
    assert rates.max() == pytest.approx(2.0)


def test_every_optimizer_is_built_with_its_own_rate_and_the_same_decay():
    """On a zero gradient only the decay moves a parameter: by AdamW's rate times AdamW's decay, for all."""
    params = {"head": {"kernel": jnp.full((256, 64), 3.0)}}
    zero = jax.tree.map(jnp.zeros_like, params)
    for name in optimizers.OPTIMIZERS:
        tx = optimizers.build(name, models.preset("llama-tiny"), 1e-2, 1, weight_decay=0.5)
        updates, _ = jax.jit(tx.update)(zero, tx.init(params), params)
        np.testing.assert_allclose(updates["head"]["kernel"], -1e-2 * 0.5 * 3.0, rtol=1e-4, err_msg=name)


def test_gradients_are_clipped_to_norm_one():
    params = {"w": jnp.zeros((4, 4))}
    tx = optimizers.build("sgd", MLPConfig((1, 1, 1), 2), 1e-2, 1)
    updates, _ = tx.update({"w": jnp.full((4, 4), 100.0)}, tx.init(params), params)
    assert float(optax.tree.norm(updates)) == pytest.approx(100 * 1e-2)  # SGD's multiple times the rate


def test_unknown_optimizer():
    with pytest.raises(UsageError, match="unknown optimizer 'adam'; choose among: adamw, gefen"):
        optimizers.choose("adam")


# --------------------------------------------------------------------------------------------- records


def example(name="adamw", validated=(0, 2)):
    found = record.Record(name, name.title(), 1e-3, 100, 800, 800, 400, 5000, {}, 1.0)
    for step in range(4):
        metrics = tasks.Metrics(3.0 - step / 10, 0.1) if step in validated else None
        losses = np.full(min(step, 1), 4.0 - step, np.float32)
        found.add(train.Event(step, losses, [0.0, 9.0, 0.1, 0.2][step], metrics))
    return found


def test_record():
    found = example()
    assert found.train_loss == [3.0, 2.0, 1.0]
    assert found.validation_losses() == {0: 3.0, 2: 2.8}
    assert found.state_bytes_per_parameter == 8
    times = found.step_time()  # without the first step
    assert times == (pytest.approx(0.15), pytest.approx(0.12), pytest.approx(0.18), 2)
    assert record.last_common_step([found, example(validated=(0,))]) == 0
    assert record.last_common_step([found, example(validated=())]) is None


def test_a_record_spreads_the_time_of_a_chunk():
    found = record.Record("a", "A", 1e-3, 100, 800, 800, 400, 5000, {}, 1.0)
    found.add(train.Event(4, np.ones(4, np.float32), 2.0, None))
    assert found.step_seconds == [0.5] * 4


def test_json_has_no_nan(tmp_path):
    found = example()
    found.train_loss[1] = float("nan")
    found.validation.append((3, float("inf"), 0.0))
    record.write_json(tmp_path / "run.json", found.as_dict())

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    read = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert read["train_loss"] == [3.0, None, 1.0]
    assert read["validation"][-1] == [3, None, 0.0]
    assert read["step_time"]["steps"] == 2
