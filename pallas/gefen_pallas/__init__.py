"""GPU kernels for Gefen: twins of `gefen_jax.update`, tested against it. Knows nothing of `gefen_jax`."""
