"""`python -m gefen_jax` is `gefen-jax`."""

import sys

from gefen_jax.cli import main

sys.exit(main())
