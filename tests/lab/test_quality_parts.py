"""Codebook families, blocks, the n-gram model and the report, against plain NumPy and hand-made cells."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quality_cases import cell, study

from gefen_jax.codebook import histogram, mse
from gefen_jax.lab import (
    models,
    quality,
    quality_cells,
    quality_codebooks,
    quality_momentum,
    quality_plots,
    quality_report,
    quality_stats,
    quality_tasks,
    quality_variants,
)
from gefen_jax.lab.errors import UsageError
from gefen_jax.lab.ngrams import NGramConfig, rows_of
from gefen_jax.lab.optimizers import OPTIMIZERS, build
from gefen_jax.plan import check_codebook
from gefen_jax.quantization import decode, encode, nearest, search_table


@pytest.fixture(scope="module")
def counts():
    random = np.random.default_rng(0)
    return histogram((random.standard_t(4, size=(256, 256)) * 1e-3).astype(np.float32), (1, 256))


@pytest.mark.parametrize("bits", [8, 4])
def test_families_are_codebooks_and_the_exact_program_is_the_best(counts, bits):
    errors = quality_codebooks.errors(counts, bits)
    for family, words_of in quality_codebooks.FAMILIES.items():
        words = words_of(counts, bits)
        assert words.dtype == np.float32
        if family == "nozero":
            assert words.shape == (2**bits,)
            assert not np.any(words == 0)
        else:
            check_codebook(words, bits, "gefen")
            assert np.sum(words == 0) == bits // 4
        expected = mse(counts, words) / mse(counts, quality_codebooks.learned(counts, bits))
        assert errors[family] == expected
    assert errors["learned"] == 1
    assert all(error > 0.999 for family, error in errors.items() if family != "nozero")
    assert errors["lloyd"] < errors["uniform"]
    assert errors["lloyd"] < 1.1


@pytest.mark.parametrize("bits", [8, 4])
def test_families_work_in_the_search_table(counts, bits):
    y = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, 20000).astype(np.float32))
    for family, words_of in quality_codebooks.FAMILIES.items():
        words = jnp.asarray(words_of(counts, bits))
        found, exact = (decode(codes, words) for codes in (encode(y, search_table(words)), nearest(y, words)))
        np.testing.assert_allclose(jnp.abs(y - found), jnp.abs(y - exact), atol=1e-6, err_msg=family)


def test_evenly_spaced_and_logarithmic_words():
    np.testing.assert_allclose(quality_codebooks.uniform(None, 4)[8:], np.arange(1, 9) / 8)
    upper = quality_codebooks.logarithmic(None, 8)[129:].astype(float)
    ratios, steps = upper[1:] / upper[:-1], np.diff(upper)
    linear = steps < 1.01 * quality_codebooks.STEP
    assert 0 < linear.sum() < 60
    np.testing.assert_allclose(ratios[~linear], ratios[-1], rtol=2e-3)


def test_blocks_divide_every_shape():
    shapes = [(7,), (4096,), (96, 288), (96, 96), (257, 31), (3, 3, 16, 32), (512, 2)]
    for shape in shapes:
        for size in (64, 256, 1024):
            for tile in (quality_variants.row_block(size)(shape), quality_variants.column_block(size)(shape)):
                assert len(tile) == len(shape)
                assert all(s % t == 0 for s, t in zip(shape, tile))
                assert math.prod(tile) <= size
    assert quality_variants.row_block(128)((96, 288)) == (1, 96)
    assert quality_variants.row_block(256)((512, 2)) == (128, 2)


def test_every_optimizer_can_be_built_for_every_task():
    for name, task in quality_tasks.TASKS.items():
        loaded = task.load(task.data)
        shapes = jax.eval_shape(loaded.task.init, jax.random.key(0))
        for optimizer in OPTIMIZERS:
            if (name, optimizer) != ("lora", "adam_mini"):  # it knows the layers of models, not adapters
                jax.eval_shape(build(optimizer, loaded.task.config, 1e-3, 10).init, shapes)


def plain_row(run, rows):
    code = 0
    for byte in run:
        code = (code ^ byte) * 0x9E3779B1 % 2**32
        code ^= code >> 15
    return code % rows


def test_rows_of_runs_equal_plain_integers():
    tokens = np.random.default_rng(0).integers(256, size=(3, 11)).astype(np.uint8)
    for order in (1, 2, 4):
        found = rows_of(jnp.asarray(tokens), order, 97)
        for i in range(3):
            padded = [0] * (order - 1) + [int(byte) + 1 for byte in tokens[i]]
            expected = [plain_row(padded[j : j + order], 97) for j in range(11)]
            assert found[i].tolist() == expected


def test_the_ngram_model_equals_numpy_and_reads_its_orders_only():
    config = NGramConfig(vocab=256, context=9, orders=3, rows=53, width=4, hidden=6)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda s: random.normal(size=s.shape).astype("f4"), models.shapes(config))
    tokens = random.integers(256, size=(2, 9)).astype(np.uint8)
    p = jax.tree.map(np.float64, params)
    parts = [p["embed_1"]["embedding"][tokens]]
    parts += [p[f"embed_{n}"]["embedding"][np.asarray(rows_of(jnp.asarray(tokens), n, 53))] for n in (2, 3)]
    h = np.concatenate(parts, axis=-1) @ p["dense"]["kernel"] + p["dense"]["bias"]
    h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    expected = h @ p["head"]["kernel"] + p["head"]["bias"]
    found = models.logits(config, params, tokens)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    changed = tokens.copy()
    changed[:, 2] ^= 1
    other = np.asarray(models.logits(config, params, changed))
    same = np.all(np.isclose(other, found), axis=(0, 2))
    assert same.tolist() == [True, True, False, False, False, True, True, True, True]


def test_ngram_rows_are_rarely_seen():
    loaded = quality_tasks.TASKS["ngram"].load("pydoc")
    params = loaded.task.init(jax.random.key(0))
    grads = jax.jit(jax.grad(loaded.task.loss))(params, next(loaded.task.batches(1, 16, 0)))
    untouched = ~np.any(grads["embed_5"]["embedding"], axis=1)
    assert untouched.mean() > 0.8


def cells():
    found = study("gpt", gap=0.001) + study("qwen", gap=0.002, seeds=range(4)) + study("cnn", gap=-0.1, choice={})
    return [*found, cell("gefen_4bit", loss=math.nan, diverged=True)]


def test_report_says_what_the_statistics_say(tmp_path):
    files = quality_report.write(cells(), tmp_path)
    assert [file.name for file in files] == ["README.md", "differences.png", "curves.png", "rates.png"]
    text = files[0].read_text()
    gap = quality_stats.gap([c for c in cells() if c.task == "gpt"], "gefen", 1e-3, 1e-3)
    assert f"| {quality_report.format_gap(gap)} |" in text
    rows = [line for line in text.splitlines() if line.startswith("| Gefen |")]
    assert len(rows) == 5  # gate, pooled, three tasks
    assert "+0.0012" in rows[1]  # (16 * 0.001 + 4 * 0.002) / 20
    assert "| 1.25 | 0.75x | 1.20x |" in rows[1]
    assert "not finite, 1 pair" in text
    assert "Gefen, 4 bits diverged at 0.001 with seeds 0." in text
    assert "missing: 20 pairs of 48" in rows[0]
    assert "cnn: AdamW's best rate was not chosen on seeds of its own." in text
    assert "gpt, at AdamW's best rate, fewer pairs than 16: Gefen, 4 bits 1" in text
    absent = text[text.index("Tasks without a run") :]
    assert "llama" in absent
    assert "cnn" not in absent


def test_report_keeps_settings_apart():
    both = study("gpt", gap=0.0) + [dataclasses.replace(c, steps=800, loss=c.loss + 1) for c in study("gpt", gap=0.5)]
    results = quality_report.analyse(both)
    assert [result.setting.steps for result in results] == [40, 800]
    np.testing.assert_allclose([result.gaps["1x", "gefen"].mean for result in results], [0.0, 0.5], atol=1e-12)


def test_report_needs_a_run(tmp_path):
    with pytest.raises(UsageError, match="no finished run of a study"):
        quality_report.write([c for c in cells() if c.purpose == "choice"], tmp_path)


def test_curves_leave_the_start_above_the_picture():
    low, high = quality_plots.upper_part([5.0, 3.0, 2.5, 2.2, 2.1, 2.0, math.nan])
    assert low < 2.0
    assert 2.5 < high < 5


def test_momentum_is_counted_in_the_blocks_that_quantise_it(monkeypatch):
    config = NGramConfig(vocab=256, context=16, orders=1, rows=1, width=32, hidden=32)
    task = quality_tasks.text_task(config, "pydoc").task
    monkeypatch.setattr(quality_momentum, "SHARES", (0.5, 1.0))
    found = quality_momentum.momentum_counts(task, build("adamw", config, 1e-2, 4), 4, 4)(0)
    assert list(found) == [0, 2, 4]
    params = task.init(jax.random.key(0))
    mu = {name: np.zeros_like(params[name][kind]) for name, kind in (("embed_1", "embedding"), ("head", "kernel"))}
    tx = build("adamw", config, 1e-2, 4)
    opt_state = tx.init(params)
    gradient, update = jax.jit(jax.grad(task.loss)), jax.jit(tx.update)
    for batch in task.batches(4, 4, 0):
        grads = gradient(params, batch)
        norm = math.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads)))
        for (name, old), kind in zip(mu.items(), ("embedding", "kernel")):
            mu[name] = 0.9 * old + 0.1 * np.asarray(grads[name][kind]) * min(1, 1 / norm)
        updates, opt_state = update(grads, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
    expected = histogram(mu["embed_1"], (4, 32)) + histogram(mu["head"], (1, 256))
    assert np.abs(found[4] - expected).sum() < 0.01 * expected.sum()  # rounding moves a few over a bin's edge


def test_shipped_studies_can_be_read():
    files = quality.shipped()
    assert files
    assert quality_momentum.read(files) or quality_cells.read(files)
    for title, head, rows in quality_momentum.tables(quality_momentum.read(files)):
        assert len({len(row) for row in rows} | {len(head)}) == 1, title


@pytest.mark.parametrize("optimizer", ["gefen", "gefen_shapes", "gefen_4bit"])
def test_the_shipped_study_finds_the_default_no_worse_than_adamw(optimizer):
    verdict = quality_stats.gate(quality_cells.read(quality.shipped()), optimizer)
    assert verdict.passed, (verdict.failures, verdict.missing)


def test_the_readme_shows_the_table_of_the_shipped_study():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert quality_report.language_table(quality_cells.read(quality.shipped())) in readme
