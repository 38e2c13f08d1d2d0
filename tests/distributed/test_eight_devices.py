"""Runs each file of `eight/` in a process of its own, with eight forced host devices.

XLA reads the number of devices once per process, and the other tests need one. To see a single file at work:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest tests/distributed/eight/test_collectives.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EIGHT = Path(__file__).parent / "eight"
FLAG = "--xla_force_host_platform_device_count=8"
FILES = sorted(path.name for path in EIGHT.glob("test_*.py"))


def test_there_are_files():
    assert len(FILES) >= 10


@pytest.mark.parametrize("name", FILES)
def test_on_eight_devices(name):
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(EIGHT / name)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"XLA_FLAGS": FLAG, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
