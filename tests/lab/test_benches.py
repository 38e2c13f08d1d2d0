"""The commands behind the README's tables: they run, write results in the one form, and count what they say."""

import json

import jax
import numpy as np
import pytest

from gefen_jax import cli, gefen
from gefen_jax.accounting.tensors import tree_bytes
from gefen_jax.lab import bench_memory, bench_step, how, models, results


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bench_step_writes_all_metrics_of_all_contenders(tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    assert cli.main(["bench", "step", "--sizes", "1m", "--pairs", "2", "--out", str(out)]) == 0
    found = lines(out)
    contenders = {c.name for c in bench_step.contenders()}
    assert {line["subject"] for line in found} == contenders
    per_contender = {line["metric"] for line in found if line["subject"] == "gefen apply"}
    assert per_contender == {
        "wall time",
        "cpu time",
        "wall ratio",
        "cpu ratio",
        "trace + compile",
        "trace + compile ratio",
        "temporaries",
        "state",
    }
    assert all(line["schema"] == results.SCHEMA and line["environment"]["packages"]["jax"] for line in found)
    assert all(line["p20"] <= line["median"] <= line["p80"] for line in found)
    ratios = {line["median"] for line in found if line["subject"] == "adamw" and line["metric"].endswith("ratio")}
    assert ratios == {1.0}
    state = {line["subject"]: line["median"] for line in found if line["metric"] == "state"}
    assert state["adamw"] == pytest.approx(8, abs=1e-3)
    assert 1 < state["gefen apply"] < 1.15
    printed = capsys.readouterr().out
    assert "goal gefen apply, wall ratio <= 1.5" in printed
    assert f"written to {out}" in printed


def test_donated_apply_needs_almost_no_temporaries():
    contender = next(c for c in bench_step.contenders() if c.name == "gefen apply")
    shapes = models.shapes(bench_step.SIZES["25m"])
    compiled = bench_step.compile_step(contender, shapes)
    assert compiled.temporaries / models.count(shapes) <= 0.1


@pytest.mark.parametrize("arguments", [["--sizes", "9m"], ["--pairs", "0"]])
def test_bench_step_refuses_what_it_cannot_measure(arguments, capsys):
    assert cli.main(["bench", "step", *arguments]) == 2
    assert "unknown size '9m'; choose among" in capsys.readouterr().err or arguments[0] == "--pairs"


def test_bench_memory_counts_what_init_makes(tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    assert cli.main(["bench", "memory", "--models", "gpt-tiny,llama-tiny-scanned", "--out", str(out)]) == 0
    found = {(line["config"]["model"], line["subject"]): line for line in lines(out)}
    config = models.preset("gpt-tiny")
    shapes = models.shapes(config)
    made = gefen(1e-3).init(models.init(config, jax.random.key(0)))
    assert found["gpt-tiny", "gefen"]["median"] == pytest.approx(tree_bytes(made) / models.count(shapes))
    assert found["gpt-tiny", "gefen"]["median"] <= found["gpt-tiny", "gefen"]["config"]["bound"]
    assert ("gpt-tiny", "adam8bit") in found
    assert ("llama-tiny-scanned", "adam8bit") not in found  # stacked layers: peers would need rules of their own
    assert "gpt-tiny: 31,320 parameters" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpt3", "gpt-tiny-scanned"])
def test_bench_memory_refuses_unknown_models(name, capsys):
    assert cli.main(["bench", "memory", "--models", name]) == 2
    assert name in capsys.readouterr().err


def test_calibrated_plans_keep_the_bytes():
    gradients = bench_memory.structured_gradients(models.shapes(models.preset("gpt")))
    shapes = jax.tree.map(lambda g: g.shape, gradients)
    assert jax.tree.leaves(gradients)[0].dtype == jax.numpy.bfloat16
    assert jax.tree.structure(shapes, is_leaf=lambda x: isinstance(x, tuple)) == jax.tree.structure(gradients)
    [with_plan] = [
        result
        for result in bench_memory.study("gpt", calibrated=True, peers=False)
        if result.subject == "gefen, calibrated"
    ]
    uncalibrated = bench_memory.study("gpt", calibrated=False, peers=False)[0]
    assert with_plan.median <= uncalibrated.median * 1.001  # the budget: what the shape rule stores, or n/170


def test_the_picture_shows_the_factored_estimate(tmp_path):
    squares = np.outer([1.0, 4.0], [2.0, 3.0, 5.0])
    np.testing.assert_allclose(how.factor(squares), squares)  # rank one is kept exactly
    out = tmp_path / "how.png"
    assert cli.main(["how", "--model", "gpt", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 20_000


def test_results_of_samples_are_their_percentiles():
    found = results.Result.of("b", "s", "m", "1", [5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.median, found.p20, found.p80, found.samples) == (3.0, 1.8, 4.2, 5)
