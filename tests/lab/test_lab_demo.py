"""The demo end to end on tiny models: files, printed words, Ctrl-C, terminals and pipes, wrong input."""

import io
import json
import re
import signal
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from gefen_jax import cli
from gefen_jax.lab import demo, display, picture, plots, record, report, tasks, train

TEXT = ("the quick brown fox jumps over the lazy dog, " * 200).encode()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_bytes(TEXT)
    return str(path)


def check_files(out):
    """The run's JSON, after a look at the picture."""
    pixels = matplotlib.image.imread(out / "demo.png")
    assert pixels.shape[1] == 1950
    assert pixels[..., :3].std() > 0.05  # not blank
    return json.loads((out / "demo.json").read_text())


def test_demo_end_to_end(text, tmp_path, capsys):
    words = f"--data {text} --model gpt-tiny --steps 6 --batch 4 --seed 5 --lr 0.01 --out {tmp_path / 'out'}"
    assert cli.main(["demo", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed  # no control characters where there is no terminal
    result = check_files(tmp_path / "out")
    assert result["complete"] is True
    assert result["settings"]["seed"] == 5
    assert result["data"]["train_bytes"] + result["data"]["validation_bytes"] == len(TEXT)
    assert result["environment"]["packages"]["jax"]
    adamw, gefen = result["optimizers"]
    assert (adamw["name"], gefen["name"]) == ("adamw", "gefen")
    assert adamw["validation"][0] == gefen["validation"][0]  # the same start
    assert adamw["train_loss"][0] == gefen["train_loss"][0]  # the same first batch
    assert adamw["train_loss"][1:] != gefen["train_loss"][1:]
    assert adamw["state_bytes"] == 8 * adamw["parameters"] + 8
    assert gefen["state_bytes"] < 0.3 * adamw["state_bytes"]
    assert gefen["peak_bytes"] < adamw["peak_bytes"]
    for run in (adamw, gefen):
        assert len(run["train_loss"]) == len(run["step_seconds"]) == 6
        assert [point[0] for point in run["validation"]] == list(range(7))
        assert run["validation"][-1][1] < run["validation"][0][1] - 0.3
        assert f"{run['validation'][-1][1]:.4f}" in printed
        assert f"{run['state_bytes'] / run['parameters']:.2f}" in printed
    llama = result["state_of_real_models"]["llama3-1.5b"]
    assert llama["adamw"] / llama["parameters"] == pytest.approx(8, abs=1e-6)
    assert llama["gefen"] / llama["parameters"] < 1.03
    assert "step 6/6" in printed


def test_ctrl_c_keeps_what_was_measured(text, tmp_path):
    steps, reached = 4000, 500
    words = f"--data {text} --model llama-tiny --steps {steps} --batch 2 --optimizers adamw,sgd --out {tmp_path}"
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child would inherit "ignored"
    try:
        command = [sys.executable, "-W", "error", "-m", "gefen_jax", "demo", *words.split()]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        for printed in process.stdout:
            if re.match(rf"step +{reached}/{steps} ", printed):
                break
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert errors == ""
    result = check_files(tmp_path)
    assert result["complete"] is False
    adamw, sgd = result["optimizers"]
    assert reached <= len(adamw["train_loss"]) == len(sgd["train_loss"]) < steps
    step = adamw["validation"][-1][0]
    assert f"Stopped by Ctrl-C: compared at step {step} of {steps}." in rest
    assert f"{adamw['validation'][-1][1]:.4f}" in rest


def test_ctrl_c_before_anything_was_measured(text, tmp_path, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "prepare", interrupted)
    assert cli.main(["demo", "--data", text, "--model", "gpt-tiny", "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "gefen-jax demo: stopped by Ctrl-C\n"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data /no/such/file", "data '/no/such/file': no such file; give stdlib, a path, a glob or module:callable"),
        ("--model gpt5", "unknown model 'gpt5'; choose one of: gpt-tiny"),
        ("--model gpt2-124m", "--model gpt2-124m: too large for the demo; choose one of: gpt-tiny"),
        ("--optimizers adamw,adamx", "unknown optimizer 'adamx'; choose among: adamw, gefen"),
        ("--optimizers adamw,adamw", "--optimizers 'adamw,adamw': give one or more names, each once"),
        ("--optimizers ,", "--optimizers ',': give one or more names"),
        ("--steps 0", "argument --steps: '0' is not a whole number above 0"),
        ("--steps 1.5", "argument --steps: '1.5' is not a whole number above 0"),
        ("--lr nan", "argument --lr: 'nan' is not a number above 0"),
        ("--lr high", "argument --lr: 'high' is not a number above 0"),
        ("--seed -1", "argument --seed: '-1' is not a whole number from 0"),
        ("--out /dev/null/x", "--out '/dev/null/x': cannot write there (Not a directory)"),
        ("--speed 3", "unrecognized arguments: --speed 3"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(words, message, capsys, tmp_path):
    out = [] if "--out" in words else ["--out", str(tmp_path)]
    try:
        code = cli.main(["demo", *words.split(), *out])
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.err.startswith(f"gefen-jax demo: {message}")
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_text_shorter_than_a_window(tmp_path, capsys):
    (tmp_path / "short.txt").write_bytes(b"a" * 1100)
    words = f"--data {tmp_path / 'short.txt'} --model gpt --out {tmp_path}"
    assert cli.main(["demo", *words.split()]) == 2
    assert "windows of 129; give more text or a model with a shorter context" in capsys.readouterr().err


def test_the_environment_names_the_data_when_the_command_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("GEFEN_DATA", str(tmp_path / "elsewhere.txt"))
    assert cli.main(["demo", "--out", str(tmp_path)]) == 2
    assert "elsewhere.txt': no such file" in capsys.readouterr().err


# --------------------------------------------------------------------------------- display and report


def records(*names, steps=50, final=1.5, diverged=()):
    """Made-up runs."""
    random = np.random.default_rng(0)
    made = []
    for i, name in enumerate(names):
        found = record.Record(name, name.title(), 1e-3, 1000, *[8000 - 1000 * i] * 2, 4000, 10**6 - 1000 * i, {}, 1.0)
        for step in range(steps + 1):
            loss = final + 4 / (1 + step / 10) + 0.01 * i
            if name in diverged and step > 5:
                loss = float("nan")
            noisy = np.full(1 if step else 0, loss + random.normal() / 20, np.float32)
            metrics = tasks.Metrics(loss, 0.1) if step % 10 == 0 else None
            found.add(train.Event(step, noisy, 0.1, metrics))
        made.append(found)
    return made


def test_a_terminal_gets_a_live_panel():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, legacy_windows=False)
    made = records("adamw", "gefen")
    with display.progress(console, made, 50) as live:
        live.update()
    drawn = output.getvalue()
    assert "\x1b[" in drawn
    assert "step 50/50" in drawn
    assert "100 ms" not in drawn
    for found in ("Adamw", "Gefen", "ms/step", f"{made[1].validation[-1][1]:.4f}", "█", "Ctrl-C"):
        assert found in drawn


def test_a_pipe_gets_a_line_per_validation():
    output = io.StringIO()
    made = records("adamw", "gefen", steps=10)
    with display.progress(Console(file=output), made, 10) as plain:
        plain.update()
        plain.update()
    assert output.getvalue() == "step 10/10  0:00  validation loss: Adamw 3.5000  Gefen 3.5100\n"


def test_sparkline():
    assert display.sparkline([]) == ""
    assert display.sparkline([2.0]) == "▁"
    assert display.sparkline([1.0, 1.0, 2.0, 2.0], width=2) == "▁█"
    assert display.sparkline([1.0, float("nan")]) == "▁!"
    assert len(display.sparkline(list(range(1000)))) == 24


def test_the_finding_in_words():
    worse, better, lost = records("adamw", "gefen"), records("adamw", "gefen"), records("a", "b", diverged=["b"])
    better[1].validation = [(at, loss - 0.02, accuracy) for at, loss, accuracy in better[1].validation]
    assert "Gefen is 0.0100 nats per byte above Adamw, with 0.88 times its optimizer state." in report.finding(
        worse, 50
    )
    assert "Gefen is 0.0100 nats per byte below Adamw" in report.finding(better, 50)
    assert "The loss of B or A is not finite" in report.finding(lost, 50)
    assert report.finding(worse[:1], 50) == ""


@pytest.mark.parametrize("count", [1, 2, 3, 13])
def test_pictures_of_any_number_of_optimizers(count, tmp_path):
    names = [f"optimizer {i}" for i in range(count)]
    made = records(*names, diverged=names[2:3])
    real = {picture.SHOWN: dict.fromkeys(names, 2**30)}
    picture.draw(made, 50, real, "a caption", tmp_path / "demo.png")
    assert matplotlib.image.imread(tmp_path / "demo.png").std() > 0.05


def test_a_run_that_never_stepped(tmp_path):
    made = records("adamw", "gefen", steps=0)
    output = io.StringIO()
    Console(file=output, width=100).print(report.results(made, 0))
    assert re.search(r"Gefen +5\.5100 +\+0\.0100 +6\.84 KiB +7\.00 +975\.6 KiB *\n", output.getvalue())
    picture.draw(made, 0, {picture.SHOWN: {"adamw": 8, "gefen": 1}}, "", tmp_path / "demo.png")
    assert matplotlib.image.imread(tmp_path / "demo.png").std() > 0.05


def test_looks_are_distinct_and_fixed():
    names = [f"o{i}" for i in range(12)]
    found = plots.looks(["lion", "adamw", *names, "gefen"])
    assert len(set(found.values())) == len(found) == 15
    assert found["adamw"] == plots.LOOKS[0]
    assert found["gefen"] == plots.looks(["gefen"])["gefen"] == plots.LOOKS[1]
    assert len({look.colour for look in plots.looks(names[:8]).values()}) == 8
