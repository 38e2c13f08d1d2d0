"""The ladder: its rungs agree, its counts agree with each other, and it finds what it is meant to find."""

import json
import re

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest

from gefen_jax import cli
from gefen_jax.accounting import ProfilerError
from gefen_jax.lab import ladder, ladder_counts, ladder_plots, ladder_rungs, models
from gefen_jax.lab.bench_step import random_tree
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.ladder_rungs import RUNGS, Climber, Optimizer, find

SHAPES = {
    "kernel": jax.ShapeDtypeStruct((64, 96), "float32"),
    "bias": jax.ShapeDtypeStruct((97,), "float32"),
    "scalar": jax.ShapeDtypeStruct((), "float32"),
    "stack": jax.ShapeDtypeStruct((3, 48, 40), "float32"),
}


@pytest.fixture(scope="module")
def trees():
    return random_tree(SHAPES, 1), random_tree(SHAPES, 0)


@pytest.fixture(scope="module")
def rungs(trees):
    """Climbers by (optimizer, rung)."""
    found = {}
    for name in ("adamw", "gefen"):
        for climber in ladder_rungs.climbers(find(name), *trees):
            found[name, climber.rung] = climber
    return found


def after(climber, params, grads, steps=3):
    params, opt_state = ladder_rungs.copied((params, climber.opt_state))
    for _ in range(steps):
        params, opt_state = climber.step(params, opt_state, grads)
    return params


class TestRungs:
    def test_every_rung_is_there_but_a_kernel_for_adamw(self, rungs):
        assert [rung for name, rung in rungs if name == "gefen"] == list(RUNGS)
        assert [rung for name, rung in rungs if name == "adamw"] == [rung for rung in RUNGS if rung != "fused"]
        assert "adamw" in find("adamw").why

    @pytest.mark.parametrize("name", ["adamw", "gefen"])
    def test_all_compute_the_same(self, name, trees, rungs):
        params, _ = trees
        for (other, rung), climber in rungs.items():
            if other != name or (name == "gefen" and rung == "flat buffer"):  # one vector has no rows and columns
                continue
            expected = after(rungs[name, "eager"], *trees)
            got = after(climber, *trees)
            for start, a, b in zip(*map(jax.tree.leaves, (params, expected, got))):
                moved = np.abs(np.asarray(a) - np.asarray(start)).max()
                # A code may fall to the other side of a decision threshold: 1/127 of a block's largest momentum.
                np.testing.assert_allclose(a, b, rtol=0, atol=(1e-4 if name == "adamw" else 1e-2) * moved, err_msg=rung)

    def test_eager_adamw_is_optax(self, trees, rungs):
        params, grads = trees
        tx = optax.adamw(ladder_rungs.RATE)
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        for a, b in zip(*map(jax.tree.leaves, (params, after(rungs["adamw", "eager"], *trees)))):
            np.testing.assert_array_equal(a, b)

    @pytest.mark.parametrize("name", ["lion", "nadamw", "adabelief", "muon", "ademamix", "sgd"])
    def test_any_optax_optimizer_by_name(self, name):
        optimizer = find(name)
        assert optimizer.name == name
        assert isinstance(optimizer.plain, optax.GradientTransformation)
        assert optimizer.fused is None

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("lyon", "optax has no lyon.*such as: lion"),
            ("lbfgs", "missing.*'value'"),
            ("cosine_similarity", "unexpected keyword"),
            ("clip", "learning_rate"),
            ("__doc__", "not callable"),
            ("", "optax has no"),
        ],
    )
    def test_what_is_no_optimizer_is_named(self, name, problem):
        with pytest.raises(UsageError, match=problem) as raised:
            find(name)
        assert "\n" not in str(raised.value)


