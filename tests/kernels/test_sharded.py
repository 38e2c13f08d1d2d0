"""Kernels never see part of a block, and never make XLA gather a leaf."""

import os
import pathlib
import subprocess
import sys


def test_kernels_on_several_devices():
    script = pathlib.Path(__file__).with_name("sharded_checks.py")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("passed")
