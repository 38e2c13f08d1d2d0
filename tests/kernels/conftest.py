"""The interpreter of Triton must be chosen before Triton is imported; nothing else here imports it."""

import os
import sys

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
