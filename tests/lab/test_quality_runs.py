"""Runs of the study: equal conditions, resuming, and the command from end to end, on a very small model."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gefen_jax import cli
from gefen_jax.lab import adapters, models, optimizers, quality_cells, quality_runner, quality_tasks, quality_variants
from gefen_jax.lab.language import GPTConfig
from gefen_jax.lab.ngrams import NGramConfig
from gefen_jax.lab.quality_cells import STUDY, Key
from gefen_jax.lab.quality_runner import Runner
from gefen_jax.state import GefenState

TINY = NGramConfig(vocab=256, context=16, orders=2, rows=64, width=32, hidden=32)
GPT = GPTConfig(vocab=256, context=16, layers=1, heads=2, width=32)
TASK = quality_tasks.StudyTask("tiny", functools.partial(quality_tasks.text_task, TINY), "pydoc", 4, language=True)
ALL_TASKS = quality_tasks.TASKS


@pytest.fixture(scope="module", autouse=True)
def tiny_tasks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality_tasks, "TASKS", {"tiny": TASK})
        patch.setattr(quality_tasks, "WINDOWS", 16)
        patch.setattr(quality_runner, "DISPATCH", 4)
        yield


@pytest.fixture(scope="module")
def runner():
    return Runner()


def key(optimizer="adamw", rate=1e-2, seed=0, steps=8):
    return Key("tiny", optimizer, rate, seed, steps, 4, 0.1, 0.99, "")


def test_a_run_is_the_plain_loop(runner):
    task = runner.task("tiny").task
    tx = optimizers.build("adamw", TINY, 1e-2, 8)
    params = models.init(TINY, jax.random.key(3))
    opt_state = tx.init(params)
    losses = []
    step = jax.jit(jax.value_and_grad(task.loss))
    for batch in task.batches(8, 4, 3):
        loss, grads = step(params, batch)
        losses.append(float(loss))
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    found = runner.run(key(seed=3), STUDY)
    assert [step for step, _ in found.training] == [4, 8]
    np.testing.assert_allclose([loss for _, loss in found.training], [np.mean(losses[:4]), np.mean(losses[4:])], 1e-5)
    expected = task.loss(params, task.validation(task.validation_index))
    np.testing.assert_allclose(found.loss, expected, rtol=1e-5)
    assert [step for step, _ in found.validation] == [4, 8]
    assert found.validation[-1][1] == found.loss
    assert found.state_bytes == 8 * found.parameters + 8  # two counts: AdamW's and the schedule's
    assert not found.diverged


def test_a_step_is_compiled_once_for_all_seeds_and_rates_and_runs_do_not_touch_each_other(runner):
    runner.run(key("gefen_shapes"), STUDY)
    first = runner.run(key("gefen_shapes", 2e-2, 1), STUDY)
    assert first.compile_seconds == 0
    runner.run(key("gefen_shapes", 1e-3, 2), STUDY)
    again = runner.run(key("gefen_shapes", 2e-2, 1), STUDY)
    assert (again.training, again.validation) == (first.training, first.validation)
    other = Runner().run(key("gefen_shapes", 2e-2, 1), STUDY)
    assert other.compile_seconds > 0
    assert (other.training, other.validation) == (first.training, first.validation)


def test_all_optimizers_start_alike_and_see_the_same_batches(runner):
    still = [runner.run(key(name, 1e-12, 5), STUDY) for name in ("adamw", "gefen", "gefen_4bit", "sgd")]
    for cell in still[1:]:
        np.testing.assert_allclose([x for _, x in cell.training], [x for _, x in still[0].training], rtol=1e-6)
    other = runner.run(key("adamw", 1e-12, 6), STUDY)
    assert abs(other.training[0][1] - still[0].training[0][1]) > 1e-4


def test_a_run_that_diverges_says_so(runner):
    cell = runner.run(key("sgd", 1e20), STUDY)
    assert cell.diverged
    assert not math.isfinite(cell.loss)
    assert quality_cells.Cell.of(json.loads(cell.dumps())).diverged
    assert json.loads(cell.dumps())["loss"] is None


def test_adapters_train_and_the_model_beneath_stays(monkeypatch, runner):
    base = models.init(TINY, jax.random.key(9))
    monkeypatch.setattr(quality_tasks, "pretrained", lambda config: base)
    monkeypatch.setattr(quality_tasks, "RANK", 3)
    task = quality_tasks.adapter_task(TINY, "pydoc").task
    params = task.init(jax.random.key(0))
    batch = next(task.batches(1, 4, 0))
    expected = runner.task("tiny").task.loss(base, batch)
    np.testing.assert_allclose(task.loss(params, batch), expected, rtol=1e-6)  # b is 0: the model as it was
    grads = jax.grad(task.loss)(params, batch)
    assert all(not np.any(leaf["a"]) and np.any(leaf["b"]) for leaf in grads.values())


def test_merged_kernels_are_products():
    model = models.init(GPT, jax.random.key(0))
    random = np.random.default_rng(0)
    fresh = adapters.adapters(models.shapes(GPT), 3, jax.random.key(1))
    found = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), jnp.float32), fresh)
    merged = adapters.merge(model, found, scale=0.5)
    for name in ("attn_qkv", "attn_out", "mlp_in", "mlp_out"):
        a, b = (np.float64(found[f"h_0/{name}"][part]) for part in "ab")
        expected = np.float64(model["h_0"][name]["kernel"]) + 0.5 * a @ b
        np.testing.assert_allclose(merged["h_0"][name]["kernel"], expected, rtol=1e-4, atol=1e-5)
    changed = jax.tree.map(lambda x, y: bool((x != y).any()), model, merged)
    assert sum(jax.tree.leaves(changed)) == len(found) == 4


def test_bfloat16_tasks_train_in_bfloat16():
    task = quality_tasks.bfloat16_task(TASK.load, "pydoc").task
    params = task.init(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    grads = jax.eval_shape(jax.grad(task.loss), params, next(task.batches(1, 4, 0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}


def test_every_study_task_has_a_model_and_data():
    for name, chosen in ALL_TASKS.items():
        loaded = chosen.load(chosen.data)
        params = jax.eval_shape(loaded.task.init, jax.random.key(0))
        assert 1e4 < models.count(params) < 1e6, name
        batch = next(loaded.task.batches(1, chosen.batch, 0))
        assert len(batch.inputs) == chosen.batch
        assert len(loaded.fingerprint) == 16


def command(*words):
    return cli.main(["bench", "quality", *map(str, words)])


def run_words(path, seeds):
    rates = ("--rates", "1x,2x", "--choice-rates", "3e-3,1e-2", "--choice-seeds", "100", "--steps", "8")
    return (
        "run",
        "--tasks",
        "tiny",
        "--optimizers",
        "adamw,gefen",
        "--steps",
        "8",
        *rates,
        "--seeds",
        seeds,
        "--out",
        path,
    )


def test_command_stops_and_goes_on(tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "cells.jsonl"
    real, runs = Runner.run, []

    def interrupted(self, key, purpose, progress):
        if len(runs) == 4:
            raise KeyboardInterrupt
        runs.append(key)
        return real(self, key, purpose, progress)

    monkeypatch.setattr(Runner, "run", interrupted)
    assert command(*run_words(path, "0-1")) == cli.INTERRUPTED
    assert [cell.key for cell in quality_cells.read([path])] == [k._replace(data=runs[0].data) for k in runs]
    assert "4/10 tiny gefen" in capsys.readouterr().out

    monkeypatch.setattr(Runner, "run", lambda *a: runs.append(a[1]) or real(*a))
    assert command(*run_words(path, "0-1")) == 0
    cells = quality_cells.read([path])
    assert len(cells) == len(runs) == len(set(runs)) == 2 + 2 * 2 * 2
    assert command(*run_words(path, "0-1")) == 0  # nothing is left to do
    assert len(runs) == len(cells)
    assert command(*run_words(path, "0-2")) == 0  # more seeds: the choice stands
    assert len(quality_cells.read([path])) == len(runs) == 14

    assert command("report", path, "--out", tmp_path / "report") == 0
    files = {file.name: file.stat().st_size for file in (tmp_path / "report").iterdir()}
    assert set(files) == {"README.md", "differences.png", "curves.png", "rates.png"}
    assert max(files.values()) < 200_000
    text = (tmp_path / "report" / "README.md").read_text()
    assert "| Gefen | " in text
    capsys.readouterr()
    assert command("report", path, "--table") == 0
    assert capsys.readouterr().out.strip() in text
    assert "3 pairs" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the following arguments are required: run|codebooks|report"),
        (("run", "--tasks", "nothing"), "unknown task 'nothing'; choose among: tiny"),
        (("run", "--choice-rates", "fast"), "--choice-rates: could not convert string to float: 'fast'"),
        (("run", "--tasks", "tiny", "--out", "/dev/null/x"), "--out '/dev/null/x': cannot write there"),
        (("run", "--tasks", "tiny", "--data", "/no/such/file"), "data '/no/such/file': no such file"),
        (("report", "/no/such/file"), "/no/such/file: cannot be read"),
    ],
)
def test_command_refuses_in_one_line(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    try:
        code = command(*words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_optimizer_that_cannot_take_a_task_is_refused_before_any_run(tmp_path, monkeypatch, capsys):
    adapted = quality_tasks.StudyTask("adapted", functools.partial(quality_tasks.adapter_task, GPT), "pydoc", 4)
    monkeypatch.setattr(quality_tasks, "TASKS", {"tiny": TASK, "adapted": adapted})
    path = tmp_path / "cells.jsonl"
    optimizers = ("--optimizers", "sgd,adam_mini")
    assert command("run", "--tasks", "tiny,adapted", *optimizers, "--rates", "1e-3", "--out", path) == 2
    assert "adam_mini cannot train adapted: leaf 'h_0/attn_out/a'" in capsys.readouterr().err
    assert not path.exists()


def test_variants_differ_in_what_they_name(runner):
    task = runner.task("tiny").task
    params = task.init(jax.random.key(0))
    grads = jax.jit(jax.grad(task.loss))(params, next(task.batches(1, 4, 0)))

    def state(name):
        choice = quality_variants.choose(name)
        opt_state = optimizers.build_choice(choice, TINY, 1e-3, 8).init(params)
        opt_state = choice.prepare(opt_state, [grads] * choice.batches if choice.batches > 1 else grads)
        nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, GefenState))
        return next(node for node in nodes if isinstance(node, GefenState))

    plain = state("gefen")
    kernel = lambda node: node.mu_scale["head"]["kernel"].shape  # noqa: E731
    assert kernel(plain) == (32, 1)
    assert kernel(state("gefen_rows64")) == (32, 4)
    assert kernel(state("gefen_columns256")) == (1, 256)
    uniform = state("gefen_uniform").codebook
    np.testing.assert_allclose(uniform[128:], np.arange(128) / 127, rtol=1e-6)
    np.testing.assert_allclose(state("gefen_4bit_uniform").codebook[7:], np.arange(9) / 8, rtol=1e-6)
    assert not np.any(state("gefen_nozero").codebook == 0)
    np.testing.assert_array_equal(state("gefen_batches4").codebook, plain.codebook)  # four times the same gradients
