"""Gefen for JAX: AdamW's recipe with about one byte of optimizer state per parameter."""

from gefen_jax.state import GefenState as GefenState
from gefen_jax.transform import gefen as gefen
from gefen_jax.transform import scale_by_gefen as scale_by_gefen
