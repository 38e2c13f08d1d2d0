"""The laboratory: models, data, training, measuring and drawing. Needs the extra `gefen-jax[demo]`."""
