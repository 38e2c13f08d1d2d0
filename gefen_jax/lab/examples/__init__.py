"""Short programs to copy from, each a page that runs: `python -m gefen_jax.lab.examples.NAME --help`.

* `fsdp`: a sharded run with checkpoints, continued on half of the devices.
* `many_hosts`: a run on several hosts that survives the loss of one.
* `host_offload`: optimizer state in host memory between steps.
* `nnx_sharded`: Flax NNX under a mesh, its `nnx.Optimizer` and its checkpoints.
* `from_adamw`: a running AdamW continues as Gefen, and back.
* `watching`: what quantisation costs during a run, and when to calibrate again.

All but the NNX one train a small byte-level language model on the sources of Python's standard library.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from gefen_jax.lab.errors import UsageError


def run(main: Callable[[], Any]) -> NoReturn:
    """Run an example as a program: wrong options are an error of one line, exit code 2."""
    try:
        main()
    except UsageError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def counted(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number that is at least ``least``.

    >>> counted(2)("8")
    8
    """

    def whole(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least {least}")
        return int(word)

    return whole
