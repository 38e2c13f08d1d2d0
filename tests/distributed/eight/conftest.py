"""These files need eight devices, which XLA counts once per process: see test_eight_devices.py."""

import os

collect_ignore_glob = (
    [] if "xla_force_host_platform_device_count=8" in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]
)
