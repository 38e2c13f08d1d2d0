"""Two real processes with `jax.distributed`: one is killed in the middle, both start again, and nothing shows.

The program is the example `many_hosts`, as a user would run it: two devices in each process, collectives over loopback.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

STEPS, EVERY = 15, 3


def start(folder, hosts=2, devices=2):
    """The processes of one run, each with its output going to a file."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    words = [sys.executable, "-W", "error", "-m", "gefen_jax.lab.examples.many_hosts", "--model", "gpt-tiny"]
    words += ["--checkpoints", str(folder), "--steps", str(STEPS if hosts > 1 else 0), "--every", str(EVERY)]
    words += ["--coordinator", f"localhost:{port}", "--hosts", str(hosts)]
    processes = []
    for host in range(hosts):
        with Path(f"{folder}.{host}.txt").open("w") as log:
            processes.append(subprocess.Popen([*words, "--host", str(host)], stdout=log, stderr=log, env=env))
    return processes


def printed(folder, host=0):
    return Path(f"{folder}.{host}.txt").read_text()


def finish(processes, folder):
    """Wait for a run to end well."""
    try:
        codes = [process.wait(timeout=900) for process in processes]
    finally:
        end(processes)
    assert codes == [0] * len(processes), printed(folder)[-5000:] + printed(folder, len(processes) - 1)[-5000:]


def end(processes):
    for process in processes:
        process.kill()
        process.wait()


def losses(text):
    return dict(re.findall(r"^step (\d+): loss (\S+)$", text, re.MULTILINE))


def content(folder, step):
    """All arrays of a checkpoint, as NumPy."""
    path = folder / str(step) / "default"
    with ocp.PyTreeCheckpointer() as reader:
        with (path / "_METADATA").open():  # a checkpoint that does not exist is an error here
            shapes = reader.metadata(path).item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        return reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=arguments))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b)):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(start(folder), folder)
    return folder


def test_a_killed_run_continues_to_the_bit(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    processes = start(folder)
    try:
        deadline = time.monotonic() + 900
        while not (folder / str(2 * EVERY)).exists():  # committed: Orbax renames what is complete
            assert time.monotonic() < deadline, printed(folder)[-5000:]
            assert processes[1].poll() is None, printed(folder, 1)[-5000:]
            time.sleep(0.01)
        processes[1].send_signal(signal.SIGKILL)
        assert processes[1].wait() == -signal.SIGKILL
        assert not (folder / str(STEPS)).exists()
    finally:
        end(processes)
    before = losses(printed(folder))
    complete = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    assert 2 * EVERY <= max(complete) < STEPS
    # A save that the crash cut off, whatever it managed to write.
    shutil.copytree(
        folder / str(EVERY), cut := folder / f"{max(complete) + EVERY}.orbax-checkpoint-tmp", dirs_exist_ok=True
    )
    for path in cut.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    finish(start(folder), folder)
    assert f"continuing at step {max(complete)}\n" in printed(folder)
    after = losses(printed(folder))
    assert list(after) == [str(step) for step in range(max(complete) + 1, STEPS + 1)]
    assert before | after == losses(printed(uninterrupted))
    for step in (0, EVERY, STEPS):
        same(content(folder, step), content(uninterrupted, step))


def test_the_plan_is_that_of_one_process(uninterrupted, tmp_path):
    """Saved before the first step: fresh state, with the structure and codebook of the first gradients."""
    folder = tmp_path / "alone"
    finish(start(folder, hosts=1, devices=4), folder)
    two, one = (content(path, 0)["opt_state"][1] for path in (uninterrupted, folder))
    assert two["count"] == 0
    assert jax.tree.map(np.shape, two) == jax.tree.map(np.shape, one)
    same(two["format"], one["format"])
    np.testing.assert_allclose(two["codebook"], one["codebook"], rtol=0, atol=2e-3)  # gradients round differently
    assert len(np.unique(two["codebook"])) == 255  # learned: the prior has other words
