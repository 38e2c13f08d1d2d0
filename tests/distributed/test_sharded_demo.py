"""`gefen-jax demo --devices 8` as a user types it: the processor becomes eight devices; bytes of one are reported."""

import json
import os
import subprocess
import sys


def demo(folder, *words):
    command = [sys.executable, "-W", "error", "-m", "gefen_jax", "demo", *words, "--out", str(folder)]
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)


def test_the_demo_on_eight_devices(tmp_path):
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog, " * 200)
    words = ["--data", str(tmp_path / "fox.txt"), "--model", "gpt-tiny", "--steps", "6", "--lr", "0.01"]
    done = demo(tmp_path / "out", *words, "--devices", "8")
    assert done.returncode == 0, done.stderr
    assert "fully sharded over 8 devices" in done.stdout
    assert "one device" in done.stdout
    result = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert result["settings"]["devices"] == 8
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
    adamw, gefen = result["optimizers"]
    for run in (adamw, gefen):
        assert run["device_parameter_bytes"] * 8 == 4 * run["parameters"]  # every leaf has an axis that 8 divides
        assert run["validation"][-1][1] < run["validation"][0][1] - 0.3
    assert adamw["validation"][0] == gefen["validation"][0]
    assert adamw["device_state_bytes"] == adamw["parameters"] + 8  # an eighth of 8 bytes, and two counts
    assert gefen["device_state_bytes"] < 0.4 * adamw["device_state_bytes"]
    assert gefen["device_state_bytes"] < 0.2 * gefen["state_bytes"]  # the codebook is on every device


def test_batches_must_be_divisible(tmp_path):
    done = demo(tmp_path, "--devices", "3")
    assert (done.returncode, done.stderr) == (2, "gefen-jax demo: --batch 8: not a multiple of --devices 3\n")
