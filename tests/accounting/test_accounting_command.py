"""The command: presets, a user's own script, JSON, and what it says to wrong options."""

import argparse
import json
import textwrap

import pytest

from gefen_jax.accounting import DECODERS
from gefen_jax.lab import account as command
from gefen_jax.lab.errors import UsageError

SCRIPT = """
import jax, jax.numpy as jnp, optax

optimizer = optax.adamw(1e-3)
params = {"w": jnp.ones((16, 8))}
opt_state = optimizer.init(params)
batch = jnp.ones((4, 16))

def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)

@jax.jit
def train_step(params, opt_state, batch):
    updates, opt_state = optimizer.update(jax.grad(loss)(params, batch), opt_state, params)
    return optax.apply_updates(params, updates), opt_state
"""

ADDED = """
def setup():
    return train_step, (params, opt_state, batch)
"""


def run(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_presets_print_states_flops_and_what_fits(capsys):
    assert run("--model", "llama-1.5b", "--mesh", "fsdp=8", "--device", "a100-40gb", "--optimizer", "adamw,gefen",
               "--length", "8192", "--attention", "fused", "--usable", "0.95", "--layout", "fsdp") == 0  # fmt: skip
    text = capsys.readouterr().out
    assert "Optimizer state for 1,498,482,688 parameters" in text
    assert "6 N D with all N" in text
    assert "What fits: llama-1.5b, 8192 tokens, fsdp=8, 40.00 GiB a device" in text
    assert "Advice: adamw, fsdp" in text


def test_json_has_the_same_numbers(capsys):
    assert run("--json", "--optimizer", "adamw,gefen,adam-mini", "--memory", "24GiB", "--precision", "fp32,bf16") == 0
    states, flops, fits = json.loads(capsys.readouterr().out)
    assert [row["optimizer"] for row in states["rows"]] == ["adamw", "gefen", "adam_mini"]
    assert states["rows"][0]["state"] == 8 * DECODERS["gpt2-124m"].count + 4
    assert sum(row["FLOPs"] for row in flops["rows"]) == DECODERS["gpt2-124m"].flops(1, 1024).total
    assert {row["layout"] for row in fits["rows"]} == {"replicated", "offload"}


def test_a_users_script_needs_two_added_lines(tmp_path, capsys):
    assert len(ADDED.strip().splitlines()) <= 3
    script = tmp_path / "users_training.py"
    script.write_text(SCRIPT + ADDED)
    assert run("--script", f"{script}:setup") == 0
    text = capsys.readouterr().out
    assert "Account of train_step" in text
    assert "donate the parameters and the optimizer state" in text


def test_a_script_may_give_options_and_be_run(tmp_path, capsys):
    script = tmp_path / "users_other_training.py"
    script.write_text(
        SCRIPT
        + textwrap.dedent("""
        def setup():
            return train_step, (params, opt_state, batch), {"loss": loss, "optimizer": optimizer, "repeats": 1}
        """)
    )
    assert run("--script", f"{script}:setup", "--run", "--device", "h100", "--json") == 0
    data = json.loads(capsys.readouterr().out)[0]
    assert any("MFU" in row["what"] for section in data["sections"] for row in section["rows"] if "what" in row)


def test_paper(capsys):
    assert run("--paper") == 0
    text = capsys.readouterr().out
    assert "97 GiB" in text
    assert "FSDP, Llama-3 1.5B" in text


@pytest.mark.parametrize("source", ["traced", "compiled"])
def test_activations_from_the_trace_and_from_xla(monkeypatch, capsys, source):
    tiny = DECODERS["gpt2-124m"].__class__("tiny", "gpt", 1, 16, 2, 2, 8, 32, 20, 16)
    monkeypatch.setattr(command, "DECODERS", {"tiny": tiny})
    assert run("--model", "tiny", "--optimizer", "adamw", "--activations", source, "--precision", "fp32") == 0
    assert f"activations: {source}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "bert"], "unknown model 'bert'; choose among: gpt2-124m"),
        (["--optimizer", "adamx"], "--optimizer: unknown 'adamx'; choose among: adamw"),
        (["--device", "abacus"], "unknown device 'abacus'; known: a100"),
        (["--memory", "many"], "--memory: found 'many'"),
        (["--mesh", "fsdp=x"], "--mesh: found 'fsdp=x'"),
        (["--layout", "zero"], "--layout: unknown 'zero'"),
        (["--precision", "fp8"], "--precision: unknown 'fp8'"),
        (["--length", "2000"], "--length: found 2000, gpt2-124m has positions for 1 to 1024"),
        (["--usable", "2"], "--usable: found 2.0"),
        (["--run"], "--run needs --script"),
        (["--target", "h100"], "--activations compiled"),
        (["--target", "v100", "--activations", "compiled"], "--target: unknown target 'v100'"),
        (["--script", "train"], "expected FILE.py:FUNCTION or MODULE:FUNCTION"),
        (["--script", "nowhere/train.py:f"], "there is no file nowhere/train.py"),
        (["--script", "no_such_module:f"], "there is no module no_such_module"),
        (["--script", "json:nothing"], "found nothing of that name, expected a function"),
        (["--script", "os:getcwd"], r"found str, expected \(step"),
    ],
)
def test_wrong_options_are_answered_in_one_line(words, message):
    with pytest.raises(UsageError, match=message) as error:
        run(*words)
    assert "\n" not in str(error.value)


def test_a_step_that_cannot_be_traced(tmp_path):
    script = tmp_path / "users_broken_training.py"
    script.write_text("import jax.numpy as jnp\ndef step(params):\n    return 1 if params.sum() > 0 else 0\n"
                      "def setup():\n    return step, (jnp.ones(3),)\n")  # fmt: skip
    with pytest.raises(UsageError, match=r"step cannot be traced for cpu: TracerBoolConversionError") as error:
        run("--script", f"{script}:setup")
    assert "\n" not in str(error.value)
    script.write_text("def setup():\n    return (lambda x: x), (1.0,), {'speed': 2}\n")
    with pytest.raises(UsageError, match=r"unknown options \['speed'\]; known: alternatives"):
        run("--script", f"{script}:setup")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def setup():\n    raise RuntimeError('no\\ndata')\n", "RuntimeError: no data (at {script}:2)"),
        ("import os\n1 / 0\n", "ZeroDivisionError: division by zero (at {script}:2)"),
        ("\nx = (\n", "SyntaxError: '(' was never closed ({script.name}, line 2) (at {script}:2)"),
    ],
)
def test_a_script_that_fails_is_shown_in_one_line(tmp_path, text, message):
    script = tmp_path / "users_failing.py"
    script.write_text(text)
    with pytest.raises(UsageError) as caught:
        run("--script", f"{script}:setup")
    assert str(caught.value) == f"{script}:setup: the script failed with {message.format(script=script)}"