class TestCounts:
    @pytest.mark.parametrize("rung", ["per tensor", "tree-wise", "whole step", "flat buffer"])
    @pytest.mark.parametrize("name", ["adamw", "gefen"])
    def test_a_profile_counts_what_the_programs_say(self, name, rung, trees, rungs):
        """Two independent counts: instructions of the compiled programs, and events of the executor."""
        climber = rungs[name, rung]
        found = ladder_counts.trace(climber, *trees)
        assert found.events == ladder_counts.launches(climber)
        assert found.programs == {"per tensor": len(SHAPES), "tree-wise": 2}.get(rung, 1)

    def test_each_rung_launches_less(self, trees, rungs):
        counts = [ladder_counts.trace(rungs["adamw", rung], *trees).programs for rung in RUNGS if rung != "fused"]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > 10 * len(SHAPES)

    def test_eager_runs_one_operation_at_a_time(self, trees):
        p = jnp.ones(4)
        climber = Climber("eager", lambda p, s, g: (p + g * 2.0, s), (), [])
        found = ladder_counts.trace(climber, p, p)
        assert (found.programs, found.events) == (2, 2)
        assert ladder_counts.launches(climber) is None

    @pytest.mark.parametrize("rung", ["per tensor", "tree-wise", "whole step", "flat buffer", "fused"])
    def test_donated_steps_write_in_place(self, rung, trees, rungs):
        assert ladder_counts.in_place(rungs["gefen", rung], *trees) > 0.99

    def test_steps_that_donate_nothing_do_not(self, trees, rungs):
        assert ladder_counts.in_place(rungs["adamw", "eager"], *trees) == 0
        tx = optax.adamw(1e-3)
        copying = Climber("whole step", jax.jit(ladder_rungs.whole_step(tx)), tx.init(trees[0]), [])
        assert ladder_counts.in_place(copying, *trees) == 0

    @pytest.mark.parametrize("dtype", ladder_counts.DTYPES)
    def test_fused_arithmetic_stays_within_rounding(self, dtype, trees):
        limit = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}[dtype]
        for name, rung in (("adamw", "whole step"), ("gefen", "fused")):
            assert ladder_counts.difference(find(name), rung, dtype, *trees) < limit

    def test_a_different_step_differs(self, trees):
        half = optax.sgd(0.5)
        half_apply = type("Half", (), {"init": half.init, "apply": staticmethod(self.apply)})
        optimizer = Optimizer("sgd", optax.sgd(1.0), half_apply)
        assert ladder_counts.difference(optimizer, "fused", "float32", *trees) == pytest.approx(0.5, rel=1e-5)
        assert ladder_counts.difference(find("adamw"), "fused", "float32", *trees) is None

    @staticmethod
    def apply(grads, params, opt_state):
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), opt_state

    def test_no_finite_number_is_not_close(self, trees):
        broken = Optimizer("broken", optax.scale(float("nan")), None)
        assert ladder_counts.difference(broken, "whole step", "float32", *trees) == float("inf")

    @pytest.mark.parametrize("limit", ladder_counts.LIMITS.values())
    @pytest.mark.parametrize(("name", "tensors"), [("gpt2-124m", 148), ("llama3-1.5b", 147), ("qwen3-1.7b", 310)])
    def test_launches_hold_all_tensors_and_no_more_than_fit(self, name, tensors, limit):
        groups = ladder_counts.launch_groups(models.shapes(models.preset(name)), limit)
        assert sum(groups) == tensors
        assert all(5 * 8 * group <= limit for group in groups)  # five pointers at least: p, g, mu, scale, nu
        assert len(groups) == 1 if limit > 10_000 else len(groups) >= tensors * 5 * 8 / limit


class TestCommand:
    def run(self, tmp_path, words):
        files = f"--out {tmp_path / 'l.jsonl'} --plot {tmp_path / 'l.png'}"
        return cli.main(["bench", "ladder", "--fast", *files.split(), *words.split()])

    def test_end_to_end(self, tmp_path, capsys):
        assert self.run(tmp_path, "--optimizer lion --sizes 1x16 --turns 1") == 0
        printed = capsys.readouterr().out
        assert "lion has no kernel of its own" in printed
        assert re.search(r"gpt2-124m +148 +1 \(148\) +2 \(104\+44\)", printed)
        lines = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text().splitlines()]
        assert {line["benchmark"] for line in lines} == {"bench ladder"}
        metrics = {(line["config"]["size"], line["config"]["rung"], line["metric"]): line for line in lines}
        for rung in RUNGS:
            if rung != "fused":
                assert metrics["1x16", rung, "time"]["median"] > 0
        assert metrics["1x16", "whole step", "programs"]["median"] == 1
        assert metrics["1x16", "whole step", "in place"]["median"] == 1
        assert 0 < metrics["1x16", "whole step", "share of a train step"]["median"] < 1
        assert metrics["1x16", "whole step", "difference from eager"]["median"] < 1e-3
        pixels = matplotlib.image.imread(tmp_path / "l.png")
        assert pixels[..., :3].std() > 0.05

    def test_without_a_profiler_it_says_so_and_goes_on(self, tmp_path, capsys, monkeypatch):
        monkeypatch.delattr(jax.profiler, "ProfileData")
        with pytest.raises(ProfilerError, match="counted from programs only"):
            ladder_counts.trace(None, None, None)
        assert self.run(tmp_path, "--optimizer sgd --sizes 1x16 --turns 1") == 0
        printed = capsys.readouterr().out
        assert "no executor events of eager: this jax has no jax.profiler.ProfileData" in printed
        assert re.search(r"whole step +- +\d+ +- +100%", printed)

    def test_a_profiler_in_use_is_an_error_that_says_so(self, trees, rungs, tmp_path):
        with jax.profiler.trace(str(tmp_path)), pytest.raises(ProfilerError, match="is it in use"):
            ladder_counts.trace(rungs["adamw", "whole step"], *trees)

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            ("--optimizer lyon", "unknown optimizer 'lyon'"),
            ("--sizes 6", "found '6', expected LAYERSxWIDTH"),
            ("--sizes 2x18", "multiple of 4"),
            ("--turns 0", "--turns must be at least 1; found 0"),
            ("--target h1", "unknown 'h1'; choose among: a100"),
        ],
    )
    def test_bad_options(self, words, problem, tmp_path, capsys):
        assert self.run(tmp_path, words) == 2
        assert problem in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


def test_a_picture_of_one_optimizer_and_one_size():
    config = {"optimizer": "lion", "size": "1x16", "parameters": 100, "tensors": 3, "rung": "eager", "tokens": 8}
    results = [
        ladder.Result.of("bench ladder", "lion", metric, "1", 2.0, config=config | {"rung": rung})
        for metric in ("time", "events", "share of a train step")
        for rung in ("eager", "whole step")
    ]
    figure = ladder_plots.draw(results)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert "lion: whole step is 1x faster than eager when small, 1.0x when large" in titles
    assert "3 tensors: what one step makes the executor do" in titles
