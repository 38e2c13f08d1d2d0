"""`python -m gefen_jax` is `gefen-jax`."""

import sys

from gefen_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
